"""What a model's computation says about one weight, and whether a layout agrees with it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from muonsplit.layout import Block, Layout, Segment, compress

State = Literal["heads", "none", "unknown"]


class Run(NamedTuple):
    """Consecutive rows that go to the same heads, and are mixed there.

    Attributes:
        start: First row (column, for axis 1).
        stop: One past the last.
        heads: Which heads of the attention they serve; empty where they serve none in
            particular, such as a gate. A key of grouped-query attention serves several.
    """

    start: int
    stop: int
    heads: frozenset[int]


@dataclass(frozen=True, slots=True)
class Truth:
    """Where the heads of one weight are, as the model computes.

    Attributes:
        state: ``heads``; ``none`` where the rows are used in one piece; or ``unknown``.
        axis: The axis the heads lie on: 0 for rows, 1 for columns (Conv1D).
        rows: The weight's size on that axis.
        runs: For ``heads``, every row once, ascending; else empty.
        evidence: What was seen, or why nothing could be.
    """

    state: State
    axis: int
    rows: int
    runs: tuple[Run, ...]
    evidence: str

    @property
    def layout(self) -> Layout | None:
        """The finest cut that keeps every run whole; None where there are no heads."""
        if self.state != "heads":
            return None
        roles = {frozenset[int](): "rest"}
        pieces = [
            Segment(roles.get(run.heads, "head"), 1, run.stop - run.start) for run in self.runs
        ]
        segments, groups = compress(pieces)
        return Layout(segments, groups, self.axis)

    def objection(self, layout: Layout | None) -> str:
        """What is wrong with a cut, given these heads; empty if it keeps them apart and whole.

        A block is right if every run lies inside or outside it, and one head owns all its runs:
        K and V of one head may be one block, half a head or rows of two heads may not. Rows that
        serve no head may stand in any block.

        Args:
            layout: The cut; None for a weight that stays whole.
        """
        if self.state != "heads":
            cut = layout is not None and not layout.is_whole
            return f"no heads ({self.evidence}), cut as {layout}" if cut else ""
        if layout is None or layout.is_whole:
            return f"heads as {self.layout}, left whole"
        if (layout.axis, layout.rows) != (self.axis, self.rows):
            return f"heads on axis {self.axis} of {self.rows}, cut as {layout}"
        return next((said for block in layout.blocks() if (said := self._wrong(block))), "")

    def _wrong(self, block: Block) -> str:
        owners: frozenset[int] | None = None
        for run, inside in _inside(self.runs, block):
            if not run.heads:
                continue
            if inside < run.stop - run.start:
                return f"{block} holds {inside} of the rows {run.start}–{run.stop - 1} of a head"
            both = run.heads if owners is None else owners & run.heads
            if not both:
                return f"{block} holds rows of more than one head"
            owners = both
        return ""


def _inside(runs: Sequence[Run], block: Block) -> Iterator[tuple[Run, int]]:
    """The runs that touch a block, with how many of their rows do."""
    for run in runs:
        rows = sum(max(0, min(b, run.stop) - max(a, run.start)) for a, b in block.spans)
        if rows:
            yield run, rows
