"""One step of a DeepSpeed engine on two ranks: the slices it holds are put together whole."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor, nn

import muonsplit
from muonsplit.errors import EvidenceError
from muonsplit.evidence.captured import open_capture
from muonsplit.subjects.deepspeed import Engine
from tests_cpu.ranks import run
from tests_cpu.test_capture import assert_holds, copied

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.downstream, pytest.mark.dist]

WORLD, STEPS, BETA, LR = 2, 2, 0.95, 0.125
# No multiple of each other, so that partitions end inside rows.
SHAPES = {"embed_tokens.weight": (7, 5), "up.weight": (9, 6), "mid.weight": (5, 7)}
MUON = ("up.weight", "mid.weight")
ENGINES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "0-bf16": {"stage": 0, "bf16": True},
    "1": {"stage": 1},
    "1-bf16": {"stage": 1, "bf16": True, "accumulation": "bf16"},
    "1-bf16-fp32": {"stage": 1, "bf16": True, "accumulation": "fp32"},
    "2": {"stage": 2},
    "2-round-robin": {"stage": 2, "zero": {"round_robin_gradients": True}},
    "3": {"stage": 3},
    "3-bf16": {"stage": 3, "bf16": True, "accumulation": "bf16"},
    "2-offload": {"stage": 2, "zero": {"offload_optimizer": {"device": "cpu"}}},
    "3-offload": {"stage": 3, "zero": {"offload_optimizer": {"device": "cpu"}}},
}


def gradient(name: str, step: int, rank: int) -> Tensor:
    """Whole numbers, so that any order of adding gives the same mean in any dtype."""
    seed = 100 * step + 10 * rank + list(SHAPES).index(name)
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randint(-3, 4, SHAPES[name], generator=generator)


def mean(name: str, step: int) -> Tensor:
    return sum(gradient(name, step, rank) for rank in range(WORLD)) / WORLD  # pyright: ignore[reportReturnType]


class Lesson(nn.Module):
    """Weights whose gradients are given: the loss is linear in them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(7, 5)
        self.up, self.mid = nn.Linear(6, 9), nn.Linear(7, 5, bias=False)
        self.step = 0
        self.to(dtype)

    def forward(self) -> Tensor:
        named = dict(self.named_parameters())
        rank = dist.get_rank()
        found = [(named[n] * gradient(n, self.step, rank).to(named[n])).sum() for n in SHAPES]
        return torch.stack(found).sum() + 0 * self.up.bias.sum()


def config(chosen: dict[str, Any], micro_batches: int = 1) -> dict[str, Any]:
    stage = chosen["stage"]
    zero = {"stage": stage, **chosen.get("zero", {})}
    if stage == 3:
        zero["reduce_scatter"] = False
    params = {"lr": LR, "momentum": BETA, "weight_decay": 0.1, "torch_adam": True}
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "optimizer": {"type": "Muon", "params": {**params, "per_head_muon": False}},
        "bf16": {"enabled": chosen.get("bf16", False)},
    }
    if "accumulation" in chosen:
        made["data_types"] = {"grad_accum_dtype": chosen["accumulation"]}
    return made


def built(chosen: dict[str, Any], micro_batches: int = 1) -> tuple[Lesson, Engine, Any]:
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(WORLD))
    lesson = Lesson(torch.bfloat16 if chosen.get("bf16") else torch.float32)
    driven = Engine(lesson, config(chosen, micro_batches))
    return lesson, driven, driven._engine  # pyright: ignore[reportPrivateUsage]


def whole(lesson: Lesson, engine: Any) -> dict[str, Tensor]:
    """What DeepSpeed itself gathers: the masters, or the parameters where there are none."""
    named = {n: p for n, p in lesson.named_parameters() if p.dim() > 1 or hasattr(p, "ds_id")}
    named = {n: named[n] for n in SHAPES}
    get = import_module("deepspeed.utils").safe_get_full_fp32_param
    found = {n: get(p) for n, p in named.items()}
    halves = (getattr(engine.optimizer, key, ()) for key in ("fp16_groups", "fp32_groups"))
    masters = {
        id(low): high
        for some in zip(*halves, strict=False)
        for low, high in zip(*some, strict=True)
    }
    return copied(
        {n: masters.get(id(p), p) if found[n] is None else found[n] for n, p in named.items()}
    )


