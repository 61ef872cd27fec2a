"""Attention of GLM-5.2 at full width, from checkpoints to the answer.

What has to be done at least, a layer: 1.3 GB are read twice, once to measure and once to decide,
and of every hypothesis that may hold, Gram matrices of blocks on their smaller side, d²n
multiplications each.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from safetensors.torch import save_file
from torch import Tensor

from muonsplit.audit.result import AuditedWeight
from muonsplit.audit.statement import sound
from muonsplit.geometry import plan
from muonsplit.layout import Layout
from muonsplit.models.load import build, resolve

LR = 2e-3
DIALECT = "deepspeed-0.19.8"
# Nothing, where it cannot be told: of thousands of rows some hundred directions are lifted, and 32
# among thousands of columns do not overlap anyway, so that parts of rows look like the whole.
LEAVES = {
    "q_a_proj": "whole",
    "q_b_proj": "q 64×256",
    "kv_b_proj": "kv 64×448",
    "o_proj": "",
    "weights_proj": "",
}


def stepped(layout: Layout | None, rows: int, cols: int, source: torch.Generator) -> Tensor:
    """A gradient of full rank, orthogonalised by its decomposition and the quintic of numbers.

    Its singular values fall like 1/k, and its blocks share their directions. None of them is taller
    than it is wide, so the scale is one.
    """
    fall = 1 / torch.arange(1, min(rows, cols) + 1)
    right = torch.linalg.qr(torch.randn(cols, len(fall), generator=source))[0]
    left = torch.randn(rows, len(fall), generator=source)
    if layout is None:
        return torch.linalg.qr(left)[0] * quintic(fall) @ right.T
    parts = (left * fall).chunk(len(layout.blocks()))
    return torch.cat([lifted(part) for part in parts]) @ right.T


def lifted(block: Tensor) -> Tensor:
    """A wide block, orthogonalised."""
    energies, U = torch.linalg.eigh(block.double() @ block.double().T)
    S = energies.clamp(min=1e-30).sqrt()
    return (U * (quintic(S) / S) @ U.T @ block.double()).float()


def quintic(S: Tensor) -> Tensor:
    """What five steps make of singular values; Jordan et al., 2024."""
    S = S / S.norm()
    for _ in range(5):
        S = 3.4445 * S - 4.7750 * S**3 + 2.0315 * S**5
    return S


def checkpoints(folder: Path, layers: Sequence[int]) -> None:
    """Writes two checkpoints of the projections of attention, whose steps are those of a layer."""
    decisions = {d.name: d for d in plan(build(resolve("glm-5.2").config), DIALECT).decisions}
    before, after = dict[str, Tensor](), dict[str, Tensor]()
    for leaf in LEAVES:
        source = torch.Generator().manual_seed(0)
        part = "indexer." if leaf == "weights_proj" else ""
        names = [f"model.layers.{layer}.self_attn.{part}{leaf}.weight" for layer in layers]
        first = decisions[names[0]]
        rows, cols = first.shape
        step = LR * stepped(first.layout, rows, cols, source)
        for name in names:
            before[name] = 0.02 * torch.randn(first.shape, generator=source)
            after[name] = before[name] - step
    for name, weights in (("before", before), ("after", after)):
        save_file(weights, folder / f"{name}.safetensors")


class Ran(NamedTuple):
    """What a process came to.

    Attributes:
        code: Its exit code.
        weights: What it said of each weight.
        memory: The most that it held, in GiB.
    """

    code: int
    weights: tuple[AuditedWeight, ...]
    memory: float


# What it held at most is asked of itself: a child's usage begins with its parent's.
RUN = """
import atexit, sys
from pathlib import Path
from muonsplit.cli import main
atexit.register(lambda: Path(sys.argv[1]).write_text(Path("/proc/self/status").read_text()))
main(sys.argv[2:])
"""


def audited(folder: Path, layers: str) -> Ran:
    """The command, in a process of its own, with as many threads as it takes."""
    names, status = f"model.layers.{layers}.self_attn.*_proj.weight", folder / "status"
    command = [
        *(sys.executable, "-c", RUN, status, "audit"),
        *(folder / "before.safetensors", folder / "after.safetensors"),
        *("--model", "glm-5.2", "--dialect", DIALECT, "--weights", names),
        *("--lr", str(LR), "--weight-decay", "0", "--report", folder / "report"),
    ]
    free = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    code = subprocess.run(command, env=free, capture_output=True, check=False).returncode
    weights = sound(folder / "report" / "certificate.json").weights
    lines = status.read_text().splitlines()
    most = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return Ran(code, weights, most / 2**20)


@pytest.mark.corpus
@pytest.mark.timeout(1200)
def test_every_projection_is_read_right_or_not_in_three_gib(tmp_path: Path) -> None:
    checkpoints(tmp_path, [0])
    ran = audited(tmp_path, "0")
    assert {w.weight.split(".")[-2]: w.observed for w in ran.weights} == LEAVES
    assert ran.code == 2
    assert ran.memory < 3


@pytest.mark.parametrize("layers", [1, 2])
def test_time_and_memory_by_layers(
    benchmark: BenchmarkFixture, tmp_path: Path, layers: int
) -> None:
    checkpoints(tmp_path, range(layers))
    benchmark.extra_info["layers"] = layers
    ran: Any = benchmark.pedantic(audited, (tmp_path, f"[0-{layers - 1}]"), rounds=1)
    benchmark.extra_info["GiB"] = round(ran.memory, 2)
    assert ran.code == 2
