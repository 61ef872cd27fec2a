"""The signed bias of singular values: what a wrong coefficient leaves when noise averages out.

An iteration maps each normalised singular value σ to F(σ) and leaves its directions alone. The
component of an update along a direction, over F(σ) and over its mean in the block, so that size
does not count, is 1 + ρ. Noise gives ρ any sign; another coefficient θ shifts it by Δθ·e with

    e(σ) = ∂ ln F(σ) / ∂θ, less its mean in the block.

Least squares over all directions of all blocks then read the shift off the update:

    Δθ = Σ e·ρ / Σ e².

Legal rounding shifts it too. A diagonal of XXᵀ has entries of one size, which a multiplication by
c rounds to one side; in bfloat16 that is as if a coefficient were off by 1e-3, as much as a typing
error, and could be ten times that. No bound on it is of use, so it is measured: the same blocks go
through the arithmetic's own rounding points, and only the difference of the two shifts counts.

That difference is a sum over blocks, which are independent, as their norms and their spectra's
bases are drawn apart; inside a block nothing is, for it shares its norm's rounding. Where a subject
rounds like the arithmetic, either may be called the other, so every term is symmetric about zero,
and whatever its distribution (Efron, J. Am. Stat. Assoc. 64, 1969, with Hoeffding's inequality)

    P(|Σx| > z·√Σx²) ≤ 2·exp(−z²/2).

A subject that has nearly all bits of the arithmetic's differs by nearly nothing, and that by a
rounding more or less to one side; so √Σx² is taken for at least half of the legal shift's own.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.newton_schulz import Coefficients, polynomial, schedule
from muonsplit.newton_schulz.normalize import denominator
from muonsplit.observe.tolerance import TAIL

# One false alarm in 10⁹ coefficients, on either side.
_DEVIATIONS = math.sqrt(2 * (TAIL + math.log(2)))
# Roundings of one coefficient's term in a step, each to one side: A twice, its product with the
# coefficient and with A, the sum, the product with X, and the sum with aX.
_ROUNDINGS = 7
# Chosen: how much of the arithmetic's own scatter any legal subject may differ by.
_LEAST = 0.5
# A direction is legible where the noise of the cast is at most 2 % of it.
_LEGIBLE = 32.0


class Observed(NamedTuple):
    """Blocks of one shape in their singular directions, and what was seen to be made of them.

    Attributes:
        U: Left singular vectors, shape ``[B, rows, k]``.
        Vh: Right singular vectors, shape ``[B, k, cols]``.
        exact: F(σ), shape ``[B, k]``; anything where a direction does not count.
        e: Sensitivities less their mean, shape ``[B, k, coefficients]``; zero likewise.
        seen: Σ e·ρ of each block's observed update, shape ``[B, coefficients]``.
    """

    U: Tensor
    Vh: Tensor
    exact: Tensor
    e: Tensor
    seen: Tensor

    def along(self, update: Tensor) -> Tensor:
        """Σ e·ρ of each block's update; shape ``[B, coefficients]``."""
        return _along(update, self.U, self.Vh, self.exact, self.e)


def observe(given: Tensor, update: Tensor, arithmetic: Arithmetic) -> Observed:
    """Takes observed updates apart.

    Args:
        given: What was orthogonalised, shape ``[B, rows, cols]``.
        update: What was made of it, same shape; of any positive size.
        arithmetic: Its coefficients and normalisation give the exact polynomial.
    """
    U, S, Vh = torch.linalg.svd(given.double(), full_matrices=False)
    norms = S.square().sum(-1, keepdim=True).sqrt()
    # The cast adds noise of about roundoff · norm / √entries to every component.
    entries = given.shape[-2] * given.shape[-1]
    counted = _LEGIBLE * arithmetic.roundoff * norms / entries**0.5 < S
    S = torch.where(counted, S / denominator(norms, arithmetic), 1.0)
    exact = torch.where(counted, polynomial(S, arithmetic), math.inf)
    e = _less_mean(_sensitivities(S, arithmetic), counted.unsqueeze(-1))
    return Observed(U, Vh, exact, e, _along(update, U, Vh, exact, e))


@dataclass(frozen=True, slots=True)
class Bias:
    """By how much updates read as if one coefficient were another.

    Attributes:
        coefficient: Its name, and the steps that take it.
        where: The blocks it was read off.
        declared: Its value.
        seen: The shift that the observed updates show against the exact polynomial.
        legal: The shift that the arithmetic's own rounding shows.
        error: Standard error of the difference, or half of the legal shift's if that is more.
        slack: What numbers held and summed in float32 may add to it.
        energy: Σe², so that ``off² · energy`` is how much of ρ the shift explains.
    """

    coefficient: str
    where: str
    declared: float
    seen: float
    legal: float
    error: float
    slack: float
    energy: float

    @property
    def off(self) -> float:
        """The shift that rounding does not explain."""
        return self.seen - self.legal

    @property
    def allowed(self) -> float:
        """The largest such shift that may be chance or float32."""
        return _DEVIATIONS * self.error + self.slack

    @property
    def passes(self) -> bool:
        """Whether it is allowed; what is no number is not."""
        return abs(self.off) <= self.allowed


