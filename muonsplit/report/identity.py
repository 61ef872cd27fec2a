"""What a subject was found to speak."""

from dataclasses import asdict
from typing import Any

from muonsplit.certificate.identify import Identified, Spoken
from muonsplit.report.tables import Table, table

_SHOWN = 8


def sentence(subject: str, found: Identified) -> str:
    """The answer in one line."""
    best, names = found.best, " and ".join(found.best.names)
    if best.bits:
        others = [" and ".join(one.names) for one in found.ranked[1:]]
        same = f"; here the same as {', '.join(others)}" if others else ""
        return f"{subject} speaks {names} in every bit, {found.cut}{same}."
    if best.explains:
        return f"{subject} speaks {names} up to rounding, {found.cut}."
    return f"{subject} speaks none of them; nearest is {names}, which parts at {best.stage}."


def identity_table(subject: str, found: Identified) -> Table:
    """The arithmetics that come closest, the best first."""
    rows = [
        (" and ".join(one.names), _agreement(one), one.stage, one.said)
        for one in found.ranked[:_SHOWN]
    ]
    columns = ("dialect", "agrees", "parts at", "where")
    return table(f"{subject}: weights with heads are cut {found.cut}", columns, rows)


def identity_json(subject: str, found: Identified) -> dict[str, Any]:
    """The whole ranking as plain values."""
    ranked = [
        {**asdict(one), "off": str(one.off), "explains": one.explains} for one in found.ranked
    ]
    return {"subject": subject, "cut": found.cut, "ranked": ranked}


def _agreement(one: Spoken) -> str:
    if one.bits:
        return "every bit"
    return "up to rounding" if one.explains else f"{one.passed} of 5 stages"
