"""One HTML file that needs nothing else: no network, no script; every string is escaped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from muonsplit.certificate.run import Certificate
from muonsplit.certificate.verdict import CheckResult, ModelResult, WeightResult
from muonsplit.report.picture import Cut, Values, cut, values
from muonsplit.report.summary import (
    Alike,
    alike,
    cause,
    denominators,
    facts,
    first_failed,
    remarks,
    title_of,
)
from muonsplit.report.tables import Table, floor_table, weights_table
from muonsplit.report.text import clipped, collapsed, one_line, plain, shown_shape

if TYPE_CHECKING:
    from jinja2 import Environment

MARKS = {"passed": "✓", "failed": "✗", "undecided": "?", "skipped": "–"}


@dataclass(frozen=True, slots=True)
class Weight:
    """Weights whose three answers are the same: the first of them, and its pictures."""

    first: WeightResult
    names: str
    count: int
    cut: Cut
    values: Values | None


@dataclass(frozen=True, slots=True)
class Model:
    """What is shown of one model."""

    result: ModelResult
    first: CheckResult | None
    findings: list[Alike]
    weights: list[Weight]
    table: Table
    floor: Table


def render(certificate: Certificate) -> str:
    """Writes a certificate as one page."""
    models = [
        Model(
            m,
            first_failed(m),
            alike(certificate, m),
            _weights(m),
            weights_table(m),
            floor_table(m),
        )
        for m in certificate.models
    ]
    return filled(
        "certificate.html.jinja",
        certificate=certificate,
        cause=cause(certificate),
        facts=facts(certificate),
        denominators=denominators(certificate),
        remarks=remarks(certificate),
        fields=_fields(certificate),
        models=models,
    )


def filled(template: str, **shown: Any) -> str:
    """Fills a template of this package."""
    return _environment().get_template(template).render(shown)


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("muonsplit.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names: dict[str, Any] = {"marks": MARKS, "title_of": title_of}
    filters: dict[str, Any] = {"line": one_line, "shape": shown_shape, "share": _share}
    made.globals.update(names)
    made.filters.update(filters)
    return made


def _harmless(value: Any) -> Any:
    """Every string that a template prints, except what another template has made."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return plain(clipped(value))
    return value


def _fields(certificate: Certificate) -> list[tuple[str, str, str]]:
    """Fields of the dialect, their values and where they come from."""
    dialect = certificate.dialect
    parts = (dialect.split, dialect.arithmetic)
    return [
        (name, str(getattr(part, name)), str(dialect.sources.get(name, "")))
        for part in parts
        for name in type(part).__dataclass_fields__
    ]


def _weights(model: ModelResult) -> list[Weight]:
    """Weights of one answer together, those that diverged first."""
    groups: dict[Any, list[WeightResult]] = {}
    for w in model.weights:
        key = (w.leaf, w.shape, w.truth, w.planned, w.observed, w.blocks, w.diverged)
        groups.setdefault(key, []).append(w)
    found = [_weight(model, group) for group in groups.values()]
    return sorted(found, key=lambda weight: not weight.first.diverged)


def _weight(model: ModelResult, group: Sequence[WeightResult]) -> Weight:
    names = [w.weight for w in group]
    shown = next((s.weight for s in model.spectra if s.weight in set(names)), None)
    drawn = values([s for s in model.spectra if s.weight == shown])
    return Weight(group[0], collapsed(names), len(group), cut(group[0]), drawn)


def _share(value: float, numbers: Sequence[float]) -> str:
    """A number as a part of the largest, in per cent; nothing where that says nothing."""
    sizes = [abs(float(number)) for number in numbers]
    if not sizes or not all(map(math.isfinite, sizes)) or max(sizes) == 0:
        return "0"
    return f"{100 * abs(float(value)) / max(sizes):.1f}"
