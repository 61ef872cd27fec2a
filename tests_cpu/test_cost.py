"""What a sharded step costs, against arithmetic by hand and counts element by element."""

import json
import random
import subprocess
import sys
from collections import Counter as Tally
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import (
    Placement,
    _StridedShard,  # pyright: ignore[reportPrivateUsage]
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from muonsplit.cli import main
from muonsplit.cost import (
    AT_ONCE,
    Cost,
    Counter,
    Grid,
    Load,
    Weight,
    cost,
    count,
    load,
    stages,
)
from muonsplit.cost.count import batched, sent_back
from muonsplit.dialect import DEFAULT_DIALECT, DIALECTS, Arithmetic, dialect_named
from muonsplit.errors import UsageError
from muonsplit.geometry import Decision, Plan, plan
from muonsplit.geometry.shard import tensor_parallel_axes
from muonsplit.layout import Layout, Segment
from muonsplit.models.load import build, resolve
from muonsplit.muon import optimizer
from muonsplit.muon.blocks import directions
from muonsplit.newton_schulz import newton_schulz
from muonsplit.report.cost import amount
from muonsplit.sharding import region
from muonsplit.sharding.ways import fsdp_over_tp

DOCS = Path(__file__).parents[1] / "docs" / "sharding.md"

# Five steps of the standard iteration: A = XXᵀ, A², and (bA + cA²)X.
STANDARD = Arithmetic(compute_dtype="bfloat16", cpu_dtype="float32", scale_on="update")


def standard_flop(rows: int, cols: int) -> int:
    d, n = sorted((rows, cols))
    return 5 * (2 * d * d * n + 2 * d**3 + 2 * d * d * n)


def strided(tp: int) -> tuple[Placement, Placement]:
    return _StridedShard(0, split_factor=tp), Shard(0)


def test_whole_heads_stay_where_they_are() -> None:
    q = Weight("q", (32, 48), Layout.heads("q", 4, 8), (Shard(0),))
    found = load([q], (2,), STANDARD)
    each = 5 * (4 * 8 * 8 * 48 + 2 * 8**3)
    assert each == standard_flop(8, 48) == 66560
    assert found == Load([2 * each, 2 * each], [0, 0], [0, 0], calls=0)


def test_a_cut_head_goes_to_whoever_holds_most_of_it() -> None:
    # Rows 0–7 and 8–14: of the head of rows 5–9 rank 0 holds three, rank 1 two of 4 elements.
    q = Weight("q", (15, 4), Layout.heads("q", 3, 5), (Shard(0),))
    each = 5 * (4 * 4 * 4 * 5 + 2 * 4**3)
    assert load([q], (2,), STANDARD) == Load([2 * each, each], [0, 32], [32, 0], calls=2)


@pytest.mark.parametrize(
    ("scale_on", "dtype", "device", "there", "back"),
    [
        ("update", torch.float32, "meta", 4, 4),
        ("update", torch.bfloat16, "meta", 2, 2),
        ("result", torch.bfloat16, "meta", 2, 2),
        ("rate", torch.float32, "meta", 4, 2),
        ("rate", torch.float32, "cpu", 4, 4),
        ("step", torch.float64, "meta", 8, 2),
    ],
)
def test_bytes_are_those_of_update_and_result(
    scale_on: str, dtype: torch.dtype, device: str, there: int, back: int
) -> None:
    arithmetic = Arithmetic(compute_dtype="bfloat16", cpu_dtype="float32", scale_on=scale_on)  # type: ignore[arg-type]
    q = Weight("q", (15, 4), Layout.heads("q", 3, 5), (Shard(0),), dtype)
    found = load([q], (2,), arithmetic, device=torch.device(device))
    assert (found.there, found.back) == ([0, 8 * there], [8 * back, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DIALECTS)
def test_results_have_the_dtype_that_the_optimizer_gives_them(
    name: str, dtype: torch.dtype
) -> None:
    arithmetic, layout = dialect_named(name).arithmetic, Layout.heads("q", 3, 5)
    for chosen in (arithmetic, arithmetic.fastest()):
        found = directions([torch.ones(15, 4, dtype=dtype)], [layout], chosen)[0].update
        assert sent_back(dtype, chosen, found.device) is found.dtype


def test_a_whole_matrix_over_four_ranks() -> None:
    o = Weight("o", (8, 6), None, (Shard(0),))
    each = standard_flop(8, 6)
    assert load([o], (4,), STANDARD) == Load(
        [each, 0, 0, 0], [0, 48, 48, 48], [144, 0, 0, 0], calls=2
    )
    # Of two the second is given to who has nothing yet, also if it is in a batch of its own.
    for at_once, calls in ((96, 2), (95, 4)):
        assert load([o, o], (4,), STANDARD, at_once=at_once) == Load(
            [each, each, 0, 0], [48, 48, 96, 96], [144, 144, 0, 0], calls
        )


def test_whole_blocks_are_work_too() -> None:
    # Only rank 0 holds rows of the first weight; of the second both hold as much.
    kept = Weight("kept", (1, 8, 6), None, (Shard(0),))
    o = Weight("o", (8, 6), None, (Shard(0),))
    each = standard_flop(8, 6)
    for at_once, calls in ((96, 2), (1, 2)):
        assert load([kept, o], (2,), STANDARD, at_once=at_once) == Load(
            [each, each], [96, 0], [0, 96], calls
        )


def test_what_is_divided_otherwise_is_shared_out_by_itself() -> None:
    # The first is of all four ranks, the second of each pair: each begins with the first of equals.
    both = Weight("both", (8, 6), None, (Shard(0), Shard(1)))
    pair = Weight("pair", (8, 6), None, (Shard(0), Replicate()))
    each = standard_flop(8, 6)
    found = load([both, pair, both], (2, 2), STANDARD)
    assert found.flop == [2 * each, 2 * each, 0, 0]
    # Two exchanges of all, two of pairs; those of a batch with nothing to send do not take place.
    assert found.calls == 4
    assert load([both, pair, both], (2, 2), STANDARD, at_once=1).calls == 6


def test_tensor_parallelism_and_fsdp() -> None:
    # Rows 0–3 and 4–7 by tensor parallelism, halves of these by FSDP: one head each.
    q = Weight("q", (8, 3), Layout.heads("q", 4, 2), strided(2))
    each = standard_flop(2, 3)
    assert load([q], (2, 2), STANDARD) == Load([each] * 4, [0] * 4, [0] * 4)
    o = Weight("o", (4, 4), None, (Shard(0), Shard(1)))
    each = standard_flop(4, 4)
    assert load([o], (2, 2), STANDARD) == Load([each, 0, 0, 0], [0, 16, 16, 16], [48, 0, 0, 0], 2)


def test_replicas_do_the_same_again() -> None:
    # Ranks 0 and 2 hold halves, and so do 1 and 3.
    a = Weight("a", (4, 6), None, (Shard(0), Replicate()))
    each = standard_flop(4, 6)
    found = load([a], (2, 2), STANDARD)
    assert found == Load([each, each, 0, 0], [0, 0, 48, 48], [48, 48, 0, 0], 2)
    b = Weight("b", (4, 6), None, (Replicate(), Replicate()))
    assert load([b], (2, 2), STANDARD) == Load([each] * 4, [0] * 4, [0] * 4)


@pytest.mark.parametrize("name", ["deepspeed-0.19.8", "torch-2.13", "kimi-k3", "dion"])
@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)])
def test_operations_are_those_that_torch_counts(name: str, shape: tuple[int, int]) -> None:
    arithmetic = dialect_named(name).arithmetic
    with FlopCounterMode(display=False) as counted:
        newton_schulz(
            torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)), arithmetic
        )
    weight = Weight("w", shape, None, (Replicate(),))
    found = load([weight], (1,), arithmetic, device=torch.device("cpu"))
    assert found.flop == [counted.get_total_flops()]


