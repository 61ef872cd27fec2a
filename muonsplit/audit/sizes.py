"""Which learning rates a hypothesis allows, by the sizes of its blocks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from muonsplit.audit.band import band
from muonsplit.audit.spectra import Sized
from muonsplit.dialect import DIALECTS, Arithmetic
from muonsplit.muon.scale import factors
from muonsplit.newton_schulz.oracle import polynomial

# Chosen: a fitted rate assumes that the singular values of what is orthogonalised span half a
# decade somewhere in this range, relative to the norm, and that one of them is among the fifth of
# such a span that is lifted most. How far that is at least follows from the coefficients.
_SPAN, _RANGE, _POINTS, _SHARE = 0.5, (-2.3, 0.0), 4000, 0.8


class Rates(NamedTuple):
    """An interval of learning rates; empty if ``low`` is above ``high``."""

    low: float
    high: float

    def off(self, other: "Rates") -> float:
        """How far two intervals are apart, as a factor; 1 if they meet.

        An interval that is empty by itself is as far from any as the factor it lacks.
        """
        lacking = math.sqrt(max(1.0, _ratio(self.low, self.high)))
        return max(lacking, _ratio(self.low, other.high), _ratio(other.low, self.high), 1.0)


ANY = Rates(0.0, math.inf)


def _ratio(above: float, below: float) -> float:
    if above <= below:
        return 1.0
    return above / below if below > 0 else math.inf


class Rule(NamedTuple):
    """A scale rule: an arithmetic, of which only bounds and scale are looked at, and its name."""

    name: str
    arithmetic: Arithmetic

    def size(self, block: Sequence[int], matrix: Sequence[int]) -> float:
        """The factor on a block, learning rate aside."""
        return math.prod(factors(self.arithmetic, block, matrix))


def rules(arithmetic: Arithmetic) -> list[Rule]:
    """The scale rules that are tried: the declared one, by block and by matrix, then all others."""
    found: dict[tuple[object, ...], Rule] = {}
    others = [dialect.arithmetic for dialect in DIALECTS.values()]
    for one in (arithmetic, *others):
        per = "matrix" if one.scale_per == "matrix" else "block"
        for each in (per, "matrix" if per == "block" else "block"):
            made = replace(arithmetic, scale=one.scale, extra_scale=one.extra_scale, scale_per=each)
            extra = "" if one.extra_scale == 1.0 else f" × {one.extra_scale:g}"
            key = (made.scale, made.extra_scale, made.scale_per)
            found.setdefault(key, Rule(f"{made.scale}{extra}, of the {each}", made))
    return list(found.values())


def allowed(sizes: Iterable[Sized], rule: Rule, matrix: Sequence[int], steps: int) -> Rates:
    """The learning rates under which every block has a possible size.

    Args:
        sizes: The blocks of a hypothesis.
        rule: The scale rule.
        matrix: Shape of the whole weight, output × input.
        steps: Steps between the two checkpoints. Of several only the most is known: updates may
            cancel.
    """
    low, high = 0.0, math.inf
    for s in sizes:
        if s.still == s.blocks:
            continue
        bounds = band(rule.arithmetic, min(s.rows, s.cols))
        size = rule.size((s.rows, s.cols), matrix)
        low = max(low, (s.most - s.hidden) / (steps * bounds.high * size))
        if steps == 1:
            high = min(high, (s.least + s.hidden) / (bounds.low * size))
    return Rates(low, high)


class Anchor(NamedTuple):
    """What a weight that is not split says of the learning rate.

    Attributes:
        rates: Those under which it has a possible size.
        top: The one under which the largest size that it may have had is the top of the band.
    """

    rates: Rates
    top: float


def anchored(sizes: Sequence[Sized], rule: Rule, matrix: Sequence[int], steps: int) -> Anchor:
    """What one weight says of the learning rate; arguments as of :func:`allowed`."""
    most = [s._replace(most=s.most + s.hidden, hidden=0.0) for s in sizes]
    return Anchor(allowed(sizes, rule, matrix, steps), allowed(most, rule, matrix, steps).low)


def fitted(anchors: Sequence[Anchor], arithmetic: Arithmetic) -> tuple[Rates, int]:
    """The learning rates that most weights allow, and how many those are.

    The lower end is sure: the largest size that was seen cannot be above the band. The upper end
    assumes that some singular value was lifted as far as most spans of them are.

    Args:
        anchors: What single weights say.
        arithmetic: Whose band it is.
    """
    ends = sorted({a.rates.low: a for a in anchors if a.rates.low <= a.rates.high}.items())
    if not ends:
        return ANY, 0
    held = {end: [a for a in anchors if a.rates.low <= end <= a.rates.high] for end, _ in ends}
    low, most = max(ends, key=lambda end: (len(held[end[0]]), end[0]))
    high = min(most.top * _edge(arithmetic), *(a.rates.high for a in held[low]))
    return Rates(low, high), len(held[low])


@cache
def _edge(arithmetic: Arithmetic) -> float:
    """How far above the largest size that was seen the top of the band may be."""
    inputs = torch.logspace(*_RANGE, _POINTS, dtype=torch.float64) / arithmetic.norm_factor
    width = int(_SPAN / (_RANGE[1] - _RANGE[0]) * _POINTS)
    spans = polynomial(inputs, arithmetic).unfold(0, width, 10)
    least = spans.quantile(_SHARE, 1).min()
    return float(band(arithmetic, 1).high / least)
