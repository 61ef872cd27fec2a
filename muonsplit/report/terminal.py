"""Tables on a terminal, and in a log at a width that does not break them."""

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text

from muonsplit.report.tables import Table

_LOG_WIDTH = 200
_COLOURS = {"conforms": "green", "violates": "red", "inconclusive": "yellow"}


def console(stderr: bool = False) -> Console:
    """A console that wraps on a terminal only."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _LOG_WIDTH, highlight=False)


def show(tables: Sequence[Table]) -> None:
    """Draws tables one below the other."""
    out = console()
    for found in tables:
        drawn = Drawn(title=Text(found.title), title_justify="left", box=box.SIMPLE_HEAD)
        for name in found.columns:
            drawn.add_column(name, overflow="fold")
        for row in found.rows:
            drawn.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
        out.print(drawn)
