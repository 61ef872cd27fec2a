"""An audit as one HTML file that needs nothing else, and the files of its report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muonsplit.audit.result import Audit, AuditedWeight, Outcome, Tried
from muonsplit.files import write_whole
from muonsplit.report.audit import (
    Group,
    audit_cause,
    audit_markdown,
    caveat,
    explained_table,
    groups,
    hypothesis,
    nearest,
    outcomes,
    seen,
    settings,
    sure,
    tried_table,
    weights_table,
)
from muonsplit.report.gram import Gram, Scale, Spectra, gram, scale_of, spectra
from muonsplit.report.html import filled
from muonsplit.report.tables import Table
from muonsplit.report.text import shown_shape

_WIDTH = 180.0
_MOST_CARDS, _MOST_SHOWN, _MOST_FOLDED = 60, 6, 200
# The classes that give a verdict its colour give an outcome the same.
_TONES: dict[Outcome, str] = {
    "as planned": "conforms",
    "otherwise": "violates",
    "undecided": "inconclusive",
    "unread": "inconclusive",
}
_STATUSES = {"as planned": "passed", "otherwise": "failed"}


@dataclass(frozen=True, slots=True)
class Bar:
    """A hypothesis: what its blocks became, drawn from ``left``, and what they may be.

    Attributes:
        tone: Class of its colour.
        cells: What the table of hypotheses says of it.
        seen: Left end and width of the sizes of its blocks.
        possible: Left end and width of the possible sizes.
        observed: Whether it is the observed one.
    """

    tone: str
    cells: tuple[str, ...]
    seen: tuple[float, float]
    possible: tuple[float, float]
    observed: bool


@dataclass(frozen=True, slots=True)
class Bars:
    """The hypotheses on one weight, on one scale; those that are far off apart."""

    ticks: tuple[tuple[float, str], ...]
    shown: tuple[Bar, ...]
    folded: tuple[Bar, ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class Card:
    """What is shown of weights that differ only by layer, of one of them in pictures.

    Attributes:
        title: Owner and leaf, shape and count.
        tone: Class of its colour.
        said: What was orthogonalised, in words.
        facts: What stands beside it, by name.
        weight: The one whose pictures these are.
        gram: Its overlaps; None without a picture.
        inside: Mean overlap inside planned blocks, in words; empty if there is none.
        outside: Mean overlap between them, likewise.
        spectra: Its singular values; None if there are none.
        bars: Its hypotheses.
        explained: What explains the recorded input.
    """

    title: str
    tone: str
    said: str
    facts: tuple[tuple[str, str], ...]
    weight: str
    gram: Gram | None
    inside: str
    outside: str
    spectra: Spectra | None
    bars: Bars
    explained: Table


def audit_html(audit: Audit) -> str:
    """Writes an audit as one page, without a script, an address or a string that acts.

    Raises:
        CertificateError: If a picture does not hold what it says.
    """
    found = groups(audit)
    ordered = sorted(found, key=lambda group: group.worst.outcome == "as planned")
    digests = [("before, sha256", audit.evidence.before), ("after, sha256", audit.evidence.after)]
    return filled(
        "audit.html.jinja",
        audit=audit,
        verdict=str(audit.verdict),
        cause=audit_cause(audit).partition(": ")[2],
        caveat=caveat(audit),
        tiles=[("Muon weights", len(audit.weights), ""), *_tiles(audit)],
        facts=[*settings(audit), *digests],
        found=weights_table(audit),
        statuses=_STATUSES,
        cards=[_card(group) for group in ordered[:_MOST_CARDS]],
        left_out=len(ordered[_MOST_CARDS:]),
    )


def write_audit_reports(audit: Audit, directory: Path) -> list[Path]:
    """Writes ``report.md`` and ``report.html``, each whole or not at all.

    Returns:
        Where they were written.

    Raises:
        CertificateError: If a picture does not hold what it says; nothing is written then.
    """
    made = {"report.md": audit_markdown(audit), "report.html": audit_html(audit)}
    for name, text in made.items():
        write_whole(directory / name, text.encode())
    return [directory / name for name in made]


def _tiles(audit: Audit) -> list[tuple[str, int, str]]:
    return [(o, n, _STATUSES.get(o, "undecided") if n else "") for o, n in outcomes(audit).items()]


def _card(group: Group) -> Card:
    weight = next((w for w in group.weights if w.picture), group.worst)
    drawn = gram(weight.picture) if weight.picture else None
    planned, whole = hypothesis(weight, weight.planned), hypothesis(weight, "whole")
    values = None
    if weight.picture:
        values = spectra(weight.picture, None if planned is whole else planned, whole)
    facts = (
        ("planned", _written(planned, weight.planned)),
        ("observed", _written(seen(weight), weight.observed)),
        ("how sure", sure(group.worst) if weight.observed else ""),
        ("scale", weight.scale),
        ("why", group.why),
        ("weights", group.names),
    )
    return Card(
        f"{weight.leaf}, {shown_shape(weight.shape)}, ×{len(group.weights)}",
        _TONES[weight.outcome],
        _headline(weight),
        tuple((name, said) for name, said in facts if said),
        weight.weight,
        drawn,
        _overlap(drawn.inside) if drawn else "",
        _overlap(drawn.outside) if drawn else "",
        values,
        _bars(weight),
        explained_table(weight),
    )


def _overlap(mean: float) -> str:
    return "" if math.isnan(mean) else f"{mean:.3f}"


def _headline(weight: AuditedWeight) -> str:
    """What was orthogonalised, for one who does not know how a layout is written."""
    if weight.outcome in ("undecided", "unread"):
        return {"undecided": "Undecided", "unread": "Not read"}[weight.outcome]
    if not weight.observed:
        return "Not as planned"
    found = seen(weight)
    said = _in_words(found) if found else weight.observed
    if weight.outcome == "as planned":
        return f"{said}, as planned"
    if weight.observed == weight.planned:
        return f"{said}, as planned; not so its scale"
    return f"{said}, not as planned"


def _in_words(tried: Tried) -> str:
    if tried.layout == "whole":
        return "The whole matrix as one" if tried.blocks < 2 else f"Each of {tried.blocks} matrices"
    return f"{tried.blocks} blocks, each on its own"


def _written(tried: Tried | None, said: str) -> str:
    words = _in_words(tried) if tried else ""
    return f"{said} – {words[0].lower() + words[1:]}" if words else said


def _bars(weight: AuditedWeight) -> Bars:
    ordered = nearest(weight)
    scale = scale_of(end for t in ordered for end in (t.least, t.most, t.low, t.high))
    observed, cells = seen(weight), tried_table(weight).rows
    planned, whole = hypothesis(weight, weight.planned), hypothesis(weight, "whole")
    bars = [
        (_bar(t, said, scale, t is observed), t is planned or t is whole or i < _MOST_SHOWN)
        for i, (t, said) in enumerate(zip(ordered, cells, strict=True))
    ]
    folded = [bar for bar, open_one in bars if not open_one]
    return Bars(
        tuple((_px(scale.at(value)), f"{value:g}") for value in scale.ticks()),
        tuple(bar for bar, open_one in bars if open_one),
        tuple(folded[:_MOST_FOLDED]),
        len(folded[_MOST_FOLDED:]),
    )


def _bar(tried: Tried, cells: Sequence[str], scale: Scale, observed: bool) -> Bar:
    if observed:
        tone = "conforms"
    else:
        tone = "inconclusive" if tried.fits and not tried.against else "violates"
    return Bar(
        tone,
        tuple(cells),
        _stretch(scale, tried.least, tried.most),
        _stretch(scale, tried.low, tried.high),
        observed,
    )


def _stretch(scale: Scale, low: float, high: float) -> tuple[float, float]:
    left, right = _px(scale.at(low)), _px(scale.at(high))
    return left, max(3.0, round(right - left, 2))


def _px(part: float) -> float:
    return round(part * _WIDTH, 2)
