"""Blocks of an observed update beside the exact ones: direction and size, with their bounds."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.checks.case import Case, matrices
from muonsplit.checks.follow import spoken
from muonsplit.checks.registry import BLIND, Finding, UndecidedError
from muonsplit.dialect import Arithmetic
from muonsplit.geometry import Decision
from muonsplit.muon import orthogonalize
from muonsplit.observe.fit import Fit, compare
from muonsplit.observe.tolerance import Bounds, bounds

# A block of numbers closer than this to the smallest that its dtype holds is not legible.
_ABOVE_SUBNORMAL = 2.0**8


class Judged(NamedTuple):
    """One block of a weight, compared with the exact one.

    Attributes:
        weight: The weight.
        number: Which block, from 0.
        shape: Its rows and columns.
        found: How it fits.
        limit: The largest error of direction that rounding may cause.
        size_limit: The largest relative error of size that rounding may cause.
        spoken: Whether its weight has every bit of the dialect's; asked where rounding hides much.
    """

    weight: Decision
    number: int
    shape: tuple[int, int]
    found: Fit
    limit: float
    size_limit: float
    spoken: bool = False

    @property
    def legible(self) -> bool:
        """Whether a fault would show."""
        return self.spoken or self.limit <= BLIND

    @property
    def named(self) -> str:
        """The block in words."""
        return f"block {self.number} of {self.shape[0]} × {self.shape[1]}"

    @property
    def turned(self) -> str:
        """What is wrong with its direction; empty if nothing is."""
        if self.spoken or self.found.residual <= self.limit:
            return ""
        off = f"off by {self.found.residual:.3g}, {self.limit:.3g} allowed"
        return f"{self.named} points elsewhere: {off}"

    @property
    def resized(self) -> str:
        """What is wrong with its size; empty if nothing is."""
        if self.spoken or abs(self.found.size - 1) <= self.size_limit:
            return ""
        return f"{self.named} is {self.found.size:.3g} times its size"

    @property
    def numbers(self) -> dict[str, float]:
        """Measurements behind a finding."""
        return {"off": self.found.residual, "allowed": self.limit, "size": self.found.size}


# A weight and its update → the part of the update that is compared.
Part = Callable[[Decision, Tensor], Tensor]


def judged(
    case: Case,
    drawn: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    part: Part = lambda _, update: update,
    bounded_by: Mapping[str, Tensor] | None = None,
) -> Iterator[list[Judged]]:
    """The blocks of each weight that nothing has been found against, compared one by one.

    Args:
        case: Says what is expected.
        drawn: Gradients of a first step.
        after: Parameters that it leaves.
        part: What of an update is compared.
        bounded_by: Gradients whose spectra the bounds are derived from, if not those drawn.
    """
    weights = case.weights
    updates = [case.direction(d.name, drawn) for d in weights]
    raws = updates if bounded_by is None else [case.direction(d.name, bounded_by) for d in weights]
    blocks = [matrices(raw, d.layout) for d, raw in zip(weights, raws, strict=True)]
    limits = iter(_limits([b for each in blocks for b in each], case.dialect.arithmetic))
    for d, update, each in zip(weights, updates, blocks, strict=True):
        exact = orthogonalize(update, d.layout, case.dialect.arithmetic.exact())
        parts = (matrices(part(d, x), d.layout) for x in (case.update(d.name, after), exact))
        found = [
            Judged(d, number, raw.shape, compare("as planned", seen, wanted), *next(limits))
            for number, (raw, seen, wanted) in enumerate(zip(each, *parts, strict=True))
        ]
        if not all(b.legible for b in found):
            stated = [case.stated(d.name, case.base.settings[0])]
            if spoken(case, d, [drawn], case.start[d.name], stated, after[d.name]):
                found = [b._replace(spoken=True) for b in found]
        yield found


def _limits(blocks: Sequence[Tensor], arithmetic: Arithmetic) -> list[Bounds]:
    """What rounding may do to each block; anything where what it is made of is lost."""
    held = [_normalised(block, arithmetic) for block in blocks]
    asked = [(b, each) for b, each in zip(blocks, held, strict=True) if each is not None]
    known = iter(bounds(asked))
    return [Bounds(math.inf, math.inf) if each is None else next(known) for each in held]


def _normalised(raw: Tensor, arithmetic: Arithmetic) -> Arithmetic | None:
    """The arithmetic with what ε makes of this block's norm in its factor; None if all is lost."""
    norm = float(raw.norm())
    if norm == 0:
        return arithmetic
    scaled = norm * arithmetic.norm_factor
    by = {"add": scaled + arithmetic.epsilon, "clamp": max(scaled, arithmetic.epsilon)}
    factor = by.get(arithmetic.normalize, scaled) / norm
    smallest = torch.finfo(getattr(torch, arithmetic.cpu_dtype)).tiny
    if float(raw.abs().max()) / (norm * factor) < _ABOVE_SUBNORMAL * smallest:
        return None
    # To six digits, so that ordinary norms share one bound.
    return replace(arithmetic, norm_factor=float(f"{factor:.6g}"))


def wrong(case: Case, weights: Iterable[Sequence[Judged]], where: str) -> Iterator[Finding]:
    """A finding on the worst block of each weight in which direction or size is off.

    Args:
        case: Says whether sizes can be judged.
        weights: The blocks of each weight, as :func:`judged` gives them.
        where: Which input it was, in words.

    Raises:
        UndecidedError: If rounding alone may turn the blocks of every weight as far as a fault.
    """
    seen = False
    for blocks in weights:
        legible = [b for b in blocks if b.legible]
        seen = seen or bool(legible)
        known = case.stated(blocks[0].weight.name, case.base.settings[0]).known
        off = [b for b in legible if b.turned or (known and b.resized)]
        if off:
            b = max(off, key=lambda b: b.found.residual / b.limit)
            said = f"{where}: {b.turned or b.resized}"
            yield Finding(b.weight.name, said, case.dialect.name, str(b.found), b.numbers)
    if not seen:
        raise UndecidedError(f"{where}: rounding alone may turn every block as far as a fault")
