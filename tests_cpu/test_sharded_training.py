"""Miniatures of the named models train on several ranks: the bits of one process."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from muonsplit import plan
from muonsplit.geometry.shard import tensor_parallel_axes
from muonsplit.muon import PerHeadMuon
from tests_cpu import test_training as alone
from tests_cpu.ranks import run
from tests_cpu.test_training import LM_LOSS, SETTINGS, STEPS, Setting, entropy, halves

pytestmark = pytest.mark.dist

TRAINED = [SETTINGS[0], SETTINGS[2]]
each_setting = pytest.mark.parametrize("setting", TRAINED, ids=str)
# Draws a rank, of two, of what rounding may do to a run.
DRAWS = 3
ROUNDING = torch.finfo(torch.float32).eps / 2


class Course(NamedTuple):
    """One run.

    Attributes:
        losses: Before every step and after the last, the mean over the ranks.
        parameters: A digest of each one's bytes after the last step.
        held: How many elements of parameters this rank holds.
    """

    losses: list[float]
    parameters: dict[str, str]
    held: int


Batches = list[tuple[Tensor, Tensor]]
# What is done to the parameters by name between backward pass and step.
Change = Callable[[dict[str, nn.Parameter]], None]


def ended(model: nn.Module, losses: Sequence[float]) -> Course:
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # The root stays gathered after a forward pass.
            unit.reshard()
    named = dict(model.named_parameters())
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in named.values())
    return Course(list(losses), {name: digest(p) for name, p in named.items()}, held)


def digest(p: Tensor) -> str:
    full = p.full_tensor() if isinstance(p, DTensor) else p
    return hashlib.sha256(alone.raw(full).numpy().tobytes()).hexdigest()


def course(
    model: nn.Module, optimizer: PerHeadMuon, batches: Batches, change: Change | None = None
) -> Course:
    """Trains on the mean over batches, one after another, and over whoever holds the model."""
    found: list[float] = []
    for step in range(STEPS + 1):
        model.zero_grad()
        means = [LM_LOSS(alone.logits(model, read), wanted.flatten()) for read, wanted in batches]
        found.append(sum(float(mean.detach()) for mean in means) / len(means))
        if step < STEPS:
            for mean in means:
                (mean / len(means)).backward()
            if change is not None:
                change(dict(model.named_parameters()))
            optimizer.step()
    return ended(model, found)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, axes: dict[str, int]) -> None:
    """Stores every weight as a DTensor, divided along its axis or on every rank."""
    for prefix, module in model.named_modules():
        for key, p in list(module.named_parameters(prefix, recurse=False)):
            where = Shard(axes[key]) if key in axes else Replicate()
            held = distribute_tensor(p.detach(), mesh, [where], src_data_rank=None)
            module.register_parameter(key.rpartition(".")[2], nn.Parameter(held))


def layers(model: Any) -> list[nn.Module]:
    return list(model.model.layers)


def compute_on_whole_weights(unit: nn.Module, skipped: list[nn.Module]) -> None:
    """In the forward pass of a module its DTensors are whole tensors, whose backward divides.

    Hooks inside those of ``fully_shard``, if there are any: they see what it has gathered.
    """
    inner = {m for part in skipped if part is not unit for m in part.modules()}
    # What a module computes with, where it keeps it.
    kept: list[dict[str, Any]] = [vars(m)["_parameters"] for m in unit.modules() if m not in inner]
    divided: list[dict[str, Any]] = []

    def enter(*_: Any) -> None:
        divided.extend(dict(parameters) for parameters in kept)
        for parameters in kept:
            for key, p in parameters.items():
                if p is not None:
                    parameters[key] = p.full_tensor()

    def leave(*_: Any) -> None:
        for parameters, before in zip(kept, divided, strict=True):
            parameters.update(before)
        divided.clear()

    unit.register_forward_pre_hook(enter)
    unit.register_forward_hook(leave, prepend=True)


def divide(model: nn.Module, way: str, axes: dict[str, int]) -> None:
    world = dist.get_world_size()
    # One rank is a mesh of both axes, four are two by two.
    pairs = 2 if world == 4 else 1
    match way:
        case "tp":
            tensor_parallel(model, init_device_mesh("cpu", (world,)), axes)
            compute_on_whole_weights(model, [])
        case "fsdp":
            mesh = init_device_mesh("cpu", (world,))
            for unit in (*layers(model), model):
                fully_shard(unit, mesh=mesh)
        case _:
            shape = (world // pairs, pairs)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            tensor_parallel(model, mesh["tp"], axes)
            for unit in (*layers(model), model):
                fully_shard(unit, mesh=mesh["dp"])
                compute_on_whole_weights(unit, layers(model))


def mean_over_ranks(found: Course) -> Course:
    losses = torch.tensor(found.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    # The number of ranks is a power of two: of equal losses the mean is each of them.
    return found._replace(losses=(losses / dist.get_world_size()).tolist())


def sharded(setting: Setting, way: str, batches: Batches) -> Course:
    model = alone.untrained(setting)
    planned = plan(model, setting.dialect)
    divide(model, way, tensor_parallel_axes(planned))
    optimizer = alone.per_head(model.named_parameters(), planned.layouts(), setting)
    return mean_over_ranks(course(model, optimizer, batches))


def solo(setting: Setting, batches: Batches, noise: torch.Generator | None = None) -> Course:
    """A run of one process, with what rounding in another order may do to it, if there is noise.

    A product of matrices, summed in any order, is that of weights which are off by the rounding
    of as many terms as they have columns; a gradient is off by that of as many as there are tokens.
    """
    model = alone.untrained(setting)
    optimizer = alone.per_head(
        model.named_parameters(), plan(model, setting.dialect).layouts(), setting
    )
    if noise is None:
        return course(model, optimizer, batches)

    def off(like: Tensor, terms: int) -> Tensor:
        return terms * ROUNDING * (2 * torch.rand(like.shape, generator=noise) - 1)

    def change(named: dict[str, nn.Parameter]) -> None:
        for p in named.values():
            if p.grad is not None:
                size = p.grad.square().mean().sqrt()
                p.grad += size * off(p.grad, alone.SEQUENCES * alone.TOKENS)

    with torch.no_grad():
        for p in model.parameters():
            p *= 1 + off(p, p.shape[-1])
    return course(model, optimizer, batches, change)


def of_one(setting: Setting) -> dict[str, Course]:
    """Runs of one process: the other file's, one of both halves in turn, one that sees one half."""
    found = alone.train(setting)
    return {
        "alone": ended(found.model, found.losses),
        "tp-fsdp": sharded(setting, "tp-fsdp", [alone.tokens()]),
        "in turn": solo(setting, halves()),
        "one half": solo(setting, halves()[:1]),
    }


