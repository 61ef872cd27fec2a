"""Checkpoints that DeepSpeed 0.19.8 saves are read as its engine has the weights."""

import hashlib
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from muonsplit.errors import EvidenceError
from muonsplit.evidence.opened import opened
from tests_cpu.ranks import run

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.downstream, pytest.mark.slow]

STEPS = 3


class Small(nn.Module):
    """Weights whose elements two ranks cannot share evenly, and a buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a = nn.Linear(7, 5)
        self.b = nn.Linear(5, 3, bias=False)
        self.c = nn.Linear(3, 3, bias=False)
        self.register_buffer("counted", torch.arange(3))
        self.to(dtype)

    def forward(self) -> Tensor:
        rank = torch.distributed.get_rank()
        x = torch.full((2, 7), 1.0 + rank, dtype=self.a.weight.dtype)
        return self.c(self.b(torch.tanh(self.a(x)))).square().sum()


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(bytes(tensor.contiguous().reshape(-1).view(torch.uint8))).hexdigest()


def saved(
    folder: str, stage: int, dtype: torch.dtype, optimizer: str, zero: dict[str, Any]
) -> dict[str, tuple[torch.dtype, str]]:
    """On each rank: trains, saves, and says what the engine has."""
    from muonsplit.subjects.deepspeed import Engine

    params: dict[str, Any] = {"lr": 0.01, "torch_adam": True}
    if optimizer == "Muon":
        params = {"lr": 0.01, "momentum": 0.9, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": optimizer, "params": params},
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    engine = Engine(Small(dtype), config)
    for _ in range(STEPS):
        engine.backward(engine.forward())
        engine.step()
    engine._engine.save_checkpoint(folder)
    weights = engine.parameters()
    engine.close()
    return {name: (weight.dtype, digest(weight)) for name, weight in weights.items()}


CASES = [
    (1, 0, torch.float32, "Adam", {}),
    (2, 0, torch.bfloat16, "Adam", {}),
    (2, 1, torch.float32, "Adam", {}),
    (2, 1, torch.bfloat16, "Adam", {}),
    (2, 1, torch.float32, "Muon", {}),
    (2, 1, torch.float32, "Adam", {"parameter_alignment": True}),
    (2, 2, torch.float32, "Muon", {}),
    (2, 2, torch.float32, "Adam", {"round_robin_gradients": True}),
    (1, 3, torch.float32, "Adam", {}),
    (2, 3, torch.float32, "Adam", {}),
    (2, 3, torch.bfloat16, "Adam", {}),
    (2, 3, torch.float32, "Muon", {"reduce_scatter": False}),
]


@pytest.mark.parametrize(("world", "stage", "dtype", "optimizer", "zero"), CASES)
def test_weights_are_those_of_the_engine(
    tmp_path: Path,
    world: int,
    stage: int,
    dtype: torch.dtype,
    optimizer: str,
    zero: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    expected = run(world, saved, str(tmp_path), stage, dtype, optimizer, zero)[0]
    states = tmp_path / f"global_step{STEPS}"
    capfd.readouterr()
    for path in (tmp_path, states):
        with pytest.raises(EvidenceError, match=r"pickled; nothing was loaded"):
            opened(path)
        found = opened(path, trust_pickles=True)
        assert (found.path, found.step) == (path, STEPS)
        # Master copies are float32; rounded, they are what the model has.
        master = torch.float32 if stage else dtype
        for name, (kept, weight) in expected.items():
            assert found.entries[name].dtype == master
            assert digest(found.read(name).to(kept)) == weight, name
    assert capfd.readouterr() == ("", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of stage 3 on two ranks."""
    path = tmp_path_factory.mktemp("zero")
    run(2, saved, str(path), 3, torch.float32, "Adam", {})
    return path


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_what_is_read_may_be_changed(folder: Path) -> None:
    found = opened(folder, trust_pickles=True)
    before = found.read("a.weight")
    found.read("a.weight").zero_()
    assert torch.equal(found.read("a.weight"), before)
    assert before.any()


def test_a_missing_rank(copied: Path) -> None:
    next(copied.glob("*/*rank_1*optim_states.pt")).unlink()
    with pytest.raises(EvidenceError, match=r"cannot read .*Expected 2 .* All ranks' files"):
        opened(copied, trust_pickles=True)


def test_a_damaged_rank(copied: Path) -> None:
    next(copied.glob("*/*rank_1*optim_states.pt")).write_bytes(b"cut short")
    with pytest.raises(EvidenceError, match="cannot read"):
        opened(copied, trust_pickles=True)


@pytest.mark.parametrize("tag", ["..", ".", "", "/tmp", "global_step9", "a/../global_step3"])
def test_a_tag_that_is_none(copied: Path, tag: str) -> None:
    (copied / "latest").write_text(tag)
    for trusted in (False, True):
        with pytest.raises(EvidenceError, match="has no such folder of DeepSpeed's states"):
            opened(copied, trust_pickles=trusted)


def test_without_latest_the_only_tag_is_meant(copied: Path) -> None:
    (copied / "latest").unlink()
    assert opened(copied, trust_pickles=True).step == STEPS
    (copied / f"global_step{STEPS}").rename(copied / "best")
    assert opened(copied, trust_pickles=True).step is None
    (copied / "other").mkdir()
    (copied / "other" / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps(1))
    with pytest.raises(EvidenceError, match="several DeepSpeed checkpoints: best, other"):
        opened(copied, trust_pickles=True)


def test_other_parallelism_is_refused(copied: Path) -> None:
    states = copied / f"global_step{STEPS}"
    (states / "zero_pp_rank_0_mp_rank_01_model_states.pt").write_bytes(b"")
    with pytest.raises(EvidenceError, match="tensor or pipeline parallelism"):
        opened(copied, trust_pickles=True)


def test_without_deepspeed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(EvidenceError, match=r"Install deepspeed.*zero_to_fp32\.py"):
        opened(folder, trust_pickles=True)


def test_weights_beside_it_that_are_safe_come_first(copied: Path) -> None:
    save_file({"a.weight": torch.ones(2)}, copied / "model.safetensors")
    assert opened(copied).entries["a.weight"].shape == (2,)
    assert opened(copied, trust_pickles=True).entries["a.weight"].shape == (5, 7)