# Element by element: who holds it is what torch.chunk says, which block it is in what batches say.

LAYOUTS: list[tuple[tuple[int, ...], Layout | None]] = [
    ((24, 5), Layout.heads("q", 6, 4)),
    ((15, 4), Layout.heads("q", 3, 5)),
    ((8, 12), Layout.heads("q", 4, 3, axis=1)),
    ((24, 3), Layout((Segment("q", 2, 4), Segment("k", 1, 2), Segment("v", 1, 2)), 2)),
    ((24, 3), Layout((Segment("q", 2, 4), Segment("k", 1, 4)), 2, joined=True)),
    ((12, 7), None),
    ((5, 4, 6), None),
    ((16, 2, 3), None),
]


def placements_of(tp_axis: int | None, tp: int) -> tuple[Placement, ...]:
    if tp_axis is None:
        return Shard(0), Replicate()
    return (_StridedShard(0, split_factor=tp) if tp_axis == 0 else Shard(0)), Shard(tp_axis)


def held_by(
    shape: Sequence[int], mesh: tuple[int, int], place: Sequence[int], tp_axis: int | None
) -> set[int]:
    """Elements of one rank: tensor parallelism divides first, FSDP what that leaves."""
    index = torch.arange(prod(shape)).view(*shape)
    for axis, rank, world in ((tp_axis, place[1], mesh[1]), (0, place[0], mesh[0])):
        if axis is not None:
            chunks = index.chunk(world, axis)
            index = chunks[rank] if rank < len(chunks) else index[:0]
    return set(index.flatten().tolist())


