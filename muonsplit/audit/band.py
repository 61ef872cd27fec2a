"""What an iteration can make of singular values, whatever it is given."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.newton_schulz import Coefficients, newton_schulz, polynomial, schedule

# Of the blocks that rounding is measured on: decades over which singular values fall, and shapes.
_DECADES = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0) * 4
_SHAPES = ((16, 16), (64, 64), (64, 512), (128, 128))
# Of more such blocks, how much of the energy is in singular values that are lifted the most.
_SHARES = (0.2, 0.5, 0.8)
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
    decades and on some that are lifted the most, in the dtype that GPUs iterate in, and twice the
    largest excess is allowed. Iterations in float16 with a norm in float16 (optimuon 0.1.1) were
    seen to exceed that on one block of 50, if it has fewer than 32 singular values.

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
        exponents = torch.rand(len(_DECADES), rows, generator=source, dtype=torch.float64)
        S = 10.0 ** (-exponents * torch.tensor(_DECADES).unsqueeze(1))
        S = torch.cat([S, _lifted_most(arithmetic, rows)])
        drawn = torch.randn(len(S), rows, cols, generator=source, dtype=torch.float64)
        U, _, Vh = torch.linalg.svd(drawn, full_matrices=False)
        blocks = ((U * S.unsqueeze(1)) @ Vh).float()
        lifted = newton_schulz(blocks, on_gpu).double()
        most = max(most, float(torch.linalg.matrix_norm(lifted, 2).max()))
    return 1 + max(_SAFETY * (most / high - 1), _LEAST)


def _lifted_most(arithmetic: Arithmetic, rank: int) -> Tensor:
    """Spectra of norm 1, many of whose values go to the top of the band; the rest is in one."""
    inputs = torch.linspace(0, 1, 10001, dtype=torch.float64)
    top = float(inputs[polynomial(inputs / arithmetic.norm_factor, arithmetic).argmax()])
    S = torch.full((len(_SHARES), rank), 1e-9, dtype=torch.float64)
    for spectrum, share in zip(S, _SHARES, strict=True):
        many = min(rank - 1, max(1, int(share / top**2)))
        spectrum[:many] = top
        spectrum[-1] = max(0.0, 1 - many * top**2) ** 0.5
    return S


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
