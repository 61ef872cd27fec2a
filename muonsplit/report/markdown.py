"""Markdown, as a pull request or a job summary shows it."""

import re
from collections.abc import Sequence

from muonsplit.certificate.run import Certificate
from muonsplit.certificate.verdict import ModelResult
from muonsplit.report.summary import alike, denominators, facts, notes
from muonsplit.report.tables import (
    Table,
    floor_table,
    models_table,
    reasons_table,
    table,
    weights_table,
)
from muonsplit.report.text import clipped, one_line

# GitHub refuses a job summary above 1 MiB; bytes, with room for what a job says besides.
_LARGEST = 1_000_000
_LONGEST_CELL = 2000
_MARKS = {"conforms": "✅", "violates": "❌", "inconclusive": "⚠️"}
# An underscore inside a word is none of Markdown's.
_SPECIAL = re.compile(r"[\\`*\[\]|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def render(tables: Sequence[Table]) -> str:
    """Writes tables one below the other."""
    return "\n\n".join(map(_table, tables)) + "\n"


def page(certificate: Certificate) -> str:
    """Writes a certificate as one page that fits a job summary; what is left out is counted."""
    models = models_table(certificate)
    mark = _MARKS[str(certificate.verdict)]
    tables = [table("models", models.columns, models.rows)]
    for m in certificate.models:
        tables += _findings(certificate, m)
    after = [made(m) for m in certificate.models for made in (weights_table, floor_table)]
    after.append(table("of how much this speaks", ("", ""), denominators(certificate)))
    after.append(table("what was certified", ("", ""), facts(certificate)))
    parts = [f"## {mark} {_heading(models.title)}", f"**{_heading(models.note)}**"]
    parts += [
        *map(_table, tables),
        *_onward(certificate),
        *(_table(found) for found in after if found.rows),
    ]
    return fitting("\n\n".join(parts) + "\n", "certificate.json")


def _findings(certificate: Certificate, model: ModelResult) -> list[Table]:
    rows = [
        (f.check, f.weights, f.said, f.first.planned, f.first.observed, _numbers(f.proof))
        for f in alike(certificate, model)
    ]
    columns = ("check", "weights", "what", "planned", "observed", "proof, on the first")
    findings = table(f"{model.label}: findings", columns, rows)
    shown = [findings, reasons_table(model, "undecided"), reasons_table(model, "skipped")]
    return [found for found in shown if found.rows]


def _onward(certificate: Certificate) -> list[str]:
    """Notes as code, which indented by four they are whatever quotes they hold."""
    said = notes(certificate, details=True)
    return ["How to go on:", "\n".join(f"    {note}" for note in said)] if said else []


def _numbers(proof: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in proof)


def fitting(text: str, whole: str) -> str:
    """Text as it is if it fits a job summary; else its first lines, and how many are left out.

    Args:
        text: Lines of a page.
        whole: What holds everything, as a reader is told.
    """
    if len(text.encode()) <= _LARGEST:
        return text
    lines, size, kept = text.split("\n"), 0, 0
    for line in lines:
        size += len(line.encode()) + 1
        if size > _LARGEST:
            break
        kept += 1
    said = f"{len(lines) - kept} more lines are left out; {whole} holds everything."
    return "\n".join([*lines[:kept], "", said, ""])


def _table(found: Table) -> str:
    lines = [f"**{_heading(found.title)}**", ""]
    if found.note:
        lines += [_heading(found.note), ""]
    lines.append("| " + " | ".join(map(_cell, found.columns)) + " |")
    lines.append("|" + " --- |" * len(found.columns))
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in found.rows]
    return "\n".join(lines)


def _heading(text: str) -> str:
    return _escaped(one_line(text))


def _cell(text: str) -> str:
    return _escaped(clipped(text, _LONGEST_CELL)).replace("\n", "<br>")


def _escaped(text: str) -> str:
    harmless = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(lambda found: f"\\{found[0]}", harmless)
