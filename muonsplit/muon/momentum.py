"""Momentum: what is kept from step to step, and what is orthogonalised."""

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic


def advance_momentum(
    gradient: Tensor, buffer: Tensor, arithmetic: Arithmetic, beta: float
) -> Tensor:
    """Takes one momentum step.

    Args:
        gradient: Any shape; read only.
        buffer: Same shape; updated in place.
        arithmetic: Its ``momentum`` and ``nesterov`` choose the form.
        beta: Momentum coefficient in [0, 1).

    Returns:
        What is to be orthogonalised; a new tensor, or the buffer itself without Nesterov.
    """
    form = arithmetic.momentum
    if form in ("ema", "ema_plus_g"):
        _lerp_(buffer, gradient, 1 - beta, arithmetic.foreach)
    else:
        _mul_(buffer, beta, arithmetic.foreach)
        buffer.add_(gradient, alpha=1 - beta if form == "ema_muladd" else 1)
    return _ahead(gradient, buffer, form, beta) if arithmetic.nesterov else buffer


def _ahead(gradient: Tensor, buffer: Tensor, form: str, beta: float) -> Tensor:
    """The update one more step ahead of the buffer."""
    if form == "ema":
        return gradient.lerp(buffer, beta)
    if form == "ema_muladd":
        return (1 - beta) * gradient + beta * buffer
    if form == "ema_plus_g":
        return gradient + buffer
    if form == "sum":
        return buffer * beta + gradient
    return gradient.add(buffer, alpha=beta)


def _mul_(x: Tensor, factor: float, foreach: bool) -> None:
    if foreach:
        torch._foreach_mul_([x], factor)
    else:
        x.mul_(factor)


def _lerp_(x: Tensor, towards: Tensor, weight: float, foreach: bool) -> None:
    if foreach:
        torch._foreach_lerp_([x], [towards], weight)
    else:
        x.lerp_(towards, weight)
