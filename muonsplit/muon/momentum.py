"""Momentum: what is kept from step to step, and what is orthogonalised."""

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.errors import InputError
from muonsplit.muon.foreach import add_, lerp_, mul_
from muonsplit.newton_schulz import refuse


def advance_momentum(
    gradient: Tensor, buffer: Tensor, arithmetic: Arithmetic, beta: float, step: int = 1
) -> Tensor:
    """Takes one momentum step.

    Args:
        gradient: Any shape; read only.
        buffer: Same shape, its own dtype; updated in place.
        arithmetic: Its ``momentum`` and ``nesterov`` choose the form.
        beta: Momentum coefficient in [0, 1).
        step: Gradients seen, this one included; only ``ema_debiased`` asks.

    Returns:
        What is to be orthogonalised; a new tensor, or the buffer itself without Nesterov.

    Raises:
        InputError: If the gradient is no dense floating-point tensor of the buffer's shape or
            requires grad, or beta is out of range.
    """
    refuse.tensor("gradient", gradient)
    refuse.number("beta", beta, below=1.0)
    if gradient.shape != buffer.shape:
        shapes = f"{tuple(gradient.shape)}, its buffer {tuple(buffer.shape)}"
        raise InputError(f"gradient has shape {shapes}.")
    if arithmetic.step_dtype == "float32" and buffer.dtype != torch.float64:
        wide, kept = gradient.float(), buffer.float()
        ahead = _advance(wide, kept, arithmetic, beta, step)
        buffer.copy_(kept)
        return ahead
    return _advance(gradient, buffer, arithmetic, beta, step)


def _advance(
    gradient: Tensor, buffer: Tensor, arithmetic: Arithmetic, beta: float, step: int
) -> Tensor:
    form, foreach = arithmetic.momentum, arithmetic.foreach != "none"
    if form in ("ema", "ema_plus_g", "ema_debiased"):
        lerp_(buffer, gradient, 1 - beta, foreach)
    else:
        mul_(buffer, beta, foreach)
        add_(buffer, gradient, 1 - beta if form == "ema_muladd" else 1.0, foreach)
    if form == "ema_debiased":
        return _debiased(gradient, buffer, arithmetic.nesterov, beta, step)
    return _ahead(gradient, buffer, form, beta) if arithmetic.nesterov else buffer


def _debiased(gradient: Tensor, buffer: Tensor, nesterov: bool, beta: float, step: int) -> Tensor:
    if not nesterov:
        return buffer / (1 - beta**step)
    ahead = buffer / (1 - beta ** (step + 1))
    return beta * ahead + (1 - beta) * (gradient / (1 - beta**step))


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
