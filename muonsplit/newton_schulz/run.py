"""Newton–Schulz on a batch: one road through normalisation and iteration for every arithmetic."""

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.dialect.coefficients import schedule
from muonsplit.errors import InputError
from muonsplit.newton_schulz import refuse
from muonsplit.newton_schulz.accelerated import accelerated
from muonsplit.newton_schulz.fast import may_share, orthogonalize_into
from muonsplit.newton_schulz.gram import gram, on_gram
from muonsplit.newton_schulz.normalize import normalize
from muonsplit.newton_schulz.products import step
from muonsplit.newton_schulz.refuse import Backend
from muonsplit.newton_schulz.rounding import entered, norm_dtype, result_dtype, rounding


def newton_schulz(X_BMN: Tensor, arithmetic: Arithmetic, backend: Backend = "torch") -> Tensor:
    """Orthogonalises every block of a batch, without the scale.

    On a CPU, for one dtype below float64 and one form, a block's result depends on its own bits
    only, not on its neighbours or their number: blocks are made contiguous and normalised one by
    one, and those whose batch would show are iterated alone.

    Args:
        X_BMN: Blocks, shape ``[B, M, N]``, floating point, M and N at least 1.
        arithmetic: Coefficients, form, dtypes and normalisation.
        backend: ``torch``, or ``triton`` for the kernel of :mod:`muonsplit.kernels`, whose bits
            are a block's own on every device. What it cannot do is an error: nothing else runs in
            its place.

    Returns:
        Shape ``[B, M, N]``, in the dtype of the iteration or of the pre-cast; float32 where that
        is emulated.

    Raises:
        InputError: If the batch is not 3-D, empty, or not dense floating point, or requires grad.
        UsageError: If the arithmetic names no known coefficient set, the backend is unknown, or
            triton is missing or too old.
    """
    refuse.arithmetic(arithmetic)
    refuse.tensor("X_BMN, a floating-point batch [blocks, rows, columns],", X_BMN, (3,))
    if 0 in X_BMN.shape:
        raise InputError(f"X_BMN, a floating-point batch, is empty: {tuple(X_BMN.shape)}.")
    refuse.backend(backend)
    if backend == "triton":
        return accelerated(X_BMN, arithmetic)
    if arithmetic.form == "fast":
        result = torch.empty_like(
            X_BMN, dtype=arithmetic.dtype_on(X_BMN.device), memory_format=torch.contiguous_format
        )
        orthogonalize_into([X_BMN], [result], arithmetic)
        return result
    if len(X_BMN) > 1 and not may_share(X_BMN):
        return torch.cat([_iterate(X.unsqueeze(0), arithmetic) for X in X_BMN])
    return _iterate(X_BMN, arithmetic)


def _iterate(X: Tensor, arithmetic: Arithmetic) -> Tensor:
    tall = X.size(-2) > X.size(-1)
    right = tall and arithmetic.tall == "right"
    flipped = tall and not right
    dtype, steps = arithmetic.dtype_on(X.device), schedule(arithmetic)
    normed = norm_dtype(X, arithmetic)
    X = _normalized(X, flipped, normed, arithmetic)
    if normed is not dtype:
        X = entered(X, dtype, arithmetic)
    q = rounding(dtype, X, arithmetic)
    if arithmetic.tall == "transpose_copy":
        X = X.contiguous()
    if steps and on_gram(X.size(-2), X.size(-1), arithmetic):
        left = "flipped" if flipped and arithmetic.tall == "transpose" else "left"
        side = "right" if right else left
        X = gram(X, steps, arithmetic.restarts, arithmetic.form, side, q)
    else:
        for coefficients in steps:
            X = step(X, coefficients, right, arithmetic.form, q)
    if result_dtype(X, arithmetic) is not dtype:
        X = entered(X, result_dtype(X, arithmetic), arithmetic)
    return X.mT if flipped else X


def _normalized(X: Tensor, flipped: bool, dtype: torch.dtype, arithmetic: Arithmetic) -> Tensor:
    """The blocks over their norms, in a dtype."""
    if arithmetic.pre_cast is not None:
        X = X.to(getattr(torch, arithmetic.pre_cast)).to(X.dtype)
    q = rounding(dtype, X, arithmetic)
    X = entered(X, dtype, arithmetic).contiguous()
    return normalize(X.mT if flipped else X, arithmetic, q)
