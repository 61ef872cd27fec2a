"""One weight: what its sizes, its overlaps and its recorded input come to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from muonsplit.audit.chance import Coordinates, Gain, compared, coordinates
from muonsplit.audit.decay import Lost
from muonsplit.audit.decide import Decided, Weight, decide
from muonsplit.audit.inputs import AHEAD, MOST_OFF, explained
from muonsplit.audit.measure import Change, change
from muonsplit.audit.pictured import pictured
from muonsplit.audit.question import Question
from muonsplit.audit.result import AuditedWeight, Explained, digits
from muonsplit.audit.sizes import Rates, Rule
from muonsplit.geometry import Decision
from muonsplit.layout import Layout

# A given rate may have been rounded by who wrote it down.
_GIVEN = 1e-3
# Chosen: how far the size of an update may be from what its input says; bfloat16 errs by less.
_RESIZED = 0.05


@dataclass(slots=True)
class One:
    """One weight that is being decided on; its values are read when they are needed."""

    question: Question
    decision: Decision
    weight: Weight
    rules: Sequence[Rule]
    rates: Rates
    lost: Lost
    show: bool
    _change: Change | None = None
    _turned: dict[int, Coordinates] = field(default_factory=dict[int, Coordinates])

    def row(self) -> AuditedWeight:
        """What became of it."""
        planned = next(iter(self.weight.cuts))
        rates = self._rates()
        found = decide(self.weight, planned, self.rules, rates, self.question.steps, self._compare)
        fits = self._explained(rates)
        row = self._row(found, planned)
        if fits:
            known = self.question.told(self.decision.name).lr is not None
            row = _by_input(row, fits, self.weight.cuts, planned, known)
        picture = None
        if self.show and len(self.decision.shape) == 2 and rates.low > 0:
            picture = pictured(self._values(), self.weight.cuts[planned], *self._units(rates))
        return replace(row, explained=fits[:4], picture=picture)

    def _rates(self) -> Rates:
        rate = self.question.told(self.decision.name).lr
        return Rates(rate * (1 - _GIVEN), rate * (1 + _GIVEN)) if rate else self.rates

    def _units(self, rates: Rates) -> tuple[float, float]:
        """The sizes of a planned block and of the whole."""
        layout, shape = next(iter(self.weight.cuts.values())), self.weight.shape
        matrix = self.weight.matrix(layout)
        block = matrix if layout is None else (layout.blocks()[0].rows, matrix[-1])
        rule = self.rules[0]
        return rates.low * rule.size(block, matrix), rates.low * rule.size(shape, shape)

    def _values(self) -> Tensor:
        if self._change is None:
            both = self.question.matched.both
            off = self.lost.of(self.decision.name)
            self._change = change(*both, self.decision.name, off.taken)
        return self._change.values

    def _compare(self, candidate: Layout | None, other: Layout | None) -> Gain:
        return compared(self._along, candidate, other)

    def _along(self, axis: int) -> Coordinates:
        if axis not in self._turned:
            values = self._values()
            self._turned[axis] = coordinates(values.mT if axis else values)
        return self._turned[axis]

    def _explained(self, rates: Rates) -> tuple[Explained, ...]:
        if not self.question.recorded or self.question.steps != 1:
            return ()
        told = self.question.told(self.decision.name)
        beta = told.beta
        arithmetic = self.question.dialect.arithmetic
        return explained(
            self._values(),
            self.question.recorded,
            self.decision.name,
            self.weight.cuts,
            arithmetic,
            arithmetic.beta if beta is None else beta,
            told.lr or rates.low or 1.0,
        )

    def _row(self, found: Decided, planned: str) -> AuditedWeight:
        cut = self.weight.cuts
        reason, outcome = found.reason, "undecided"
        scale = " or ".join(rule.name for rule in found.rules)
        if found.cut:
            alike = found.cut == planned and self.rules[0] in found.rules
            outcome = "as planned" if alike else "otherwise"
            if found.cut == planned and not alike:
                reason = f"the cut is as planned, its scale is {scale}"
            elif not alike:
                reason = f"{found.cut}: {written(cut[found.cut])}"
        elif _excluded(found, planned, self.rules[0]):
            outcome, reason = "otherwise", f"not as planned; {reason}"
        return AuditedWeight(
            self.decision.name,
            f"{self.decision.owner}.{self.decision.leaf}",
            self.decision.shape,
            written(cut[planned]),
            written(cut[found.cut]) if found.cut else "",
            outcome,
            reason,
            found.margin,
            found.sigma,
            found.next,
            scale,
            found.tried,
            (),
            None,
        )


def _excluded(found: Decided, planned: str, rule: Rule) -> bool:
    """Whether the plan does not fit, although nothing else was decided."""
    mine = [t for t in found.tried if t.cut == planned and t.scale == rule.name]
    return bool(found.tried) and not any(t.fits for t in mine)


def written(layout: Layout | None) -> str:
    """A cut as it stands on a certificate."""
    return "whole" if layout is None else str(layout)


def _by_input(
    row: AuditedWeight,
    fits: Sequence[Explained],
    cut: Mapping[str, Layout | None],
    planned: str,
    known: bool,
) -> AuditedWeight:
    """What the recorded input says is better than what sizes say.

    Args:
        row: What sizes say.
        fits: The hypotheses on the input, the best first.
        cut: Layouts by name.
        planned: The name of the planned cut.
        known: Whether the learning rate is.
    """
    best, rest = fits[0], fits[1:]
    margin = min((e.off for e in rest), default=float("inf")) / max(best.off, 1e-12)
    if best.off > MOST_OFF or margin < AHEAD:
        return row
    observed = written(cut[best.cut])
    reason = "" if best.cut == planned else f"{best.cut}: {observed}"
    if not reason and known and abs(best.size - 1) > _RESIZED:
        reason = f"the cut is as planned, its update is {best.size:.3g} times its size"
    return replace(
        row,
        observed=observed,
        outcome="otherwise" if reason else "as planned",
        reason=reason,
        margin=digits(margin),
        sigma=0.0,
        next=rest[0].cut if rest else "",
        scale="",
    )
