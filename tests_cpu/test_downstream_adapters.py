"""Released peers through their adapters, by our own observation: what is right and what is not.

Only checks of the cut, the arithmetic and what is carried are asked here. A peer that is right
passes them or is undecided where its own bfloat16 hides it, and that is written down too.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from muonsplit.certificate.run import Certificate, Question, certify
from muonsplit.errors import SubjectError
from muonsplit.layout import Layout
from muonsplit.models.load import build, resolve
from muonsplit.models.miniature import miniature
from muonsplit.observe import gradients
from muonsplit.subjects.connect import ADAPTERS
from muonsplit.subjects.drive import Saved, Task
from muonsplit.subjects.process import Worker
from muonsplit.subjects.protocol import Hyper
from tests_cpu.certificates import first_asked

pytestmark = pytest.mark.downstream

MODULES = {
    "muon-optimizer": "muon",
    "muon-fsdp2": "muon_fsdp2",
    "builtin": "muonsplit",
    "faulty": "muonsplit",
}
ASKED = (
    "independence.weights",
    "routing.muon",
    "routing.others",
    "recognition.split",
    "recognition.whole",
    "arithmetic.direction",
    "arithmetic.scale",
    "arithmetic.bias",
    "state.momentum",
    "state.decay",
)
NOISY = {"arithmetic.direction", "state.momentum", "state.decay"}


class Row(NamedTuple):
    """A subject and the dialect it speaks; the checks its own rounding may leave undecided."""

    spec: str
    dialect: str
    undecided: frozenset[str] = frozenset()


# Told where the heads are, and asked per head.
SPLITS = (
    Row("dion", "dion", frozenset(NOISY)),
    Row("dion:use_polar_express=false,nesterov=true,adjust_lr=rms_norm", "dion-newton-schulz"),
    # Key and value of a head are unequal blocks in the miniature of GLM-5.2 alone.
    Row("dion", "dion:mla_key_value=apart", frozenset(NOISY)),
    Row("gram-newton-schulz", "gram-newton-schulz-0.1.6", frozenset({"state.momentum"})),
    Row(
        "gram-newton-schulz:ns_algorithm=standard_newton_schulz",
        "gram-newton-schulz-0.1.6-standard",
    ),
    Row("emerging-optimizers", "emerging-optimizers-0.3.0"),
    Row(
        "emerging-optimizers:fp32_matmul_prec=highest",
        "emerging-optimizers-0.3.0-highest",
    ),
    Row("optimuon", "optimuon-0.1.1"),
    Row("optimuon:gram_ns=false,coefficients=jordan", "optimuon-0.1.1-standard"),
    Row("muonium", "muonium-0.2.0"),
    Row("muonium", "muonium-0.2.0:mla_key_value=apart"),
)
# Whole matrices, as their own dialects say.
WHOLE = (
    Row("torch:nesterov=false", "torch-2.13:nesterov=false"),
    Row("torch:adjust_lr_fn=match_rms_adamw", "torch-2.13:scale=moonlight"),
    Row("muon-optimizer", "jordan"),
    Row("pytorch-optimizer", "pytorch-optimizer-4.1.0"),
    Row("pytorch-optimizer:ns_method=gram_newton_schulz", "pytorch-optimizer-4.1.0-gram"),
    Row("heavyball:seed=0", "heavyball-3.2.1"),
    Row("muon-fsdp2", "muon-fsdp2-0.3.0"),
    Row("dtensor-muon", "dtensor-muon-0.1.0"),
)


@pytest.fixture(scope="module", autouse=True)
def surroundings() -> Iterator[None]:
    """A checkout of dion where a subject's own process finds it."""
    checkout = Path(os.environ.get("MUONSPLIT_PEERS", "/nowhere")) / "dion"
    with pytest.MonkeyPatch.context() as patch:
        if checkout.is_dir():
            patch.syspath_prepend(str(checkout))
            patch.setenv("PYTHONPATH", str(checkout), prepend=os.pathsep)
        yield


def needs(spec: str) -> None:
    name = spec.partition(":")[0]
    module = MODULES.get(name, name.replace("-", "_"))
    if importlib.util.find_spec(module) is None and module not in sys.modules:
        pytest.skip(f"{module} is not installed")


def certified(spec: str, model: str, dialect: str | None = None) -> Certificate:
    needs(spec)
    with Worker(spec, timeout=300) as worker:
        return certify(worker, Question(models=(model,), dialect=dialect, only=ASKED))


