"""Released DeepSpeed 0.19.8 trains miniatures of the named models on two ranks, in bfloat16."""

import copy
import functools
import math
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from muonsplit import plan
from muonsplit.dialect import dialect_named
from muonsplit.models.miniature import VOCABULARY
from muonsplit.muon.momentum import advance_momentum
from muonsplit.observe.fit import Fit, fit, hypotheses
from muonsplit.subjects.deepspeed import DIALECT, Engine
from tests_cpu import test_training as alone
from tests_cpu.ranks import run
from tests_cpu.test_training import ADAMW_LR, LM_LOSS, LR, SETTINGS, Setting, entropy

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.downstream

TRAINED = [SETTINGS[1], SETTINGS[3]]
each_setting = pytest.mark.parametrize("setting", TRAINED, ids=str)
STEPS, BETA, WORLD = 6, 0.95, 2
SPLIT = {
    "glm-5.2": {"q_b_proj", "kv_b_proj"},
    "kimi-k3": {"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"},
}
# Without stacks of experts, which an engine that accumulates in float32 refuses.
DENSE: Mapping[str, Mapping[str, object]] = {
    "glm-5.2": {"mlp_layer_types": ["dense"] * 7},
    "kimi-k3": {"first_k_dense_replace": 4},
}


class Lesson(nn.Module):
    """A model and what it reads; engines call it for the loss.

    Args:
        model: Its config is the lesson's, where DeepSpeed looks for it.
        batch: Tokens and what follows them.
    """

    def __init__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self._read, self._follows = batch

    def forward(self) -> Tensor:
        return LM_LOSS(alone.logits(self.model, self._read), self._follows.flatten())


class Ran(NamedTuple):
    """What a run of the engine left.

    Attributes:
        losses: Before every step, the mean over the ranks.
        tags: Of each parameter whether Muon trains it, and in how many heads.
        optimizer: The class that the engine has chosen.
        finite: Whether all parameters are.
        fits: Of each weight that the plan splits: what explains its last step, the best first.
    """

    losses: list[float]
    tags: dict[str, tuple[bool, int | None]]
    optimizer: str
    finite: bool
    fits: dict[str, list[Fit]]


def config(accumulation: str) -> dict[str, Any]:
    rates = {"lr": LR, "adam_lr": ADAMW_LR, "momentum": BETA, "weight_decay": 0.0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": accumulation},
        "zero_optimization": {"stage": 1},
        "optimizer": {
            "type": "Muon",
            "params": {**rates, "per_head_muon": True, "torch_adam": True},
        },
    }


def mean_gradients(lesson: Lesson) -> dict[str, Tensor]:
    """By torch alone, on each rank of its half; halving is exact, so the order is no matter."""
    lesson.zero_grad()
    lesson().backward()
    found: dict[str, Tensor] = {}
    for name, p in lesson.model.named_parameters():
        if p.grad is not None:
            dist.all_reduce(found.setdefault(name, p.grad / WORLD))
    return found


def engine_run(setting: Setting, changed: Mapping[str, object], accumulation: str) -> Ran:
    """Trains by the engine, and beside it computes what its Muon is to orthogonalise.

    Each step a twin of the model takes the engine's parameters, and torch its gradients. Their
    momentum is kept in the dtype that the engine accumulates in.
    """
    lesson = Lesson(alone.untrained(setting, changed), alone.halves()[dist.get_rank()])
    twin, split = copy.deepcopy(lesson), plan(lesson.model, DIALECT).split
    arithmetic = dialect_named(DIALECT).arithmetic
    dtype = torch.float32 if accumulation == "fp32" else setting.dtype
    buffers = {d.name: torch.zeros(d.shape, dtype=dtype) for d in split}
    engine = Engine(lesson, config(accumulation))
    named = dict(lesson.model.named_parameters())
    master = import_module("deepspeed.utils").safe_get_full_fp32_param
    losses, ahead, before = list[float](), dict[str, Tensor](), dict[str, Tensor]()
    for _ in range(STEPS):
        twin.load_state_dict(engine.parameters(), strict=False)
        gradients = mean_gradients(twin)
        for name, buffer in buffers.items():
            ahead[name] = advance_momentum(gradients[name].to(dtype), buffer, arithmetic, BETA)
            before[name] = master(named[name]).clone()
        loss = engine.forward()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    fits = {
        d.name: fit(
            (before[d.name] - master(named[d.name])) / LR,
            ahead[d.name],
            hypotheses(d.layout, d.shape[0]),
            arithmetic,
        )
        for d in split
    }
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    tags: dict[str, tuple[bool, int | None]] = {
        name: (bool(p.use_muon), p.muon_num_heads)  # pyright: ignore[reportAttributeAccessIssue]
        for name, p in named.items()
    }
    finite = all(bool(p.isfinite().all()) for p in named.values())
    optimizer = type(engine._engine.optimizer).__name__  # pyright: ignore[reportPrivateUsage]
    engine.close()
    return Ran((mean / WORLD).tolist(), tags, optimizer, finite, fits)