def trained(name: str, folder: Path) -> tuple[list[bytes], str]:
    """Captures two steps; what DeepSpeed gathers before, between and after them."""
    lesson, driven, engine = built(ENGINES[name])
    found = [save(whole(lesson, engine))]
    for step in range(STEPS):
        lesson.step = step
        driven.backward(driven.forward())
        with muonsplit.capture(engine, folder / str(step)):
            engine.step()
        found.append(save(whole(lesson, engine)))
    driven.close()
    return found, type(engine.optimizer).__name__


@pytest.mark.parametrize("name", ENGINES)
def test_slices_make_the_whole(tmp_path: Path, name: str) -> None:
    chosen = ENGINES[name]
    gathered, _ = run(WORLD, trained, name, tmp_path, limit=240)[0]
    weights = [load(x) for x in gathered]
    early = chosen["stage"] in (1, 2) and "offload" not in name
    folded = early and chosen.get("accumulation") != "fp32"
    half = chosen.get("accumulation") == "bf16"
    momentum = {n: torch.zeros(SHAPES[n]) for n in MUON}
    if half:
        momentum = {n: x.bfloat16() for n, x in momentum.items()}
    for step in range(STEPS):
        found = open_capture(tmp_path / str(step), verify=True)
        assert found.steps == 1
        assert_holds(found.part("before"), weights[step])
        assert_holds(found.part("after"), weights[step + 1])
        assert not torch.equal(weights[step]["up.weight"], weights[step + 1]["up.weight"])
        given = {n: mean(n, step) for n in SHAPES if n not in MUON or not folded}
        gradients = found.part("gradients")
        assert set(gradients.entries) == set(given)
        for n, x in given.items():
            assert torch.equal(gradients.read(n).float(), x), n
        assert set(found.left_out("gradients")) == (set(MUON) if folded else set())
        if step:
            assert_momentum(found, "momentum_before", momentum)
        momentum = {n: m.lerp(mean(n, step).to(m), 1 - BETA) for n, m in momentum.items()}
        assert_momentum(found, "momentum", momentum)
        assert found.momentum_key("embed_tokens.weight") == "exp_avg"
        assert found.settings("up.weight")["lr"] == LR
        assert found.settings("up.weight")["momentum"] == BETA


def assert_momentum(found: Any, part: str, expected: dict[str, Tensor]) -> None:
    saved = found.part(part)
    assert set(saved.entries) == set(SHAPES)
    for name, x in expected.items():
        assert torch.equal(saved.read(name), x), name


def not_stepped(folder: Path) -> str:
    lesson, driven, engine = built(ENGINES["1"], micro_batches=2)
    driven.backward(driven.forward())
    try:
        with muonsplit.capture(engine, folder):
            engine.step()
    except EvidenceError as error:
        said = str(error)
    else:
        said = "nothing"
    lesson.step = 1
    driven.backward(driven.forward())
    with muonsplit.capture(engine, folder):
        engine.step()
    driven.close()
    return said


def test_a_micro_batch_is_no_step(tmp_path: Path) -> None:
    for said in run(WORLD, not_stepped, tmp_path / "x", limit=240):
        assert said.startswith("No steps of DeepSpeedZeroOptimizer were taken")
    embed = open_capture(tmp_path / "x").part("gradients").read("embed_tokens.weight")
    both = sum(mean("embed_tokens.weight", step) for step in range(2))
    assert torch.equal(embed, both / 2)


def its_optimizer(folder: Path) -> str:
    _, driven, engine = built(ENGINES["1"])
    try:
        with muonsplit.capture(engine.optimizer, folder):
            pass
    except EvidenceError as error:
        return str(error)
    finally:
        driven.close()
    return "nothing"


def test_the_engine_is_asked_for(tmp_path: Path) -> None:
    for said in run(WORLD, its_optimizer, tmp_path / "x", limit=240):
        assert "give the engine" in said
    assert not (tmp_path / "x").exists()