def by_status(found: Certificate, status: str) -> set[str]:
    return {r.check for model in found.models for r in model.results if r.status == status}


def weights_of(found: Certificate, check: str) -> set[str]:
    return {
        finding.weight
        for model in found.models
        for result in model.results
        if result.check == check
        for finding in result.findings
    }


@pytest.mark.slow
@pytest.mark.parametrize("row", SPLITS, ids=lambda row: f"{row.spec} as {row.dialect}")
def test_told_where_the_heads_are_it_splits_there(row: Row) -> None:
    found = certified(row.spec, "deepseek-v2-lite", row.dialect)
    assert by_status(found, "failed") == set()
    assert by_status(found, "undecided") <= row.undecided
    assert "recognition.split" in by_status(found, "passed")
    weights = found.models[0].weights
    assert {w.leaf.rpartition(".")[2] for w in weights if w.planned != "whole"} >= {"kv_b_proj"}
    assert all(w.observed == w.planned for w in weights)


@pytest.mark.slow
@pytest.mark.parametrize("row", WHOLE, ids=lambda row: f"{row.spec} as {row.dialect}")
def test_it_speaks_its_own_dialect_of_whole_matrices(row: Row) -> None:
    found = certified(row.spec, "deepseek-v2-lite", row.dialect)
    assert by_status(found, "failed") == set()
    assert by_status(found, "undecided") <= row.undecided
    assert {"arithmetic.scale", "recognition.whole"} <= by_status(found, "passed")


@pytest.mark.slow
@pytest.mark.parametrize("row", WHOLE[2:], ids=lambda row: row.spec)
def test_asked_per_head_it_is_whole(row: Row) -> None:
    found = certified(row.spec, "llama", f"{row.dialect}+per-head")
    assert by_status(found, "failed") == {"recognition.split"}
    assert len(weights_of(found, "recognition.split")) == 6
    assert {w.observed for w in found.models[0].weights} == {"whole"}


def test_rounding_at_random_cannot_be_judged() -> None:
    found = certified("heavyball", "llama", "heavyball-3.2.1")
    assert by_status(found, "undecided") == {"subject.repeatable"}


@pytest.mark.slow
def test_muon_fsdp2_orthogonalises_its_own_buffer_without_nesterov() -> None:
    dialect = "muon-fsdp2-0.3.0:nesterov=false"
    found = certified("muon-fsdp2:nesterov=false", "llama", dialect)
    assert by_status(found, "failed") == {"state.momentum"}
    assert len(weights_of(found, "state.momentum")) == 14


def test_muon_fsdp2_calls_a_function_that_it_does_not_have() -> None:
    found = certified("muon-fsdp2:dtensor=false", "llama", "muon-fsdp2-0.3.0")
    answers = first_asked(found)
    assert (answers.check, answers.status) == ("subject.answers", "failed")
    assert "name 'muon_update' is not defined" in answers.findings[0].message


@pytest.mark.slow
def test_muon_fsdp2_scales_experts_by_how_many_they_are() -> None:
    # max(4, 64) where max(64, 96) is meant; max(4, 96) happens to be right of the others.
    found = certified("muon-fsdp2", "glm-5.2", "muon-fsdp2-0.3.0")
    assert by_status(found, "failed") == {"arithmetic.scale"}
    wrong = weights_of(found, "arithmetic.scale")
    assert {name.rpartition("experts.")[2] for name in wrong} == {"gate_up_proj"}


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["muonium", "dtensor-muon"])
def test_their_float32_buffers_are_rounded_when_they_are_loaded(spec: str) -> None:
    needs(spec)
    dialect = {"muonium": "muonium-0.2.0", "dtensor-muon": "dtensor-muon-0.1.0"}[spec]
    with Worker(spec, timeout=300) as worker:
        found = certify(worker, Question(models=("llama",), dialect=dialect))
    # torch's load_state_dict takes the dtype of the bfloat16 parameter; neither overrides it.
    assert by_status(found, "failed") == {"state.resume"}
    assert by_status(found, "undecided") == set()


@pytest.mark.slow
def test_optimuon_scales_heads_by_the_shape_of_the_whole() -> None:
    found = certified("optimuon", "deepseek-v2-lite", "optimuon-0.1.1:scale_per=block")
    assert by_status(found, "failed") == {"arithmetic.scale"}
    leaves = {name.split(".")[-2] for name in weights_of(found, "arithmetic.scale")}
    assert leaves == {"q_proj", "kv_b_proj"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "dialect"),
    [
        ("optimuon:cautious_wd=true", "optimuon-0.1.1"),
        ("muonium:use_cautious_wd=true", "muonium-0.2.0"),
        ("dtensor-muon:use_cautious_wd=true", "dtensor-muon-0.1.0"),
    ],
)
def test_cautious_decay_is_no_decay_of_the_whole_weight(spec: str, dialect: str) -> None:
    assert by_status(certified(spec, "llama", dialect), "failed") == {"state.decay"}


