"""The corpus as tables of plain strings."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from muonsplit.checks import CHECKS
from muonsplit.faulty.floor import Floor
from muonsplit.faulty.trial import Row, Trial
from muonsplit.faulty.visibility import Visibility
from muonsplit.observe.families import FAMILIES

_MARKS = {"passed": "·", "failed": "X", "skipped": "-", "undecided": "?"}


class Shown(NamedTuple):
    """A table.

    Attributes:
        title: Printed above it.
        columns: Headings.
        rows: One string a column.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]


def trial_table(tried: Iterable[Trial]) -> Shown:
    """Each fault with the check that it names and the one that caught it."""
    columns = ("fault", "on", "named check", "first to fail", "caught", "origin", "what is wrong")
    rows = [
        (f.name, f.place, f.check, t.first, "yes" if t.caught else "NO", f.origin, f.summary)
        for t in tried
        for f in [t.fault]
    ]
    return Shown("faulty subjects", columns, rows)


def matrix_table(rows: Iterable[Row]) -> Shown:
    """Each fault beside every check; the columns are numbered as the checks run."""
    numbers = {check: str(number) for number, check in enumerate(CHECKS, 1)}
    cells = [
        (
            row.fault.name,
            *(_MARKS[row.found[check]] if check in row.found else "" for check in CHECKS),
        )
        for row in rows
    ]
    title = "faults × checks: X fails, ? cannot tell, - does not apply"
    return Shown(title, ("fault", *numbers.values()), cells)


def check_table() -> Shown:
    """The numbers of the checks."""
    rows = [(str(number), check) for number, check in enumerate(CHECKS, 1)]
    return Shown("checks by number", ("number", "check"), rows)


def family_table(seen: Iterable[Visibility]) -> Shown:
    """Each fault with the families of gradients in which one step does not show it."""
    rows = [
        (v.fault.name, *("hidden" if v.seen[f] == "invisible" else "seen" for f in FAMILIES))
        for v in seen
    ]
    return Shown("faults in one step, by family of gradients", ("fault", *FAMILIES), rows)


def floor_table(floors: Iterable[Floor]) -> Shown:
    """The smallest fault of each kind that is caught, for each dtype."""
    columns = ("kind", "dtype", "smallest caught", "largest missed", "of what", "caught by")
    rows = [
        (f.kind, f.dtype, _size(f.smallest), _size(f.largest_missed), f.unit, f.check)
        for f in floors
    ]
    return Shown("detection floor, by decades", columns, rows)


def _size(size: float | None) -> str:
    return "none" if size is None else f"{size:g}"
