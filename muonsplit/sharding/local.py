"""Where the heads are in what a rank holds of a weight.

The width of a head survives a column-parallel cut, the count does not: eight heads of 32 rows are
four heads of 32 on each of two ranks, and an optimizer that still counts eight orthogonalises half
heads without an error (deepspeed pull request #8384). So the layout is made anew from the rows
that are there, and a shard that cuts a head is dropped, raised or gathered, as the dialect says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from muonsplit.errors import CutHeadError, LayoutError
from muonsplit.layout import Block, Layout, Segment, compress
from muonsplit.sharding.held import Shard, Spans

CutHeads = Literal["drop", "raise", "gather"]
Outcome = Literal["heads", "whole", "empty", "dropped", "gather"]

HINT = "Shard at a multiple of the head width, or gather the head before its update."


@dataclass(frozen=True, slots=True)
class Local:
    """What becomes of one weight on one rank.

    Attributes:
        outcome: ``heads``: every head that is touched is held, and is a block. ``whole``: the
            plan does not cut this weight. ``empty``: no row is held. ``dropped``: a head is cut,
            and the shard is one block. ``gather``: a head is cut, and has to be put together.
        layout: How the local rows are cut, padding left out; None except for ``heads``.
        shard: What the rank holds.
        reason: Why; where a head is cut, which, and how much of it is held.
        cut: The blocks of the whole weight that the shard cuts.
    """

    outcome: Outcome
    layout: Layout | None
    shard: Shard
    reason: str
    cut: tuple[Block, ...] = ()


def sharded(layout: Layout | None, shard: Shard, cut_heads: CutHeads = "drop") -> Local:
    """Where the heads are in what a rank holds.

    Args:
        layout: How the whole weight is cut; None where it is not.
        shard: What the rank holds.
        cut_heads: What happens to a shard that cuts a head, as in
            :class:`muonsplit.dialect.SplitRule`.

    Raises:
        LayoutError: If the shard is not one of a weight of this layout.
        CutHeadError: If a head is cut and ``cut_heads`` is ``raise``; the message names it.
    """
    if layout is not None and shard.axis == layout.axis and shard.size != layout.rows:
        raise LayoutError(f"A shard of {shard.size} rows is none of {layout}, of {layout.rows}.")
    if not shard.spans:
        return Local("empty", None, shard, f"empty: {shard}")
    if layout is None:
        return Local("whole", None, shard, f"not split by heads; {shard}")
    if cut := tuple(_cut_blocks(layout, shard)):
        reason = _why(cut, layout, shard)
        if cut_heads == "raise":
            raise CutHeadError(f"A shard of {layout} cuts a head: {reason}.", HINT)
        outcomes: dict[CutHeads, Outcome] = {"drop": "dropped", "gather": "gather"}
        return Local(outcomes[cut_heads], None, shard, f"cuts a head: {reason}", cut)
    local = layout if shard.axis != layout.axis else _local_layout(layout, shard)
    return Local("heads", local, shard, f"{local}: whole heads, {shard}")


def _cut_blocks(layout: Layout, shard: Shard) -> Iterator[Block]:
    """The blocks that are touched, but not held whole and in one piece."""
    for block in layout.blocks():
        if shard.axis != layout.axis:
            # Every block reaches across the axis that is divided.
            cut = not shard.is_whole
        elif not _overlap(block.spans, shard.spans):
            cut = False
        else:
            cut = bool(_overlap(block.spans, shard.partial)) or any(
                _place(span, shard) is None for span in block.spans
            )
        if cut:
            yield block


def _local_layout(layout: Layout, shard: Shard) -> Layout:
    # One by one, also where the heads of a role are joined to one block.
    heads = replace(layout, joined=False).blocks()
    placed = [(at, head) for head in heads if (at := _place(head.spans[0], shard)) is not None]
    kept = [Segment(head.role, 1, head.rows) for _, head in sorted(placed)]
    segments, groups = compress(kept)
    return Layout(segments, groups, layout.axis, layout.joined)


def _place(span: tuple[int, int], shard: Shard) -> int | None:
    """The first local row of rows that are stored in one piece; None if they are not."""
    row = 0
    for start, stop in shard.spans:
        if start <= span[0] and span[1] <= stop:
            return row + span[0] - start
        row += stop - start
    return None


def _why(cut: Sequence[Block], layout: Layout, shard: Shard) -> str:
    """Names the first block that is cut, and how much of it is held."""
    block, noun = cut[0], "columns" if layout.axis else "rows"
    first, last = block.spans[0][0], block.spans[-1][1] - 1
    name = f"{block.role}[{block.head}], {noun} {first}–{last}"
    if len(block.spans) > 1:
        name = f"{block.role}, joined, {block.rows} {noun} within {first}–{last}"
    if shard.axis != layout.axis:
        held = f"of which {shard} are held"
    else:
        touched, part = (_overlap(block.spans, s) for s in (shard.spans, shard.partial))
        held = f"of which {touched - part} of {block.rows} are held"
        held += f", and {part} in part" if part else ""
        held += ", but not in one piece" if touched - part == block.rows else ""
    return f"{name}, {held}" + (f"; {len(cut)} blocks are cut" if len(cut) > 1 else "")


def _overlap(one: Spans, other: Spans) -> int:
    return sum(max(0, min(b, d) - max(a, c)) for a, b in one for c, d in other)
