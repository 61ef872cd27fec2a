"""Goldens agree, a change waits for review, and their values are not of our own making."""

import functools
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from muonsplit import Layout, Plan, goldens, plan
from muonsplit.dialect import DEFAULT_DIALECT, DIALECTS
from muonsplit.errors import GoldenError, UsageError
from muonsplit.models import load
from muonsplit.models.miniature import miniature
from muonsplit.muon import orthogonalize
from muonsplit.newton_schulz import newton_schulz, scale_factor
from muonsplit.observe.tolerance import rounding_bound

_SMALL = (
    *("plan/llama", "plan/gpt-neox-20b", "numeric/dion", "numeric/deepspeed-0.19.8"),
    *("update/kimi-k3", "update/llama-odd", "update/pythia-70m"),
)
MODELS = list(load.golden_models())


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "golden"
    shutil.copytree(load.golden_root(), root)
    monkeypatch.setattr(load, "golden_root", lambda: root)
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


@pytest.mark.parametrize("damage", ["", "{}", "no plan"])
def test_an_update_needs_an_accepted_plan(copied: Path, damage: str) -> None:
    (copied / "models" / "llama" / "plan.json").write_text(damage)
    (problem,) = goldens.check(["update/llama"])
    assert "accept plan/llama" in problem


def test_an_update_follows_the_text_of_the_plan(copied: Path) -> None:
    path = copied / "models" / "llama" / "plan.json"
    good = path.read_text()
    path.write_text(good.replace("q 32×128", "q 64×64"))
    (problem,) = goldens.check(["update/llama"])
    assert "differs" in problem
    assert "self_attn.q_proj" in "".join(goldens.diff(["update/llama"]))
    path.write_text(good.replace("q 32×128", "q 33×128"))
    (problem,) = goldens.check(["update/llama"])
    assert "q 33×128" in problem


@pytest.mark.parametrize("label", ["wide", "tall", "square"])
@pytest.mark.parametrize("name", DIALECTS)
def test_the_iteration_agrees_with_the_golden(name: str, label: str) -> None:
    stored = load_file(load.golden_root() / "numeric" / f"{name}.safetensors")
    given, wanted = stored[f"{label}.input"], stored[f"{label}.expected"]
    arithmetic = DIALECTS[name].arithmetic
    made = newton_schulz(given, arithmetic.exact())
    made = made * scale_factor(arithmetic, *given.shape[1:])
    assert (made - wanted).norm() < 1e-11 * wanted.norm()


@functools.cache
def planned(model: str) -> Plan:
    """What the rules say of the miniature; no golden was made from it."""
    return plan(load.build(miniature(load.resolve(model).config)))


