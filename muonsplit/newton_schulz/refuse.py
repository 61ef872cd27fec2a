"""Refuses what cannot be computed on, by name."""

import math
from collections.abc import Collection
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.errors import InputError, UsageError

Backend = Literal["torch", "triton"]


def backend(value: Any) -> None:
    """Refuses what is no backend.

    Raises:
        UsageError: If it is none.
    """
    if value not in get_args(Backend):
        raise UsageError(f"backend must be 'torch' or 'triton', got {repr(value)[:60]}.")


def arithmetic(value: Any) -> None:
    """Refuses what is no arithmetic.

    Raises:
        UsageError: If it is none.
    """
    if not isinstance(value, Arithmetic):
        raise UsageError(
            f"arithmetic must be an Arithmetic, got {type(value).__name__}.",
            "A dialect has one: dialect_named(NAME).arithmetic.",
        )


def tensor(name: str, value: Any, ranks: Collection[int] = ()) -> None:
    """Refuses what is no dense floating-point tensor of a rank.

    Args:
        name: What it is called.
        value: What was given.
        ranks: Numbers of dimensions it may have; any if none.

    Raises:
        InputError: If it is something else, or requires grad where a graph would be made.
    """
    if not isinstance(value, Tensor):
        raise InputError(f"{name} must be a tensor, got {type(value).__name__}.")
    if value.layout is not torch.strided or not value.is_floating_point():
        raise InputError(
            f"{name} must be dense and floating-point, got {value.dtype} and {value.layout}."
        )
    if ranks and value.ndim not in ranks:
        wanted = " or ".join(f"{rank}-D" for rank in ranks)
        raise InputError(f"{name} must be {wanted}, got shape {tuple(value.shape)}.")
    if value.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"{name} requires grad, and what is made of it has none.",
            "Detach it, or work under torch.no_grad().",
        )


def number(name: str, value: Any, below: float = math.inf) -> None:
    """Refuses what is no finite number from 0 to a bound.

    Raises:
        InputError: If it is something else.
    """
    try:
        fits = bool(0 <= value < below) and math.isfinite(value)
    except (TypeError, OverflowError, RuntimeError):
        fits = False
    if not fits:
        wanted = "a finite number ≥ 0" if below == math.inf else f"in [0, {below:g})"
        raise InputError(f"{name} must be {wanted}, got {repr(value)[:60]}.")
