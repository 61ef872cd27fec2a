"""Auditing: two checkpoints, a config and a dialect come to what a run did."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from muonsplit.audit.cuts import WHOLE, cuts
from muonsplit.audit.decay import Decay, Lost
from muonsplit.audit.decide import Weight
from muonsplit.audit.inputs import backwards
from muonsplit.audit.measure import Measured, change, measured
from muonsplit.audit.one import One, written
from muonsplit.audit.question import Question
from muonsplit.audit.result import Audit, AuditedWeight, Evidence, Settings, digits
from muonsplit.audit.sizes import ANY, Rates, Rule, anchored, fitted, rules
from muonsplit.audit.spectra import blocks_of, largest
from muonsplit.errors import EvidenceError
from muonsplit.geometry import Decision
from muonsplit.layout import Layout


def audit(question: Question) -> Audit:
    """Tells what a run did with each Muon weight.

    Each weight is read, measured and forgotten; once more where its sizes leave several cuts
    possible. No more is held than a weight before and after.

    Raises:
        EvidenceError: If the evidence as a whole says nothing: equal checkpoints, another model.
    """
    matched = question.matched
    names = [d.name for d in matched.decisions]
    lost = Lost(question)
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
        one = One(question, d, weights[d.name], possible, rates, lost, kind not in shown)
        shown.add(kind)
        rows.append(question.state.once("decided", d.name, AuditedWeight, one.row))
    _refuse_backwards(rows)
    return _audit(question, _on_firm_ground(question, rows), possible, rates, lost, known)


def _measured(
    question: Question, d: Decision, each: Mapping[str, Layout | None], lost: Lost
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


def _refuse_backwards(rows: Sequence[AuditedWeight]) -> None:
    held = [row.explained for row in rows if row.explained]
    if held and all(map(backwards, held)):
        raise EvidenceError(
            f"All {len(held)} weights moved along their gradients, not against them: the "
            "checkpoints are in the wrong order.",
            "Give the earlier one first.",
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
            anchored(w.sizes[WHOLE], rule, w.matrix(None), question.steps)
            for w in anchors
            if WHOLE in w.sizes
        ]
        rates, count = fitted([a for a in each if a.rates.low > 0], rule.arithmetic)
        if count > best[2]:
            best = rule, rates, count
    rest = [rule for rule in every if rule is not best[0]]
    return [best[0], *rest], best[1]


def _on_firm_ground(question: Question, rows: Sequence[AuditedWeight]) -> list[AuditedWeight]:
    """Takes back what rests on a rate that was fitted on weights that turned out to be cut."""
    told = all(question.told(row.weight).lr is not None for row in rows)
    anchors = [row.observed for row in rows if row.planned == written(None) and row.observed]
    if told or 2 * anchors.count(written(None)) >= len(anchors):
        return list(rows)
    reason = "most weights that the learning rate was fitted on were cut themselves: give it"
    return [
        replace(
            row,
            observed="",
            outcome="undecided",
            reason=reason,
            margin=0.0,
            sigma=0.0,
            next="",
            scale="",
        )
        if row.planned != written(None) and row.scale
        else row
        for row in rows
    ]


def _unread(d: Decision, reason: str) -> AuditedWeight:
    leaf, cut = f"{d.owner}.{d.leaf}", written(d.layout)
    return AuditedWeight(
        d.name, leaf, d.shape, cut, "", "unread", reason, 0.0, 0.0, "", "", (), (), None
    )


def _audit(
    question: Question,
    rows: Sequence[AuditedWeight],
    possible: Sequence[Rule],
    rates: Rates,
    lost: Lost,
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
            matched.asked,
            matched.muon,
        ),
        Settings(
            question.steps,
            (digits(rates.low), digits(rates.high)),
            all(question.told(row.weight).lr is not None for row in rows),
            digits(max((lost.of(row.weight).taken for row in rows), default=0.0)),
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
