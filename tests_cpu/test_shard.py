"""Shards hold what frameworks say they hold, and heads are found in them or said to be cut."""

import json
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import start_processes

from muonsplit.errors import CutHeadError, LayoutError, UsageError
from muonsplit.geometry import Plan, plan
from muonsplit.geometry.shard import shard_plan
from muonsplit.layout import Layout
from muonsplit.sharding import (
    Shard,
    column_parallel,
    flat,
    of_parameter,
    sharded,
)

# From the published configs; tests_cpu/test_plan.py has where each comes from.
GLM_Q_B = Layout.parse("q 64×256")
GLM_KV_B = Layout.parse("kv 64×448")
GLM_KV_APART = Layout.parse("64 × (k 192 | v 256)")
LLAMA_3_Q = Layout.parse("q 32×128")
LLAMA_3_K = Layout.parse("k 8×128")
PHI_3 = Layout.parse("q 32×96 | k 8×96 | v 8×96")
FALCON = Layout.parse("8 × (q 16×64 | k 64 | v 64)")
GPT_2 = Layout.parse("q 12×64 | k 12×64 | v 12×64, axis 1")


@pytest.mark.parametrize(
    ("layout", "rank", "world", "spans", "local"),
    [
        (GLM_Q_B, 3, 8, [(6144, 8192)], "q 8×256"),
        (GLM_KV_B, 7, 8, [(25088, 28672)], "kv 8×448"),
        (GLM_KV_APART, 1, 8, [(3584, 7168)], "8 × (k 192 | v 256)"),
        (LLAMA_3_Q, 5, 16, [(1280, 1536)], "q 2×128"),
        (LLAMA_3_K, 1, 2, [(512, 1024)], "k 4×128"),
        (PHI_3, 1, 4, [(768, 1536), (3264, 3456), (4032, 4224)], "q 8×96 | k 2×96 | v 2×96"),
        (FALCON, 3, 4, [(6912, 9216)], "2 × (q 16×64 | k 64 | v 64)"),
        # Half a group: nine heads of Q on one rank, the other seven, K and V on the next.
        (FALCON, 2, 16, [(1152, 1728)], "q 9×64"),
        (FALCON, 3, 16, [(1728, 2304)], "q 7×64 | k 64 | v 64"),
        (GPT_2, 3, 4, [(576, 768), (1344, 1536), (2112, 2304)], None),
        (GPT_2, 0, 1, [(0, 2304)], "q 12×64 | k 12×64 | v 12×64, axis 1"),
    ],
)
def test_tensor_parallel_shards_of_real_weights(
    layout: Layout, rank: int, world: int, spans: list[tuple[int, int]], local: str | None
) -> None:
    shard = column_parallel(layout, rank, world)
    assert (shard.size, shard.spans, shard.axis, shard.padding) == (
        layout.rows,
        tuple(spans),
        layout.axis,
        0,
    )
    found = sharded(layout, shard)
    assert found.outcome == "heads"
    assert found.cut == ()
    assert str(found.layout) == (local or "q 3×64 | k 3×64 | v 3×64, axis 1")


def test_the_width_survives_and_the_count_does_not() -> None:
    # deepspeed pull request #8384: a tag of 8 heads on a shard of 128 rows made half heads of 16.
    assert str(sharded(Layout.parse("q 8×32"), column_parallel(256, 1, 2)).layout) == "q 4×32"


def test_a_contiguous_shard_of_a_fused_weight_is_no_tensor_parallel_one() -> None:
    # FSDP2 on 4 ranks: 1152 of 4608 rows, so rank 2 has the last Q heads and half of K.
    shard = Shard(4608, ((2304, 3456),))
    assert str(sharded(PHI_3, shard).layout) == "q 8×96 | k 4×96"


@pytest.mark.parametrize("rank", [0, 5, 15])
def test_more_ranks_than_kv_heads_cut_heads(rank: int) -> None:
    shard = column_parallel(LLAMA_3_K, rank, 16)
    assert shard.rows == 64
    head = {0: 0, 5: 2, 15: 7}[rank]
    said = f"k[{head}], rows {128 * head}–{128 * head + 127}, of which 64 of 128 are held"
    dropped, gathered = sharded(LLAMA_3_K, shard, "drop"), sharded(LLAMA_3_K, shard, "gather")
    assert (dropped.outcome, dropped.layout) == ("dropped", None)
    assert (gathered.outcome, gathered.layout) == ("gather", None)
    assert dropped.reason == gathered.reason == f"cuts a head: {said}"
    assert [(b.role, b.head) for b in dropped.cut] == [("k", head)]
    with pytest.raises(CutHeadError) as caught:
        sharded(LLAMA_3_K, shard, "raise")
    assert said in caught.value.message
    assert "gather the head" in caught.value.hint


