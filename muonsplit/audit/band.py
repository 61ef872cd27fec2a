"""What an iteration can make of singular values, whatever it is given."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from muonsplit.dialect import Arithmetic
from muonsplit.newton_schulz import Coefficients, newton_schulz, schedule

# Of the blocks that rounding is measured on: decades over which singular values fall, and shapes.
_DECADES = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0) * 4
_SHAPES = ((16, 16), (64, 64), (64, 512), (128, 128))
# Chosen: how often the largest excess that was measured is allowed, and at least this much.
_SAFETY, _LEAST = 2.0, 0.005


class Band(NamedTuple):
    """Bounds on the largest singular value of one orthogonalised block, without its scale.

    Attributes:
        low: The least it can be, of a block that is not zero.
        high: The most.
    """

    low: float
    high: float


def band(arithmetic: Arithmetic, rank: int) -> Band:
    """The bounds for a block of at most ``rank`` singular values.

    A block over its Frobenius norm has a largest singular value of 1/√rank at least and of 1 at
    most, and every other one is between 0 and 1. Each step maps the interval they are in to another
    one, exactly. ε is taken for nothing, which holds for blocks of a norm far above it.

    What rounding adds to the largest singular value has no useful bound: on directions below the
    noise floor the gains are large. It is measured, on blocks of spectra that fall by up to eight
    decades, in the dtype that GPUs iterate in, and twice the largest excess
    is allowed.

    Args:
        arithmetic: Its coefficients, steps, norm factor and the dtype of the iteration.
        rank: The smaller side of the block.
    """
    return _band(replace(arithmetic, scale="none", extra_scale=1.0, scale_per="block"), rank)


@cache
def _band(arithmetic: Arithmetic, rank: int) -> Band:
    first = 1 / arithmetic.norm_factor
    low, high = (first / rank**0.5, first), (0.0, first)
    for step in schedule(arithmetic):
        low, high = _image(step, low), _image(step, high)
    excess = _excess(arithmetic, high[1])
    return Band(low[0] / excess, high[1] * excess)


@cache
def _excess(arithmetic: Arithmetic, high: float) -> float:
    """By which factor rounding may exceed what is possible without it."""
    source = torch.Generator().manual_seed(0)
    on_gpu = replace(arithmetic, cpu_dtype=arithmetic.compute_dtype)
    most = high
    for rows, cols in _SHAPES:
        U, _, Vh = torch.linalg.svd(
            torch.randn(len(_DECADES), rows, cols, generator=source, dtype=torch.float64),
            full_matrices=False,
        )
        exponents = torch.rand(len(_DECADES), 1, rows, generator=source, dtype=torch.float64)
        S = 10.0 ** (-exponents * torch.tensor(_DECADES).view(-1, 1, 1))
        blocks = ((U * S) @ Vh).float()
        lifted = newton_schulz(blocks, on_gpu).double()
        most = max(most, float(torch.linalg.matrix_norm(lifted, 2).max()))
    return 1 + max(_SAFETY * (most / high - 1), _LEAST)


def _image(step: Coefficients, inside: tuple[float, float]) -> tuple[float, float]:
    """Where a step takes an interval: its extremes are at the ends or where the slope is zero."""
    a, b, c = step
    points = [*inside, *(x for x in _flat(step) if inside[0] < x < inside[1])]
    values = [a * x + b * x**3 + c * x**5 for x in points]
    return min(values), max(values)


def _flat(step: Coefficients) -> list[float]:
    """Where the slope a + 3bx² + 5cx⁴ is zero, for positive x."""
    a, b, c = step
    if c == 0:
        squares = [-a / (3 * b)] if b else []
    else:
        under = 9 * b * b - 20 * a * c
        squares = (
            [(-3 * b + sign * under**0.5) / (10 * c) for sign in (-1, 1)] if under >= 0 else []
        )
    return [square**0.5 for square in squares if square > 0]
