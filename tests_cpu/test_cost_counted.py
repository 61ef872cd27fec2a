"""What steps on several ranks multiply and send, counted, is what is computed on paper."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from muonsplit.cost import AT_ONCE, Cost, Grid, cost
from muonsplit.dialect import DEFAULT_DIALECT, dialect_named
from muonsplit.geometry import Plan, plan
from muonsplit.geometry.shard import tensor_parallel_axes
from muonsplit.models.load import build, resolve
from muonsplit.models.miniature import miniature
from muonsplit.muon import PerHeadMuon, optimizer, sharded
from muonsplit.sharding.ways import Sharding
from muonsplit.subjects.distribute import (
    _tensor_parallel,  # pyright: ignore[reportPrivateUsage]
    distribute,
)
from tests_cpu.ranks import run

pytestmark = pytest.mark.dist

# Seconds that all cases of one number of ranks may take.
LIMIT = 240


class Counted(NamedTuple):
    """What one rank did in one step.

    Attributes:
        flop: Operations of products of matrices.
        there: Bytes that it gave to all-to-all calls on the way to owners.
        back: Bytes of results that it gave to them.
        calls: All-to-all calls.
    """

    flop: int
    there: int
    back: int
    calls: int


class Case(NamedTuple):
    """A step that is counted.

    Attributes:
        model: Whose miniature.
        way: How it is divided, as ``muonsplit certify --sharding`` says it.
        dialect: What is computed.
        dtype: Of the parameters.
        at_once: Elements of whole weights that are stepped at once.
    """

    model: str
    way: str
    dialect: str = DEFAULT_DIALECT
    dtype: torch.dtype = torch.float32
    at_once: int = AT_ONCE["torch"]


@contextmanager
def exchanges(me: int) -> Generator[list[tuple[bool, int]]]:
    """Every all-to-all call: whether it is to owners, and the bytes that this rank sends others."""
    seen: list[tuple[bool, int]] = []
    ways: list[bool] = []
    distributed: Any = dist
    exchange, carry = distributed.all_to_all_single, sharded._Group.carry

    def counted(found: Tensor, given: Tensor, to: list[int], of: list[int], *, group: Any) -> None:
        place = dist.get_process_group_ranks(group).index(me)
        assert given.element_size() == found.element_size() == 1
        assert (sum(to), sum(of)) == (found.numel(), given.numel())
        assert to[place] == of[place] == 0
        seen.append((ways[-1], sum(of)))
        exchange(found, given, to, of, group=group)

    def noted(self: Any, local: Any, *, to_owners: bool) -> None:
        ways.append(to_owners)
        carry(self, local, to_owners=to_owners)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(distributed, "all_to_all_single", counted)
        patched.setattr(sharded._Group, "carry", noted)
        yield seen


def counted_step(model: nn.Module, found: Plan, dialect: str) -> Counted:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    stepped = PerHeadMuon(model.named_parameters(), found.layouts(), dialect=dialect)
    flops: Any = FlopCounterMode(display=False)
    with exchanges(dist.get_rank()) as seen, flops:
        stepped.step()
    there, back = (sum(n for way, n in seen if way is wanted) for wanted in (True, False))
    return Counted(flops.get_total_flops(), there, back, len(seen))


def on_paper(found: Cost) -> list[Counted]:
    """What is computed of a step with one stage, by rank."""
    calls = [found.stages[0].load.calls] * found.grid.ranks
    return [Counted(*each) for each in zip(found.flop, found.there, found.back, calls, strict=True)]


# Miniatures on ranks of their own.

WORLDS: Mapping[int, Sequence[str]] = {2: ("fsdp", "tp"), 4: ("fsdp", "tp", "tp-fsdp")}
MODELS = ("llama", "deepseek-v2-lite", "glm-5.2")
# Batches of one weight or a few; half precision, in which some dialects send what they compute.
OTHERS = [
    Case("glm-5.2", "fsdp", at_once=1 << 14),
    Case("deepseek-v2-lite", "tp", at_once=1),
    Case("llama", "fsdp", "torch-2.13", torch.bfloat16),
    Case("llama", "tp", "kimi-k3", torch.bfloat16),
    Case("deepseek-v2-lite", "fsdp", "dion", torch.bfloat16),
]
CASES = {
    world: [*(Case(model, way) for model in MODELS for way in ways), *OTHERS]
    for world, ways in WORLDS.items()
}


def small(case: Case) -> nn.Module:
    return build(miniature(resolve(case.model).config), "cpu").to(case.dtype)


def counted_cases(cases: Sequence[Case]) -> list[Counted]:
    """On one of several ranks."""
    found: list[Counted] = []
    for case in cases:
        model = small(case)
        planned = plan(model, case.dialect)
        sharding = Sharding(case.way, dist.get_world_size(), tensor_parallel_axes(planned))
        distribute(model, sharding)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(optimizer, "_AT_ONCE", {"torch": case.at_once})
            found.append(counted_step(model, planned, case.dialect))
    return found


@lru_cache(maxsize=2)
def counted_on(world: int) -> list[list[Counted]]:
    """By rank and case."""
    return run(world, counted_cases, CASES[world], limit=LIMIT)


@lru_cache(maxsize=64)
def computed(world: int, case: Case) -> Cost:
    arithmetic = dialect_named(case.dialect).arithmetic
    wide = arithmetic.buffer_dtype == "float32"
    tp = {"fsdp": 1, "tp": world, "tp-fsdp": 2}[case.way]
    return cost(
        plan(small(case), case.dialect),
        Grid(world, tp),
        arithmetic,
        dtype=torch.float32 if wide else case.dtype,
        at_once=case.at_once,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize(
    ("world", "i"), [(world, i) for world, cases in CASES.items() for i in range(len(cases))]
)
def test_ranks_do_what_is_computed(world: int, i: int) -> None:
    case = CASES[world][i]
    counted = [rank[i] for rank in counted_on(world)]
    assert counted == on_paper(computed(world, case)), case
    assert all(rank.flop and rank.there and rank.back for rank in counted)


def test_the_miniatures_are_cut_in_every_way() -> None:
    rows = [row for case in CASES[4] for row in computed(4, case).rows]
    assert any(row.cut for row in rows if row.layout is not None)
    assert any(row.cut for row in rows if row.layout is None)
    assert any(row.cut == 0 for row in rows)
    assert any(row.redundant for row in rows)
    assert any(len(row.shape) == 3 for row in rows)
    stages = [computed(4, case).stages[0] for case in CASES[4]]
    assert max(stage.load.calls for stage in stages) > 8


# Full size: one of 512 ranks, on a device without memory, with nobody there to answer.

LAYERS = 4
RANKS = (0, 255, 511)
TP = (1, 8)


def large() -> nn.Module:
    """Three dense layers of GLM-5.2 and one with experts, as wide as they are."""
    return build({**resolve("glm-5.2").config, "num_hidden_layers": LAYERS})


def counted_at_512() -> list[Counted]:
    """On one of as many ranks as are asked about, each of which takes the place of one of 512.

    torch keeps which place a process has on a mesh, so that no process can take two.
    """
    rank = RANKS[dist.get_rank()]
    dist.destroy_process_group()
    return [_counted_at_512(rank, tp) for tp in TP]


def _counted_at_512(rank: int, tp: int) -> Counted:
    model = large()
    planned = plan(model)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=512)
    mesh = init_device_mesh("cpu", (512 // tp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        _tensor_parallel(model, mesh["tp"], tensor_parallel_axes(planned))
    fully_shard(model, mesh=mesh["dp"])
    found = counted_step(model, planned, DEFAULT_DIALECT)
    dist.destroy_process_group()
    return found


def test_one_of_512_ranks_does_what_is_computed() -> None:
    counted = run(len(RANKS), counted_at_512, limit=LIMIT)
    for i, tp in enumerate(TP):
        model = large()
        found = cost(plan(model), Grid(512, tp), dialect_named(DEFAULT_DIALECT).arithmetic)
        assert [each[i] for each in counted] == [on_paper(found)[rank] for rank in RANKS], tp
        shapes = {row.leaf: (row.shape, row.count) for row in found.rows}
        assert shapes["q_b_proj"] == ((16384, 2048), LAYERS)
        assert shapes["o_proj"] == ((6144, 16384), LAYERS)
        assert all(row.cut for row in found.rows if len(row.shape) == 2)
    assert all(each.flop and each.there for rank in counted for each in rank)
    assert any(each.back for rank in counted for each in rank)
