"""The step itself: decay, and the update times the learning rate, each where it is rounded."""

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.muon.blocks import Direction
from muonsplit.muon.foreach import add_, mul_
from muonsplit.newton_schulz import Rounding, rounding_of

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
    if arithmetic.step_dtype == "float32" and parameter.dtype in (torch.bfloat16, torch.float16):
        wide = parameter.float()
        _apply_(wide, direction, arithmetic, lr, decay)
        parameter.copy_(wide)
    else:
        _apply_(parameter, direction, arithmetic, lr, decay)


def _apply_(
    parameter: Tensor, direction: Direction, arithmetic: Arithmetic, lr: float, decay: float
) -> None:
    rate = _rate(lr, direction.rate, arithmetic)
    _decay(parameter, lr if arithmetic.decay_rate == "base" else rate, decay, arithmetic)
    update, q = direction.update, rounding_of(direction.update, arithmetic)
    if decay and arithmetic.decay in ("folded", "folded_rounded"):
        held = update.dtype
        update = update + decay * parameter
        if arithmetic.decay == "folded_rounded":
            update = q(update).to(held)
        else:
            q = _unrounded
    if arithmetic.scale_on == "step":
        if arithmetic.rate_tensor:
            rate = _as_tensor(rate, update, q)
        parameter.sub_(q(update * rate))
    elif isinstance(rate, Tensor):
        parameter.sub_(update * rate)
    else:
        add_(parameter, update, -rate, arithmetic.foreach == "all")


def _rate(lr: float, factor: Rate, arithmetic: Arithmetic) -> Rate:
    """The learning rate times what the scale leaves on it."""
    if not arithmetic.rate_tensor or isinstance(factor, Tensor):
        return lr * factor
    return float(torch.tensor(lr) * torch.tensor(factor))


def _as_tensor(rate: Rate, update: Tensor, q: Rounding) -> Tensor:
    """A rate as a product with the update sees it: in the update's dtype."""
    return q(torch.as_tensor(rate, dtype=update.dtype, device=update.device))


def _decay(parameter: Tensor, rate: Rate, decay: float, arithmetic: Arithmetic) -> None:
    if arithmetic.decay == "add":
        lost = rate * decay
        if isinstance(lost, Tensor):
            parameter.sub_(parameter * lost)
        else:
            parameter.add_(parameter, alpha=-lost)
    elif arithmetic.decay == "mul":
        kept = 1 - rate * decay
        if isinstance(kept, Tensor):
            parameter.mul_(kept)
        else:
            mul_(parameter, kept, arithmetic.foreach == "all")


def _unrounded(x: Tensor) -> Tensor:
    return x
