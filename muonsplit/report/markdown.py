"""Tables in Markdown, as a pull request or a job summary shows them."""

from collections.abc import Sequence

from muonsplit.report.tables import Table


def render(tables: Sequence[Table]) -> str:
    """Writes tables one below the other."""
    return "\n\n".join(map(_table, tables)) + "\n"


def _table(found: Table) -> str:
    lines = [f"**{_cell(found.title)}**", ""]
    lines.append("| " + " | ".join(found.columns) + " |")
    lines.append("|" + " --- |" * len(found.columns))
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in found.rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return escaped.replace("\n", "<br>")
