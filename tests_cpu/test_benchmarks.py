"""Figures, not assertions: `tox -e bench`. Ratios of medians within one run are what counts.

The floor of an update is its floating-point operations over this machine's sgemm rate, which
`test_sgemm` measures in the same run: standard Newton–Schulz takes 20·d²·n + 10·d³ a block of
d × n, Gram with one restart 8·d²·n + 28·d³.
"""

import functools
import importlib
import os
import subprocess
import sys
import typing
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from muonsplit.dialect import Arithmetic, dialect_named
from muonsplit.geometry import plan
from muonsplit.layout import Layout
from muonsplit.models.load import build, resolve
from muonsplit.muon import PerHeadMuon, orthogonalize

SHAPES = [
    (16, 64, 512),
    (16, 64, 2048),
    (16, 128, 2048),
    (16, 192, 2048),
    (64, 128, 512),
    (16, 256, 512),
]
Update = Callable[[Tensor], Tensor]


def flop(heads: int, rows: int, cols: int, form: str) -> int:
    short, long = sorted((rows, cols))
    if form == "gram":
        return heads * (8 * short**2 * long + 28 * short**3)
    return heads * (20 * short**2 * long + 10 * short**3)


def test_sgemm(benchmark: BenchmarkFixture) -> None:
    a = torch.randn(1024, 1024)
    benchmark.extra_info["flop"] = 2 * 1024**3
    benchmark(torch.mm, a, a)


def reference(heads: int, dialect: str = "deepspeed-0.19.8", fast: bool = False) -> Update:
    arithmetic = dialect_named(dialect).arithmetic
    arithmetic = arithmetic.fastest() if fast else replace(arithmetic, cpu_dtype="float32")
    return lambda x: orthogonalize(x, Layout.heads("q", heads, len(x) // heads), arithmetic)


def deepspeed(heads: int, monkeypatch: pytest.MonkeyPatch) -> Update:
    module = pytest.importorskip("deepspeed.runtime.zero.muon.original_muon")
    # What it takes on a CPU without float16 products.
    monkeypatch.setattr(module, "ns_compute_dtype", lambda *_: torch.float32)
    return lambda x: module._per_head_orthogonalize(x, heads, 5, "gram")


def emerging(heads: int) -> Update:
    """Emerging-Optimizers' standard form on a batch of heads, in float32."""
    if not hasattr(typing, "override"):  # it is written for Python 3.12
        typing.override = lambda function: function  # pyright: ignore
    pytest.importorskip("emerging_optimizers")
    module = importlib.import_module("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    return lambda x: module.newton_schulz(x.view(heads, -1, x.shape[1]), 5, "simple")


@pytest.mark.parametrize("who", ["fast", "reference", "standard", "deepspeed", "emerging"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_update(
    benchmark: BenchmarkFixture,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int],
    who: str,
) -> None:
    """One head-split update in float32, ours and theirs, the same numbers up to rounding."""
    heads, d, n = shape
    update = {
        "fast": lambda: reference(heads, fast=True),
        "reference": lambda: reference(heads),
        "standard": lambda: reference(heads, "deepspeed-0.19.8-standard"),
        "deepspeed": lambda: deepspeed(heads, monkeypatch),
        "emerging": lambda: emerging(heads),
    }[who]()
    form = "standard" if who in ("standard", "emerging") else "gram"
    benchmark.group = f"update {shape}"
    benchmark.extra_info["flop"] = flop(heads, d, n, form)
    benchmark.pedantic(update, (torch.randn(heads * d, n),), rounds=9, warmup_rounds=2)


@pytest.mark.parametrize("halves", ["emulated", "native"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves(benchmark: BenchmarkFixture, dtype: Any, halves: Any) -> None:
    """Emulated against native half precision; without instructions for it, native crawls."""
    arithmetic = Arithmetic(cpu_dtype=dtype, halves=halves)
    benchmark.group = f"halves {dtype}"
    layout = Layout.heads("q", 4, 64)
    benchmark.pedantic(
        orthogonalize, (torch.randn(256, 256), layout, arithmetic), rounds=5, warmup_rounds=1
    )


@pytest.mark.parametrize("who", ["fast", "reference", "deepspeed"])
def test_step_of_glm(
    benchmark: BenchmarkFixture, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """A whole optimizer step of GLM-5.2-0.8B: its 69 Muon weights at their real shapes."""
    decided = plan(build(resolve("glm-5.2-0.8b").config)).decisions
    named = [(d.name, nn.Parameter(torch.zeros(d.shape))) for d in decided]
    layouts = {d.name: d.layout for d in decided}
    for _, p in named:
        p.grad = torch.randn(p.shape)
    if who == "deepspeed":
        module = pytest.importorskip("deepspeed.runtime.zero.muon.original_muon")
        monkeypatch.setattr(module, "ns_compute_dtype", lambda *_: torch.float32)
        optimizer = module.SingleDeviceMuon([tagged(p, layouts[name]) for name, p in named])
    else:
        dialect = dialect_named("deepspeed-0.19.8")
        chosen = dialect.arithmetic.fastest() if who == "fast" else dialect.arithmetic
        optimizer = PerHeadMuon(named, layouts, dialect=replace(dialect, arithmetic=chosen))
    benchmark.group = "step of glm-5.2-0.8b"
    benchmark.pedantic(optimizer.step, rounds=3, warmup_rounds=1)


def tagged(p: nn.Parameter, layout: Layout | None) -> nn.Parameter:
    """A parameter as DeepSpeed's own tagger leaves it."""
    if layout is not None:
        p.muon_num_heads = len(layout.blocks())
    p.is_expert_group = p.ndim == 3
    return p


def test_plan_of_glm(benchmark: BenchmarkFixture) -> None:
    model = build(resolve("glm-5.2").config)
    benchmark.pedantic(plan, (model,), rounds=5, warmup_rounds=1)


@functools.cache
def many_layers(parameters: int) -> nn.Module:
    """Small Llama layers of nine parameters each, on ``meta``."""
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=4, num_key_value_heads=2
    )
    with torch.device("meta"):
        layers = [LlamaDecoderLayer(config, i) for i in range(-(-parameters // 9))]
    return nn.ModuleList(layers)


@pytest.mark.parametrize("parameters", [50_000, 100_000])
def test_plan_of_many_parameters(benchmark: BenchmarkFixture, parameters: int) -> None:
    # Linear, if the second takes twice as long as the first.
    model = many_layers(parameters)
    benchmark.extra_info["parameters"] = parameters
    decided = benchmark.pedantic(plan, (model,), rounds=3, warmup_rounds=1)
    assert len(decided.decisions) + len(decided.others) == sum(1 for _ in model.parameters())
    assert len(decided.split) == 3 * len(model)


@pytest.mark.parametrize("model", ["kimi-k3", "llama"])
def test_plan_from_the_command_line(benchmark: BenchmarkFixture, model: str) -> None:
    command = [sys.executable, "-m", "muonsplit", "plan", model, "--format", "json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run() -> None:
        subprocess.run(command, check=True, capture_output=True, env=environment)

    benchmark.pedantic(run, rounds=2)


@pytest.mark.parametrize("profile", ["smoke", "ci"])
def test_certify_from_the_command_line(benchmark: BenchmarkFixture, profile: str) -> None:
    # The floor is torch's import in either process, and the bounds: half of what is left.
    command = [sys.executable, "-m", "muonsplit", "certify", "--profile", profile, "--seed", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run() -> None:
        subprocess.run(command, check=True, capture_output=True, env=environment)

    benchmark.pedantic(run, rounds=1)
