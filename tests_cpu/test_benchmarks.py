"""Figures, not assertions: `tox -e bench`. Ratios of medians within one run are what counts.

The floor of an update is its floating-point operations over this machine's sgemm rate, which
`test_sgemm` measures in the same run: standard Newton–Schulz takes 20·d²·n + 10·d³ a block of
d × n, Gram with one restart 8·d²·n + 28·d³.
"""

import functools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from muonsplit.dialect import dialect_named
from muonsplit.geometry import plan
from muonsplit.layout import Layout
from muonsplit.models.load import build, resolve
from muonsplit.muon import orthogonalize

SHAPES = [(16, 64, 512), (16, 128, 2048), (16, 192, 512), (16, 256, 512)]


def test_sgemm(benchmark: BenchmarkFixture) -> None:
    a = torch.randn(1024, 1024)
    benchmark.extra_info["flop"] = 2 * 1024**3
    benchmark(torch.mm, a, a)


@pytest.mark.parametrize("form", ["matmul", "gram"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_orthogonalize(benchmark: BenchmarkFixture, shape: tuple[int, int, int], form: str) -> None:
    heads, d, n = shape
    name = "deepspeed-0.19.8" if form == "gram" else "deepspeed-0.19.8-standard"
    base = dialect_named(name).arithmetic
    arithmetic = replace(base, cpu_dtype="float32")
    short, long = min(d, n), max(d, n)
    standard = 20 * short**2 * long + 10 * short**3
    gram = 8 * short**2 * long + 28 * short**3
    benchmark.extra_info["flop"] = heads * (gram if form == "gram" else standard)
    update, layout = torch.randn(heads * d, n), Layout.heads("q", heads, d)
    benchmark.pedantic(orthogonalize, (update, layout, arithmetic), rounds=5, warmup_rounds=1)


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
