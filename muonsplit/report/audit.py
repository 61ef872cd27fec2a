"""What an audit comes to, in words and tables; and as a page of Markdown."""

import math
from collections import Counter
from dataclasses import dataclass

from muonsplit.audit.result import Audit, AuditedWeight, Outcome, Tried
from muonsplit.certificate.verdict import Verdict
from muonsplit.report import markdown
from muonsplit.report.gram import span
from muonsplit.report.tables import Table, table
from muonsplit.report.text import collapsed, counted, one_line, shown_shape

OUTCOMES: tuple[Outcome, ...] = ("as planned", "otherwise", "undecided", "unread")
_MOST_REASONS = 8
_MARKS = {Verdict.CONFORMS: "✅", Verdict.VIOLATES: "❌", Verdict.INCONCLUSIVE: "⚠️"}


@dataclass(frozen=True, slots=True)
class Group:
    """Weights that differ only by layer, in model order, of which the same was found."""

    weights: tuple[AuditedWeight, ...]

    @property
    def worst(self) -> AuditedWeight:
        """The one of which it is least sure."""
        return min(self.weights, key=lambda weight: (weight.margin, weight.sigma or math.inf))

    @property
    def names(self) -> str:
        """Their names, as one if they differ only by layer."""
        return collapsed([weight.weight for weight in self.weights])

    @property
    def why(self) -> str:
        """Why they are not as planned, in the words of the worst, and how many say otherwise."""
        others = sum(weight.reason != self.worst.reason for weight in self.weights)
        more = f" ({counted(others, 'other')} in other words)" if others else ""
        return one_line(self.worst.reason) + more if self.worst.reason else ""


def groups(audit: Audit) -> list[Group]:
    """Weights of one leaf, shape, plan and observation together, in model order."""
    found: dict[tuple[object, ...], list[AuditedWeight]] = {}
    for w in audit.weights:
        key = (w.leaf, w.shape, w.planned, w.observed, w.scale, w.outcome)
        found.setdefault(key, []).append(w)
    return [Group(tuple(weights)) for weights in found.values()]


def hypothesis(weight: AuditedWeight, layout: str, scale: str = "") -> Tried | None:
    """The hypothesis of a layout under a scale rule; None if it was not tried.

    Args:
        weight: Whose hypotheses.
        layout: The layout as it is written, or ``whole``.
        scale: The scale rule that is preferred; else the one that suits it best.
    """
    found = [tried for tried in weight.tried if tried.layout == layout]
    return min(found, key=lambda tried: (tried.scale not in scale, tried.off)) if found else None


def seen(weight: AuditedWeight) -> Tried | None:
    """The hypothesis that was observed; None if it is undecided."""
    return hypothesis(weight, weight.observed, weight.scale) if weight.observed else None


def audit_tables(audit: Audit, details: bool = False) -> list[Table]:
    """The weights under the count of outcomes, what is wrong with the whole, what is undecided.

    Args:
        audit: What to show.
        details: Whether also every hypothesis on every weight is shown.
    """
    shown = [weights_table(audit), findings_table(audit)]
    if details:
        for w in audit.weights:
            shown += [tried_table(w), explained_table(w)]
    return [found for found in shown if found.rows or found is shown[0]]


def weights_table(audit: Audit) -> Table:
    """A row for each set of weights that differ only by layer."""
    rows = [
        (
            *(g.worst.leaf, f"{shown_shape(g.worst.shape)} ×{len(g.weights)}"),
            *(g.worst.planned, g.worst.observed or "–", g.worst.scale, _following(g.worst)),
            *(g.worst.outcome, g.why),
        )
        for g in groups(audit)
    ]
    columns = (
        "weight",
        "shape",
        "planned",
        "observed",
        "scale",
        "next hypothesis",
        "outcome",
        "why",
    )
    title = f"{audit.model} under {audit.dialect.name}: {audit.verdict}, by evidence from a run"
    return table(title, columns, rows, f"{audit.verdict}: {_counts(audit)}")


def _counts(audit: Audit) -> str:
    counts = outcomes(audit)
    return ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "no Muon weight"


