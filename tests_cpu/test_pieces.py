"""Who holds which part of each block, element by element, and who orthogonalises it."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import (
    _StridedShard,  # pyright: ignore[reportPrivateUsage]
)

from muonsplit.layout import Layout
from muonsplit.sharding import owners, region
from muonsplit.sharding.pieces import Share, shares
from property.strategies import layouts, pieces

# For each axis of a mesh the axis of the weight that it divides, or None where it repeats it.
Axes = Sequence[int | None]


class Division:
    """What each member of a group holds of a tensor of the numbers of its elements.

    Args:
        shape: Shape of the whole.
        mesh: Shape of the mesh.
        axes: What is divided along each axis of the mesh.
        last_first: Whether the last axis of the mesh divides before the first, as tensor
            parallelism under ``fully_shard`` does.
    """

    def __init__(
        self, shape: tuple[int, ...], mesh: tuple[int, ...], axes: Axes, last_first: bool = False
    ) -> None:
        self.whole = torch.arange(torch.Size(shape).numel()).view(shape)
        placements: list[Any] = [Replicate() if a is None else Shard(a) for a in axes]
        if last_first:
            placements[0] = _StridedShard(axes[0] or 0, split_factor=mesh[1])
        # One of those who hold the same.
        places = [
            place
            for place in product(*map(range, mesh))
            if all(i == 0 for i, a in zip(place, axes, strict=True) if a is None)
        ]
        self.regions = [region(shape, mesh, place, placements) for place in places]
        order = list(range(len(mesh)))[:: -1 if last_first else 1]
        self.locals = [self._local(place, mesh, axes, order) for place in places]

    def _local(
        self, place: tuple[int, ...], mesh: tuple[int, ...], axes: Axes, order: list[int]
    ) -> Tensor:
        held = self.whole
        for i in order:
            if (axis := axes[i]) is not None:
                chunks = held.chunk(mesh[i], axis)
                held = chunks[place[i]] if place[i] < len(chunks) else held.narrow(axis, 0, 0)
        return held


def blocks_of(whole: Tensor, layout: Layout | None) -> list[Tensor]:
    """The elements of each block, from the rows of the heads."""
    if layout is None:
        return [x.unsqueeze(0) for x in whole] if whole.ndim == 3 else [whole]
    heads = pieces(layout)
    if layout.joined:
        roles = dict.fromkeys(role for role, _ in heads)
        heads = [(r, [i for role, rows in heads if role == r for i in rows]) for r in roles]
    return [whole.index_select(layout.axis, torch.tensor(rows)) for _, rows in heads]


def check(division: Division, layout: Layout | None) -> tuple[Share, ...]:
    """Every element of every block is where the tiles say, in one tile of one member."""
    found = shares(tuple(division.whole.shape), layout, division.regions)
    blocks = blocks_of(division.whole, layout)
    held = [torch.zeros_like(local) for local in division.locals]
    assert len(found) == len(blocks)
    for share, block in zip(found, blocks, strict=True):
        assert share.shape == tuple(block.shape)
        there = torch.zeros_like(block)
        members = [piece.member for piece in share.pieces]
        assert members == sorted(set(members))
        for piece in share.pieces:
            assert piece.elements > 0
            for tile in piece.tiles:
                there[tile.block] += 1
                held[piece.member][tile.local] += 1
                assert torch.equal(block[tile.block], division.locals[piece.member][tile.local])
        assert bool((there == 1).all())
        holds = torch.cat([local.flatten() for local in division.locals])
        assert sum(piece.elements for piece in share.pieces) == int(
            torch.isin(holds, block.flatten()).sum()
        )
    assert all(bool((times == 1).all()) for times in held)
    return found


MESHES = st.sampled_from(
    [
        ((1,), [0], False),
        ((2,), [0], False),
        ((3,), [1], False),
        ((5,), [0], False),
        ((2, 2), [None, 0], False),
        ((3, 2), [1, None], False),
        ((2, 2), [0, 1], False),
        ((2, 3), [0, 0], False),
        ((2, 2), [0, 0], True),
        ((3, 2), [0, 0], True),
        ((2, 2), [1, 1], True),
    ]
)


@given(layouts(), st.integers(1, 7), MESHES)
@example(Layout.parse("q 4×8"), 3, ((2,), [0], False))
@example(Layout.parse("q 3×8"), 3, ((5,), [0], False))
@example(Layout.parse("64 × (k 3 | v 4)"), 3, ((5,), [0], False))
@example(Layout.parse("q 3×4 | k 4 | v 4"), 5, ((2, 2), [0, 1], False))
@example(Layout.parse("3 × (q 2×4 | k 4 | v 4), joined"), 4, ((2, 2), [0, 0], True))
@example(Layout.parse("q 3×4 | k 4 | v 4, axis 1"), 4, ((2, 2), [1, 1], True))
@example(Layout.parse("whole 2"), 4, ((5,), [0], False))
def test_pieces_are_where_they_are(
    layout: Layout, other: int, mesh: tuple[tuple[int, ...], Axes, bool]
) -> None:
    shape = (other, layout.rows) if layout.axis else (layout.rows, other)
    check(Division(shape, *mesh), layout)


@given(st.lists(st.integers(1, 7), min_size=2, max_size=3).map(tuple), MESHES)
@example((2, 7), ((5,), [0], False))
def test_pieces_of_weights_without_a_layout(
    shape: tuple[int, ...], mesh: tuple[tuple[int, ...], Axes, bool]
) -> None:
    check(Division(shape, *mesh), None)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_pieces_of_stacks(axis: int, world: int) -> None:
    found = check(Division((3, 4, 5), (world,), [axis]), None)
    # Whole experts where experts are divided.
    assert all((len(share.pieces) == 1) == (axis == 0) for share in found)


def most(share: Share) -> list[int]:
    """Those who hold most of a block."""
    largest = max(piece.elements for piece in share.pieces)
    return [piece.member for piece in share.pieces if piece.elements == largest]


def cost(share: Share) -> int:
    """Of the Gram matrix on the short side."""
    rows, cols = share.shape[-2:]
    return min(rows, cols) ** 2 * max(rows, cols)


@given(st.lists(st.tuples(layouts(), st.integers(1, 7)), min_size=1, max_size=4), MESHES)
def test_owners_hold_most_and_have_least_to_do(
    weights: list[tuple[Layout, int]], mesh: tuple[tuple[int, ...], Axes, bool]
) -> None:
    blocks: list[Sequence[Share]] = []
    members = 0
    for layout, other in weights:
        shape = (other, layout.rows) if layout.axis else (layout.rows, other)
        regions = Division(shape, *mesh).regions
        members = len(regions)
        blocks.append(shares(shape, layout, regions))
    found = owners(blocks, members)
    assert found == owners(blocks, members)
    assert [len(each) for each in found] == [len(each) for each in blocks]
    owned = [
        (share, owner)
        for each, its in zip(blocks, found, strict=True)
        for share, owner in zip(each, its, strict=True)
    ]
    load = [0] * members
    for share, owner in owned:
        assert owner in most(share)
        load[owner] += cost(share)
    # Whoever was given a block that others hold as much of had, before its last one, no more to do
    # than they have in the end.
    for member in range(members):
        contested = [s for s, owner in owned if owner == member and len(most(s)) > 1]
        assert not contested or any(
            load[member] - cost(s) <= min(load[other] for other in most(s)) for s in contested
        )


@given(
    st.lists(layouts(joined=False).map(lambda x: Layout(x.segments, x.groups)), min_size=1),
    st.integers(2, 4),
)
def test_work_is_balanced_where_all_hold_as_much(cut: list[Layout], world: int) -> None:
    # Columns are divided, so that every member holds as much of every head.
    cols = 2 * world
    blocks = [
        shares((x.rows, cols), x, Division((x.rows, cols), (world,), [1]).regions) for x in cut
    ]
    load = [0] * world
    for each, its in zip(blocks, owners(blocks, world), strict=True):
        for share, owner in zip(each, its, strict=True):
            load[owner] += cost(share)
    largest = max(cost(share) for each in blocks for share in each)
    assert max(load) <= sum(load) / world + largest


def test_owners_by_hand() -> None:
    # Heads of 8 rows, 6 rows a member: rows 0–5 | 6–11 | 12–17 | 18–23. Member 0 holds most of the
    # first, member 3 of the last; 1 and 2 hold four rows each of the second.
    regions = Division((24, 20), (4,), [0]).regions
    found = shares((24, 20), Layout.heads("q", 3, 8), regions)
    held = [[(piece.member, piece.elements // 20) for piece in s.pieces] for s in found]
    assert held == [[(0, 6), (1, 2)], [(1, 4), (2, 4)], [(2, 2), (3, 6)]]
    assert owners([found], 4) == [[0, 1, 3]]
    # A second such weight has its middle head given to the one that has nothing to do yet.
    assert owners([found, found], 4) == [[0, 1, 3], [0, 2, 3]]