@pytest.mark.parametrize(
    ("layout", "rank", "spans", "local"),
    [
        (LLAMA_3_K, 5, [(256, 384)], "k 128"),
        (LLAMA_3_Q, 5, [(1280, 1536)], "q 2×128"),
        # 32 Q heads on 16 ranks, 8 K and V heads twice each.
        (PHI_3, 5, [(960, 1152), (3264, 3360), (4032, 4128)], "q 2×96 | k 96 | v 96"),
        # Two ranks share a group: each has half of its Q heads and all of its K and V.
        (FALCON, 3, [(1664, 2304)], "q 8×64 | k 64 | v 64"),
        (FALCON, 2, [(1152, 1664), (2176, 2304)], "q 8×64 | k 64 | v 64"),
    ],
)
def test_kv_heads_are_repeated_where_asked(
    layout: Layout, rank: int, spans: list[tuple[int, int]], local: str
) -> None:
    shard = column_parallel(layout, rank, 16, replicate=True)
    assert shard.spans == tuple(spans)
    assert str(sharded(layout, shard, "raise").layout) == local


def test_repeated_heads_must_divide_the_ranks() -> None:
    with pytest.raises(LayoutError, match="8 heads or groups of k 8×128 do not divide 12 ranks"):
        column_parallel(LLAMA_3_K, 0, 12, replicate=True)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_is_none(rank: int) -> None:
    with pytest.raises(LayoutError, match=f"no rank {rank} among 4"):
        column_parallel(4096, rank, 4)


def test_joined_projections_are_cut_by_any_tensor_parallelism() -> None:
    # Megatron's projection split: all of Q is one matrix, a rank of 4 has a quarter of it.
    layout = Layout.parse("8 × (q 16×64 | k 64 | v 64), joined")
    found = sharded(layout, column_parallel(layout, 1, 4), "gather")
    assert found.outcome == "gather"
    assert [(b.role, b.rows) for b in found.cut] == [("q", 8192), ("k", 512), ("v", 512)]
    assert "q, joined, 8192 rows within 0–9087, of which 2048 of 8192 are held" in found.reason
    # Where a rank has all of one role and nothing of the others, nothing is cut.
    apart = Layout.parse("q 16×64 | k 4×64, joined")
    assert str(sharded(apart, Shard(1280, ((0, 1024),))).layout) == "q 16×64, joined"


def test_a_head_stored_in_two_places_is_no_block() -> None:
    found = sharded(Layout.parse("q 2×4"), Shard(8, ((4, 6), (0, 4), (6, 8))))
    assert found.outcome == "dropped"
    assert "q[1], rows 4–7, of which 4 of 4 are held, but not in one piece" in found.reason


def test_heads_are_found_in_the_order_in_which_they_are_stored() -> None:
    shard = Shard(10, ((6, 10), (0, 2)))
    found = sharded(Layout.parse("q 2 | k 4 | v 4"), shard)
    assert str(found.layout) == "v 4 | q 2"
    assert shard.origin(0, 4) == ((6, 10),)
    assert shard.origin(2, 5) == ((8, 10), (0, 1))


def test_the_other_axis_cuts_every_head() -> None:
    found = sharded(LLAMA_3_Q, Shard(4096, ((0, 1024),), axis=1))
    assert found.outcome == "dropped"
    assert len(found.cut) == 32
    assert "q[0], rows 0–127, of which columns 0–1023 of 4096 are held" in found.reason
    assert sharded(LLAMA_3_Q, Shard.whole(4096, axis=1)).layout == LLAMA_3_Q


def test_a_rank_without_rows_has_no_heads_and_cuts_none() -> None:
    # dion issue #74: 18 rows on 8 ranks are six shards of 3 and two empty ones.
    layout = Layout.parse("q 6×3")
    found = [sharded(layout, column_parallel(layout, rank, 8), "raise") for rank in range(8)]
    assert [f.outcome for f in found] == ["heads"] * 6 + ["empty"] * 2
    assert [f.shard.rows for f in found] == [3] * 6 + [0] * 2
    assert found[7].reason == "empty: none of 18 rows"


