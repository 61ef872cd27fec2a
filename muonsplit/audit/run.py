"""Auditing: two checkpoints, a config and a dialect come to what a run did."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from muonsplit.audit import decay
from muonsplit.audit.chance import Coordinates, Gain, coordinates, mixed, turned
from muonsplit.audit.cuts import WHOLE, cuts, refines
from muonsplit.audit.decay import Decay
from muonsplit.audit.decide import Decided, Weight, decide
from muonsplit.audit.inputs import AHEAD, MOST_OFF, explained
from muonsplit.audit.matched import Matched
from muonsplit.audit.measure import Change, Measured, change, measured
from muonsplit.audit.pictured import pictured
from muonsplit.audit.result import Audit, AuditedWeight, Evidence, Explained, Settings
from muonsplit.audit.sizes import ANY, Rates, Rule, allowed, fitted, rules
from muonsplit.audit.spectra import blocks_of, largest
from muonsplit.audit.state import State
from muonsplit.dialect import Dialect
from muonsplit.errors import EvidenceError
from muonsplit.evidence.saved import Saved
from muonsplit.geometry import Decision
from muonsplit.layout import Layout

Progress = Callable[[int, int, str], None]
# A given rate may have been rounded by who wrote it down.
_GIVEN = 1e-3


class Told(NamedTuple):
    """What is known of how one weight was trained.

    Attributes:
        lr: Learning rate; None to fit it.
        weight_decay: Weight decay; None to fit it.
        beta: Momentum coefficient; None for the dialect's.
    """

    lr: float | None = None
    weight_decay: float | None = None
    beta: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a run.

    Attributes:
        matched: Checkpoints and plan, brought together.
        dialect: The dialect that the run is held to.
        recorded: The step's inputs: ``gradients``, ``momentum``, ``momentum_before``.
        told: What is known of how a weight was trained, by its name.
        steps: Optimizer steps between the checkpoints.
        kind: ``checkpoints`` or ``capture``.
        state: Where to put down what is known already, and take it up again.
        progress: Told how many are done, of how many, and the weight that begins.
    """

    matched: Matched
    dialect: Dialect
    recorded: Mapping[str, Saved] = field(default_factory=dict[str, Saved])
    told: Callable[[str], Told] = lambda name: Told()
    steps: int = 1
    kind: str = "checkpoints"
    state: State = field(default_factory=State)
    progress: Progress = lambda done, of, name: None


def audit(question: Question) -> Audit:
    """Tells what a run did with each Muon weight.

    Each weight is read, measured and forgotten; once more where its sizes leave several cuts
    possible. No more is held than a weight before and after.

    Raises:
        EvidenceError: If the evidence as a whole says nothing: equal checkpoints, another model.
    """
    matched = question.matched
    names = [d.name for d in matched.decisions]
    lost = _Lost(question)
    each = {d.name: cuts(d, matched.legal[d.name], matched.heads) for d in matched.decisions}
    found: dict[str, Measured | str] = {}
    for done, d in enumerate(matched.decisions):
        question.progress(done, 2 * len(names), d.name)
        found[d.name] = _measured(question, d, each[d.name], lost)
    known = {name: m for name, m in found.items() if isinstance(m, Measured)}
    _refuse_equal(question, known)
    weights = {
        d.name: Weight(d.shape, each[d.name], known[d.name].sizes)
        for d in matched.decisions
        if d.name in known
    }
    possible, rates = _settled(question, weights)
    rows: list[AuditedWeight] = []
    shown = set[tuple[object, ...]]()
    for done, d in enumerate(matched.decisions):
        question.progress(len(names) + done, 2 * len(names), d.name)
        if d.name not in weights:
            rows.append(_unread(d, str(found[d.name])))
            continue
        kind = (d.owner, d.leaf, d.shape)
        one = _One(question, d, weights[d.name], possible, rates, lost, kind not in shown)
        shown.add(kind)
        rows.append(question.state.once("decided", d.name, AuditedWeight, one.row))
    return _audit(question, rows, possible, rates, lost, known)


