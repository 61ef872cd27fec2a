"""Which cut explains a change of weights, and how sure that is."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from muonsplit.audit.band import band
from muonsplit.audit.chance import Gain
from muonsplit.audit.cuts import refines
from muonsplit.audit.result import Tried, digits
from muonsplit.audit.sizes import Rates, Rule, allowed
from muonsplit.audit.spectra import Sized
from muonsplit.layout import Layout

# Candidate's cut, another cut → how much larger the candidate's blocks would be by chance.
Compare = Callable[[Layout | None, Layout | None], Gain]


class Decided(NamedTuple):
    """What was decided on one weight.

    Attributes:
        cut: The name of the cut; empty if none was decided.
        rules: The scale rules that it fits under, the first of all rules first.
        reason: Why none was decided.
        margin: Factor by which the hypothesis that comes next is impossible.
        sigma: How many standard errors that is, where it was ruled out by chance; else 0.
        next: That hypothesis.
        tried: Every hypothesis under the declared rule, and those that fit under others.
    """

    cut: str
    rules: tuple[Rule, ...]
    reason: str
    margin: float
    sigma: float
    next: str
    tried: tuple[Tried, ...]


class Hypothesis(NamedTuple):
    """A cut under a rule."""

    cut: str
    layout: Layout | None
    rule: Rule
    off: float


class Weight(NamedTuple):
    """What is known of one weight without its values.

    Attributes:
        shape: Its shape, output × input.
        cuts: Layouts by name.
        sizes: Sizes of the blocks of each.
    """

    shape: tuple[int, ...]
    cuts: Mapping[str, Layout | None]
    sizes: Mapping[str, tuple[Sized, ...]]

    def off(self, cut: str, rule: Rule, rates: Rates, steps: int) -> Hypothesis:
        """A cut under a rule, and how far its sizes are from possible."""
        layout = self.cuts[cut]
        mine = allowed(self.sizes[cut], rule, self.matrix(layout), steps)
        return Hypothesis(cut, layout, rule, mine.off(rates))

    def matrix(self, layout: Layout | None) -> tuple[int, ...]:
        """The whole as its blocks are oriented."""
        flipped = layout is not None and layout.axis == 1
        return self.shape[::-1] if flipped else self.shape[-2:]


def decide(
    weight: Weight,
    planned: str,
    rules: Sequence[Rule],
    rates: Rates,
    steps: int,
    compare: Compare,
) -> Decided:
    """Decides on one weight.

    A hypothesis fits if its blocks have possible sizes. Of those that fit the coarsest comes first.
    It is the cut if, for every other that fits, its blocks' rows are more orthogonal than they
    would be if that other were true.

    One thing at most is taken to be wrong, the cut or the scale.

    Args:
        weight: The weight.
        planned: The name of the planned cut.
        rules: The scale rules that are possible, the declared one first.
        rates: The learning rates that are possible.
        steps: Steps between the checkpoints.
        compare: Looks at the values once more.
    """
    every = [weight.off(cut, rules[0], rates, steps) for cut in weight.cuts]
    every += [weight.off(planned, rule, rates, steps) for rule in rules[1:]]
    fitting = [h for h in every if h.off == 1.0]
    shown = [h for h in every if h.rule is rules[0] or h.off == 1.0]
    tried = tuple(_tried(weight, h, rates, steps) for h in shown)
    undecided = Decided("", (), "", 0.0, 0.0, "", tried)
    if all(s.most <= s.hidden for sizes in weight.sizes.values() for s in sizes):
        return undecided._replace(
            reason="it did not move, or by less than rounding hides", tried=()
        )
    if not fitting:
        near = min(every, key=lambda h: h.off)
        said = f"nothing that was tried fits; {near.cut} comes nearest, off by {near.off:.3g} times"
        return undecided._replace(reason=said)
    for winner in _coarsest_first(fitting):
        rivals = {h.cut: h.layout for h in fitting if h.cut != winner.cut}
        against: dict[str, Gain] = {}
        for cut, layout in rivals.items():
            against[cut] = compare(winner.layout, layout)
            if not against[cut].rules_out:
                break
        else:
            also = tuple(h.rule for h in fitting if h.cut == winner.cut)
            return _won(undecided, winner, also, every, against)
    names = ", ".join(dict.fromkeys(h.cut for h in _coarsest_first(fitting)))
    return undecided._replace(reason=f"it may be any of: {names}")


def _coarsest_first(fitting: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Each cut once, under the first rule that fits; those that others refine come first."""
    once = {h.cut: h for h in reversed(fitting)}
    finer = {
        cut: sum(refines(other.layout, h.layout) for other in once.values())
        for cut, h in once.items()
    }
    return sorted(once.values(), key=lambda h: -finer[h.cut])


def _won(
    undecided: Decided,
    winner: Hypothesis,
    also: tuple[Rule, ...],
    every: Sequence[Hypothesis],
    against: Mapping[str, Gain],
) -> Decided:
    others = [h for h in every if h.cut != winner.cut and h.off > 1.0]
    margins = {h.cut: h.off for h in reversed(others)}
    margins |= {cut: found.gain for cut, found in against.items()}
    following = min(margins, key=lambda cut: margins[cut], default="")
    beaten = against.get(following)
    return undecided._replace(
        cut=winner.cut,
        rules=also,
        margin=digits(margins.get(following, math.inf)),
        sigma=0.0 if beaten is None else digits(math.log(beaten.gain) / beaten.error),
        next=following,
        tried=tuple(
            replace(t, against=f"its blocks would overlap {against[t.cut].gain:.3g} times as much")
            if t.cut in against and t.fits
            else t
            for t in undecided.tried
        ),
    )


def _tried(weight: Weight, h: Hypothesis, rates: Rates, steps: int) -> Tried:
    """A hypothesis in units of the size that a block has under it, at the nearest rate."""
    lows, highs, bounds = list[float](), list[float](), list[tuple[float, float]]()
    rate = _nearest(allowed(weight.sizes[h.cut], h.rule, weight.matrix(h.layout), steps), rates)
    for s in weight.sizes[h.cut]:
        reach = band(h.rule.arithmetic, min(s.rows, s.cols))
        unit = rate * h.rule.size((s.rows, s.cols), weight.matrix(h.layout)) or 1.0
        lows += [s.least / unit] if s.still < s.blocks else []
        highs.append(s.most / unit)
        low = reach.low if steps == 1 else 0.0
        bounds.append((max(0.0, low - s.hidden / unit), steps * reach.high + s.hidden / unit))
    return Tried(
        h.cut,
        "whole" if h.layout is None else str(h.layout),
        h.rule.name,
        sum(s.blocks for s in weight.sizes[h.cut]),
        digits(min(lows, default=0.0)),
        digits(max(highs)),
        digits(max(low for low, _ in bounds)),
        digits(min(high for _, high in bounds)),
        digits(h.off),
        "",
    )


def _nearest(mine: Rates, rates: Rates) -> float:
    """The learning rate of an interval that a hypothesis comes nearest to."""
    if mine.low > mine.high:
        mine = Rates((mine.low * mine.high) ** 0.5, (mine.low * mine.high) ** 0.5)
    return min(max(mine.low, rates.low), rates.high) or 1.0
