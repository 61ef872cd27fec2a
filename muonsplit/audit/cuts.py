"""The ways in which a weight may have been cut, right or wrong."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from muonsplit.errors import LayoutError
from muonsplit.geometry import Decision
from muonsplit.layout import Layout, Segment

WHOLE = "whole matrix"
PLANNED = "as planned"
# Ranks that a weight is divided among, and a fused weight's Q, K and V.
_PARTS = (2, 3, 4, 8)


def cuts(
    decision: Decision, legal: Iterable[Layout | None], heads: Sequence[int]
) -> dict[str, Layout | None]:
    """Every hypothesis on one weight by name; no two cut alike.

    Args:
        decision: The plan.
        legal: What other split rules make of it.
        heads: Head counts that the model has, for weights that have none of their own.
    """
    found: dict[str, Layout | None] = {}
    for name, layout in _named(decision, legal, heads):
        layout = None if layout is not None and layout.is_whole else layout
        if not any(_alike(layout, other) for other in found.values()):
            found[WHOLE if layout is None else name] = layout
    return found


def refines(fine: Layout | None, coarse: Layout | None) -> bool:
    """Whether every block of one cut is inside a block of the other, and they differ."""
    if fine is None or coarse is None:
        return coarse is None and fine is not None
    if fine.axis != coarse.axis:
        return False
    owners = _owners(coarse)
    inside = all(
        len({owner for a, b in block.spans for owner in owners[a:b]}) == 1
        for block in fine.blocks()
    )
    return inside and not fine.same_cut(coarse)


def _owners(layout: Layout) -> list[int]:
    owners = [0] * layout.rows
    for number, block in enumerate(layout.blocks()):
        for a, b in block.spans:
            owners[a:b] = [number] * (b - a)
    return owners


def _alike(one: Layout | None, other: Layout | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.same_cut(other)


def _named(
    decision: Decision, legal: Iterable[Layout | None], heads: Sequence[int]
) -> Iterator[tuple[str, Layout | None]]:
    if len(decision.shape) != 2:
        yield WHOLE, None
        return
    planned = decision.layout
    yield PLANNED, planned
    yield WHOLE, None
    for layout in legal:
        if layout is not None:
            yield f"{layout}, by another rule", layout
    own = [decision.heads] if decision.heads else []
    counts = list(dict.fromkeys([*own, *heads]))
    axis = 0 if planned is None else planned.axis
    if planned is not None:
        yield from _around(planned)
    for count in counts:
        yield from _equal("rows", f"{count} parts of rows", decision.shape, count, axis)
        yield from _equal("cols", f"{count} parts of columns", decision.shape, count, 1 - axis)
    for count in _PARTS:
        yield from _equal("rows", f"{count} parts of rows", decision.shape, count, axis)


def _around(planned: Layout) -> Iterator[tuple[str, Layout]]:
    """Half of what is planned, and several of it together."""
    if planned.joined:
        return
    if all(segment.width % 2 == 0 and segment.width > 2 for segment in planned.segments):
        halves = tuple(Segment(r, 2 * h, w // 2) for r, h, w in planned.segments)
        yield "half heads", replace(planned, segments=halves)
    for many, name in ((2, "head pairs"), (4, "four heads")):
        try:
            yield name, planned.per_block(many)
        except LayoutError:
            continue


def _equal(
    role: str, name: str, shape: Sequence[int], parts: int, axis: int
) -> Iterator[tuple[str, Layout]]:
    rows = shape[axis]
    # A block of one row is normalised, not orthogonalised.
    if parts > 1 and rows % parts == 0 and rows // parts > 1:
        yield name, Layout.heads(role, parts, rows // parts, axis)