@functools.cache
def updates(model: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradient and expected [blocks, first row and sum of rows, columns] by weight."""
    stored = load_file(load.golden_root() / "update" / f"{model}.safetensors")
    names = dict.fromkeys(key.rpartition(".")[0] for key in stored)
    return {name: (stored[f"{name}.gradient"], stored[f"{name}.expected"]) for name in names}


def excess(gradient: Tensor, expected: Tensor, layout: Layout | None, precision: str) -> float:
    """The largest error of a block, in units of what rounding may do to it."""
    arithmetic = DIALECTS[DEFAULT_DIALECT].arithmetic
    if precision == "float64":
        arithmetic = arithmetic.exact()
    given = gradient.to(getattr(torch, precision))
    blocks = (len(expected), -1, gradient.shape[-1])
    made = orthogonalize(given, layout, arithmetic).double().view(blocks)
    worst = 0.0
    for block, seen, wanted in zip(given.double().view(blocks), made, expected, strict=True):
        bound = rounding_bound(block, arithmetic)
        # ‖seen‖ ≥ (1 − bound)·‖exact‖; a row is off by the whole error at most, the sum of r rows,
        # a product with r ones, by √r of it.
        most = bound * seen.norm() / (1 - bound)
        found = torch.stack([seen[0], seen.sum(0)])
        off = (found - wanted).norm(dim=1) / torch.tensor([1.0, len(block) ** 0.5])
        worst = max(worst, float(off.max() / most))
    return worst


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_by_the_plan_of_a_miniature_agrees_with_the_golden(
    model: str, precision: str
) -> None:
    layouts = planned(model).layouts()
    # The golden itself was rounded to float64, in as many places.
    sides = 2 if precision == "float64" else 1
    for name, (gradient, expected) in updates(model).items():
        assert excess(gradient, expected, layouts[name], precision) < sides, name


@pytest.mark.parametrize("model", ["glm-5.2", "kimi-k3", "llama", "gpt-neox-20b"])
def test_a_step_by_another_plan_does_not(model: str) -> None:
    layouts = planned(model).layouts()
    for name, (gradient, expected) in updates(model).items():
        # What is cut stays whole, and what is whole is cut in two.
        halves = Layout.heads("q", 2, gradient.shape[0] // 2)
        if gradient.ndim == 2 and halves.segments[0].width > 1:
            other = None if layouts[name] else halves
            assert excess(gradient, expected, other, "float32") > 10, name


@pytest.mark.parametrize("model", MODELS)
def test_every_cut_of_a_miniature_has_a_golden_and_files_are_small(model: str) -> None:
    split = {d.name: (d.heads, d.shape) for d in planned(model).split}
    stored = {n: (len(made), tuple(given.shape)) for n, (given, made) in updates(model).items()}
    assert set(split.values()) == {cut for name, cut in stored.items() if name in split}
    assert stored.keys() - split.keys()
    assert (load.golden_root() / "update" / f"{model}.safetensors").stat().st_size < 100 << 10


# Heads of the miniatures, by hand: 64 of GLM-5.2 and 96 of Kimi-K3 over 16, Llama's 32 and 8 over
# 4. The stacks hold four experts.
HEADS = {
    "glm-5.2": {"q_b_proj": 4, "kv_b_proj": 4, "o_proj": 1, "wq_b": 1, "down_proj": 4},
    "kimi-k3": {"q_proj": 6, "q_b_proj": 6, "kv_b_proj": 6, "f_a_proj": 1, "down_proj": 4},
    "llama": {"q_proj": 8, "k_proj": 2, "o_proj": 1, "gate_proj": 1},
    "gpt-neox-20b": {"query_key_value": 1, "dense": 1},
}


@pytest.mark.parametrize("model", HEADS)
def test_update_goldens_are_the_polynomial_on_heads_cut_by_hand(model: str) -> None:
    leaves = {n.removesuffix(".weight").rpartition(".")[2]: n for n in updates(model)}
    for leaf, heads in HEADS[model].items():
        gradient, expected = updates(model)[leaves[leaf]]
        blocks = gradient.double().reshape(heads, -1, gradient.shape[-1])
        made = jordan(blocks)
        assert expected.shape == (heads, 2, gradient.shape[-1])
        assert (made[:, 0] - expected[:, 0]).norm() < 1e-11 * made.norm()
        assert (made.sum(1) - expected[:, 1]).norm() < 1e-11 * made.norm() * blocks.shape[1] ** 0.5


def jordan(blocks: Tensor) -> Tensor:
    """Jordan's polynomial five times, written out; no function of the package is asked."""
    u, s, vh = torch.linalg.svd(blocks, full_matrices=False)
    s = s / (blocks.square().sum((-2, -1)).sqrt().unsqueeze(-1) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    scale = max(1.0, blocks.shape[-2] / blocks.shape[-1]) ** 0.5
    return (u * s.unsqueeze(-2)) @ vh * scale


def test_numeric_goldens_are_the_polynomial_on_singular_values() -> None:
    stored = load_file(load.golden_root() / "numeric" / "jordan.safetensors")
    for label in ("wide", "tall", "square"):
        wanted = jordan(stored[f"{label}.input"])
        assert (stored[f"{label}.expected"] - wanted).norm() < 1e-11 * wanted.norm()