def blocks_of(
    shape: Sequence[int], layout: Layout | None
) -> list[tuple[tuple[int, ...], set[int]]]:
    index = torch.arange(prod(shape)).view(*shape)
    if layout is None:
        found = list(index) if index.ndim == 3 else [index]
    else:
        found = [block for batch in layout.batches(index) for block in batch]
    made = [(tuple(block.shape), set(block.flatten().tolist())) for block in found]
    return sorted(made, key=lambda block: min(block[1]))


# What it takes, which weight, which block, who may own it, its shape, elements by rank.
_Open = tuple[int, int, int, list[int], tuple[int, ...], dict[int, int]]


def naive(
    weights: Sequence[tuple[tuple[int, ...], Layout | None, int | None]],
    mesh: tuple[int, int],
    batch: int,
) -> Load:
    """Counted element by element in float32, as many weights at once as are given."""
    places = list(product(*map(range, mesh)))
    total = Load.none(prod(mesh))
    replicated = [i for i, (_, _, axis) in enumerate(weights) if axis is None and mesh[1] > 1]
    divided = [i for i in range(len(weights)) if i not in replicated]
    groups = [(divided, list(range(len(places))))]
    groups += [
        (replicated, [r for r, p in enumerate(places) if p[1] == tp]) for tp in range(mesh[1])
    ]
    calls = Tally[int]()
    for chosen, ranks in groups:
        busy = dict.fromkeys(ranks, 0)
        open_blocks: list[_Open] = []
        settled: list[tuple[int, tuple[int, ...], dict[int, int]]] = []
        travelling: set[int] = set()
        for i in chosen:
            shape, layout, axis = weights[i]
            holds = {rank: held_by(shape, mesh, places[rank], axis) for rank in ranks}
            for b, (size, inside) in enumerate(blocks_of(shape, layout)):
                sizes = {r: len(held & inside) for r, held in holds.items() if held & inside}
                if len(sizes) > 1:
                    travelling.add(i // batch)
                short, long = sorted(size)
                work = short * short * long
                best = [r for r in ranks if sizes.get(r) == max(sizes.values())]
                if len(best) > 1:
                    open_blocks.append((-work, i, b, best, size, sizes))
                    continue
                busy[best[0]] += work
                settled.append((best[0], size, sizes))
        for work, _, _, best, size, sizes in sorted(open_blocks, key=itemgetter(0, 1, 2)):
            owner = min((busy[r], r) for r in best)[1]
            busy[owner] -= work
            settled.append((owner, size, sizes))
        calls.update(dict.fromkeys(ranks, 2 * len(travelling)))
        for owner, size, sizes in settled:
            total.flop[owner] += standard_flop(*size)
            for rank, n in sizes.items():
                if rank != owner:
                    total.there[rank] += 4 * n
                    total.back[owner] += 4 * n
    assert len(set(calls.values())) <= 1
    return Load(total.flop, total.there, total.back, max(calls.values(), default=0))


@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (3, 1), (8, 1), (1, 4), (2, 2), (4, 2), (2, 4)])
def test_every_element_is_counted(mesh: tuple[int, int]) -> None:
    source = random.Random(str(mesh))
    for _ in range(12):
        some = source.choices(LAYOUTS, k=source.randint(1, 6))
        axes = [source.choice((None, 0, 1)) for _ in some]
        # FSDP2 and torch agree on who holds a row where tensor parallelism divides evenly.
        even = [
            None if axis == 0 and shape[0] % prod(mesh) else axis
            for (shape, _), axis in zip(some, axes, strict=True)
        ]
        weights = [(*one, axis) for one, axis in zip(some, even, strict=True)]
        made = [
            Weight(str(i), shape, layout, placements_of(axis, mesh[1]))
            for i, (shape, layout, axis) in enumerate(weights)
        ]
        assert load(made, mesh, STANDARD) == naive(weights, mesh, len(weights)), weights
        assert load(made, mesh, STANDARD, at_once=1) == naive(weights, mesh, 1), weights


