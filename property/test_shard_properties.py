"""What holds for every shard of every layout, row by row."""

import math
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as Sharded
from torch.distributed.tensor.placement_types import _StridedShard

from muonsplit.dialect import DIALECTS, Arithmetic
from muonsplit.errors import CutHeadError
from muonsplit.layout import Layout
from muonsplit.muon import PerHeadMuon, orthogonalize
from muonsplit.sharding import (
    Local,
    Shard,
    column_parallel,
    flat,
    of_parameter,
    sharded,
)
from property.strategies import layouts, pieces, same_bits

Head = tuple[str, list[int]]


def rows_of(spans: tuple[tuple[int, int], ...]) -> list[int]:
    return [row for start, stop in spans for row in range(start, stop)]


def blocks_of(layout: Layout) -> list[Head]:
    """What a layout means, from its heads: each alone, or those of a role together."""
    heads = pieces(layout)
    if not layout.joined:
        return heads
    roles = dict.fromkeys(role for role, _ in heads)
    return [(r, [i for role, rows in heads if role == r for i in rows]) for r in roles]


def mapped_back(found: Local) -> list[Head]:
    """The local blocks in rows of the whole weight, by the shard's rows one after another."""
    assert found.layout is not None
    stored = rows_of(found.shard.spans)
    return [(role, [stored[row] for row in rows]) for role, rows in blocks_of(found.layout)]


def ordered(blocks: list[Head]) -> list[Head]:
    return sorted((role, sorted(rows)) for role, rows in blocks)


@st.composite
def divisible(draw: st.DrawFn, world: int) -> Layout:
    """A layout whose heads, or groups where there are several, divide the ranks."""
    layout = draw(layouts(3, 2, 8, joined=False))
    if layout.groups > 1:
        return replace(layout, groups=layout.groups * world)
    segments = tuple(s._replace(heads=s.heads * world) for s in layout.segments)
    return replace(layout, segments=segments)


@given(st.data(), st.sampled_from([1, 2, 3, 4, 8]))
def test_ranks_together_hold_the_blocks_of_the_whole(data: st.DataObject, world: int) -> None:
    layout = data.draw(divisible(world))
    found = [sharded(layout, column_parallel(layout, r, world), "raise") for r in range(world)]
    assert all(f.layout is not None and f.layout.axis == layout.axis for f in found)
    together = [block for f in found for block in mapped_back(f)]
    assert ordered(together) == ordered(blocks_of(layout))
    # The width survives, the count does not: every rank has the same share of each width.
    for f in found:
        widths = sorted(len(rows) for _, rows in mapped_back(f))
        assert sorted(widths * world) == sorted(len(rows) for _, rows in blocks_of(layout))


@given(layouts(), st.data(), st.integers(1, 4))
def test_heads_may_be_dealt_to_ranks_in_any_order(
    layout: Layout, data: st.DataObject, world: int
) -> None:
    # What is dealt is a head, or of a joined layout all rows of a role.
    hands: list[list[Head]] = [[] for _ in range(world)]
    for block in data.draw(st.permutations(blocks_of(layout))):
        hands[data.draw(st.integers(0, world - 1))].append(block)
    together: list[Head] = []
    for hand in hands:
        spans = tuple((row, row + 1) for _, rows in hand for row in rows)
        found = sharded(layout, Shard(layout.rows, spans, layout.axis), "raise")
        assert found.outcome == ("heads" if hand else "empty")
        if hand:
            assert found.layout is not None
            assert found.layout.joined == layout.joined
            # A rank's own blocks, in the order in which it stores them.
            mine = mapped_back(found)
            assert ordered(mine) == ordered(hand)
            assert layout.joined or mine == hand
            together += mine
    assert ordered(together) == ordered(blocks_of(layout))


