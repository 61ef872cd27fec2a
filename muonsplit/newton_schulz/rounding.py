"""Rounding points: half precision emulated in float32, or left to the device."""

from collections.abc import Callable

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic

# Rounds in place and returns its argument, so it is given intermediate results only.
Rounding = Callable[[Tensor], Tensor]

_HALVES = (torch.bfloat16, torch.float16)


def emulated(dtype: torch.dtype, X: Tensor, arithmetic: Arithmetic) -> bool:
    """Whether a dtype is emulated on the device of a tensor."""
    return X.device.type == "cpu" and dtype in _HALVES and arithmetic.halves == "emulated"


def rounding(dtype: torch.dtype, X: Tensor, arithmetic: Arithmetic) -> Rounding:
    """How a tensor on the device of ``X`` is rounded to a dtype, in place.

    Not at all where the dtype is native.
    """
    if not emulated(dtype, X, arithmetic):
        return _unchanged
    return lambda x: x.copy_(x.to(dtype))


def rounding_of(X: Tensor, arithmetic: Arithmetic) -> Rounding:
    """How what :func:`newton_schulz` returned is rounded to its dtype."""
    return rounding(result_dtype(X, arithmetic), X, arithmetic)


def result_dtype(X: Tensor, arithmetic: Arithmetic) -> torch.dtype:
    """The dtype an iteration's result has: its own, or that of the update's pre-cast."""
    if arithmetic.pre_cast is not None:
        return getattr(torch, arithmetic.pre_cast)
    return arithmetic.dtype_on(X.device)


def norm_dtype(X: Tensor, arithmetic: Arithmetic) -> torch.dtype:
    """The dtype that blocks are normalised in."""
    dtype = arithmetic.dtype_on(X.device)
    # float16 ends at 65504, where a finite norm is easily infinite.
    named = {
        "input": torch.float32 if X.dtype is torch.float16 else X.dtype,
        "compute": dtype,
        "float32": torch.float32,
    }[arithmetic.norm_dtype]
    return torch.float64 if dtype is torch.float64 else named


def entered(X: Tensor, dtype: torch.dtype, arithmetic: Arithmetic) -> Tensor:
    """Numbers rounded to a dtype, in the dtype that holds them; the argument is left alone."""
    held = X.to(carrier(dtype, X, arithmetic))
    if not emulated(dtype, X, arithmetic):
        return held
    return rounding(dtype, X, arithmetic)(held.clone() if held is X else held)


def carrier(dtype: torch.dtype, X: Tensor, arithmetic: Arithmetic) -> torch.dtype:
    """The dtype that holds numbers of a dtype on the device of ``X``."""
    return torch.float32 if emulated(dtype, X, arithmetic) else dtype


def _unchanged(x: Tensor) -> Tensor:
    return x
