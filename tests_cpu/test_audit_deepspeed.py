"""Steps of DeepSpeed on two ranks, captured and audited: its stages split, and stage 0 does not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muonsplit
from muonsplit.audit.result import Audit
from muonsplit.certificate.verdict import Verdict
from muonsplit.models.load import build
from muonsplit.subjects.deepspeed import DIALECT
from tests_cpu import audited as runs
from tests_cpu.audited import DECAY, LR, MODELS, audited
from tests_cpu.ranks import run

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.downstream, pytest.mark.dist]

WORLD, STEPS, MODEL = 2, 3, "llama-256"
HEADS = ("q_proj", "k_proj", "v_proj")


class Lesson(nn.Module):
    """A language model whose loss is that of sequences of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = build(MODELS[MODEL](), "cpu").to(dtype)
        self.config = self.inner.config
        self.ids = torch.zeros(4, 32, dtype=torch.long)

    def forward(self) -> Tensor:
        return self.inner(input_ids=self.ids, labels=self.ids).loss


def config(stage: int, half: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["reduce_scatter"] = False
    muon = {"lr": LR, "momentum": 0.95, "weight_decay": DECAY, "torch_adam": True}
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "optimizer": {"type": "Muon", "params": {**muon, "per_head_muon": True}},
    }
    if half:
        made["bf16"] = {"enabled": True}
    return made


def captured(stage: int, half: bool, folder: Path) -> None:
    """Takes some steps on sequences of each rank's own, the last of them captured."""
    from muonsplit.subjects.deepspeed import Engine

    rank = torch.distributed.get_rank()
    lesson = Lesson(torch.bfloat16 if half else torch.float32)
    driven = Engine(lesson, config(stage, half))
    source = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        lesson.ids = torch.randint(runs.VOCABULARY, lesson.ids.shape, generator=source)
        driven.backward(driven.forward())
        if step < STEPS - 1:
            driven.step()
            continue
        with muonsplit.capture(driven._engine, folder):  # pyright: ignore[reportPrivateUsage]
            driven.step()
    driven.close()


def step_of(folder: Path, stage: int, half: bool = False) -> Audit:
    (folder / "config.json").write_text(json.dumps(MODELS[MODEL]()))
    run(WORLD, captured, stage, half, folder / "step", limit=240)
    return audited(folder / "step", None, DIALECT, config=folder)


def leaf(name: str) -> str:
    return name.split(".")[-2]


@pytest.mark.parametrize(
    ("stage", "half"), [(1, False), (1, True), (2, False), (3, False), (3, True)]
)
def test_every_stage_of_zero_splits_by_heads(tmp_path: Path, stage: int, half: bool) -> None:
    found = step_of(tmp_path, stage, half)
    assert found.evidence.kind == "capture"
    assert found.settings.lr_given
    assert found.settings.lr[0] == pytest.approx(LR)
    accused = [(w.weight, w.outcome, w.observed, w.reason) for w in found.weights]
    assert found.verdict is Verdict.CONFORMS, accused
    assert {w.observed for w in found.weights if leaf(w.weight) in HEADS} == {
        "q 8×32",
        "k 4×32",
        "v 4×32",
    }


@pytest.mark.parametrize("half", [False, True])
def test_stage_0_orthogonalises_whole_what_it_has_tagged(tmp_path: Path, half: bool) -> None:
    found = step_of(tmp_path, 0, half)
    assert found.verdict is Verdict.VIOLATES
    for w in found.weights:
        assert w.observed == "whole", (w.weight, w.reason)
        assert w.outcome == ("otherwise" if leaf(w.weight) in HEADS else "as planned")