@st.composite
def held(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """Disjoint intervals in any order."""
    cuts = sorted(draw(st.sets(st.integers(0, size), max_size=8)))
    spans = [(a, b) for a, b in pairwise(cuts) if draw(st.booleans())]
    return draw(st.permutations(spans))


def runs(rows: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for row in rows:
        if found and found[-1][-1] + 1 == row:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def cut_blocks(layout: Layout, stored: list[int], whole: set[int]) -> list[list[int]]:
    """Row by row: blocks that are touched, but not there whole, run by run as they are stored."""
    where = {row: i for i, row in enumerate(stored)}
    cut: list[list[int]] = []
    for _, rows in blocks_of(layout):
        there = all(
            row in whole and where[row] == where.get(run[0], -1) + i
            for run in runs(rows)
            for i, row in enumerate(run)
        )
        if not there and any(row in where for row in rows):
            cut.append(rows)
    return cut


def check_cut(layout: Layout, shard: Shard, expected: list[list[int]], whole: set[int]) -> None:
    found = sharded(layout, shard)
    assert [rows_of(block.spans) for block in found.cut] == expected
    if not expected:
        assert found.outcome == ("heads" if shard.spans else "empty")
        return
    assert (found.outcome, found.layout) == ("dropped", None)
    gathered = sharded(layout, shard, "gather")
    assert (gathered.outcome, gathered.cut) == ("gather", found.cut)
    named, count = expected[0], sum(row in whole for row in expected[0])
    with pytest.raises(CutHeadError) as caught:
        sharded(layout, shard, "raise")
    for said in (found.reason, gathered.reason, caught.value.message):
        assert f"{named[0]}–{named[-1]}, of which {count} of {len(named)} are held" in said
        assert f"{found.cut[0].role}" in said


@given(layouts(), st.data())
def test_a_cut_head_is_always_found_and_named(layout: Layout, data: st.DataObject) -> None:
    spans = data.draw(held(layout.rows))
    stored = rows_of(tuple(spans))
    shard = Shard(layout.rows, tuple(spans), layout.axis)
    assert rows_of(shard.spans) == stored
    check_cut(layout, shard, cut_blocks(layout, stored, set(stored)), set(stored))
    found = sharded(layout, shard)
    if found.outcome == "heads":
        # Nothing is cut, so all that is stored is in a block, and in one only.
        assert sorted(row for _, rows in mapped_back(found) for row in rows) == sorted(stored)


@given(layouts(), st.integers(1, 5), st.data())
def test_a_flat_slice_holds_its_elements(layout: Layout, cols: int, data: st.DataObject) -> None:
    layout = replace(layout, axis=0)
    start = data.draw(st.integers(0, layout.rows * cols))
    stop = data.draw(st.integers(start, layout.rows * cols))
    elements = set(range(start, stop))
    grid = {row: set(range(row * cols, (row + 1) * cols)) for row in range(layout.rows)}
    stored = [row for row, own in grid.items() if own & elements]
    whole = {row for row, own in grid.items() if own <= elements}
    shard = flat((layout.rows, cols), start, stop)
    assert rows_of(shard.spans) == stored
    assert set(rows_of(shard.partial)) == set(stored) - whole
    check_cut(layout, shard, cut_blocks(layout, stored, whole), whole)


@given(layouts(), st.data())
def test_the_other_axis_cuts_every_block(layout: Layout, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 8))
    spans = data.draw(held(size))
    found = sharded(layout, Shard(size, tuple(spans), 1 - layout.axis))
    everything = rows_of(tuple(spans)) == list(range(size))
    assert found.cut == (() if everything or not spans else layout.blocks())
    assert found.layout == (layout if everything else None)


@given(st.integers(1, 40), st.integers(1, 9))
def test_rows_are_divided_as_torch_divides_them(size: int, world: int) -> None:
    parts = [part.tolist() for part in torch.arange(size).chunk(world)]
    parts += [[] for _ in range(world - len(parts))]
    for rank, expected in enumerate(parts):
        shard = column_parallel(size, rank, world, padded=True)
        assert rows_of(shard.spans) == expected
        assert shard.rows + shard.padding == len(parts[0])
        assert column_parallel(size, rank, world) == replace(shard, padding=0)


@given(layouts(joined=False), st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
def test_repeated_heads_are_whole_and_all_there(layout: Layout, world: int) -> None:
    share = world // layout.groups if layout.groups > 1 else world
    fits = world % layout.groups == 0 and all(
        s.heads % share == 0 or share % s.heads == 0 for s in layout.segments
    )
    if not fits:
        return
    copies: dict[tuple[int, ...], int] = {}
    for rank in range(world):
        shard = column_parallel(layout, rank, world, replicate=True)
        for _, rows in mapped_back(sharded(layout, shard, "raise")):
            copies[tuple(rows)] = copies.get(tuple(rows), 0) + 1
    segments = [s for _ in range(layout.groups) for s in layout.segments for _ in range(s.heads)]
    assert copies == {
        tuple(rows): max(1, share // segment.heads)
        for (_, rows), segment in zip(pieces(layout), segments, strict=True)
    }


@given(layouts(), st.data(), st.integers(0, 20))
def test_local_rows_lead_back_to_the_whole(
    layout: Layout, data: st.DataObject, length: int
) -> None:
    shard = Shard(layout.rows, tuple(data.draw(held(layout.rows))))
    start = data.draw(st.integers(0, shard.rows))
    stop = min(start + length, shard.rows)
    assert rows_of(shard.origin(start, stop)) == rows_of(shard.spans)[start:stop]


PLACEMENTS = st.one_of(
    st.builds(Sharded, st.sampled_from([0, 1])),
    st.builds(lambda dim, f: _StridedShard(dim, split_factor=f), st.just(0), st.integers(2, 3)),
    st.builds(Replicate),
)


@given(
    st.tuples(st.integers(1, 12), st.integers(1, 6)),
    st.lists(st.tuples(st.integers(1, 4), PLACEMENTS), min_size=1, max_size=3),
)
@example((4, 6), [(2, Sharded(0)), (2, Sharded(1))])
def test_placements_are_read_as_torch_applies_them(
    shape: tuple[int, int], axes: list[tuple[int, Any]]
) -> None:
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    mesh = tuple(world for world, _ in axes)
    for coordinate in product(*map(range, mesh)):
        local, last = whole, []
        for i, (place, (world, placement)) in enumerate(zip(coordinate, axes, strict=True)):
            behind = [(n, p) for n, p in axes[i + 1 :] if getattr(p, "dim", None) == 0]
            if (
                isinstance(placement, _StridedShard)
                and behind
                and all(isinstance(p, Sharded) for _, p in behind)
                and placement.split_factor == math.prod(n for n, _ in behind)
            ):
                # FSDP2 divides what tensor parallelism has left of the rows.
                last.append((place, world, Sharded(0)))
            elif not isinstance(placement, Replicate):
                parts, _ = placement._split_tensor(local, world, with_padding=False)
                local = parts[place]
        for place, world, placement in last:
            local = placement._split_tensor(local, world, with_padding=False)[0][place]
        shard = of_parameter(
            SimpleNamespace(
                shape=torch.Size(shape),
                placements=tuple(placement for _, placement in axes),
                device_mesh=SimpleNamespace(shape=mesh, get_coordinate=lambda c=coordinate: c),
            )
        )
        if local.numel() == 0:
            assert shard.spans == ()
            continue
        rows, columns = (local[:, 0] // shape[1]).tolist(), (local[0] % shape[1]).tolist()
        assert rows_of(shard.spans) == (columns if shard.axis else rows)
        # Rows are told even where columns are missing too, and are then all partial.
        missing = len(columns) < shape[1] if shard.axis == 0 else rows != list(range(shape[0]))
        assert rows_of(shard.partial) == (sorted(rows) if missing else [])


def has_no_vectors(layout: Layout) -> bool:
    """Blocks of one row are refused."""
    return all(segment.width > 1 for segment in layout.segments)


ARITHMETICS = {
    "gram-fp32": DIALECTS["deepspeed-0.19.8"].arithmetic,
    "standard-fp32": replace(DIALECTS["deepspeed-0.19.8-standard"].arithmetic, cpu_dtype="float32"),
}


def local_of(matrix: Tensor, shard: Shard) -> Tensor:
    """What the rank stores: its rows in its order, then padding that must not be read."""
    stored = matrix.index_select(shard.axis, torch.tensor(rows_of(shard.spans)))
    size = list(stored.shape)
    size[shard.axis] = shard.padding
    return torch.cat([stored, torch.full(size, torch.nan)], dim=shard.axis)


@pytest.mark.parametrize("arithmetic", ARITHMETICS.values(), ids=ARITHMETICS)
@given(
    data=st.data(),
    world=st.integers(1, 4),
    cols=st.integers(2, 24),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**31 - 1),
)
def test_the_shard_of_the_result_is_the_result_of_the_shard(
    arithmetic: Arithmetic, data: st.DataObject, world: int, cols: int, padding: int, seed: int
) -> None:
    layout = data.draw(divisible(world).filter(has_no_vectors))
    shape = (cols, layout.rows) if layout.axis else (layout.rows, cols)
    update = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    result = orthogonalize(update, layout, arithmetic)
    for rank in range(world):
        shard = column_parallel(layout, rank, world)
        found = sharded(layout, replace(shard, padding=padding), "raise")
        local = local_of(update, found.shard).narrow(layout.axis, 0, found.shard.rows)
        mine = orthogonalize(local, found.layout, arithmetic)
        assert same_bits(mine, local_of(result, shard))


@given(
    heads=st.integers(1, 4),
    width=st.integers(2, 12),
    cols=st.integers(2, 24),
    world=st.integers(1, 4),
    seed=st.integers(0, 2**31 - 1),
)
def test_the_reference_optimizer_steps_alike_on_every_rank(
    heads: int, width: int, cols: int, world: int, seed: int
) -> None:
    layout = Layout.heads("q", heads * world, width)
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(2, layout.rows, cols, generator=generator)

    def trained(layout: Layout | None, gradients: Tensor) -> Tensor:
        weight = nn.Parameter(torch.zeros(gradients.shape[1:]))
        optimizer = PerHeadMuon([("w", weight)], {"w": layout})
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        return weight.detach()

    whole = trained(layout, gradients)
    for rank in range(world):
        found = sharded(layout, column_parallel(layout, rank, world), "raise")
        assert found.layout == Layout.heads("q", heads, width)
        ((start, stop),) = found.shard.spans
        assert same_bits(trained(found.layout, gradients[:, start:stop]), whole[start:stop])