def test_batches_are_those_of_the_optimizer() -> None:
    assert dict(optimizer._AT_ONCE) == dict(AT_ONCE)
    source = random.Random(0)
    # 16 + 16 rows of two are just what one batch holds.
    sizes = [16, 16, 1, *(source.randint(1, 40) for _ in range(60))]
    weights = [Weight(str(i), (n, 2), None, ()) for i, n in enumerate(sizes)]
    named = [(str(i), torch.empty(n, 2, device="meta")) for i, n in enumerate(sizes)]
    its = [[name for name, _ in some] for some in optimizer._batched(named, 64)]
    assert [[w.name for w in some] for some in batched(weights, 64)] == its


def test_a_block_without_an_owner_of_its_own_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The head of rows 5–9 is on both ranks, the others are on one.
    q = Weight("q", (15, 4), Layout.heads("q", 3, 5), (Shard(0),))
    assert Counter((2,), STANDARD).count([[q]])[1] == 3
    with monkeypatch.context() as patched:
        patched.setattr(count, "owners", lambda weights, members: [[1, 1, 1]])
        assert Counter((2,), STANDARD).count([[q]])[1] == 2
    whole = (((0, 15),), ((0, 4),))
    monkeypatch.setattr(count, "region", lambda *_: whole)
    assert Counter((2,), STANDARD).count([[q]])[1] == 0


# The recipe.


def decision(
    shape: tuple[int, ...], kind: str = "other", leaf: str = "x", layout: Layout | None = None
) -> Decision:
    return Decision("m.0.x", shape, "M", leaf, kind, layout, None, None, "", "")  # type: ignore[arg-type]


