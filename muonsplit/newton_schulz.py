"""Newton–Schulz on a batch of blocks: standard and Gram iterations, with their rounding points.

    X_BMN   blocks: B blocks of M rows and N columns
    A_BMM   X Xᵀ, the Gram matrix on the short side
    q       rounds to the dtype of the iteration

On a CPU, bfloat16 and float16 are emulated: operands are rounded and multiplied in float32, which
is what tensor cores do and about fifty times faster than native half-precision products there.

Oracle order, the most trusted first: :func:`singular_value_oracle`, then :func:`newton_schulz`
in float64, then the lower precisions.
"""

from collections.abc import Callable, Mapping
from itertools import cycle, islice

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.errors import InputError, UsageError

Coefficients = tuple[float, float, float]
Rounding = Callable[[Tensor], Tensor]

COEFFICIENTS: Mapping[str, tuple[Coefficients, ...]] = {
    # Keller Jordan, https://kellerjordan.github.io/posts/muon/
    "jordan": ((3.4445, -4.7750, 2.0315),),
    # You Jiacheng, in KellerJordan/modded-nanogpt commit 0674386
    "you": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Polar Express, arXiv:2505.16932, for 5 steps with the 1.02 safety factor folded in,
    # as dion commit 0a059a4 and modded-nanogpt ship it
    "polar-express-5": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    # DeepSeek-V4: eight Jordan steps, then two that pin the singular values at 1
    "deepseek-v4": ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2,
}


def schedule(arithmetic: Arithmetic) -> tuple[Coefficients, ...]:
    """The coefficients of every step; a set shorter than the steps is cycled.

    Raises:
        UsageError: If there is no coefficient set of that name.
    """
    if arithmetic.coefficients not in COEFFICIENTS:
        known = ", ".join(COEFFICIENTS)
        raise UsageError(f"There is no coefficient set {arithmetic.coefficients!r}.", known)
    return tuple(islice(cycle(COEFFICIENTS[arithmetic.coefficients]), arithmetic.steps))


def scale_factor(rule: str, rows: int, cols: int) -> float:
    """The factor on the update of a block of ``rows`` × ``cols`` (output × input)."""
    factors = {
        "jordan": max(1.0, rows / cols) ** 0.5,
        "moonlight": 0.2 * max(rows, cols) ** 0.5,
        "spectral": max(rows, cols) ** 0.5,
        "bernstein": (rows / cols) ** 0.5,
        "none": 1.0,
    }
    return factors[rule]


def compute_dtype(arithmetic: Arithmetic, device: torch.device) -> torch.dtype:
    """The dtype the iteration runs in on a device."""
    name = arithmetic.cpu_dtype if device.type == "cpu" else arithmetic.compute_dtype
    return getattr(torch, name)


def newton_schulz(X_BMN: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Orthogonalises every block of a batch, without the scale.

    On a CPU, for one dtype below float64 and one form, a block's result depends on its own bits
    only, not on its neighbours or their number: blocks are made contiguous and normalised one by
    one, and those that a batch would not keep aligned are iterated alone.

    Args:
        X_BMN: Blocks, shape ``[B, M, N]``, floating point, M and N at least 1.
        arithmetic: Coefficients, form, dtypes and normalisation.

    Returns:
        Shape ``[B, M, N]``, float32 where the iteration was emulated, else its dtype.

    Raises:
        InputError: If the batch is not 3-D, empty, or not floating point.
    """
    if X_BMN.ndim != 3 or not X_BMN.is_floating_point() or 0 in X_BMN.shape:
        raise InputError(
            "Newton–Schulz takes a non-empty floating-point batch [blocks, rows, columns], got "
            f"shape {tuple(X_BMN.shape)} and dtype {X_BMN.dtype}."
        )
    if len(X_BMN) > 1 and not _aligned(X_BMN):
        return torch.cat([newton_schulz(X.unsqueeze(0), arithmetic) for X in X_BMN])
    dtype = compute_dtype(arithmetic, X_BMN.device)
    q, X = _enter(X_BMN, arithmetic, dtype)
    tall = X.size(-2) > X.size(-1)
    flipped = tall and arithmetic.tall == "transpose"
    X = _normalize(X.mT if flipped else X, arithmetic, q)
    if arithmetic.cast == "after":
        X = X.to(X.dtype if _emulated(dtype, X) else dtype)
        q = _rounding(dtype, X)
        X = q(X)
    if arithmetic.form == "gram" and X.size(-2) != X.size(-1) and (flipped or not tall):
        X = _gram(X, arithmetic, flipped, q)
    else:
        step = _STEPS["matmul" if arithmetic.form == "gram" else arithmetic.form]
        for coefficients in schedule(arithmetic):
            X = step(X, coefficients, tall and not flipped, q)
    return X.mT if flipped else X


def rounded(X: Tensor, arithmetic: Arithmetic) -> Tensor:
    """A result rounded to the dtype of the iteration, as where a scale is applied in it."""
    return _rounding(compute_dtype(arithmetic, X.device), X)(X)


def _aligned(X: Tensor) -> bool:
    """Whether every block of a batch, and of its Gram matrices, starts on a 64-byte boundary.

    BLAS chooses kernels by alignment on a CPU, so elsewhere in a batch a block would be summed in
    another order. On an accelerator equal bits for another batch are not ours to promise.
    """
    short, long = sorted(X.shape[-2:])
    return X.device.type != "cpu" or (short * short % 16 == 0 and short * long % 16 == 0)


def singular_value_oracle(X_BMN: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The exact result by another road: the polynomial applied to singular values in float64.

    Args:
        X_BMN: Blocks, shape ``[B, M, N]``.
        arithmetic: Only its coefficients, steps and normalisation matter.

    Returns:
        Shape ``[B, M, N]``, float64, without the scale.
    """
    U, S, Vh = torch.linalg.svd(X_BMN.double(), full_matrices=False)
    norms = S.square().sum(-1, keepdim=True).sqrt()
    S = S / _denominator(norms, arithmetic)
    for a, b, c in schedule(arithmetic):
        S = a * S + b * S**3 + c * S**5
    return (U * S.unsqueeze(-2)) @ Vh


def _enter(X: Tensor, arithmetic: Arithmetic, dtype: torch.dtype) -> tuple[Rounding, Tensor]:
    """The batch in the dtype it is normalised in, and that dtype's rounding."""
    if arithmetic.pre_cast is not None:
        X = X.to(getattr(torch, arithmetic.pre_cast)).to(X.dtype)
    if dtype is torch.float64:
        return _rounding(dtype, X), X.double().contiguous()
    if arithmetic.cast == "after":
        X = X.float() if X.dtype in (torch.float16, torch.bfloat16) else X
        return _rounding(X.dtype, X), X.contiguous()
    if not _emulated(dtype, X):
        return _rounding(dtype, X), X.to(dtype).contiguous()
    q = _rounding(dtype, X)
    return q, q(X.float()).contiguous()


def _emulated(dtype: torch.dtype, X: Tensor) -> bool:
    return X.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)


