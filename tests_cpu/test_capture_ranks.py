"""One step on several ranks: what they write apart is the whole, and what is lost is named."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import muonsplit
from muonsplit.errors import EvidenceError
from muonsplit.evidence.captured import Captured, open_capture
from muonsplit.evidence.description import decoded
from muonsplit.sharding import Shard
from tests_cpu.ranks import run
from tests_cpu.test_capture import LR, assert_holds, bits, copied, matrices, net, reference
from tests_cpu.test_sharded_training import tensor_parallel

pytestmark = pytest.mark.dist

AXES = {"up.weight": 0, "down.weight": 1, "experts": 1}
WAYS = [("ddp", 2), ("fsdp", 2), ("fsdp", 4), ("tp", 2), ("tp", 4), ("fsdp+tp", 4), ("hsdp", 4)]


def divided(model: nn.Module, way: str) -> nn.Module:
    """Divides nine rows, four, three and seven, which two and four ranks do not divide."""
    world = dist.get_world_size()
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if way == "tp":
        tensor_parallel(model, init_device_mesh("cpu", (world,)), AXES)
    elif way == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif way == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "dp"))
        fully_shard(model, mesh=mesh)
    else:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel(model, mesh["tp"], AXES)
        if way == "fsdp+tp":
            fully_shard(model, mesh=mesh["dp"])
    return model


def give_gradients(model: nn.Module) -> None:
    # Elementwise, so that each rank makes its part of the same gradient.
    for p in model.parameters():
        p.grad = torch.sin(3 * p.detach())


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def stepped(way: str, folder: Path, kind: str) -> tuple[bytes, bytes]:
    """Takes two steps, the second captured; what torch gathers of weights and of momentum."""
    model = divided(net(), way)
    optimizer = reference(model) if kind == "reference" else torchs(model)
    for step in range(2):
        give_gradients(model)
        if step == 0:
            optimizer.step()
        else:
            with muonsplit.capture(optimizer, folder, model):
                optimizer.step()
    named = matrices(model, optimizer)
    states = {n: optimizer.state[p] for n, p in named.items()}
    kept = {n: s.get("momentum_buffer", s.get("exp_avg")) for n, s in states.items()}
    return tuple(save(copied({n: whole(x) for n, x in y.items()})) for y in (named, kept))


def torchs(model: nn.Module) -> torch.optim.Optimizer:
    named = [(n, p) for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    return torch.optim.Muon(named, lr=LR)


@pytest.mark.parametrize(("way", "world"), [x for x in WAYS if x[0] not in ("ddp",)])
def test_ranks_hold_together_what_one_process_holds(tmp_path: Path, way: str, world: int) -> None:
    run(world, stepped, way, tmp_path, "reference")
    found = open_capture(tmp_path, verify=True)
    # A step of the reference has the same bits on any number of ranks.
    model = net()
    optimizer = reference(model)
    named = matrices(model, optimizer)
    give_gradients(model)
    optimizer.step()
    states = [optimizer.state[p] for p in named.values()]
    kept = [s["momentum_buffer" if "momentum_buffer" in s else "exp_avg"] for s in states]
    assert_holds(found.part("before"), named)
    assert_holds(found.part("momentum_before"), dict(zip(named, kept, strict=True)))
    give_gradients(model)
    assert_holds(found.part("gradients"), {n: p.grad for n, p in named.items()})
    optimizer.step()
    assert_holds(found.part("after"), named)
    assert_holds(found.part("momentum"), dict(zip(named, kept, strict=True)))
    assert found.steps == 1


@pytest.mark.parametrize(("way", "world"), WAYS)
def test_ranks_hold_together_what_torch_gathers(tmp_path: Path, way: str, world: int) -> None:
    weights, kept = map(load, run(world, stepped, way, tmp_path, "torch")[0])
    found = open_capture(tmp_path)
    inside = {n.removeprefix("module."): x for n, x in weights.items()}
    assert_holds(found.part("after"), inside)
    momentum = {n.removeprefix("module."): x for n, x in kept.items()}
    assert_holds(found.part("momentum"), momentum)


@pytest.mark.parametrize("way", ["ddp", "hsdp"])
def test_what_several_hold_the_first_one_writes(tmp_path: Path, way: str) -> None:
    run(4, stepped, way, tmp_path, "torch")
    wrote = {int(path.name[5:10]) for path in tmp_path.glob("*.after.safetensors")}
    # The mesh of hsdp is ((0, 1), (2, 3)), repeated along its first axis.
    assert wrote == ({0} if way == "ddp" else {0, 1})


def apart(folder: Path, spoilt: bool) -> None:
    """Tensor parallelism on a mesh of its own, which does not show that it is repeated."""
    model = divided(net(), "ddp of tp")
    optimizer = torch.optim.SGD(model.named_parameters(), lr=LR)
    give_gradients(model)
    if spoilt and dist.get_rank() == 3:
        weight: Any = model.get_parameter("up.weight")
        weight.data.to_local()[0, 0] += 1
    with muonsplit.capture(optimizer, folder):
        optimizer.step()


def test_copies_that_are_not_known_as_such_have_to_be_the_same(tmp_path: Path) -> None:
    run(4, apart, tmp_path / "same", False)
    saved = open_capture(tmp_path / "same").part("before")
    assert torch.equal(saved.read("up.weight"), net().up.weight)
    run(4, apart, tmp_path / "spoilt", True)
    saved = open_capture(tmp_path / "spoilt").part("before")
    assert torch.equal(saved.read("down.weight"), net().down.weight)
    with pytest.raises(EvidenceError, match=r"up\.weight.*differs between ranks 1 and 3"):
        saved.read("up.weight")


def placed(folder: Path, told: bool) -> None:
    """Plain parameters that are shards, as Megatron has them: two and two columns of four."""
    rank, weight = dist.get_rank(), torch.arange(12.0).view(3, 4)
    mine = nn.Parameter(weight[:, 2 * rank : 2 * rank + 2].clone())
    placements = {"w": Shard(4, ((2 * rank, 2 * rank + 2),), axis=1)}
    optimizer = torch.optim.SGD([("w", mine)], lr=1.0, momentum=0.9)
    mine.grad = torch.ones_like(mine)
    with muonsplit.capture(optimizer, folder, placements=placements if told else None):
        optimizer.step()


def test_a_framework_may_say_what_a_plain_tensor_is(tmp_path: Path) -> None:
    run(2, placed, tmp_path, True)
    found, weight = open_capture(tmp_path), torch.arange(12.0).view(3, 4)
    assert_holds(found.part("before"), {"w": weight})
    assert_holds(found.part("after"), {"w": weight - 1})
    assert_holds(found.part("momentum"), {"w": torch.ones(3, 4)})


def killed(folder: Path, when: str) -> None:
    model = divided(net(), "fsdp")
    # No rank waits for another in its step.
    optimizer = torch.optim.SGD(model.named_parameters(), lr=LR, momentum=0.9)
    give_gradients(model)
    with muonsplit.capture(optimizer, folder):
        if when == "before" and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if dist.get_rank() == 1:
            if when == "raises":
                raise ZeroDivisionError
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("when", ["before", "after", "raises"])
def test_a_rank_that_dies_leaves_nothing_complete(tmp_path: Path, when: str) -> None:
    with pytest.raises(AssertionError, match="rank 1: "):
        run(2, killed, tmp_path, when)
    there = {path.name for path in tmp_path.iterdir()}
    assert "rank-00000-of-00002.json" in there
    assert any("rank-00001" in name for name in there) == (when == "after")
    with pytest.raises(EvidenceError, match="of 2 ranks 1 did not finish, rank 1 among them"):
        open_capture(tmp_path)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    run(2, stepped, "fsdp", tmp_path, "torch")
    return tmp_path


def test_rows_of_a_rank_that_wrote_none_are_named(two: Path) -> None:
    path = two / "rank-00001-of-00002.json"
    said = decoded(path)
    # Nine rows: five and four.
    assert said.files["after"].pieces["up.weight"].spans == (((5, 9),), ((0, 6),))
    path.write_text(path.read_text().replace('"after": {"size"', '"momentum_before": {"size"'))
    (two / "rank-00001-of-00002.after.safetensors").rename(
        two / "rank-00001-of-00002.momentum_before.safetensors"
    )
    with pytest.raises(EvidenceError, match=r"of \(9, 6\), rows 5–8, columns 0–5 is missing"):
        open_capture(two).part("after").read("up.weight")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"rank": 1', '"rank": 0', "describes rank 0 of 2"),
        ('"optimizer": "Muon"', '"optimizer": "SGD"', "the ranks say optimizer 'Muon', 'SGD'"),
        ('"lr": 0.05', '"lr": 0.5', "do not agree on the shape"),
    ],
)
def test_ranks_of_several_runs_are_refused(two: Path, old: str, new: str, said: str) -> None:
    path = two / "rank-00001-of-00002.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(EvidenceError, match=said):
        open_capture(two)


def test_ranks_of_another_world_are_refused(two: Path) -> None:
    (two / "rank-00003-of-00004.json").write_text("{}")
    with pytest.raises(EvidenceError, match="captures of 2, 4 ranks"):
        open_capture(two)
    (two / "rank-00003-of-00004.json").rename(two / "rank-00002-of-00002.json")
    with pytest.raises(EvidenceError, match="has rank 2 of 2"):
        open_capture(two)


def unlike(found: Captured, name: str) -> bool:
    parts = [found.part(part).read(name) for part in ("before", "after")]
    return not torch.equal(*map(bits, parts))


def test_a_step_is_seen(two: Path) -> None:
    assert unlike(open_capture(two), "up.weight")
