"""Momentum: what is kept from step to step, and what is orthogonalised."""

from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.muon.foreach import add_, lerp_, mul_


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
        lerp_(buffer, gradient, 1 - beta, arithmetic.foreach)
    else:
        mul_(buffer, beta, arithmetic.foreach)
        add_(buffer, gradient, 1 - beta if form == "ema_muladd" else 1.0, arithmetic.foreach)
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
