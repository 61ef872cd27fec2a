"""The step itself: decay, and the update times the learning rate, each where it is rounded."""

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.errors import InputError
from muonsplit.muon.blocks import Direction
from muonsplit.muon.foreach import add_, mul_
from muonsplit.newton_schulz import refuse, rounding_of


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

    Raises:
        InputError: If a number is negative or not finite, or a tensor does not fit.
    """
    refuse.number("lr", lr)
    refuse.number("decay", decay)
    refuse.tensor("parameter", parameter)
    if direction.update.shape != parameter.shape:
        shapes = f"{tuple(direction.update.shape)}, the parameter {tuple(parameter.shape)}"
        raise InputError(f"direction has shape {shapes}.")
    if arithmetic.step_dtype == "float32" and parameter.dtype in (torch.bfloat16, torch.float16):
        wide = parameter.float()
        _apply_(wide, direction, arithmetic, lr, decay)
        parameter.copy_(wide)
    else:
        _apply_(parameter, direction, arithmetic, lr, decay)


def _apply_(
    parameter: Tensor, direction: Direction, arithmetic: Arithmetic, lr: float, decay: float
) -> None:
    for part, update, factor in direction.parts(parameter):
        rate = _rate(lr, factor, arithmetic)
        _decay(part, lr if arithmetic.decay_rate == "base" else rate, decay, arithmetic)
        _subtract(part, update, rate, decay, arithmetic)


def _subtract(
    parameter: Tensor, update: Tensor, rate: float, decay: float, arithmetic: Arithmetic
) -> None:
    q = rounding_of(update, arithmetic)
    if decay and arithmetic.decay in ("folded", "folded_rounded"):
        held = update.dtype
        update = update + decay * parameter
        if arithmetic.decay == "folded_rounded":
            update = q(update).to(held)
        else:
            q = _unrounded
    if arithmetic.scale_on != "step":
        add_(parameter, update, -rate, arithmetic.foreach == "all")
    elif arithmetic.rate_tensor:
        # A product with a tensor sees it in the dtype of the update.
        parameter.sub_(q(update * q(update.new_tensor(rate))))
    else:
        parameter.sub_(q(update * rate))


def _rate(lr: float, factor: float, arithmetic: Arithmetic) -> float:
    """The learning rate times what the scale leaves on it."""
    if arithmetic.rate_tensor:
        return float(torch.tensor(lr) * torch.tensor(factor))
    return lr * factor


def _decay(parameter: Tensor, rate: float, decay: float, arithmetic: Arithmetic) -> None:
    if arithmetic.decay == "add":
        parameter.add_(parameter, alpha=-rate * decay)
    elif arithmetic.decay == "mul":
        mul_(parameter, 1 - rate * decay, arithmetic.foreach == "all")


def _unrounded(x: Tensor) -> Tensor:
    return x
