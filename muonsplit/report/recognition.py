"""Plan beside truth: tables for one model, and the sweep's report."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from muonsplit.files import write_whole
from muonsplit.recognition.judge import Judgement
from muonsplit.recognition.records import compared
from muonsplit.report.markdown import render
from muonsplit.report.tables import Table, table

Row = dict[str, Any]
_OUTCOMES = ("right", "declined", "wrong", "unknown")
_COLUMNS = ("count", "weight", "shape", "plan", "truth", "", "why")


def truth_tables(model: str, judged: Sequence[Judgement]) -> list[Table]:
    """A row for each set of weights that differ only by layer."""
    rows = Counter(
        (
            f"{j.decision.owner}.{j.decision.leaf}",
            " × ".join(map(str, j.decision.shape)),
            str(j.decision.layout or "whole"),
            str(j.truth.layout or j.truth.state),
            _word(j),
            j.objection if j.differs else _why(j),
        )
        for j in judged
    )
    cells = [(f"×{count}", *row) for row, count in rows.items()]
    return [table(f"{model}: plan beside truth", _COLUMNS, cells)]


def _word(judged: Judgement) -> str:
    return "DIFFERS" if judged.differs else judged.outcome


def _why(judged: Judgement) -> str:
    if judged.outcome == "declined":
        return judged.decision.reason
    return judged.truth.evidence


def truth_summary(judged: Sequence[Judgement]) -> str:
    """How many weights there are of each outcome."""
    counts = Counter(map(_word, judged))
    return f"{len(judged)} Muon weights: " + ", ".join(f"{n} {word}" for word, n in counts.items())


def truth_json(model: str, judged: Sequence[Judgement]) -> Row:
    """Plan and truth of every weight as plain values."""
    return {
        "model": model,
        "weights": [
            {
                **j.decision.to_json(),
                "outcome": j.outcome,
                "differs": j.differs,
                "objection": j.objection,
                "truth": {
                    "state": j.truth.state,
                    "layout": None if j.truth.layout is None else str(j.truth.layout),
                    "evidence": j.truth.evidence,
                },
            }
            for j in judged
        ],
    }


def sweep_summary(rows: Sequence[Row]) -> tuple[list[str], int]:
    """What a sweep comes to, in lines, and how many weights were recognised wrongly."""
    built = [row for row in rows if row["error"] is None]
    weights = [w for row in built for w in row["weights"]]
    counts = Counter(w["outcome"] for w in weights)
    counted = [w for w in weights if w["counted"]]
    by_rules = sum(w["outcome"] == "right" for w in counted)
    settled = sum(w["settled"] == "right" for w in counted)
    fused = [w for w in weights if w["fused"] is not None]
    by_heads = Counter(w["fused"] for w in fused)
    wrong = sum("wrong" in (w["outcome"], w["settled"], w["fused"]) for w in weights)
    return [
        f"{len(built)} of {len(rows)} architectures built; "
        f"{len(weights)} distinct weights of attention: "
        + ", ".join(f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES),
        f"attention projections whose rows have heads: {len(counted)}; "
        f"recognised by rules {_share(by_rules, len(counted))}, "
        f"with the arbiter {_share(settled, len(counted))}",
        f"fused projections, asked for by heads: {len(fused)}: "
        + ", ".join(f"{by_heads[outcome]} {outcome}" for outcome in _OUTCOMES),
        _witnessed(built),
        _recorded(built),
    ], wrong


def _recorded(built: Sequence[Row]) -> str:
    found = compared(built)
    agree = found.compared - len(found.apart)
    return f"of {found.compared} weights on record from other measurements {agree} agree"


def _witnessed(built: Sequence[Row]) -> str:
    counts: Counter[str] = Counter()
    for row in built:
        counts.update(row["witnesses"]["counts"])
    none = sum(row["witnesses"]["error"] is not None for row in built)
    said = ", ".join(f"{counts[how]} {how}" for how in ("agree", "coupled", "differ", "silent"))
    return f"views and gradients, weight by weight on miniatures: {said}; {none} have none"


def _share(part: int, of: int) -> str:
    return f"{part} ({part / of:.2%})" if of else "none"


def sweep_tables(rows: Sequence[Row]) -> list[Table]:
    """A row an architecture, then what is wrong, declined and unknown, and what did not build."""
    built = [row for row in rows if row["error"] is None]
    columns = ("architecture", "class", *_OUTCOMES)
    cells = [
        (_name(row), row["class"], *(_count(row, outcome) for outcome in _OUTCOMES))
        for row in built
    ]
    shown = [table("architectures", columns, cells)]
    for outcome in ("wrong", "declined", "unknown"):
        shown.append(_outcome_table(built, outcome))
    shown.append(_witness_table(built))
    apart = [(line,) for line in compared(built).apart]
    shown.append(table("not as on record", ("weight",), apart))
    failed = [(_name(row), row["error"]) for row in rows if row["error"] is not None]
    shown.append(table("not built", ("architecture", "why"), failed))
    return shown


def _outcome_table(rows: Iterable[Row], outcome: str) -> Table:
    cells = [
        (
            _name(row),
            f"{w['owner']}.{w['leaf']}",
            " × ".join(map(str, w["shape"])),
            w["plan"] or "whole",
            w["truth"],
            {"wrong": w["objection"], "declined": w["reason"], "unknown": w["evidence"]}[outcome],
        )
        for row in rows
        for w in row["weights"]
        if w["outcome"] == outcome
    ]
    return table(outcome, ("architecture", "weight", "shape", "plan", "truth", "why"), cells)


def _witness_table(rows: Iterable[Row]) -> Table:
    cells: list[tuple[object, ...]] = []
    for row in rows:
        seen = row["witnesses"]
        if seen["error"] is not None:
            cells.append((_name(row), "", "none", seen["error"]))
        cells += [(_name(row), w["weight"], w["how"], w["why"]) for w in seen["why"]]
    columns = ("architecture", "weight", "", "why")
    return table("where views and gradients do not both say the same", columns, cells)


def _name(row: Row) -> str:
    return f"{row['model_type']} ({row['task']})"


def _count(row: Row, outcome: str) -> int:
    return sum(w["outcome"] == outcome for w in row["weights"])


def write_sweep(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes ``sweep.json`` and ``sweep.md``, whole or not at all."""
    lines, _ = sweep_summary(rows)
    text = json.dumps(list(rows), ensure_ascii=False, indent=1, sort_keys=True) + "\n"
    page = "# Plan against truth\n\n" + "\n".join(f"- {line}" for line in lines) + "\n\n"
    written = {"sweep.json": text, "sweep.md": page + render(sweep_tables(rows))}
    for name, content in written.items():
        write_whole(folder / name, content.encode())
    return [folder / name for name in written]
