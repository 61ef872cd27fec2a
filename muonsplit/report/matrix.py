"""Many certificates beside each other: subjects × checks × dialects, and a badge."""

import json
from collections.abc import Sequence
from pathlib import Path

from muonsplit.certificate.run import Certificate
from muonsplit.certificate.verdict import ModelResult, Verdict
from muonsplit.checks import CHECKS
from muonsplit.errors import UsageError
from muonsplit.files import write_whole
from muonsplit.report import html
from muonsplit.report.tables import Table, table
from muonsplit.report.text import counted, one_line

LEGEND = "✓ passed   ✗ failed   ? undecided   – does not apply   · not asked"

_COLOURS = {
    Verdict.CONFORMS: "brightgreen",
    Verdict.VIOLATES: "red",
    Verdict.INCONCLUSIVE: "yellow",
}
_BADNESS = (Verdict.CONFORMS, Verdict.INCONCLUSIVE, Verdict.VIOLATES)
_FIXED = ("subject", "dialect", "model", "verdict")


def matrix(certificates: Sequence[Certificate]) -> Table:
    """A row for each certificate and model, a column for each check."""
    checks = _checks(certificates)
    rows = [
        (*map(one_line, (c.subject, c.dialect.name, m.label)), m.verdict, *_cells(m, checks))
        for c in certificates
        for m in c.models
    ]
    return table("subjects × checks", (*_FIXED, *checks), rows, LEGEND)


def numbered(found: Table) -> list[Table]:
    """The same with the checks as numbers, which fits a terminal, and what each number means."""
    checks = found.columns[len(_FIXED) :]
    numbers = [str(i) for i, _ in enumerate(checks, 1)]
    narrow = table(found.title, (*_FIXED, *numbers), found.rows, found.note)
    return [narrow, table("checks", ("", "check"), zip(numbers, checks, strict=True))]


def page(certificates: Sequence[Certificate]) -> str:
    """Writes the matrix as one HTML file that needs nothing else."""
    found = matrix(certificates)
    statuses = {mark: status for status, mark in html.MARKS.items()}
    return html.filled("matrix.html.jinja", found=found, fixed=len(_FIXED), statuses=statuses)


def badge(certificates: Sequence[Certificate]) -> str:
    """What shields.io's endpoint reads; it says the worst of the verdicts."""
    worst = max((c.verdict for c in certificates), key=_BADNESS.index)
    dialects = list(dict.fromkeys(c.dialect.name for c in certificates if c.verdict is worst))
    where = one_line(dialects[0], 100) if len(dialects) == 1 else counted(len(dialects), "dialect")
    said = {
        Verdict.CONFORMS: f"conforms to {where}",
        Verdict.VIOLATES: f"violates {where}",
        Verdict.INCONCLUSIVE: f"inconclusive under {where}",
    }
    shown = {
        "schemaVersion": 1,
        "label": "per-head Muon",
        "message": said[worst],
        "color": _COLOURS[worst],
    }
    return json.dumps(shown, ensure_ascii=False) + "\n"


def write_badge(certificates: Sequence[Certificate], path: Path) -> None:
    """Writes the badge, whole or not at all.

    Raises:
        UsageError: If no file can be written there.
    """
    try:
        write_whole(path, badge(certificates).encode())
    except OSError as error:
        raise UsageError(f"No badge can be written to {path}: {error}.") from None


def _checks(certificates: Sequence[Certificate]) -> list[str]:
    """Every check that any of them ran, in the order they run; strange ones last."""
    seen = dict.fromkeys(r.check for c in certificates for m in c.models for r in m.results)
    return [
        *(id for id in CHECKS if id in seen),
        *(one_line(id) for id in seen if id not in CHECKS),
    ]


def _cells(model: ModelResult, checks: Sequence[str]) -> list[str]:
    found = {one_line(result.check): html.MARKS[result.status] for result in model.results}
    return [found.get(check, "·") for check in checks]