class _Lost:
    """What weights lose by decay: as it is told, or fitted once for all of those left."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._fitted: Decay | None = None

    def of(self, name: str) -> Decay:
        told, arithmetic = self._question.told(name), self._question.dialect.arithmetic
        if told.weight_decay == 0 or arithmetic.decay.startswith("folded"):
            return Decay(0.0, 0.0)
        if told.weight_decay and told.lr and arithmetic.decay_rate == "base":
            return Decay(told.weight_decay * told.lr * self._question.steps, 0.0)
        return self.fitted

    @property
    def fitted(self) -> Decay:
        if self._fitted is None:
            matched = self._question.matched
            there = [d.name for d in matched.decisions if d.name not in matched.missing]
            self._fitted = self._question.state.once(
                "decay", "", Decay, lambda: decay.fitted(*matched.both, there)
            )
        return self._fitted


def _measured(
    question: Question, d: Decision, each: Mapping[str, Layout | None], lost: _Lost
) -> Measured | str:
    """The sizes of a weight's blocks, or why they are not known."""
    if d.name in question.matched.missing:
        return "the checkpoints do not have it"

    def measure() -> Measured:
        off = lost.of(d.name)
        seen = change(*question.matched.both, d.name, off.taken)
        doubt = _doubt(question, d.name, off)
        return measured(seen, each, doubt)

    try:
        return question.state.once("measured", d.name, Measured, measure)
    except EvidenceError as error:
        return str(error)


def _doubt(question: Question, name: str, off: Decay) -> float:
    """What decay that was not taken off may add to a block's largest singular value."""
    if not off.doubt:
        return 0.0
    earlier = question.matched.before.read(name).float()
    return off.doubt * max(float(largest(part).max()) for part in blocks_of(earlier, None))


def _refuse_equal(question: Question, known: Mapping[str, Measured]) -> None:
    if known and all(m.before == m.after for m in known.values()):
        raise EvidenceError(
            f"All {len(known)} Muon weights are equal in {question.matched.before.path} and "
            f"{question.matched.after.path}: no step was taken between them.",
            "Give checkpoints of consecutive steps.",
        )


def _settled(question: Question, weights: Mapping[str, Weight]) -> tuple[list[Rule], Rates]:
    """The scale rules that are possible, the most probable first, and the learning rates."""
    every = rules(question.dialect.arithmetic)
    told = {question.told(name).lr for name in weights}
    if None not in told:
        return every, Rates(min(filter(None, told)), max(filter(None, told))) if any(told) else ANY
    split = {d.name for d in question.matched.decisions if d.layout is not None}
    anchors = [w for name, w in weights.items() if name not in split] or list(weights.values())
    best = (every[0], Rates(1.0, 0.0), -1)
    for rule in every:
        each = [
            allowed(w.sizes[WHOLE], rule, w.matrix(None), question.steps)
            for w in anchors
            if WHOLE in w.sizes
        ]
        rates, count = fitted([r for r in each if r.low > 0], rule.arithmetic)
        if count > best[2]:
            best = rule, rates, count
    rest = [rule for rule in every if rule is not best[0]]
    return [best[0], *rest], best[1]