@pytest.mark.parametrize("name", ["dion", "muonium"])
def test_rows_that_are_apart_cannot_be_said_in_heights(name: str) -> None:
    dialect = "dion" if name == "dion" else "muonium-0.2.0"
    with pytest.raises(SubjectError, match="rows that are apart"):
        certified(name, "gpt-neox-20b", f"{dialect}:fused_qkv=projections")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "dialect"),
    [
        ("gram-newton-schulz", "gram-newton-schulz-0.1.6"),
        ("optimuon", "optimuon-0.1.1"),
        ("emerging-optimizers", "emerging-optimizers-0.3.0"),
    ],
)
def test_rows_that_are_apart_can_be_said_in_functions(spec: str, dialect: str) -> None:
    found = certified(spec, "gpt-neox-20b", f"{dialect}:fused_qkv=projections")
    assert by_status(found, "failed") == set()
    fused = [w for w in found.models[0].weights if w.leaf.endswith("query_key_value")]
    assert fused
    assert all(w.observed == w.planned and "joined" in w.planned for w in fused)


CONFIG = miniature(resolve("llama").config)


def task(dtype: torch.dtype, saved: Saved | None = None) -> Task:
    """Three steps of the miniature of Llama, every weight of two dimensions whole."""
    shapes = {name: tuple(p.shape) for name, p in build(CONFIG).named_parameters()}
    start = gradients.draw(shapes, 0, "start", size=0.05)
    steps = [gradients.draw(shapes, 0, "step", i) for i in range(3)]
    parameters, *given = ({n: t.to(dtype) for n, t in x.items()} for x in (start, *steps))
    layouts: dict[str, Layout | None] = {
        name: None for name in shapes if "layers" in name and "norm" not in name
    }
    return Task(CONFIG, parameters, given, layouts, Hyper(), saved=saved)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("torch", True),
        ("muon-optimizer", True),
        ("gram-newton-schulz", True),
        ("dion", True),
        # Their buffers are float32, and torch loads a state in the dtype of its parameter.
        ("muonium", False),
        ("dtensor-muon", False),
    ],
)
def test_bfloat16_goes_on_where_it_was_saved(name: str, same: bool) -> None:
    needs(name)
    whole = task(torch.bfloat16)
    with Worker(name, timeout=300) as worker:
        unbroken = worker.run(whole).after[-1]
        resumed = worker.run(task(torch.bfloat16, Saved(2, whole.layouts))).after[-1]
    assert all(torch.equal(unbroken[n], resumed[n]) for n in whole.layouts) is same


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "per_head"),
    [
        ("stage=1", True),
        ("stage=2", True),
        ("stage=3", True),
        ("stage=3,zero_init=true", True),
        ("stage=2,grad_accum_dtype=fp32", True),
        ("stage=0", False),
        # BF16_Optimizer calls muon_update without the heads.
        ("stage=1,grad_accum_dtype=fp32", False),
    ],
)
def test_deepspeed_in_bfloat16(options: str, per_head: bool) -> None:
    needs("deepspeed")
    given = task(torch.bfloat16)
    updates: list[torch.Tensor] = []
    for spec in (f"deepspeed:{options}", "deepspeed", "deepspeed:per_head=false"):
        with Worker(spec, timeout=300) as worker:
            after = worker.run(given).after[-1]
        queries = [name for name in given.layouts if "q_proj" in name]
        moves = [after[n].double() - given.parameters[n].double() for n in queries]
        updates.append(torch.stack(moves))
    engine, heads, whole = updates
    near, far = (heads, whole) if per_head else (whole, heads)
    # Masters in float32 differ from weights in bfloat16 by their rounding, not by the cut.
    assert (engine - near).norm() < 0.1 * near.norm()
    assert (engine - far).norm() > 0.3 * far.norm()


def test_every_adapter_is_driven_here_or_beside() -> None:
    driven = {row.spec.partition(":")[0] for row in (*SPLITS, *WHOLE)}
    assert driven | {"builtin", "faulty", "deepspeed"} == set(ADAPTERS)
