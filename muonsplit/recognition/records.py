"""What was measured of many architectures by other means than the package's own.

``golden/records.json`` holds 1,413 weights of transformers 5.24.0's default configs: whether they
are cut by heads, how many there are and how wide, from a trace of each projection's first view
and, where a convolution hides it, from a functional oracle. Fused weights, which are cut as a
dialect says, are in ``cases.json`` instead.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from muonsplit.layout import Layout
from muonsplit.models.load import golden_root


class Comparison(NamedTuple):
    """How a sweep compares with the records.

    Attributes:
        compared: Records of weights that the sweep saw.
        apart: What each that disagrees says, and what the sweep says.
    """

    compared: int
    apart: tuple[str, ...]


def compared(rows: Iterable[dict[str, Any]]) -> Comparison:
    """Holds a sweep's plans, open questions settled, against the records."""
    seen = {
        (row["task"], row["model_type"], weight["weight"], tuple(weight["shape"])): weight
        for row in rows
        for weight in row["weights"]
    }
    found = 0
    apart: list[str] = []
    for task, kind, name, shape, heads, width in _records():
        weight = seen.get((task, kind, name, tuple(shape)))
        if weight is None:
            continue
        found += 1
        wanted = None if heads in (None, 1) else (heads, width)
        got = _heads(weight["settled_plan"])
        if got != wanted:
            said = f"recorded {wanted}, planned {got}: {weight['reason']}; {weight['evidence']}"
            apart.append(f"{kind} ({task}) {name} {tuple(shape)}: {said}")
    return Comparison(found, tuple(apart))


def _records() -> Sequence[list[Any]]:
    return json.loads((golden_root() / "records.json").read_text())


def _heads(written: str | None) -> tuple[int, int] | None:
    if written is None:
        return None
    blocks = Layout.parse(written).blocks()
    return len(blocks), blocks[0].rows
