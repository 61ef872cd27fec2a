"""The Triton kernel under an arithmetic: same rounding points, its own order of summation."""

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.errors import InputError
from muonsplit.kernels import Ends, run
from muonsplit.newton_schulz.program import program
from muonsplit.newton_schulz.rounding import norm_dtype, result_dtype


def accelerated(X_BMN: Tensor, arithmetic: Arithmetic, scale: float = 1.0) -> Tensor:
    """Orthogonalises every block of a batch by the Triton kernel, in one launch.

    A block's result depends on its own bits only, never on its neighbours or their number.

    Args:
        X_BMN: Blocks, shape ``[B, M, N]``, float32, bfloat16 or float16.
        arithmetic: Any but one that normalises ``scaled`` or iterates in float64.
        scale: Factor on the result, which is rounded before and after.

    Returns:
        Shape ``[B, M, N]``, in the dtype of the iteration or of the pre-cast.

    Raises:
        UsageError: If triton is missing or too old.
        InputError: If the kernel does not take the device, a dtype, the shape or the arithmetic.
    """
    if arithmetic.normalize == "scaled":
        raise InputError(
            "The kernels divide by a norm, normalize='add' or 'clamp', not 'scaled'.",
            "Use backend='torch'.",
        )
    rows, cols = X_BMN.shape[-2:]
    ends = ends_of(X_BMN, arithmetic, scale)
    if arithmetic.pre_cast is not None:
        X_BMN = X_BMN.to(getattr(torch, arithmetic.pre_cast))
    return run(X_BMN, program(arithmetic, rows, cols, ends.dtype), ends)


def ends_of(X: Tensor, arithmetic: Arithmetic, scale: float = 1.0) -> Ends:
    """What an arithmetic does with blocks on the device of ``X``, before its program and after."""
    return Ends(
        arithmetic.dtype_on(X.device),
        norm_dtype(X, arithmetic),
        result_dtype(X, arithmetic),
        arithmetic.normalize == "clamp",
        arithmetic.norm_factor,
        arithmetic.epsilon,
        scale,
    )