class Runs(NamedTuple):
    """What came of each engine.

    Attributes:
        ran: Of the model, accumulating in its own dtype.
        refused: What is said when it is to accumulate in float32.
        dense: Of one without experts, in float32; or what is said.
    """

    ran: Ran
    refused: str
    dense: Ran | str


def of_rank(setting: Setting) -> Runs:
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(WORLD))
    said = list[Ran | str]()
    for changed in ({}, DENSE[setting.model]):
        try:
            said.append(engine_run(setting, changed, "fp32"))
        except ValueError as error:
            said.append(str(error))
    assert isinstance(said[0], str)
    return Runs(engine_run(setting, {}, "bf16"), said[0], said[1])


@functools.cache
def launched(setting: Setting) -> Runs:
    one, other = run(WORLD, of_rank, setting, limit=240)
    assert one == other
    return one


@each_setting
def test_the_loss_falls_below_what_can_be_had_without_reading(setting: Setting) -> None:
    found = launched(setting).ran
    assert len(found.losses) == STEPS
    assert abs(found.losses[0] - math.log(VOCABULARY)) < 0.5
    assert found.losses[-1] < entropy()
    assert found.finite


# Rows of one element each, or one row: nothing to orthogonalise, but two axes or three.
ROWS_OF_ONE = {
    *("q_conv1d", "k_conv1d", "v_conv1d"),
    *("self_attention_res_proj", "mlp_res_proj", "output_attn_res_proj"),
}


def tagged(setting: Setting, changed: Mapping[str, object]) -> dict[str, tuple[bool, int | None]]:
    """What DeepSpeed is to write on each parameter, by the plan and its two known departures."""
    model = alone.untrained(setting, changed)
    heads = {d.name: d.heads if d.layout else None for d in plan(model, DIALECT).decisions}
    for name, _ in model.named_parameters():
        if name.split(".")[-2] in ROWS_OF_ONE:
            assert name not in heads
            heads[name] = None
        # Two heads of 32 rows, which are also as many as four attention heads of 16 have.
        if name.endswith("indexer.wq_b.weight"):
            assert heads[name] is None
            heads[name] = 4
    return {name: (name in heads, heads.get(name)) for name, _ in model.named_parameters()}


@each_setting
def test_tags_are_the_plan_but_for_the_indexer_and_rows_of_one(setting: Setting) -> None:
    found = launched(setting)
    assert found.ran.tags == tagged(setting, {})
    if isinstance(found.dense, Ran):
        assert found.dense.tags == tagged(setting, DENSE[setting.model])


def explanations(found: Ran) -> set[str]:
    """What explains the last step of each split weight, five times better than all else does."""
    assert found.fits
    assert all(5 * best.residual < second.residual for best, second, *_ in found.fits.values())
    return {best.hypothesis for best, *_ in found.fits.values()}


@each_setting
def test_the_last_step_is_per_head_where_gradients_stay_in_bfloat16(setting: Setting) -> None:
    found = launched(setting).ran
    assert found.optimizer == "DeepSpeedZeroOptimizer"
    assert {name.split(".")[-2] for name in found.fits} == SPLIT[setting.model]
    assert explanations(found) == {"as planned"}


@each_setting
def test_accumulation_in_float32_refuses_what_is_no_matrix(setting: Setting) -> None:
    assert "dense two-dimensional matrices only" in launched(setting).refused


def test_accumulation_in_float32_refuses_kimi_without_experts_for_its_convolutions() -> None:
    said = launched(TRAINED[1]).dense
    assert isinstance(said, str)
    assert "dense two-dimensional matrices only" in said


def test_accumulation_in_float32_keeps_the_tags_and_cuts_nothing() -> None:
    """BF16_Optimizer gives Muon no number of heads: each weight is orthogonalised whole."""
    found = launched(TRAINED[0]).dense
    assert isinstance(found, Ran)
    assert found.optimizer == "BF16_Optimizer"
    assert {found.tags[name] for name in found.fits} == {(True, 4)}
    assert explanations(found) == {"whole matrix"}
    assert found.losses[-1] < entropy()
    assert found.finite
