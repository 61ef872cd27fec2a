"""The shard of the result is the result of the shard, bit for bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from muonsplit.dialect import DIALECTS, Arithmetic
from muonsplit.layout import Layout, Segment
from muonsplit.muon import directions, orthogonalize
from muonsplit.newton_schulz import fast, newton_schulz, singular_value_oracle
from muonsplit.observe.tolerance import rounding_bound
from property.strategies import (
    Heads,
    Place,
    Sharding,
    places,
    projections,
    same_bits,
    shardings,
    threads,
)

ARITHMETICS = {
    "gram-fp32": DIALECTS["deepspeed-0.19.8"].arithmetic,
    "standard-fp32": replace(DIALECTS["deepspeed-0.19.8-standard"].arithmetic, cpu_dtype="float32"),
    "standard-bf16": DIALECTS["deepspeed-0.19.8-standard"].arithmetic,
    "addmm-bf16": DIALECTS["torch-2.13"].arithmetic,
    "right-bf16": DIALECTS["dion"].arithmetic,
    "fast-fp32": DIALECTS["deepspeed-0.19.8"].arithmetic.fastest(),
    "gram-addmm-fp16": DIALECTS["gram-newton-schulz-0.1.6"].arithmetic,
    "gram-paren-fp16": replace(DIALECTS["optimuon-0.1.1"].arithmetic, scale_per="block"),
    "factored-bf16": DIALECTS["heavyball-3.2.1"].arithmetic,
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


AS_IT_IS, ODD = Place(0, 0, False), Place(3, 1, True)


@arithmetics
@given(case=shardings())
# A product that stands alone is the one BLAS splits between threads: by rows from 64 on, and by
# the inner dimension where that is long.
@example(case=Sharding(Heads(2, 64, 96, 0), 2, (1, 0), AS_IT_IS, AS_IT_IS, 2))
@example(case=Sharding(Heads(3, 96, 64, 1), 3, (2, 0, 1), AS_IT_IS, ODD, 2))
@example(case=Sharding(Heads(2, 32, 2048, 2), 2, (0, 1), ODD, AS_IT_IS, 2))
@example(case=Sharding(Heads(4, 48, 50, 3), 2, (3, 1, 2, 0), ODD, Place(16, 16, False), 1))
def test_shards_of_moved_heads_anywhere_in_memory(arithmetic: Arithmetic, case: Sharding) -> None:
    p = case.p
    update, rows = p.update(), p.layout.rows // case.tp
    moved = torch.cat([update[p.rows(head)] for head in case.order])
    with threads(case.threads):
        result = orthogonalize(case.place.hold(update), p.layout, arithmetic)
        expected = torch.cat([result[p.rows(head)] for head in case.order])
        assert bool(expected.isfinite().all())
        for start in range(0, p.layout.rows, rows):
            held = case.shard_place.hold(moved[start : start + rows])
            shard = orthogonalize(held, p.layout.shard(start, start + rows), arithmetic)
            assert same_bits(shard, expected[start : start + rows])


@given(case=shardings(), mates=st.integers(1, 3), at_once=st.integers(1, 5))
@example(case=Sharding(Heads(3, 64, 96, 0), 1, (0, 1, 2), ODD, AS_IT_IS, 2), mates=1, at_once=2)
def test_chunks_of_the_fast_form_do_not_show(case: Sharding, mates: int, at_once: int) -> None:
    """A chunk's last blocks may stand alone, and its buffers hold what the chunk before left."""
    arithmetic, p = ARITHMETICS["fast-fp32"], case.p
    update = case.place.hold(p.update())
    poison = torch.full_like(update, torch.nan)
    short, long = sorted((p.width, p.cols))
    block_bytes = 4 * (2 * short * long + 4 * short * short)
    with threads(case.threads), pytest.MonkeyPatch.context() as patch:
        expected = orthogonalize(update, p.layout, arithmetic)
        patch.setattr(fast, "_CACHE_BYTES", at_once * block_bytes)
        found = directions([poison] * mates + [update], [p.layout] * (mates + 1), arithmetic)
    assert same_bits(found[-1].scaled, expected)


