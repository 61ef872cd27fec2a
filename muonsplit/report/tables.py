"""What there is to show, as tables; the renderers differ only in how they draw one."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from muonsplit.certificate.run import Certificate
from muonsplit.certificate.verdict import ModelResult, WeightResult
from muonsplit.checks import CHECKS, Finding
from muonsplit.dialect import dialect_named
from muonsplit.geometry import Decision, Plan

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Table:
    """A table of plain strings.

    Attributes:
        title: Printed above it.
        columns: Headings.
        rows: One string a column.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Builds a table; cells are made strings, and control characters of a subject harmless."""
    cells = tuple(tuple(plain(str(cell)) for cell in row) for row in rows)
    return Table(plain(title), tuple(columns), cells)


def plain(text: str) -> str:
    """Text in which no escape sequence can do anything."""
    return _CONTROL.sub("�", text)


def plan_tables(model: str, plan: Plan) -> list[Table]:
    """The plan of a model: a row for each set of weights that differ only by layer."""
    rows = [
        (f"×{count}", f"{d.owner}.{d.leaf}", _shape(d.shape), d.layout or _uncut(d), d.reason)
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


def certificate_tables(certificate: Certificate) -> list[Table]:
    """Models, then for each that does not conform its weights and findings."""
    models = [
        (m.model, m.verdict, m.full, m.split, len(m.weights), _counts(m))
        for m in certificate.models
    ]
    columns = ("model", "verdict", "Muon weights", "split", "probed in miniature", "checks")
    title = f"{certificate.subject} under {certificate.dialect.name}: {certificate.verdict}"
    shown = [table(title, columns, models)]
    for m in certificate.models:
        shown.append(_weights(m))
        findings, open_questions = _findings(m), _undecided(m)
        if findings:
            columns = (
                "check",
                "weights",
                "what",
                "planned",
                "observed",
                "proof, on the first",
            )
            shown.append(table(f"{m.model}: findings", columns, findings))
        if open_questions:
            shown.append(table(f"{m.model}: undecided", ("check", "why"), open_questions))
    return shown


def _counts(model: ModelResult) -> str:
    counts = Counter(result.status for result in model.results)
    ordered = ("passed", "failed", "undecided", "skipped")
    return ", ".join(f"{counts[status]} {status}" for status in ordered if counts[status])


def _weights(model: ModelResult) -> Table:
    alike = Counter(
        (w.leaf, w.shape, w.planned, w.observed or "not looked at", w.diverged or _state(w))
        for w in model.weights
    )
    rows = [
        (f"×{count}", leaf, _shape(shape), planned, observed, state)
        for (leaf, shape, planned, observed, state), count in alike.items()
    ]
    columns = ("count", "weight", "shape in miniature", "planned", "observed", "first diverges at")
    return table(f"{model.model}: weight by weight", columns, rows)


def _state(weight: WeightResult) -> str:
    return "nowhere" if weight.observed else ""


def _findings(model: ModelResult) -> list[tuple[str, ...]]:
    alike: dict[tuple[str, str, str, str], list[Finding]] = {}
    for result in model.results:
        for found in result.findings:
            said = f"{found.message}\n{found.tail}".strip()
            key = (result.check, said, found.planned, found.observed)
            alike.setdefault(key, []).append(found)
    return [
        (check, collapsed([f.weight for f in found]), said, planned, observed, _proof(found[0]))
        for (check, said, planned, observed), found in alike.items()
    ]


def _proof(finding: Finding) -> str:
    return "\n".join(f"{name}: {value:.3g}" for name, value in finding.numbers.items())


def notes(certificate: Certificate) -> list[str]:
    """What a reader should know or do next."""
    said: list[str] = []
    own, asked = certificate.described["dialect"], certificate.dialect.name
    if asked != own and not dialect_named(own).per_head:
        said.append(f"{own} itself keeps every weight whole; --dialect {own} holds it to that.")
    if len(certificate.checks) < len(CHECKS):
        said.append(f"Only {len(certificate.checks)} of {len(CHECKS)} checks were asked for.")
    failed = ((r.check, m.model) for m in certificate.models for r in m.results if r.findings)
    for check, model in islice(failed, 1):
        said.append(
            f"Again, alone: muonsplit certify {certificate.subject} --model {model} "
            f"--dialect {asked} --seed {certificate.seed} --only {check}"
        )
        said.append(f"What it means: muonsplit explain {check}")
    return said


def _undecided(model: ModelResult) -> list[tuple[str, str]]:
    return [(r.check, r.reason) for r in model.results if r.status == "undecided"]


def collapsed(names: Sequence[str]) -> str:
    """Names that differ only by layer number, as one: ``layers.{0,1}.q_proj.weight``."""
    layers: dict[str, list[str]] = {}
    for name in names:
        found = _LAYER.search(name)
        key = _LAYER.sub(".{}.", name, count=1)
        layers.setdefault(key, []).append(found[1] if found else "")
    return ", ".join(
        key.replace("{}", numbers[0] if len(numbers) == 1 else "{" + ",".join(numbers) + "}")
        for key, numbers in layers.items()
    )


def _shape(shape: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"