def outcomes(audit: Audit) -> dict[Outcome, int]:
    """How many weights there are of each outcome."""
    counts = Counter(weight.outcome for weight in audit.weights)
    return {name: counts[name] for name in OUTCOMES}


def sure(weight: AuditedWeight) -> str:
    """What rules out the hypothesis that comes next, and how clearly."""
    following = _following(weight)
    if not following:
        return "not decided"
    return f"next, {following}" if weight.next else "nothing else was possible"


def _following(weight: AuditedWeight) -> str:
    if not weight.observed or not weight.margin:
        return ""
    return f"{weight.next}: {_off(weight)}" if weight.next else "none"


def _off(weight: AuditedWeight) -> str:
    if not weight.margin > 1:
        return "possible too"
    if weight.explained and not weight.scale:
        return f"it explains the recorded input {weight.margin:.3g} times worse"
    if weight.sigma > 0:
        overlap = f"its blocks would overlap {weight.margin:.3g} times as much"
        return f"{overlap}, {weight.sigma:.3g} standard errors"
    return f"its sizes are off by {_factor(weight.margin)}"


def _factor(factor: float) -> str:
    return f"×{factor:.3g}" if math.isfinite(factor) else "any factor"


def findings_table(audit: Audit) -> Table:
    """What is wrong with the whole of it."""
    return table(f"{audit.model}: findings", ("what",), [(found,) for found in audit.findings])


def tried_table(weight: AuditedWeight, most: int = 0) -> Table:
    """Every hypothesis on a weight, or the nearest, held against what its blocks became.

    Args:
        weight: Whose hypotheses.
        most: How many are shown; 0 for all.
    """
    rows = [
        (
            *(t.cut, t.layout, t.scale, t.blocks, span(t.least, t.most), span(t.low, t.high)),
            *("fits" if t.fits else f"off by {_factor(t.off)}", t.against),
        )
        for t in nearest(weight)[: most or None]
    ]
    columns = ("cut", "layout", "scale", "blocks", "largest", "possible", "fits", "against it")
    note = "The largest singular value of each block, over the size that the hypothesis gives it."
    return table(f"{weight.weight}: hypotheses", columns, rows, note)


def nearest(weight: AuditedWeight) -> list[Tried]:
    """Its hypotheses: the observed, the possible, and then the others, the nearest first."""
    observed = seen(weight)
    return sorted(weight.tried, key=lambda t: (t is not observed, t.off, t.against != ""))


def explained_table(weight: AuditedWeight) -> Table:
    """The hypotheses that explain the recorded input best."""
    rows = [
        (e.cut, e.input, e.coefficients, f"{100 * e.off:.3g} %", f"×{e.size:.3g}")
        for e in weight.explained
    ]
    columns = ("cut", "of", "coefficients", "off in direction", "size, of what it should be")
    return table(f"{weight.weight}: on the recorded input", columns, rows)


def audit_cause(audit: Audit) -> str:
    """The verdict and what decided it, in one line."""
    why = {
        Verdict.VIOLATES: _violation,
        Verdict.INCONCLUSIVE: _open_question,
        Verdict.CONFORMS: _conformity,
    }[audit.verdict]
    return one_line(f"{audit.verdict}: {why(audit)}")


def _conformity(audit: Audit) -> str:
    every = counted(len(audit.weights), "Muon weight")
    return f"{every} of {audit.model}, orthogonalised as planned"


def _violation(audit: Audit) -> str:
    if audit.findings:
        more = len(audit.findings) - 1
        return audit.findings[0] + (f" (and {counted(more, 'more finding')})" if more else "")
    off = next(g for g in groups(audit) if g.worst.outcome == "otherwise")
    count, every = outcomes(audit)["otherwise"], len(audit.weights)
    said = f"{off.worst.leaf} {_parted(off.worst)}"
    rest = count - len(off.weights)
    more = f" (and {counted(rest, 'more weight')})" if rest else ""
    return f"{count} of {counted(every, 'Muon weight')} orthogonalised otherwise: {said}{more}"


def _parted(weight: AuditedWeight) -> str:
    if not weight.observed:
        return f"not as planned, {weight.planned}"
    if weight.observed == weight.planned:
        return f"{weight.observed}, as planned, but its scale is {weight.scale}"
    return f"{weight.observed}, planned {weight.planned}"


