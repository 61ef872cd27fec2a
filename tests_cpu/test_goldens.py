"""Goldens agree, a change waits for review, and their values are not of our own making."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from muonsplit import goldens
from muonsplit.dialect import DIALECTS
from muonsplit.errors import GoldenError, UsageError
from muonsplit.models import load
from muonsplit.newton_schulz import newton_schulz, scale_factor

_SMALL = ("plan/llama", "plan/gpt-neox-20b", "numeric/dion", "numeric/deepspeed-0.19.8")


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "golden"
    shutil.copytree(load.golden_root(), root)
    for module in (load, goldens):
        monkeypatch.setattr(module, "golden_root", lambda: root)
    return root


def test_goldens_agree(copied: Path) -> None:
    assert goldens.check(_SMALL) == []
    assert not list(copied.rglob("*.new"))


def test_a_changed_plan_waits_until_it_is_accepted(copied: Path) -> None:
    path = copied / "models" / "llama" / "plan.json"
    good = path.read_text()
    path.write_text(good.replace("q 32×128", "q 64×64"))
    problems = goldens.check(["plan/llama"])
    assert len(problems) == 1
    assert "differs" in problems[0]
    assert path.read_text() != good
    assert any("+" in line and "q 32×128" in line for line in goldens.diff(["plan/llama"]))
    assert goldens.accept(["plan/llama"]) == ["plan/llama"]
    assert path.read_text() == good
    assert goldens.check(["plan/llama"]) == []


def test_a_new_value_that_waits_is_refused(copied: Path) -> None:
    path = copied / "models" / "llama" / "plan.json"
    shutil.copy(path, path.with_name("plan.json.new"))
    assert "waits for review" in goldens.check(["plan/llama"])[0]


def test_a_tensor_that_drifts_is_seen(copied: Path) -> None:
    path = copied / "numeric" / "dion.safetensors"
    tensors = load_file(path)
    tensors["wide.expected"] *= 1 + 1e-9
    save_file(tensors, path)
    assert "differs" in goldens.check(["numeric/dion"])[0]
    assert "wide.expected" in "".join(goldens.diff(["numeric/dion"]))


def test_a_missing_or_broken_golden_is_a_problem_not_a_crash(copied: Path) -> None:
    (copied / "numeric" / "dion.safetensors").write_bytes(b"no tensors")
    (copied / "models" / "llama" / "plan.json").unlink()
    assert len(goldens.check(["numeric/dion", "plan/llama"])) == 2


def test_accepting_nothing_and_unknown_names_are_errors(copied: Path) -> None:
    with pytest.raises(GoldenError):
        goldens.accept(["plan/llama"])
    with pytest.raises(UsageError):
        goldens.check(["plan/nosuch"])


@pytest.mark.parametrize("label", ["wide", "tall", "square"])
@pytest.mark.parametrize("name", DIALECTS)
def test_the_iteration_agrees_with_the_golden(name: str, label: str) -> None:
    stored = load_file(load.golden_root() / "numeric" / f"{name}.safetensors")
    given, wanted = stored[f"{label}.input"], stored[f"{label}.expected"]
    arithmetic = DIALECTS[name].arithmetic
    made = newton_schulz(given, arithmetic.exact())
    made = made * scale_factor(arithmetic, *given.shape[1:])
    assert (made - wanted).norm() < 1e-11 * wanted.norm()


def test_numeric_goldens_are_the_polynomial_on_singular_values() -> None:
    # Jordan's polynomial five times, written out; no function of the package is asked.
    stored = load_file(load.golden_root() / "numeric" / "jordan.safetensors")
    for label in ("wide", "tall", "square"):
        given = stored[f"{label}.input"]
        u, s, vh = torch.linalg.svd(given, full_matrices=False)
        s = s / (given.square().sum((-2, -1)).sqrt().unsqueeze(-1) + 1e-7)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        scale = max(1.0, given.shape[-2] / given.shape[-1]) ** 0.5
        wanted = (u * s.unsqueeze(-2)) @ vh * scale
        assert (stored[f"{label}.expected"] - wanted).norm() < 1e-11 * wanted.norm()
