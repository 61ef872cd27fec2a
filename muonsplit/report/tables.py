"""What there is to show, as tables; the renderers differ only in how they draw one."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from muonsplit.certificate.run import Certificate
from muonsplit.certificate.verdict import ModelResult, Status, WeightResult
from muonsplit.geometry import Decision, Plan
from muonsplit.report.summary import Alike, alike, alone, cause, status_counts
from muonsplit.report.text import clipped, plain, shown_shape


@dataclass(frozen=True, slots=True)
class Table:
    """A table of plain strings.

    Attributes:
        title: Printed above it.
        columns: Headings.
        rows: One string a column.
        note: A line under the title, or an empty string.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], note: str = ""
) -> Table:
    """Builds a table; cells are made strings, and control characters of a subject harmless."""
    cells = tuple(tuple(plain(clipped(str(cell))) for cell in row) for row in rows)
    return Table(plain(clipped(title)), tuple(columns), cells, plain(note))


def plan_tables(model: str, plan: Plan) -> list[Table]:
    """The plan of a model: a row for each set of weights that differ only by layer."""
    rows = [
        (f"×{count}", f"{d.owner}.{d.leaf}", shown_shape(d.shape), d.layout or _uncut(d), d.reason)
        for d, count in plan.table()
    ]
    return [
        table(f"{model} under {plan.dialect}", ("count", "weight", "shape", "cut", "why"), rows)
    ]


def _uncut(decision: Decision) -> str:
    return "whole" if len(decision.shape) == 2 else "whole, each expert"


def plan_summary(plan: Plan) -> str:
    """How many weights there are, how many are split, and where the rest goes."""
    kinds = Counter(d.kind for d in plan.others)
    others = ", ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in sorted(kinds.items()))
    return (
        f"{len(plan.decisions)} Muon weights, {len(plan.split)} split; "
        f"not Muon's: {others or 'nothing'}"
    )


def certificate_tables(certificate: Certificate, details: bool = False) -> list[Table]:
    """Models, then for each its weights, findings and open questions.

    Args:
        certificate: What to show.
        details: Whether a finding's numbers and its process's output are shown, or one line.
    """
    shown = [models_table(certificate)]
    for m in certificate.models:
        shown.append(weights_table(m))
        if findings := alike(certificate, m):
            columns, row = (_DETAILED, _detailed) if details else (_BRIEF, _brief)
            shown.append(table(f"{m.label}: findings", columns, map(row, findings)))
        shown.append(reasons_table(m, "undecided"))
        if details:
            shown += [reasons_table(m, "skipped"), floor_table(m)]
    return [found for found in shown if found.rows]


def models_table(certificate: Certificate) -> Table:
    """A row a model, under the verdict and what decided it."""
    rows = [
        (m.label, m.verdict, m.full, m.split, len(m.weights), _counts(m))
        for m in certificate.models
    ]
    columns = ("model", "verdict", "Muon weights", "split", "probed in miniature", "checks")
    title = f"{certificate.subject} under {certificate.dialect.name}: {certificate.verdict}"
    return table(title, columns, rows, cause(certificate))


def _counts(model: ModelResult) -> str:
    return ", ".join(f"{n} {status}" for status, n in status_counts(model.results).items())


def weights_table(model: ModelResult) -> Table:
    """The three answers for each set of weights that differ only by layer."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for w in model.weights:
        said = (w.truth, w.planned, w.observed or "not looked at")
        alike.setdefault((w.leaf, w.shape, said, _state(w)), []).append(w.weight)
    rows = [
        (
            *(f"×{len(names)}", leaf, shown_shape(shape), *said),
            *([alone(model, names)] if model.way else []),
            state,
        )
        for (leaf, shape, said, state), names in alike.items()
    ]
    columns = (
        "count",
        "weight",
        "shape in miniature",
        "truth",
        "planned",
        "observed",
        *(["beside one process"] if model.way else []),
        "first diverges at",
    )
    return table(f"{model.label}: weight by weight", columns, rows)


def reasons_table(model: ModelResult, status: Status) -> Table:
    """The checks that came to a status, and why."""
    rows = [(r.check, r.reason) for r in model.results if r.status == status]
    return table(f"{model.label}: {status}", ("check", "why"), rows)


def floor_table(model: ModelResult) -> Table:
    """How much may be off, at the most, without being seen."""
    rows = [(kind, f"{2 * limit:.3g}") for kind, limit in sorted(model.floor.items())]
    return table(
        f"{model.label}: detection floor", ("comparison", "what is off by more is seen"), rows
    )


def _state(weight: WeightResult) -> str:
    return weight.diverged or ("nowhere" if weight.observed else "")


_BRIEF = ("check", "weights", "what")
_DETAILED = (*_BRIEF, "planned", "observed", "proof, on the first")


def _brief(found: Alike) -> tuple[str, ...]:
    return found.check, found.weights, found.said


def _detailed(found: Alike) -> tuple[str, ...]:
    first = found.first
    said = f"{first.message}\n{first.tail}".strip()
    proof = "\n".join(f"{name}: {value}" for name, value in found.proof)
    return found.check, found.weights, said, first.planned, first.observed, proof