def of_two(setting: Setting) -> dict[str, Course]:
    rank, whole = dist.get_rank(), [alone.tokens()]
    found = {
        "tp": sharded(setting, "tp", whole),
        "fsdp": sharded(setting, "fsdp", whole),
        "halves": sharded(setting, "fsdp", [halves()[rank]]),
    }
    # Last, because nobody waits for them.
    for seed in range(rank * DRAWS, (rank + 1) * DRAWS):
        found[str(seed)] = solo(setting, whole, torch.Generator().manual_seed(seed))
    return found


def of_four(setting: Setting) -> dict[str, Course]:
    return {"tp-fsdp": sharded(setting, "tp-fsdp", [alone.tokens()])}


@functools.cache
def launched(setting: Setting, world: int) -> list[dict[str, Course]]:
    """Everything that is run on so many ranks, by rank."""
    return run(world, {1: of_one, 2: of_two, 4: of_four}[world], setting, limit=240)


WAYS = [("tp-fsdp", 1), ("tp", 2), ("fsdp", 2), ("tp-fsdp", 4)]


@pytest.mark.parametrize(("way", "world"), WAYS)
@each_setting
def test_every_way_has_the_bits_of_one_process(setting: Setting, way: str, world: int) -> None:
    """With one batch on every rank: all losses, and all parameters, on every rank."""
    one = launched(setting, 1)[0]["alone"]
    assert one.losses[-1] < entropy() / 4
    for found in launched(setting, world):
        assert found[way].losses == one.losses
        assert found[way].parameters == one.parameters


@each_setting
def test_ranks_hold_parts(setting: Setting) -> None:
    whole = launched(setting, 1)[0]["alone"].held
    held = {
        (way, world): sum(found[way].held for found in launched(setting, world))
        for way, world in WAYS
    }
    assert held["fsdp", 2] == whole
    # What tensor parallelism does not divide, every rank of it holds.
    assert whole < held["tp", 2] < 2 * whole
    assert held["tp-fsdp", 4] == held["tp", 2]


@each_setting
def test_a_half_on_each_rank_has_the_bits_of_one_process_that_adds_them(setting: Setting) -> None:
    """Of two gradients the mean does not depend on who computes it."""
    added = launched(setting, 1)[0]["in turn"]
    for found in launched(setting, 2):
        assert found["halves"].losses == added.losses
        assert found["halves"].parameters == added.parameters


def apart(losses: list[float], other: list[float]) -> Tensor:
    """The ratios of two runs' losses, as logarithms."""
    pair = [torch.tensor(x, dtype=torch.float64).log() for x in (losses, other)]
    return pair[0] - pair[1]


@each_setting
def test_a_half_on_each_rank_is_the_whole_batch_up_to_rounding(
    setting: Setting, record_property: Callable[[str, object], None]
) -> None:
    one, ranks = launched(setting, 1)[0], launched(setting, 2)
    whole = one["alone"].losses
    drawn = [found[key].losses for found in ranks for key in found if key.isdecimal()]
    assert len(drawn) == 2 * DRAWS
    # Standard deviations of the logarithms, from draws whose mean is the run itself. What is drawn
    # once more is six of them off once in a thousand times: Student's t with six degrees.
    spread = torch.stack([apart(losses, whole) for losses in drawn]).square().mean(0).sqrt()
    found = apart(ranks[0]["halves"].losses, whole).abs()
    record_property("apart", f"{found[0]:.2g}, {found.max():.2g}; spread {spread.max():.2g}")
    assert spread[0] > 0
    assert found[0] < 6 * spread[0]
    assert found.max() < 6 * spread.max()
    assert ranks[0]["halves"].losses[-1] < entropy() / 4
    # Who sees one half learns something else from the first step on.
    control = apart(one["one half"].losses, whole).abs()
    assert control[0] > 6 * spread[0]
    assert control.max() > 6 * spread.max()