def test_padding_belongs_to_no_head() -> None:
    # 18 rows on 4 ranks of 5: the last one has 3 and two rows of padding.
    layout = Layout.parse("q 6×3")
    shards = [column_parallel(layout, rank, 4, padded=True) for rank in range(4)]
    assert [(s.rows, s.padding) for s in shards] == [(5, 0), (5, 0), (5, 0), (3, 2)]
    last = sharded(layout, shards[3])
    assert (str(last.layout), last.shard.padding) == ("q 3", 2)
    assert "and 2 rows of padding" in last.reason
    # More padding than a shard has rows: the last two of 8 are padding alone.
    shards = [column_parallel(18, rank, 8, padded=True) for rank in range(8)]
    assert [(s.rows, s.padding) for s in shards] == [(3, 0)] * 6 + [(0, 3)] * 2
    assert sharded(layout, shards[7]).outcome == "empty"
    assert column_parallel(18, 3, 4).padding == 0


def test_padding_between_the_parts_is_refused() -> None:
    with pytest.raises(LayoutError, match="padding would stand between"):
        column_parallel(Layout.parse("q 2×3 | k 3"), 0, 2, padded=True)
    assert column_parallel(Layout.parse("q 2×3 | k 4"), 1, 2, padded=True).padding == 0


@pytest.mark.parametrize(
    ("start", "stop", "spans", "partial"),
    [
        (0, 107, ((0, 11),), ((10, 11),)),
        (107, 214, ((10, 22),), ((10, 11), (21, 22))),
        (214, 320, ((21, 32),), ((21, 22),)),
        (80, 120, ((8, 12),), ()),
        (81, 82, ((8, 9),), ((8, 9),)),
        (85, 95, ((8, 10),), ((8, 10),)),
        (320, 320, (), ()),
    ],
)
def test_flat_slices(
    start: int,
    stop: int,
    spans: tuple[tuple[int, int], ...],
    partial: tuple[tuple[int, int], ...],
) -> None:
    shard = flat((32, 10), start, stop)
    assert (shard.size, shard.spans, shard.partial, shard.flat) == (32, spans, partial, True)


def test_a_flat_slice_cuts_inside_a_row() -> None:
    layout = Layout.parse("q 8×4")
    found = sharded(layout, flat((32, 10), 0, 107))
    assert found.outcome == "dropped"
    assert "q[2], rows 8–11, of which 2 of 4 are held, and 1 in part" in found.reason
    # The last row whole, but the first one element short.
    found = sharded(layout, flat((32, 10), 41, 120))
    assert "q[1], rows 4–7, of which 3 of 4 are held, and 1 in part" in found.reason
    assert str(sharded(layout, flat((32, 10), 40, 120)).layout) == "q 2×4"
    assert sharded(Layout.parse("q 2×5, axis 1"), flat((32, 10), 0, 160)).outcome == "dropped"


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (5, 4), (0, 321)])
def test_a_slice_outside_the_weight(start: int, stop: int) -> None:
    with pytest.raises(LayoutError, match="which has 320"):
        flat((32, 10), start, stop)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Shard(8, ((0, 4), (3, 5))),
        lambda: Shard(8, ((4, 9),)),
        lambda: Shard(8, ((4, 4),)),
        lambda: Shard(8, ((-1, 4),)),
        lambda: Shard(8, ((0, 4),), partial=((4, 5),)),
        lambda: Shard(8, ((0, 4),), partial=((1, 3), (2, 3))),
        lambda: Shard(8, ((0, 4),), padding=-1),
        lambda: Shard(0, ()),
    ],
)
def test_what_is_no_shard(make: Callable[[], Shard]) -> None:
    with pytest.raises(LayoutError, match="disjoint"):
        make()


def test_a_shard_of_another_weight() -> None:
    with pytest.raises(LayoutError, match="1024 rows is none of q 32×128, of 4096"):
        sharded(LLAMA_3_Q, Shard(1024, ((0, 512),)))


def test_a_plain_parameter_is_whole() -> None:
    assert of_parameter(nn.Parameter(torch.empty(6, 4))) == Shard(6, ((0, 6),))
    assert of_parameter(nn.Parameter(torch.empty(()))) == Shard(1, ((0, 1),))


def test_a_piece_that_does_not_tell_its_place_is_refused() -> None:
    piece = nn.Parameter(torch.empty(12))
    piece._fsdp_flattened = True  # pyright: ignore[reportAttributeAccessIssue]
    for parameter in (piece, nn.Parameter(torch.empty(0))):
        with pytest.raises(LayoutError, match="is not told") as caught:
            of_parameter(parameter)
        assert "flat(shape, start, stop)" in caught.value.hint


