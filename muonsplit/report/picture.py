"""Pictures of a weight, as numbers that a template draws: how it is cut, and what a step made.

Lengths are CSS pixels. What does not fit a picture is counted, never dropped without a word.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from muonsplit.certificate.verdict import Spectrum, WeightResult
from muonsplit.errors import LayoutError
from muonsplit.layout import Layout

# Name and stretches of rows of each block.
_Blocks = list[tuple[str, tuple[tuple[int, int], ...]]]

_EXPERTS = re.compile(r"([1-9][0-9]{0,3}) experts, each whole")
_MOST_BLOCKS = 512
_ROOM = 22.0
_LEAST, _MOST = 144.0, 352.0
_LETTERS = 11.0
_MOST_COLUMNS, _MOST_VALUES = 16, 128
_PLOT = 132.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows of one block that stand together: where they are drawn, in which shade, and a name."""

    top: float
    height: float
    shade: int
    name: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A boundary between rows: where it is drawn, and its row; an empty text if there is no room.

    Attributes:
        at: Distance from the top.
        row: The first row below it.
        extra: Whether the plan lacks it; else the plan alone has it.
    """

    at: float
    row: str
    extra: bool = False


@dataclass(frozen=True, slots=True)
class Band:
    """One of the three answers: its name, what it says, its rows, where it leaves the plan."""

    name: str
    said: str
    stretches: tuple[Stretch, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """The three answers side by side, over the same rows."""

    rows: int
    height: float
    ticks: tuple[Mark, ...]
    bands: tuple[Band, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """One block: its singular values as heights, and its norms in words."""

    name: str
    norm_before: str
    norm_after: str
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Values:
    """Singular values of the blocks of one weight, before and after a step."""

    weight: str
    height: float
    ticks: tuple[tuple[float, str], ...]
    columns: tuple[Column, ...]
    left_out: int


def cut(weight: WeightResult) -> Cut:
    """Draws truth, plan and observation of one weight."""
    rows = max(1, math.prod(weight.shape[:-1]))
    answers = {
        "truth": _said(weight.truth, weight.shape),
        "plan": _said(weight.planned, weight.shape),
        "observed": _numbered(weight.blocks[:_MOST_BLOCKS]),
    }
    words = (weight.truth, weight.planned, weight.observed or "not looked at")
    most = max(map(len, answers.values()))
    height = min(_MOST, max(_LEAST, _ROOM * most))
    plan = _boundaries(answers["plan"])
    bands = [
        Band(name, said, _stretches(blocks, rows, height), _marks(blocks, plan, rows, height))
        for (name, blocks), said in zip(answers.items(), words, strict=True)
    ]
    ticks = _thinned(((row, False) for row in sorted({0, *plan, rows})), rows, height)
    return Cut(rows, height, ticks, tuple(bands))


def _said(text: str, shape: Sequence[int]) -> _Blocks:
    """The row blocks that a written answer means; none if it means no rows."""
    rows = max(1, math.prod(shape[:-1]))
    if text in ("whole", "none"):
        return [("", ((0, rows),))]
    if found := _EXPERTS.fullmatch(text):
        count = int(found[1])
        each = rows // count
        return [(str(i), ((i * each, (i + 1) * each),)) for i in range(min(count, _MOST_BLOCKS))]
    try:
        layout = Layout.parse(text)
    except LayoutError:
        return []
    if layout.axis == 1:
        return [("columns", ((0, rows),))]
    if layout.rows != rows or layout.groups * sum(s.heads for s in layout.segments) > _MOST_BLOCKS:
        return []
    return [(f"{b.role[:8]} {b.head}", b.spans) for b in layout.blocks()]


def _numbered(blocks: Sequence[tuple[tuple[int, int], ...]]) -> _Blocks:
    return [(str(i) if len(blocks) > 1 else "", block) for i, block in enumerate(blocks)]


def _stretches(blocks: _Blocks, rows: int, height: float) -> tuple[Stretch, ...]:
    shades = 4 if any(len(spans) > 1 for _, spans in blocks) else 2
    found: list[Stretch] = []
    for i, (name, spans) in enumerate(blocks):
        for start, stop in spans:
            tall = (stop - start) / rows * height
            shown = name if tall >= _LETTERS else ""
            found.append(Stretch(_px(start / rows * height), _px(tall), i % shades, shown))
    return tuple(found)


def _boundaries(blocks: _Blocks) -> set[int]:
    """Rows at which another block begins."""
    return {start for _, spans in blocks for start, _ in spans} - {0}


def _marks(blocks: _Blocks, plan: set[int], rows: int, height: float) -> tuple[Mark, ...]:
    if not blocks:
        return ()
    mine = _boundaries(blocks)
    return _thinned(((row, row in mine) for row in sorted(mine ^ plan)), rows, height)


def _thinned(found: Iterable[tuple[int, bool]], rows: int, height: float) -> tuple[Mark, ...]:
    """Boundaries as marks; a row is written where there is room, those the plan lacks first."""
    marks = list(found)
    written: set[int] = set()
    for row, _ in sorted(marks, key=lambda mark: not mark[1]):
        if all(abs(row - other) / rows * height >= _LETTERS for other in written):
            written.add(row)
    return tuple(
        Mark(_px(row / rows * height), str(row) if row in written else "", extra)
        for row, extra in marks
    )


def values(spectra: Sequence[Spectrum]) -> Values | None:
    """Draws singular values and norms of the blocks of one weight; None if there are none."""
    everything = [v for s in spectra for v in (*s.before, *s.after)]
    if not everything or not all(map(math.isfinite, everything)):
        return None
    step = _step(max(everything))
    top = step * max(1, math.ceil(max(everything) / step))
    ticks = [
        (_px(_PLOT * (1 - i * step / top)), f"{i * step:g}") for i in range(round(top / step) + 1)
    ]
    columns = [
        Column(
            str(s.block),
            f"{s.norm_before:.3g}",
            f"{s.norm_after:.3g}",
            tuple(_px(_PLOT * (1 - v / top)) for v in _few(s.before)),
            tuple(_px(_PLOT * (1 - v / top)) for v in _few(s.after)),
        )
        for s in spectra[:_MOST_COLUMNS]
    ]
    left_out = len(spectra) - len(columns)
    return Values(spectra[0].weight, _PLOT, tuple(ticks), tuple(columns), left_out)


def _few(found: Sequence[float]) -> Sequence[float]:
    """At most so many of them as can be told apart, the largest and the smallest among them."""
    if len(found) <= _MOST_VALUES:
        return found
    last = len(found) - 1
    return [found[round(i * last / (_MOST_VALUES - 1))] for i in range(_MOST_VALUES)]


def _step(largest: float) -> float:
    """A round distance between ticks, of which at most five are needed."""
    if largest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(largest / 4))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit * 4 >= largest * 0.999)


def _px(length: float) -> float:
    return round(length, 2)