def _open_question(audit: Audit) -> str:
    still = [w for w in audit.weights if w.outcome != "as planned"]
    if not still:
        return "there was no Muon weight to look at"
    reason, _ = Counter(w.reason for w in still).most_common(1)[0]
    every = counted(len(audit.weights), "Muon weight")
    return f"{len(still)} of {every} could not be told: {reason}"


def audit_notes(audit: Audit) -> list[str]:
    """The verdict, what it rests on, and what a reader should know before it is taken further."""
    said = [audit_cause(audit)]
    said += [f"{name}: {value}" for name, value in settings(audit)]
    said += [f"Finding: {finding}" for finding in audit.findings]
    reasons = Counter((w.outcome, w.reason) for w in audit.weights if w.outcome in OUTCOMES[2:])
    for (outcome, reason), count in reasons.most_common(_MOST_REASONS):
        said.append(f"{counted(count, 'weight')} {outcome}: {reason or 'no reason is recorded'}")
    if rest := sum(reasons.values()) - sum(n for _, n in reasons.most_common(_MOST_REASONS)):
        said.append(f"{counted(rest, 'more weight')} undecided or unread for other reasons")
    if several := sum(" or " in w.scale for w in audit.weights if w.outcome == "as planned"):
        said.append(f"{counted(several, 'weight')} as planned whose scale may be by another rule")
    return list(map(one_line, [*said, caveat(audit)]))


def settings(audit: Audit) -> list[tuple[str, str]]:
    """What the audit rests on, and what the run was taken to be."""
    s, e = audit.settings, audit.evidence
    lr, decay = ("given" if given else "fitted" for given in (s.lr_given, s.decay_given))
    missing = f"{len(e.missing)}: {collapsed(e.missing)}" if e.missing else "none"
    asked = f"{len(audit.weights)} of {e.muon}, named like {e.asked}"
    return [
        *([("Muon weights asked about", asked)] if e.asked != "*" else []),
        ("evidence", e.kind),
        ("recorded input", ", ".join(e.inputs) or "none"),
        ("dtype of the checkpoints", s.dtype),
        ("steps between", str(s.steps)),
        ("learning rate", f"{_rate(s.lr)}, {lr}"),
        ("weight decay × learning rate", f"{s.decay:.4g}, {decay}"),
        ("scale rule", " or ".join(s.scale) or "none fits"),
        ("Muon weights that the checkpoint lacks", missing),
        ("tensors that are none of the model", str(e.unknown)),
    ]


def _rate(lr: tuple[float, float]) -> str:
    low, high = (f"{end:.4g}" for end in lr)
    return low if low == high else f"{low}–{high}"


def caveat(audit: Audit) -> str:
    """Of what such evidence does not speak."""
    if audit.evidence.inputs:
        seen = "how the weights moved, and which of the recorded inputs explains it"
        unasked = "The optimizer's state over time, its options, and any other step"
    else:
        seen = "how the weights moved between two checkpoints, no more"
        unasked = "What went in, the form of the momentum, coefficients, the optimizer's state"
    return f"This is evidence from a run: it shows {seen}. {unasked} were not asked."


def audit_markdown(audit: Audit) -> str:
    """Writes an audit as one page that fits a job summary; what is left out is counted."""
    found = weights_table(audit)
    tables = [table(audit_cause(audit), found.columns, found.rows, found.note.partition(": ")[2])]
    tables.append(findings_table(audit))
    open_ones = [g.worst for g in groups(audit) if g.worst.outcome != "as planned"]
    tables += [tried_table(w, most=8) for w in open_ones]
    tables += [explained_table(w) for w in open_ones]
    shown = markdown.render([t for t in tables if t.rows or t is tables[0]])
    heading = f"## {_MARKS[audit.verdict]} Audit of a run: {audit.verdict}"
    # Indented by four, notes are code whatever they hold.
    onward = "\n".join(f"    {note}" for note in audit_notes(audit)[1:])
    return markdown.fitting(f"{heading}\n\n{shown}\n{onward}\n", "the certificate")
