"""Where the heads are in what a rank holds of a weight.

The width of a head survives a column-parallel cut, the count does not: eight heads of 32 rows are
four heads of 32 on each of two ranks, and an optimizer that still counts eight orthogonalises half
heads without an error (deepspeed pull request #8384). So the layout is made anew from the rows
that are there, and a shard that cuts a head is dropped, raised or gathered, as the dialect says.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from muonsplit.dialect import Dialect, dialect_named
from muonsplit.errors import CutHeadError, LayoutError, UsageError
from muonsplit.geometry.held import Shard, Spans, column_parallel, flat, of_parameter
from muonsplit.geometry.plan import Decision, Plan
from muonsplit.layout import Block, Layout, Segment, compress

__all__ = ["Local", "Shard", "column_parallel", "flat", "of_parameter", "shard_plan", "sharded"]

CutHeads = Literal["drop", "raise", "gather"]
Outcome = Literal["heads", "whole", "empty", "dropped", "gather"]

_HINT = "Shard at a multiple of the head width, or gather the head before its update."


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
            raise CutHeadError(f"A shard of {layout} cuts a head: {reason}.", _HINT)
        outcomes: dict[CutHeads, Outcome] = {"drop": "dropped", "gather": "gather"}
        return Local(outcomes[cut_heads], None, shard, f"cuts a head: {reason}", cut)
    local = layout if shard.axis != layout.axis else _local_layout(layout, shard)
    return Local("heads", local, shard, f"{local}: whole heads, {shard}")


def shard_plan(plan: Plan, shards: Mapping[str, Shard], dialect: Dialect | str) -> dict[str, Local]:
    """What becomes of every weight of a plan on one rank.

    Args:
        plan: The plan of the whole model.
        shards: What the rank holds, one for each weight that Muon trains. A weight that is left
            out is an error, not a whole one: a shard nobody mentioned is how heads are halved.
        dialect: A dialect or its name; says what happens to a shard that cuts a head.

    Returns:
        One answer a weight, in model order.

    Raises:
        UsageError: If a weight has no shard, or a shard no weight.
        LayoutError: If a shard is not one of its weight.
        CutHeadError: If heads are cut and the dialect raises, or if every split weight that the
            rank holds was dropped. It lists each weight; other ranks may not see the same.
    """
    chosen = dialect_named(dialect) if isinstance(dialect, str) else dialect
    rule = chosen.split.cut_heads
    _check_names(plan, shards)
    answers: dict[str, Local] = {}
    for decision in plan.decisions:
        _check_size(decision, shards[decision.name])
        # Raising waits until every weight has been seen, so that all can be listed.
        quiet = "drop" if rule == "raise" else rule
        answers[decision.name] = sharded(decision.layout, shards[decision.name], quiet)
    dropped = [f"  {n}: {a.reason}" for n, a in answers.items() if a.outcome == "dropped"]
    kept = [n for n, a in answers.items() if a.outcome in ("heads", "gather")]
    if dropped and (rule == "raise" or not kept):
        what = "cut heads" if kept else "cut heads in every split weight they hold"
        raise CutHeadError(
            f"The shards of this rank {what}, {len(dropped)} in all, under dialect "
            f"{chosen.name}:\n" + "\n".join(dropped) + "\n",
            _HINT,
        )
    return answers


def _check_names(plan: Plan, shards: Mapping[str, Shard]) -> None:
    wanted = {d.name for d in plan.decisions}
    missing = sorted(wanted - shards.keys())
    unknown = sorted(shards.keys() - wanted - {d.name for d in plan.others})
    if missing or unknown:
        raise UsageError(
            "Shards are needed for exactly the weights of the plan"
            + (f"; none is given for {', '.join(missing)}" if missing else "")
            + (f"; no parameter of the plan is {', '.join(unknown)}" if unknown else "")
            + ".",
            "Name parameters as the plan does; a weight that is not divided is Shard.whole(rows).",
        )


def _check_size(decision: Decision, shard: Shard) -> None:
    if shard.axis >= len(decision.shape) or decision.shape[shard.axis] != shard.size:
        raise LayoutError(
            f"{decision.name} has the whole shape {decision.shape}; a shard of {shard.size} on "
            f"axis {shard.axis} is none of it.",
            "A shard is stated in rows of the whole weight, without padding.",
        )


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