def exact_heads(p: Heads, update: Tensor, arithmetic: Arithmetic) -> list[tuple[Tensor, float]]:
    """Each head's exact update without the scale, and how far rounding may take one from it."""
    blocks = update.view(p.heads, p.width, p.cols)
    bounds = [rounding_bound(block, arithmetic) for block in blocks]
    return list(zip(singular_value_oracle(blocks, arithmetic), bounds, strict=True))


SIZES = [(3, 64, 96), (2, 96, 64), (5, 24, 50), (2, 32, 2048), (2, 200, 200)]
sizes = pytest.mark.parametrize("size", SIZES, ids=str)


@sizes
@arithmetics
def test_other_threads_move_a_result_within_its_rounding(
    arithmetic: Arithmetic, size: tuple[int, int, int]
) -> None:
    p = Heads(*size, seed=3)
    update = p.update()
    for count in (1, 2):
        with threads(count):
            found = newton_schulz(update.view(size), arithmetic)
        for block, (exact, bound) in zip(found, exact_heads(p, update, arithmetic), strict=True):
            assert float((block.double() - exact).norm()) <= bound * float(exact.norm())


FLOAT64 = {
    name: replace(ARITHMETICS[base], cpu_dtype="float64", compute_dtype="float64", pre_cast=None)
    for name, base in {
        "gram": "gram-fp32",
        "addmm": "addmm-bf16",
        "right": "right-bf16",
        "factored": "factored-bf16",
        "fast": "fast-fp32",
    }.items()
}


@pytest.mark.parametrize("arithmetic", FLOAT64.values(), ids=FLOAT64)
@given(case=shardings(max_heads=4))
@example(case=Sharding(Heads(2, 64, 96, 0), 2, (1, 0), AS_IT_IS, ODD, 2))
def test_float64_shards_are_equal_within_their_rounding(
    arithmetic: Arithmetic, case: Sharding
) -> None:
    """Not in bits: what BLAS makes of a float64 product depends on where it lies in memory."""
    p = case.p
    update, rows = p.update().double(), p.layout.rows // case.tp
    # The bound knows nothing of the scale's own rounding.
    unscaled = replace(arithmetic, scale="none")
    with threads(case.threads):
        result = orthogonalize(case.place.hold(update), p.layout, unscaled)
        shards = [
            orthogonalize(
                case.shard_place.hold(update[start : start + rows]),
                p.layout.shard(start, start + rows),
                unscaled,
            )
            for start in range(0, p.layout.rows, rows)
        ]
    assert result.dtype == torch.float64
    apart = torch.cat(shards) - result
    for head, (exact, bound) in enumerate(exact_heads(p, update, unscaled)):
        # Each side is within the bound of what is exact.
        assert float(apart[p.rows(head)].norm()) <= 2 * bound * float(exact.norm())


@given(p=projections(min_heads=2), place=places())
def test_a_scale_by_the_whole_matrix_is_all_that_a_shard_changes(p: Heads, place: Place) -> None:
    """Such a dialect scales a shard by the shard's own shape; it cannot know the weight's."""
    matrix = replace(DIALECTS["optimuon-0.1.1"].arithmetic, scale_on="rate")
    update = p.update()
    whole = directions([place.hold(update)], [p.layout], matrix)[0]
    shard = directions([place.hold(update[: p.width])], [p.layout.shard(0, p.width)], matrix)[0]
    assert same_bits(shard.update, whole.update[: p.width])
    rows = {"whole": p.heads * p.width, "shard": p.width}
    wanted = {name: max(1.0, r / p.cols) ** 0.5 for name, r in rows.items()}
    assert {"whole": whole.rate, "shard": shard.rate} == wanted