def biases(
    observed: Sequence[Observed], legal: Iterable[Tensor], arithmetic: Arithmetic
) -> list[Bias]:
    """Reads every coefficient of an arithmetic off observed updates.

    A wrong coefficient is the same in all blocks; what rounding does depends on their size. So
    blocks are read together, and those of each short side apart.

    Args:
        observed: Blocks that were drawn independently, the more the sharper.
        legal: For each, the updates by the arithmetic's own rounding points; of any positive size.
        arithmetic: Its coefficients are judged.

    Returns:
        For all blocks and for those of each short side, one bias for each of a, b and c of each
        different step. A coefficient that later steps hide, so that rounding leaves it unknown by
        its own size, is left out.
    """
    by_side: dict[int, list[_Part]] = {}
    for blocks, update in zip(observed, legal, strict=True):
        part = _Part(
            blocks.seen, blocks.along(update), torch.einsum("bki,bkj->ij", *[blocks.e] * 2)
        )
        by_side.setdefault(blocks.e.shape[1], []).append(part)
    together = [part for parts in by_side.values() for part in parts]
    found = _read("all blocks", together, arithmetic)
    if len(by_side) > 1:
        for side, parts in sorted(by_side.items()):
            found += _read(f"blocks of short side {side}", parts, arithmetic)
    return found


class _Part(NamedTuple):
    """Σ e·ρ of each block as seen and as legal, and Σ e·eᵀ over all."""

    seen: Tensor
    legal: Tensor
    energy: Tensor


def _read(where: str, parts: Sequence[_Part], arithmetic: Arithmetic) -> list[Bias]:
    energy = torch.stack([part.energy for part in parts]).sum(0)
    scale = energy.diagonal().clamp(min=1e-300)
    seen, legal = (torch.cat([part[i] for part in parts]) / scale for i in (0, 1))
    values = torch.tensor(_distinct(arithmetic), dtype=torch.float64).flatten()
    unit = torch.finfo(torch.float32).eps / 2
    slack = _ROUNDINGS * unit * (energy.abs() @ values.abs()) / scale
    scatter = ((seen - legal).square().sum(0), _LEAST**2 * legal.square().sum(0))
    error = torch.maximum(*scatter).sqrt()
    columns = (values, seen.sum(0), legal.sum(0), error, slack, scale)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    sizes = values.view(-1, 3).abs().amax(1).repeat_interleave(3)
    known = sizes * scale.sqrt() > _DEVIATIONS * arithmetic.roundoff
    named = zip(_names(arithmetic), rows, known.tolist(), strict=True)
    return [Bias(name, where, *row) for name, row, readable in named if readable]


def _along(update: Tensor, U: Tensor, Vh: Tensor, exact: Tensor, e: Tensor) -> Tensor:
    components = torch.einsum("bmk,bmn,bkn->bk", U, update.double(), Vh) / exact
    counted = exact.isfinite().sum(-1, keepdim=True)
    mean = components.sum(-1, keepdim=True) / counted
    # Without two directions that count there is no shape to read; e is zero then.
    deviations = torch.where(counted > 1, components / mean - 1, 0.0)
    return torch.einsum("bkj,bk->bj", e, deviations)


def _less_mean(e: Tensor, counted: Tensor) -> Tensor:
    """Sensitivities less their mean over the directions that count; zero along others."""
    mean = (e * counted).sum(-2, keepdim=True) / counted.sum(-2, keepdim=True).clamp(min=1)
    return (e - mean) * counted


def _sensitivities(S: Tensor, arithmetic: Arithmetic) -> Tensor:
    """∂ ln F / ∂θ at singular values, for every coefficient; shape ``[..., values, θ]``."""
    steps, distinct = schedule(arithmetic), _distinct(arithmetic)
    slopes = S.new_zeros((*S.shape, len(distinct), 3))
    for step in steps:
        a, b, c = step
        slopes = slopes * (a + 3 * b * S**2 + 5 * c * S**4)[..., None, None]
        slopes[..., distinct.index(step), :] += torch.stack((S, S**3, S**5), -1)
        S = a * S + b * S**3 + c * S**5
    return slopes.flatten(-2) / S.unsqueeze(-1)


def _distinct(arithmetic: Arithmetic) -> list[Coefficients]:
    return list(dict.fromkeys(schedule(arithmetic)))


def _names(arithmetic: Arithmetic) -> list[str]:
    """The letter of each coefficient and the steps that take it, counted from one."""
    steps, names = schedule(arithmetic), list[str]()
    for triple in _distinct(arithmetic):
        taking = [str(i) for i, step in enumerate(steps, 1) if step == triple]
        said = f"step{'s' * (len(taking) > 1)} {', '.join(taking)}"
        names += [f"{x} of {'every step' if len(taking) == len(steps) else said}" for x in "abc"]
    return names
