"""Tables on a terminal, and in a log at a width that does not break them."""

import os
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text

from muonsplit.report.tables import Table

_LOG_WIDTH = 200
_COLOURS = {
    "conforms": "green",
    "violates": "red",
    "inconclusive": "yellow",
    "✓": "green",
    "✗": "red",
    "?": "yellow",
}


def console(stderr: bool = False) -> Console:
    """A console that wraps where a person reads: on a terminal, or at COLUMNS."""
    stream = sys.stderr if stderr else sys.stdout
    asked = stream.isatty() or "COLUMNS" in os.environ
    return Console(file=stream, width=None if asked else _LOG_WIDTH, highlight=False)


def show(tables: Sequence[Table]) -> None:
    """Draws tables one below the other."""
    out = console()
    for found in tables:
        with out.capture() as captured:
            _draw(out, found)
        # Without the blanks that fill each line: they break a diff and a copy.
        for line in captured.get().splitlines():
            out.file.write(line.rstrip() + "\n")


def _draw(out: Console, found: Table) -> None:
    out.print(Text(found.title, style="bold"))
    if found.note:
        out.print(Text(found.note, style=_COLOURS.get(found.note.partition(":")[0], "")))
    drawn = Drawn(box=box.SIMPLE_HEAD)
    for name in found.columns:
        drawn.add_column(Text(name), overflow="fold")
    for row in found.rows:
        drawn.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
    out.print(drawn)