@dataclass(slots=True)
class _One:
    """One weight that is being decided on; its values are read when they are needed."""

    question: Question
    decision: Decision
    weight: Weight
    rules: Sequence[Rule]
    rates: Rates
    lost: _Lost
    show: bool
    _change: Change | None = None
    _turned: dict[int, Coordinates] = field(default_factory=dict[int, Coordinates])

    def row(self) -> AuditedWeight:
        planned = next(iter(self.weight.cuts))
        rates = self._rates()
        found = decide(self.weight, planned, self.rules, rates, self.question.steps, self._compare)
        fits = self._explained(rates)
        row = self._row(found, planned)
        if fits:
            row = _by_input(row, fits, self.weight.cuts, planned)
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
        found = Gain(1.0, float("inf"))
        if other is not None:
            found = turned(self._along(other.axis), candidate, other, 0)
        if candidate is not None and not found.rules_out and refines(candidate, other):
            found = mixed(self._along(candidate.axis), candidate, other, 0)
        return found

    def _along(self, axis: int) -> Coordinates:
        if axis not in self._turned:
            values = self._values()
            self._turned[axis] = coordinates(values.mT if axis else values)
        return self._turned[axis]

    def _explained(self, rates: Rates) -> tuple[Explained, ...]:
        if not self.question.recorded or self.question.steps != 1:
            return ()
        beta = self.question.told(self.decision.name).beta
        arithmetic = self.question.dialect.arithmetic
        return explained(
            self._values(),
            self.question.recorded,
            self.decision.name,
            self.weight.cuts,
            arithmetic,
            arithmetic.beta if beta is None else beta,
            rates.low or 1.0,
        )

    def _row(self, found: Decided, planned: str) -> AuditedWeight:
        cut = self.weight.cuts
        reason, outcome = found.reason, "undecided"
        scale = found.rule.name if found.rule is not None else ""
        if found.cut:
            alike = found.cut == planned and found.rule is self.rules[0]
            outcome = "as planned" if alike else "otherwise"
            if found.cut == planned and not alike:
                reason = f"the cut is as planned, its scale is {scale}"
            elif not alike:
                reason = f"{found.cut}: {_written(cut[found.cut])}"
        elif _excluded(found, planned, self.rules[0]):
            outcome, reason = "otherwise", f"not as planned; {reason}"
        return AuditedWeight(
            self.decision.name,
            f"{self.decision.owner}.{self.decision.leaf}",
            self.decision.shape,
            _written(cut[planned]),
            _written(cut[found.cut]) if found.cut else "",
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
    return (
        bool(found.tried) and not any(t.fits for t in mine) and "did not move" not in found.reason
    )


def _written(layout: Layout | None) -> str:
    return "whole" if layout is None else str(layout)


def _by_input(
    row: AuditedWeight,
    fits: Sequence[Explained],
    cut: Mapping[str, Layout | None],
    planned: str,
) -> AuditedWeight:
    """What the recorded input says is better than what sizes say."""
    best, rest = fits[0], fits[1:]
    margin = min((e.off for e in rest), default=float("inf")) / max(best.off, 1e-12)
    if best.off > MOST_OFF or margin < AHEAD:
        return row
    alike = best.cut == planned
    written = _written(cut[best.cut])
    return replace(
        row,
        observed=written,
        outcome="as planned" if alike else "otherwise",
        reason="" if alike else f"{best.cut}: {written}",
        margin=float(f"{margin:.4g}"),
        sigma=0.0,
        next=rest[0].cut if rest else "",
        scale="",
    )


def _unread(d: Decision, reason: str) -> AuditedWeight:
    layout = "whole" if d.layout is None else str(d.layout)
    leaf = f"{d.owner}.{d.leaf}"
    return AuditedWeight(
        d.name, leaf, d.shape, layout, "", "unread", reason, 0.0, 0.0, "", "", (), (), None
    )


def _audit(
    question: Question,
    rows: Sequence[AuditedWeight],
    possible: Sequence[Rule],
    rates: Rates,
    lost: _Lost,
    known: Mapping[str, Measured],
) -> Audit:
    matched = question.matched
    return Audit(
        matched.model,
        matched.config,
        question.dialect,
        Evidence(
            question.kind,
            _together(m.before for m in known.values()),
            _together(m.after for m in known.values()),
            tuple(question.recorded),
            matched.unknown,
            tuple(matched.missing),
        ),
        Settings(
            question.steps,
            (float(f"{rates.low:.4g}"), float(f"{rates.high:.4g}")),
            all(question.told(row.weight).lr is not None for row in rows),
            float(f"{max((lost.of(row.weight).taken for row in rows), default=0.0):.4g}"),
            all(question.told(row.weight).weight_decay is not None for row in rows),
            (possible[0].name,),
            matched.dtype,
        ),
        tuple(rows),
        _findings(question, possible),
    )


def _findings(question: Question, possible: Sequence[Rule]) -> tuple[str, ...]:
    declared = rules(question.dialect.arithmetic)[0]
    if possible[0].name == declared.name:
        return ()
    return (
        f"No learning rate explains the sizes of the weights that are not split under the scale of "
        f"{question.dialect.name} ({declared.name}); {possible[0].name} explains them.",
    )


def _together(digests: Iterator[str] | Sequence[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()