def placeholder(rank: int | None, world: int, *shape: int) -> SimpleNamespace:
    """What zero.Init leaves of a parameter, as deepspeed 0.19.8 makes it."""
    size = -(-torch.Size(shape).numel() // world)
    fields: dict[str, Any] = {"ds_shape": torch.Size(shape), "shape": torch.Size([0])}
    fields["ds_tensor"] = torch.empty(size)
    if rank is not None:
        fields["ds_zero_partition_rank"] = rank
    return SimpleNamespace(**fields)


def test_zero_partitions() -> None:
    # 35 elements on 2 ranks: 18, and 17 with one of padding. 18 = 3 rows of 5 and 3 more.
    first, last = (of_parameter(placeholder(rank, 2, 7, 5)) for rank in range(2))
    assert (first.spans, first.partial, first.padding) == (((0, 4),), ((3, 4),), 0)
    assert (last.spans, last.partial, last.padding) == (((3, 7),), ((3, 4),), 1)
    assert str(last) == "rows 3–6 of 7, 1 of them in part, and 1 elements of padding"
    # 3 elements on 5 ranks: the last two hold padding alone.
    assert of_parameter(placeholder(4, 5, 3, 1)) == Shard(3, (), padding=1, flat=True)
    assert of_parameter(placeholder(None, 2, 7, 5), rank=1) == last
    with pytest.raises(LayoutError, match="ds_zero_partition_rank"):
        of_parameter(placeholder(None, 2, 7, 5))
    whole = SimpleNamespace(ds_shape=(7, 5), shape=(7, 5), ds_tensor=None)
    assert of_parameter(whole) == Shard.whole(7)


class SmallAttention(nn.Module):
    """4 query and 2 key-value heads of 16 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = 4, 2, 16
        self.q_proj = nn.Linear(48, 64, bias=False)
        self.k_proj = nn.Linear(48, 32, bias=False)
        self.v_proj = nn.Linear(48, 32, bias=False)
        self.o_proj = nn.Linear(64, 48, bias=False)


def small_plan() -> Plan:
    up = nn.Linear(48, 96, bias=False)
    embedding = nn.Embedding(16, 48)
    return plan(nn.ModuleDict({"embed": embedding, "attn": SmallAttention(), "up_proj": up}))


def tensor_parallel(whole: Plan, rank: int, world: int) -> dict[str, Shard]:
    shards: dict[str, Shard] = {}
    for d in whole.decisions:
        axis = int(d.leaf == "o_proj")
        shards[d.name] = column_parallel(Layout.whole(d.shape[axis], axis), rank, world)
    return shards


def outcomes(whole: Plan, rank: int, world: int, dialect: str) -> dict[str, tuple[str, str]]:
    found = shard_plan(whole, tensor_parallel(whole, rank, world), dialect)
    assert list(found) == [d.name for d in whole.decisions]
    return {name.split(".")[-2]: (a.outcome, str(a.layout)) for name, a in found.items()}


def test_a_plan_on_two_ranks_keeps_every_head() -> None:
    whole = ("whole", "None")
    for rank in range(2):
        assert outcomes(small_plan(), rank, 2, "dion") == {
            "q_proj": ("heads", "q 2×16"),
            "k_proj": ("heads", "k 16"),
            "v_proj": ("heads", "v 16"),
            "o_proj": whole,
            "up_proj": whole,
        }


def test_a_plan_on_four_ranks_halves_the_kv_heads() -> None:
    whole = small_plan()
    dropped = outcomes(whole, 3, 4, "deepspeed-0.19.8")
    assert dropped["q_proj"] == ("heads", "q 16")
    assert dropped["k_proj"] == dropped["v_proj"] == ("dropped", "None")
    gathered = outcomes(whole, 3, 4, "glm-5")
    assert gathered["q_proj"] == ("heads", "q 16")
    assert gathered["k_proj"] == gathered["v_proj"] == ("gather", "None")
    with pytest.raises(CutHeadError) as caught:
        outcomes(whole, 3, 4, "dion")
    # Both are listed, not only the first; the query, which is whole, is not.
    first, *lines, last = caught.value.message.split("\n")
    assert "2 in all, under dialect dion" in first
    assert "every split weight" not in first
    assert [line.split(":")[0].split(".")[-2] for line in lines] == ["k_proj", "v_proj"]
    assert all("[1], rows 16–31, of which 8 of 16 are held" in line for line in lines)
    assert last == ""


def test_all_dropped_is_an_error_that_lists_each_weight() -> None:
    with pytest.raises(CutHeadError, match="every split weight") as caught:
        outcomes(small_plan(), 2, 8, "deepspeed-0.19.8")
    lines = caught.value.message.split("\n")[1:-1]
    assert [line.split(":")[0].split(".")[-2] for line in lines] == ["q_proj", "k_proj", "v_proj"]
    # Rank 2 of 8 has rows 16–23 of Q's 64, the first half of head 1.
    assert "q[1], rows 16–31, of which 8 of 16 are held" in lines[0]
    assert outcomes(small_plan(), 2, 8, "glm-5")["q_proj"] == ("gather", "None")


def test_a_weight_without_a_shard_is_an_error_and_not_whole() -> None:
    whole = small_plan()
    shards = tensor_parallel(whole, 0, 2)
    name = next(n for n in shards if "k_proj" in n)
    with pytest.raises(UsageError, match=f"none is given for {name}"):
        shard_plan(whole, {n: s for n, s in shards.items() if n != name}, "deepspeed-0.19.8")
    with pytest.raises(UsageError, match=r"no parameter of the plan is k_proj\.weight"):
        shard_plan(whole, {**shards, "k_proj.weight": shards[name]}, "deepspeed-0.19.8")
    embedding = {whole.others[0].name: Shard(16, ((0, 8),))}
    assert name in shard_plan(whole, shards | embedding, "deepspeed-0.19.8")


def test_a_shard_is_stated_in_rows_of_the_whole_weight() -> None:
    whole = small_plan()
    shards = {d.name: Shard.whole(d.shape[0]) for d in whole.decisions}
    name = next(n for n in shards if "q_proj" in n)
    with pytest.raises(LayoutError, match=rf"{name} has the whole shape \(64, 48\)"):
        shard_plan(whole, shards | {name: Shard.whole(32)}, "deepspeed-0.19.8")


# What each rank holds, by hand: spans, axis, and the spans held in part.
Held = tuple[list[list[int]], int, list[list[int]]]
TWO_RANKS: dict[str, list[Held]] = {
    "even": [([[0, 4]], 0, []), ([[4, 8]], 0, [])],
    "uneven": [([[0, 3]], 0, []), ([[3, 5]], 0, [])],
    "columns": [([[0, 3]], 1, []), ([[3, 6]], 1, [])],
    "replicated": [([[0, 4]], 0, []), ([[0, 4]], 0, [])],
}
FOUR_RANKS: dict[str, list[Held]] = {
    "even": [([[4 * r, 4 * r + 4]], 0, []) for r in range(4)],
    # torch.chunk: shares of ⌈6/4⌉ = 2 rows, the last rank has none.
    "uneven": [*(([[2 * r, 2 * r + 2]], 0, []) for r in range(3)), ([], 0, [])],
    "left to right": [([[4 * r, 4 * r + 4]], 0, []) for r in range(4)],
    # Ranks (dp, tp) in the order (0,0) (0,1) (1,0) (1,1); tp divides first.
    "fsdp over tp": [([[a, a + 4]], 0, []) for a in (0, 8, 4, 12)],
    "fsdp over tp, layers": [([[a, a + 4]], 0, []) for a in (0, 8, 4, 12)],
    # 10 rows: tp has 5 and 5, dp divides each in 3 and 2.
    "fsdp over tp, uneven": [([r], 0, []) for r in ([0, 3], [5, 8], [3, 5], [8, 10])],
    # Without tp's own placement, dp's share alone: a part of each half.
    "strided": [([[a, a + 4], [8 + a, 12 + a]], 0, []) for a in (0, 0, 4, 4)],
    "replicated and rows": [([[0, 3]], 0, []), ([[3, 5]], 0, [])] * 2,
    "both axes": [([rows], 0, [rows]) for rows in ([0, 2], [0, 2], [2, 4], [2, 4])],
}


def case(mesh: Any, shape: tuple[int, int], placements: list[Any]) -> dict[str, Any]:
    from torch.distributed.tensor import distribute_tensor

    weight = torch.arange(shape[0] * shape[1]).view(shape).double()
    return described(nn.Parameter(distribute_tensor(weight, mesh, placements)))


def described(parameter: Any) -> dict[str, Any]:
    shard = of_parameter(parameter)
    held = [shard.spans, shard.axis, shard.partial]
    return {"held": held, "size": shard.size, "local": parameter.to_local().tolist()}


def run_rank(rank: int, world: int, folder: str) -> None:
    """One rank of a real process group: what it holds, by our reading and by its values."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Sharded
    from torch.distributed.tensor.placement_types import _StridedShard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/init", rank=rank, world_size=world)
    line = init_device_mesh("cpu", (world,))
    found: dict[str, Any]
    if world == 2:
        found = {
            "even": case(line, (8, 3), [Sharded(0)]),
            "uneven": case(line, (5, 3), [Sharded(0)]),
            "columns": case(line, (4, 6), [Sharded(1)]),
            "replicated": case(line, (4, 3), [Replicate()]),
        }
    else:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        strided = _StridedShard(0, split_factor=2)
        found = {
            "even": case(line, (16, 3), [Sharded(0)]),
            "uneven": case(line, (6, 3), [Sharded(0)]),
            "left to right": case(square, (16, 3), [Sharded(0), Sharded(0)]),
            "fsdp over tp": case(square, (16, 3), [strided, Sharded(0)]),
            "fsdp over tp, layers": layers(square, 16),
            "fsdp over tp, uneven": layers(square, 10),
            "strided": case(square, (16, 3), [strided, Replicate()]),
            "replicated and rows": case(square, (5, 3), [Replicate(), Sharded(0)]),
            "both axes": case(square, (4, 6), [Sharded(0), Sharded(1)]),
        }
    found["partial"] = refused(line)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def layers(mesh: Any, size: int) -> dict[str, Any]:
    """A column-parallel linear layer under FSDP2, made by torch's own wrappers."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(3, size, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(3 * size).view(size, 3))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return described(model[0].weight)


def refused(mesh: Any) -> str:
    from torch.distributed.tensor import DTensor, Partial

    try:
        of_parameter(DTensor.from_local(torch.ones(4, 3), mesh, [Partial()]))
    except LayoutError as error:
        return error.message
    return ""


def spawned(run: Callable[..., None], world: int, folder: Path) -> list[dict[str, Any]]:
    # Ranks are forked off one clean process that has torch loaded, which takes longest.
    multiprocessing.set_forkserver_preload(
        ["torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
    )
    start_processes(run, (world, str(folder)), nprocs=world, start_method="forkserver")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def rows(spans: list[list[int]]) -> list[int]:
    return [row for start, stop in spans for row in range(start, stop)]


@pytest.mark.parametrize(("world", "expected"), [(2, TWO_RANKS), (4, FOUR_RANKS)])
def test_dtensors_of_a_real_process_group(
    world: int, expected: dict[str, list[Held]], tmp_path: Path
) -> None:
    for rank, found in enumerate(spawned(run_rank, world, tmp_path)):
        assert "holds no rows" in found.pop("partial")
        assert found.keys() == expected.keys()
        for name, ranks in expected.items():
            spans, axis, partial = ranks[rank]
            assert found[name]["held"] == [spans, axis, partial], (name, rank)
            # The values of the weight count its elements, so the local ones tell where they were.
            local, width = found[name]["local"], 6 if name in ("columns", "both axes") else 3
            elements = [i % width for i in local[0]] if axis else [row[0] // width for row in local]
            assert elements == rows(spans), (name, rank)


def run_zero(rank: int, world: int, folder: str) -> None:
    """One rank of ZeRO-3, with the elements that its partition really holds."""
    os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world))
    import deepspeed
    import deepspeed.ops

    # Left to itself it builds a shared-memory collective, which takes a compiler and minutes.
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # pyright: ignore[reportAttributeAccessIssue]
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/init", rank=rank, world_size=world
    )
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        layer = nn.Linear(5, 7, bias=False)
    with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=0), torch.no_grad():
        layer.weight.copy_(torch.arange(35).view(7, 5))
    shard = of_parameter(layer.weight)
    held = [shard.spans, shard.axis, shard.partial, shard.padding]
    local = layer.weight.ds_tensor.tolist()  # pyright: ignore[reportAttributeAccessIssue]
    Path(folder, f"{rank}.json").write_text(json.dumps({"held": held, "local": local}))
    torch.distributed.destroy_process_group()


@pytest.mark.downstream
def test_partitions_of_a_real_zero_init(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    first, last = spawned(run_zero, 2, tmp_path)
    assert first["held"] == [[[0, 4]], 0, [[3, 4]], 0]
    assert last["held"] == [[[3, 7]], 0, [[3, 4]], 1]
    assert first["local"] == list(range(18))
    assert last["local"][:17] == list(range(18, 35))
    assert len(last["local"]) == 18
