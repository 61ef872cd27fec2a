"""The step itself: decay, and the update times the learning rate, each where it is rounded."""

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.muon.blocks import Direction
from muonsplit.newton_schulz import rounding_of

Rate = float | Tensor


def apply_(
    parameter: Tensor, direction: Direction, arithmetic: Arithmetic, lr: float, decay: float
) -> None:
    """Takes one step of one weight, in place.

    Args:
        parameter: Shape ``[rows, cols]`` or ``[experts, rows, cols]``.
        direction: What is subtracted, and the factor on the learning rate.
        arithmetic: Its ``decay``, ``decay_rate``, ``scale_on`` and ``foreach`` choose the form.
        lr: Learning rate.
        decay: Weight decay coefficient.
    """
    update, adjusted = direction.update, lr * direction.rate
    _decay(parameter, lr if arithmetic.decay_rate == "base" else adjusted, decay, arithmetic)
    if arithmetic.decay.startswith("folded") and decay:
        update = update + decay * parameter
        if arithmetic.decay == "folded_rounded":
            update = rounding_of(update, arithmetic)(update).to(direction.update.dtype)
    if arithmetic.scale_on == "step":
        stepped = update * adjusted
        if update.dtype == direction.update.dtype and arithmetic.decay != "folded":
            stepped = rounding_of(stepped, arithmetic)(stepped)
        parameter.sub_(stepped)
    elif isinstance(adjusted, Tensor):
        parameter.sub_(update.to(parameter.dtype) * adjusted)
    else:
        _add_(parameter, update.to(parameter.dtype), -adjusted, arithmetic.foreach)


def _decay(parameter: Tensor, rate: Rate, decay: float, arithmetic: Arithmetic) -> None:
    if arithmetic.decay == "mul":
        kept = 1 - rate * decay
        if arithmetic.foreach and isinstance(kept, float):
            torch._foreach_mul_([parameter], kept)
        else:
            parameter.mul_(kept)
    elif arithmetic.decay == "add" and isinstance(rate, Tensor):
        parameter.sub_(parameter * (rate * decay))
    elif arithmetic.decay == "add":
        parameter.add_(parameter, alpha=-rate * decay)


def _add_(parameter: Tensor, update: Tensor, alpha: float, foreach: bool) -> None:
    if foreach:
        torch._foreach_add_([parameter], [update], alpha=alpha)
    else:
        parameter.add_(update, alpha=alpha)
