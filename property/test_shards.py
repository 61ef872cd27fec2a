"""The shard of the result is the result of the shard, bit for bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonsplit.dialect import DIALECTS, Arithmetic
from muonsplit.layout import Layout, Segment
from muonsplit.muon import directions, orthogonalize
from property.strategies import Heads, projections, same_bits

ARITHMETICS = {
    "gram-fp32": DIALECTS["deepspeed-0.19.8"].arithmetic,
    "standard-fp32": replace(DIALECTS["deepspeed-0.19.8-standard"].arithmetic, cpu_dtype="float32"),
    "standard-bf16": DIALECTS["deepspeed-0.19.8-standard"].arithmetic,
    "addmm-bf16": DIALECTS["torch-2.13"].arithmetic,
    "right-bf16": DIALECTS["dion"].arithmetic,
}
arithmetics = pytest.mark.parametrize("arithmetic", ARITHMETICS.values(), ids=ARITHMETICS)


def draw_shard(data: st.DataObject, heads: int) -> tuple[int, int]:
    """Whole heads: first and one past the last."""
    first = data.draw(st.integers(0, heads - 1), label="first head")
    return first, data.draw(st.integers(first + 1, heads), label="stop head")


@arithmetics
@given(p=projections(), data=st.data())
def test_tensor_parallel_shards(arithmetic: Arithmetic, p: Heads, data: st.DataObject) -> None:
    tp = data.draw(st.sampled_from([n for n in range(1, 7) if p.heads % n == 0]), label="tp")
    update, rows = p.update(), p.layout.rows // tp
    result = orthogonalize(update, p.layout, arithmetic)
    for rank in range(tp):
        start, stop = rank * rows, (rank + 1) * rows
        shard = orthogonalize(update[start:stop], p.layout.shard(start, stop), arithmetic)
        assert same_bits(shard, result[start:stop])


@arithmetics
@given(p=projections(min_heads=2), data=st.data())
def test_any_run_of_heads(arithmetic: Arithmetic, p: Heads, data: st.DataObject) -> None:
    first, last = draw_shard(data, p.heads)
    start, stop = first * p.width, last * p.width
    update = p.update()
    result = orthogonalize(update, p.layout, arithmetic)
    shard = orthogonalize(update[start:stop].clone(), p.layout.shard(start, stop), arithmetic)
    assert same_bits(shard, result[start:stop])


@arithmetics
@given(p=projections(min_heads=2), data=st.data())
def test_heads_may_stand_in_any_order(
    arithmetic: Arithmetic, p: Heads, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(p.heads)))
    update = p.update()
    moved = torch.cat([update[p.rows(head)] for head in order])
    result = orthogonalize(update, p.layout, arithmetic)
    expected = torch.cat([result[p.rows(head)] for head in order])
    assert same_bits(orthogonalize(moved, p.layout, arithmetic), expected)


@arithmetics
@given(p=projections(), offset=st.integers(1, 17))
def test_where_the_weight_lies_in_memory(arithmetic: Arithmetic, p: Heads, offset: int) -> None:
    update = p.update()
    moved = torch.empty(offset + update.numel())[offset:].view_as(update)
    moved.copy_(update)
    expected = orthogonalize(update, p.layout, arithmetic)
    assert same_bits(orthogonalize(moved, p.layout, arithmetic), expected)


@arithmetics
@given(p=projections(min_heads=2), data=st.data())
def test_every_other_head_may_be_nan(arithmetic: Arithmetic, p: Heads, data: st.DataObject) -> None:
    kept = p.rows(data.draw(st.integers(0, p.heads - 1), label="kept"))
    update = p.update()
    poisoned = torch.full_like(update, torch.nan)
    poisoned[kept] = update[kept]
    result = orthogonalize(poisoned, p.layout, arithmetic)
    assert same_bits(result[kept], orthogonalize(update, p.layout, arithmetic)[kept])
    result[kept] = torch.nan
    assert bool(result.isnan().all())


@arithmetics
@given(p=projections(), others=st.lists(projections(), max_size=3), data=st.data())
def test_other_weights_in_the_batch(
    arithmetic: Arithmetic, p: Heads, others: list[Heads], data: st.DataObject
) -> None:
    first, last = draw_shard(data, p.heads)
    start, stop = first * p.width, last * p.width
    shard = p.layout.shard(start, stop)
    # The same blocks' shape, so that they share a batch, and NaN, so that a leak shows.
    mates = [other._replace(width=p.width, cols=p.cols) for other in others]
    crowd = [*mates, *others]
    updates = [torch.full_like(o.update(), torch.nan) for o in mates]
    updates += [o.update() for o in others]
    at = data.draw(st.integers(0, len(crowd)), label="place in the batch")
    mine = p.update()
    updates.insert(at, mine[start:stop])
    cuts = [o.layout for o in crowd]
    cuts.insert(at, shard)
    together = [d.scaled for d in directions(updates, cuts, arithmetic)]
    expected = orthogonalize(mine, p.layout, arithmetic)[start:stop]
    assert same_bits(together[at], expected)
    for i, update, cut in zip(range(len(cuts)), updates, cuts, strict=True):
        assert together[i].shape == update.shape
        assert same_bits(together[i], orthogonalize(update, cut, arithmetic))


@arithmetics
@given(
    groups=st.integers(1, 3),
    queries=st.integers(1, 3),
    widths=st.tuples(st.integers(2, 12), st.integers(2, 12)),
    cols=st.integers(2, 24),
    axis=st.sampled_from([0, 1]),
    seed=st.integers(0, 2**31 - 1),
)
def test_a_block_of_a_grouped_layout_is_that_block_alone(
    arithmetic: Arithmetic,
    groups: int,
    queries: int,
    widths: tuple[int, int],
    cols: int,
    axis: int,
    seed: int,
) -> None:
    segments = (Segment("q", queries, widths[0]), Segment("k", 1, widths[1]))
    layout = Layout(segments, groups, axis)
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(layout.rows, cols, generator=generator)
    result = orthogonalize(matrix.T.contiguous() if axis else matrix, layout, arithmetic)
    result = result.T if axis else result
    for block in layout.blocks():
        ((start, stop),) = block.spans
        alone = orthogonalize(matrix[start:stop].clone(), None, arithmetic)
        assert same_bits(result[start:stop], alone)