def fsdp2(shape: tuple[int, int], axis: int | None, rank: int) -> tuple[tuple, torch.Tensor]:
    """What torch makes of a weight on FSDP × tensor parallelism of 2 × 2, and a rank's part."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        module = nn.Linear(shape[1], shape[0], bias=False)
        weight = torch.arange(prod(shape), dtype=torch.float32).view(shape)
        if axis is not None:
            weight = distribute_tensor(weight, mesh["tp"], [Shard(axis)], src_data_rank=None)
        module.weight = nn.Parameter(weight)
        fully_shard(module, mesh=mesh["dp"])
        held: Any = module.weight
        return held.placements, held.to_local().detach().clone()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_placements_are_those_of_fsdp2(axis: int | None) -> None:
    placements = fsdp_over_tp(axis, 2)
    for rank in range(4):
        its, local = fsdp2((8, 4), axis, rank)
        # What tensor parallelism does not divide FSDP2 has on its own mesh alone.
        assert tuple(placements) == ((*its, Replicate()) if axis is None else its)
        rows, columns = region((8, 4), (2, 2), (rank // 2, rank % 2), placements)
        whole = torch.arange(32, dtype=torch.float32).view(8, 4)
        (c, d) = columns[0]
        expected = torch.cat([whole[a:b, c:d] for a, b in rows])
        assert torch.equal(local, expected)


def test_one_rank_divides_nothing() -> None:
    assert fsdp_over_tp(0, 1) == fsdp_over_tp(1, 1) == (Shard(0), Replicate())


@pytest.mark.parametrize(
    ("found", "axis"),
    [
        (decision((8, 4), "query", layout=Layout.heads("q", 4, 2)), 0),
        (decision((4, 8), "query", layout=Layout.heads("q", 4, 2, axis=1)), 1),
        (decision((8, 4), "value"), 0),
        (decision((8, 4), "output"), 1),
        (decision((8, 4), leaf="gate_proj"), 0),
        (decision((8, 4), leaf="fc1"), 0),
        (decision((8, 4), leaf="down_proj"), 1),
        (decision((8, 4), leaf="fc2"), 1),
        (decision((8, 4), "mla_down", leaf="q_a_proj"), None),
        (decision((8, 4), "indexer", leaf="wq_b"), None),
        (decision((8, 4), leaf="gate"), None),
        # An output gate of attention: its own name, the name of an MLP's, and one of low rank.
        (decision((8, 4), "gate", leaf="g_proj"), 0),
        (decision((8, 4), "gate", leaf="gate_proj"), 0),
        (decision((8, 4), "gate", leaf="f_a_proj"), None),
        (decision((8, 4), "gate", leaf="f_b_proj"), 0),
        (decision((4, 6, 6), leaf="down_proj"), 0),
        (decision((4, 6, 6), "output", leaf="c_proj"), 0),
    ],
)
def test_what_tensor_parallelism_divides(found: Decision, axis: int | None) -> None:
    expected = {} if axis is None else {found.name: axis}
    assert tensor_parallel_axes(Plan("any", (found,), ())) == expected


def named(*names: str) -> list[Decision]:
    return [Decision(name, (4, 4), "M", "x", "other", None, None, None, "", "") for name in names]


def test_stages_are_consecutive_layers() -> None:
    names = [f"model.layers.{i}.{leaf}.weight" for i in range(5) for leaf in ("a", "b.3")]
    made = stages(named("model.in.weight", *names, "model.out.weight"), 2)
    assert [[d.name for d in stage] for stage in made] == [
        ["model.in.weight", *names[:4]],
        [*names[4:], "model.out.weight"],
    ]
    both = stages(named("encoder.0.x", "encoder.1.x", "decoder.0.x", "decoder.1.x"), 4)
    assert [len(stage) for stage in both] == [1, 1, 1, 1]
    # What stands before the first layer is none of its own.
    with pytest.raises(UsageError, match="1 layers"):
        stages(named("model.in.weight", "model.layers.0.a.weight"), 2)
    with pytest.raises(UsageError, match="5 layers"):
        stages(named(*names), 6)


# Models at full size.

ARITHMETIC = dialect_named(DEFAULT_DIALECT).arithmetic


@lru_cache(maxsize=4)
def planned(model: str) -> Plan:
    return plan(build(resolve(model).config))


@lru_cache(maxsize=32)
def cost_of(model: str, ranks: int, tp: int = 1, pp: int = 1) -> Cost:
    return cost(planned(model), Grid(ranks, tp, pp), ARITHMETIC)


def deepspeed_flop(rows: int, cols: int) -> int:
    """Five steps on the Gram matrix with one restart; the standard iteration on a square."""
    d, n = sorted((rows, cols))
    return 30 * d**3 if d == n else 8 * d * d * n + 28 * d**3


def once(found: Plan) -> int:
    total = 0
    for d in found.decisions:
        rows, cols = d.shape[-2:]
        if d.layout is None:
            count = d.shape[0] if len(d.shape) == 3 else 1
        else:
            assert d.heads is not None
            assert d.width is not None
            assert d.layout == Layout.heads(*d.layout.segments[0])
            count, rows = d.heads, d.width
        total += count * deepspeed_flop(rows, cols)
    return total


@pytest.mark.parametrize(
    ("model", "grid"),
    [
        *(("glm-5.2", (ranks, 1, 1)) for ranks in (8, 64, 512, 4096)),
        ("glm-5.2", (512, 8, 4)),
        ("glm-5.2", (4096, 8, 1)),
        ("kimi-k3", (512, 1, 1)),
        ("kimi-k3", (4096, 8, 4)),
    ],
)
def test_every_block_is_orthogonalised_once(model: str, grid: tuple[int, int, int]) -> None:
    found, ranks = cost_of(model, *grid), grid[0]
    heads = sum(d.heads for d in planned(model).split if d.heads)
    stacks = [d.shape for d in planned(model).decisions if d.layout is None]
    assert found.owned == found.blocks
    assert found.blocks == heads + sum(s[0] if len(s) == 3 else 1 for s in stacks)
    assert len(found.flop) == len(found.there) == len(found.back) == ranks
    redundant = sum(row.redundant for row in found.rows)
    assert sum(found.flop) - redundant == sum(row.flop for row in found.rows)
    assert sum(found.flop) - redundant == once(planned(model))
    assert (redundant == 0) == (grid[1] == 1)
    assert found.sent == found.least


def test_what_is_replicated_is_computed_by_all() -> None:
    rows = cost_of("glm-5.2", 4096, 8).rows
    found = {f"{row.owner}.{row.leaf}": row for row in rows if row.redundant}
    assert set(found) == {
        "GlmMoeDsaAttention.q_a_proj",
        "GlmMoeDsaAttention.kv_a_proj_with_mqa",
        "GlmMoeDsaIndexer.wq_b",
        "GlmMoeDsaIndexer.wk",
        "GlmMoeDsaIndexer.weights_proj",
        "GlmMoeDsaMoE.gate",
    }
    q_a = found["GlmMoeDsaAttention.q_a_proj"]
    assert q_a.redundant == 7 * 78 * deepspeed_flop(2048, 6144)


@pytest.mark.parametrize(
    ("ranks", "heads_lacking"), [(8, 0), (64, 0), (512, 7 / 8), (4096, 63 / 64)]
)
def test_bytes_of_glm(ranks: int, heads_lacking: float) -> None:
    rows = {f"{row.owner}.{row.leaf}": row for row in cost_of("glm-5.2", ranks).rows}
    q_b, o = rows["GlmMoeDsaAttention.q_b_proj"], rows["GlmMoeDsaAttention.o_proj"]
    experts = rows["GlmMoeDsaExperts.gate_up_proj"]
    # 64 heads of 256 rows on so many ranks: one rank has 1 − lacking of a head.
    assert q_b.there == q_b.back == 78 * 16384 * 2048 * 4 * heads_lacking
    # One owner has the rows of one rank, 6144 over them rounded up, of one matrix.
    most = -(-6144 // ranks)
    assert o.there == o.back == 78 * (6144 - most) * 16384 * 4
    assert (experts.there, experts.cut, experts.blocks) == (0, 0, 75 * 256)


def test_finer_shards_never_send_less() -> None:
    for model in ("glm-5.2", "kimi-k3"):
        sent = [cost_of(model, ranks).sent for ranks in (1, 8, 64, 512, 4096)]
        assert sent[0] == 0
        assert sent == sorted(sent)
        assert len(set(sent)) == len(sent)


def test_stages_have_their_own_ranks() -> None:
    found = cost_of("glm-5.2", 512, 8, 4)
    assert [stage.weights for stage in found.stages] == [
        len(stage) for stage in stages(planned("glm-5.2").decisions, 4)
    ]
    assert sum(stage.weights for stage in found.stages) == 912
    assert all(len(stage.load.flop) == 128 for stage in found.stages)


def test_more_tensor_parallel_ranks_than_heads_cut_them() -> None:
    def cut(tp: int) -> dict[str, int]:
        rows = cost_of("glm-5.2", tp, tp).rows
        return {row.leaf: row.cut_by_tp for row in rows if row.cut_by_tp}

    assert cut(64) == {}
    assert cut(128) == {"q_b_proj": 78 * 64, "kv_b_proj": 78 * 64}
    # 64 heads over 48 ranks: chunks of ⌈16384/48⌉ = 342 and of ⌈28672/48⌉ = 598 rows.
    inside = {"q_b_proj": (256, 342, 16384), "kv_b_proj": (448, 598, 28672)}
    expected = {
        leaf: 78 * len({edge // width for edge in range(chunk, rows, chunk) if edge % width})
        for leaf, (width, chunk, rows) in inside.items()
    }
    assert cut(48) == expected


@lru_cache(maxsize=1)
def documented() -> list[list[str]]:
    lines = DOCS.read_text().partition("## What a step costs")[2].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] in ("glm-5.2", "kimi-k3")]


def test_the_documented_table_is_what_is_computed() -> None:
    asked = {(model, ranks, tp) for model, ranks, tp, *_ in documented()}
    alone = product(("glm-5.2", "kimi-k3"), ("8", "64", "512", "4096"), ("1",))
    assert asked == {*alone, *product(("glm-5.2", "kimi-k3"), ("512", "4096"), ("8",))}
    for model, ranks, tp, *said in documented():
        found = cost_of(model, int(ranks), int(tp))
        assert said == [
            *(amount(x(found.flop), "FLOP") for x in (max, mean)),
            amount(sum(row.redundant for row in found.rows), "FLOP"),
            amount(found.sent, "B"),
            *(amount(max(x), "B") for x in (found.there, found.back)),
            str(found.idle),
            str(found.stages[0].load.calls),
        ], (model, ranks, tp)


@pytest.mark.parametrize(
    ("model", "layers", "experts", "shapes"),
    [
        ("glm-5.2", 75, 256, [(4096, 6144), (6144, 2048)]),
        ("kimi-k3", 92, 896, [(6144, 3584), (3584, 3072)]),
    ],
)
def test_work_is_balanced_as_far_as_experts_allow(
    model: str, layers: int, experts: int, shapes: list[tuple[int, int]]
) -> None:
    one = layers * sum(deepspeed_flop(*shape) for shape in shapes)
    dearest = max(deepspeed_flop(*d.shape[-2:]) for d in planned(model).decisions)
    for ranks in (8, 64, 512, 4096):
        found = cost_of(model, ranks)
        each = -(-experts // ranks)
        busy = -(-experts // each)
        assert min(found.flop[:busy]) >= each * one
        assert max(found.flop) <= max(each * one, mean(found.flop)) + dearest
    said = balance()
    assert f"{amount(one, 'FLOP')} for one of" in said
    assert str(experts) in said


def test_work_is_balanced_and_not_bytes() -> None:
    # Two experts a rank: 448 of 512 have some.
    back = cost_of("kimi-k3", 512).back
    without, those = (amount(mean(x), "B") for x in (back[448:], back[:448]))
    assert f"Kimi-K3 send {without} back each, in the mean, the others {those}." in balance()


def balance() -> str:
    return " ".join(DOCS.read_text().partition("**Balance.**")[2].partition("\n\n")[0].split())


# The command.


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["cost", *arguments])
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


def test_json_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("glm-5.2-0.8b", "--ranks", "8", "--tp", "2", "--pp", "2", "--format", "json")
    code, out, _ = run(capsys, *asked)
    found = json.loads(out)
    assert code == 0
    assert (found["model"], found["dialect"]) == ("glm-5.2-0.8b", DEFAULT_DIALECT)
    assert [found[key] for key in ("ranks", "tp", "fsdp", "pp")] == [8, 2, 2, 2]
    assert found["blocks"]["with_one_owner"] == found["blocks"]["all"] == 305
    assert found["bytes"] == found["least_bytes"]
    assert sum(stage["weights"] for stage in found["stages"]) == 69
    by_leaf = sum(row["flop"] + row["redundant"] for row in found["leaves"])
    assert by_leaf == found["flop"]["total"] == sum(s["flop"]["total"] for s in found["stages"])
    halves = json.loads(run(capsys, *asked, "--dtype", "bfloat16")[1])
    assert 2 * halves["bytes_there"]["total"] == found["bytes_there"]["total"]


def test_a_documented_row_is_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    row = next(row for row in documented() if row[:3] == ["kimi-k3", "512", "8"])
    asked = (row[0], "--ranks", row[1], "--tp", row[2], "--format", "json")
    found = json.loads(run(capsys, *asked)[1])
    assert row[3:] == [
        *(amount(found["flop"][key], "FLOP") for key in ("most", "mean", "redundant")),
        *(amount(n, "B") for n in (found["bytes"], found["bytes_there"]["most"])),
        amount(found["bytes_back"]["most"], "B"),
        str(found["idle_ranks"]),
        str(found["calls"]),
    ]


@pytest.mark.parametrize("form", ["table", "markdown"])
def test_other_forms(
    form: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    asked = ("glm-5.2-0.8b", "--ranks", "64", "--tp", "32", "--pp", "1", "--format", form)
    code, out, _ = run(capsys, *asked)
    assert code == 0
    assert "on 64 ranks: tp 32 × fsdp 2 × pp 1" in out
    assert "every block has one owner: 305 of 305" in out
    assert "GlmMoeDsaAttention.q_b_proj" in out
    assert "tp=32 cuts 96 of 96 heads of GlmMoeDsaAttention.q_b_proj" in out
    assert "pipeline stages" not in out
    assert "pipeline stages" in run(capsys, "glm-5.2-0.8b", "--ranks", "4", "--pp", "2")[1]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("nosuch", "--ranks", "8"), 64, "There is no model"),
        (("llama",), 64, "--ranks"),
        (("llama", "--ranks", "0"), 64, "ranks must be from 1 to 1048576, got 0"),
        (("llama", "--ranks", "-8"), 64, "got -8"),
        (("llama", "--ranks", "1048577"), 64, "got 1048577"),
        (("llama", "--ranks", "8", "--tp", "0"), 64, "tp must be"),
        (("llama", "--ranks", "8", "--tp", "3"), 64, "no multiple of tp=3 × pp=1"),
        (("llama", "--ranks", "8", "--tp", "4", "--pp", "4"), 64, "no multiple"),
        (("llama", "--ranks", "many"), 64, "many"),
        (("llama", "--ranks", "4096", "--pp", "4096"), 64, "do not fill pp=4096"),
        (("llama", "--ranks", "8", "--dialect", "nosuch"), 64, "Known"),
        (("llama", "--ranks", "8", "--dtype", "int8"), 64, "int8"),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(capsys, *arguments)
    assert found[0] == code
    assert said in found[2]
    assert "Traceback" not in found[2]
    assert found[1] == ""


def test_help_needs_no_torch() -> None:
    script = (
        "import sys; from muonsplit.cli import cli\n"
        "cli.main(['cost', '--help'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert "--ranks" in made.stdout


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1234567, "1.23 MB"), (4e21, "4000 EB")],
)
def test_amounts(value: float, shown: str) -> None:
    assert amount(value, "B") == shown