def _rounding(dtype: torch.dtype, X: Tensor) -> Rounding:
    if not _emulated(dtype, X):
        return lambda x: x
    return lambda x: x.to(dtype).to(torch.float32)


def _denominator(norms: Tensor, arithmetic: Arithmetic) -> Tensor:
    if arithmetic.norm_factor != 1.0:
        norms = norms * arithmetic.norm_factor
    if arithmetic.normalize == "clamp":
        return norms.clamp(min=arithmetic.epsilon)
    return norms + arithmetic.epsilon


def _normalize(X: Tensor, arithmetic: Arithmetic, q: Rounding) -> Tensor:
    # One reduction a block: a batched norm may reduce in another order for another batch size.
    norms = torch.stack([q(x.norm()) for x in X]).view(-1, 1, 1)
    return q(X / q(_denominator(norms, arithmetic)))


def _matmul_step(X: Tensor, coefficients: Coefficients, right: bool, q: Rounding) -> Tensor:
    a, b, c = coefficients
    A = q(X.mT @ X if right else X @ X.mT)
    B = q(q(b * A) + q(q(c * A) @ A))
    return q(q(a * X) + q(X @ B if right else B @ X))


def _paren_step(X: Tensor, coefficients: Coefficients, right: bool, q: Rounding) -> Tensor:
    a, b, c = coefficients
    A = q(X.mT @ X if right else X @ X.mT)
    B = q(q(b * A) + q(c * q(A @ A)))
    return q(q(a * X) + q(X @ B if right else B @ X))


def _addmm_step(X: Tensor, coefficients: Coefficients, right: bool, q: Rounding) -> Tensor:
    a, b, c = coefficients
    A = q(X.mT @ X if right else X @ X.mT)
    B = q(torch.baddbmm(A, A, A, beta=b, alpha=c))
    left, last = (X, B) if right else (B, X)
    return q(torch.baddbmm(X, left, last, beta=a))


_STEPS = {"matmul": _matmul_step, "paren": _paren_step, "addmm": _addmm_step}


def _gram(X: Tensor, arithmetic: Arithmetic, flipped: bool, q: Rounding) -> Tensor:
    """Iterates on R = XXᵀ and gathers the polynomial in Q, so that the result is QX.

    The same products in the same order as deepspeed 0.19.8 takes them, after
    https://tridao.me/blog/2026/gram-newton-schulz/.
    """
    steps, restarts = schedule(arithmetic), arithmetic.restarts
    R = q(X @ X.mT)
    Q: Tensor | None = None
    for i, (a, b, c) in enumerate(steps):
        if i in restarts and Q is not None:
            X = q(Q @ X)
            R = q(X @ X.mT)
            Q = None
        Z = q(q(b * R) + q(q(c * R) @ R))
        Q = _plus_diagonal(Z, a, q) if Q is None else q(q(a * Q) + q(Z @ Q))
        if i + 1 < len(steps) and i + 1 not in restarts:
            RZ = q(q(a * R) + q(Z @ R))
            R = q(q(a * RZ) + q(Z @ RZ))
    if Q is None:
        return X
    # A block that was transposed is multiplied from the right, which rounds otherwise.
    return q(X.mT @ Q.mT).mT if flipped else q(Q @ X)


def _plus_diagonal(Z: Tensor, a: float, q: Rounding) -> Tensor:
    Q = Z.clone()
    Q.diagonal(dim1=-2, dim2=-1).add_(a)
    return q(Q)
