"""The step itself: decay, and the update times the learning rate, each where it is rounded."""

from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.muon.blocks import Direction
from muonsplit.muon.foreach import add_, mul_
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
    rate = lr * direction.rate
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
        parameter.sub_(q(update * rate))
    elif isinstance(rate, Tensor):
        parameter.sub_(update.to(parameter.dtype) * rate)
    else:
        add_(parameter, update.to(parameter.dtype), -rate, arithmetic.foreach)


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
            mul_(parameter, kept, arithmetic.foreach)


def _unrounded(x: Tensor) -> Tensor:
    return x
