"""Each planted fault is caught first by the check it names, and no check is without a fault."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from muonsplit import faulty
from muonsplit.certificate.run import Question, certify
from muonsplit.checks import CHECKS
from muonsplit.dialect import dialect_named
from muonsplit.faulty import CHEATS, FAULTS, LEGAL, shown
from muonsplit.faulty.floor import KINDS, Floor, caught_by, floor
from muonsplit.faulty.registry import Fault
from muonsplit.faulty.trial import Row, Trial, row, tried
from muonsplit.faulty.visibility import Visibility, visibility
from muonsplit.layout import Layout
from muonsplit.observe.families import FAMILIES, of_family
from muonsplit.sharding.ways import fits
from muonsplit.subjects.process import InProcess
from muonsplit.subjects.protocol import info_of

# Nothing can plant these: they judge the harness's own model, and no subject is asked.
_OF_THE_HARNESS = {"model.miniature", "model.recognised", "model.truth"}
_LARGE = {"glm-5.2", "kimi-k3-0.40b", "transformers:qwen3_next", "transformers:gemma4_text"}
_DOCS = (Path(__file__).parent.parent / "docs" / "faults.md").read_text()

# Every public fault that is known, by the name of its source.
_PUBLIC = """
DeepSpeed #8384, first version | DeepSpeed #8384, review by pengdurice | DeepSpeed #8384, c6a7793
DeepSpeed #8384, review by delock | DeepSpeed #8384, candidates that disagree | DeepSpeed #8420
DeepSpeed #8436 | VeOmni #1108 | deepspeed 0.19.8 on GLM-5's config | VeOmni #980
PaddleFleet #1482 | PaddleFleet #1679 | lm-engine #408 | maxtext #2546 | DeepSpeed #8612
DeepSpeed #8438 | DeepSpeed #8384, 5d16495 | DeepSpeed #8441 | LLaMA-Factory #8041
KellerJordan/Muon #65 | Megatron-LM #4731 | Megatron-LM, QKV of a tensor-parallel shard
Megatron-LM #5015 | review by gaojingwei | miles #3096 | torchtitan #4812 | VeOmni #1093
prime-rl #1754 | Emerging-Optimizers #239 | Primus _as_bool | VeOmni load_state_dict
Megatron-LM #4728 | Primus propagate_specs | DeepSpeed #8384, tensor parallelism
torchtitan #4078 | DeepSpeed #7807 | DeepSpeed #8443 | AReaL #1270 | Moonlight #27
Megatron-LM #6380 | PaddleFleet #1703 | xtuner #1582 | Megatron-LM #7077 | torchtitan #4531
Megatron-LM #6740 | dion #74 | dion #83 | dion, num_heads on a mesh | dion, split_sizes with NorMuon
DeepSpeed #8628 | Megatron-LM #4486 | DeepSpeed #8580 | DeepSpeed #8580, review by alanhuangyoo
DeepSpeed #8580, review | xtuner #2030 | modded-nanogpt #47 | Megatron-LM #1428
Megatron-LM #7085 | PaddleFormers #4532 | DeepSpeed #8533 | DeepSpeed #8432 | #8435
the per-head branch returns before the guard | Emerging-Optimizers #229 | HeavyBall 5961ea66
DeepSpeed _aspect_ratio_scale | DeepSpeed #8384 before its merge | dion before #90
Emerging-Optimizers #186 | optax #1249 | Emerging-Optimizers #262 | DeepSpeed #7939
Emerging-Optimizers #245 | xtuner 1c470d12 | dion #65 | dion d3c7a006 | dion 2971bba
Emerging-Optimizers #74 | gram-newton-schulz 7721134 | Primus MIN_BLOCK_ROWS | torchtitan #4596
speculators #821 | DeepSpeed #7776 | Emerging-Optimizers #66 | Megatron-LM #3024
DeepSpeed #7641 | DeepSpeed #8091 | DeepSpeed #8384, its toy models | DeepSpeed #8384, its bounds
DeepSpeed #8436, dt_bias | gram-newton-schulz split utils | xtuner _muonsplit | PaddleFleet #1739
modded-nanogpt #253
"""
_NOT_HERE = "## What is not planted"


def _row(fault: Fault) -> str:
    return f"| `{fault.name}` | {fault.place} | {fault.origin} | `{fault.check}` |"


def _slow(name: str) -> bool:
    fault = FAULTS[name]
    late = not fault.check.startswith(("subject.", "routing.", "recognition.split"))
    return late and (fault.model in _LARGE or "standard" in fault.dialect)


# Those of several ranks are tried in test_sharded_faults.py.
_IN_ONE_PROCESS = [name for name, fault in FAULTS.items() if fault.world == 1]
_NAMES = [pytest.param(n, marks=pytest.mark.slow) if _slow(n) else n for n in _IN_ONE_PROCESS]


@pytest.mark.parametrize("name", _NAMES)
def test_fault_is_caught_first_by_its_check(name: str) -> None:
    assert tried(InProcess(f"faulty:{name}"), FAULTS[name]) == FAULTS[name].check


@pytest.mark.corpus
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.parametrize("name", _IN_ONE_PROCESS)
def test_fault_is_caught_with_other_seeds(name: str, seed: int) -> None:
    assert tried(InProcess(f"faulty:{name}"), FAULTS[name], seed) == FAULTS[name].check


def test_faults_of_ranks_name_their_way() -> None:
    ranks = [fault for fault in FAULTS.values() if fault.world > 1]
    assert len(ranks) >= 20
    assert all(fits(fault.way, fault.world) for fault in ranks)
    assert all(not FAULTS[name].way for name in _IN_ONE_PROCESS)
    assert FAULTS["part-of-a-head"].place == "llama, fsdp on 4"
    assert FAULTS["heads-permuted"].place == "llama"
    assert [f.name for f in ranks if _row(f) not in _DOCS] == []


def test_every_check_has_a_fault_that_it_catches_first() -> None:
    assert {fault.check for fault in FAULTS.values()} == set(CHECKS) - _OF_THE_HARNESS


def test_the_corpus_is_as_large_as_it_is_said_to_be() -> None:
    kinds = Counter(fault.kind for fault in FAULTS.values())
    assert sum(kinds.values()) >= 60
    assert kinds["per-head Muon"] >= 40
    assert len(CHEATS) >= 12
    assert len(LEGAL) >= 12


def test_every_fault_says_what_is_wrong_and_where_it_was_seen() -> None:
    assert all(fault.origin and fault.summary.endswith(".") for fault in FAULTS.values())
    summaries = Counter(fault.summary for fault in FAULTS.values())
    assert summaries.most_common(1)[0][1] == 1


def test_names_are_unique_and_lead_to_what_was_declared() -> None:
    names = [*FAULTS, *CHEATS, *LEGAL]
    assert len(names) == len(set(names))
    for name, fault in FAULTS.items():
        info = info_of(getattr(faulty, name.replace("-", "_")))
        assert info is not None
        assert (info.dialect, info.recognises) == (fault.dialect, fault.recognises)
        assert info.ways == ((fault.way,) if fault.way else ("ddp",))
        dialect_named(fault.dialect)


def test_every_public_fault_is_planted_or_its_absence_explained() -> None:
    origins = " | ".join(fault.origin for fault in FAULTS.values())
    absent = _DOCS.partition(_NOT_HERE)[2].partition("\n## ")[0]
    assert absent
    sources = [source.strip() for line in _PUBLIC.split("\n") for source in line.split(" | ")]
    missing = [s for s in sources if s and s not in origins and s not in absent]
    assert missing == []


def test_a_finding_names_weight_plan_and_observation() -> None:
    question = Question(only=["cut.rows"])
    found = certify(InProcess("faulty:query-count-for-key-value"), question)
    findings = [f for r in found.models[0].results for f in r.findings]
    # Llama 3 has 32 query and 8 key heads; the miniature 8 and 2 of 8 rows, 16 rows in all.
    assert {(f.planned, f.observed) for f in findings} == {
        ("k 2×8", "8 blocks of 2"),
        ("v 2×8", "8 blocks of 2"),
    }
    assert len(findings) == 4


@pytest.mark.slow
def test_a_row_of_the_matrix_goes_on_behind_the_first_that_fails() -> None:
    found = row(InProcess("faulty:stale-head-count-on-shard"), FAULTS["stale-head-count-on-shard"])
    assert list(found.found) == list(CHECKS)
    # Half heads are cut elsewhere, and point elsewhere.
    assert {"cut.rows", "arithmetic.direction"} <= set(found.failing)


def test_equal_heads_hide_a_permutation_that_others_show() -> None:
    fault = FAULTS["heads-permuted"]
    found = visibility(InProcess(f"faulty:{fault.name}"), fault)
    # The published measurement: 1.4 off for every family, and exactly nothing for equal heads.
    assert found.hidden_in == ["equal heads"]


def test_a_fault_of_the_second_step_is_invisible_in_the_first() -> None:
    fault = FAULTS["nesterov-missing"]
    found = visibility(InProcess(f"faulty:{fault.name}"), fault)
    assert "iid" in found.hidden_in


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_the_property_they_are_named_for(family: str) -> None:
    layout = Layout.heads("q", 4, 6)
    made = of_family(family, (24, 16), layout, 0)
    heads = made.view(4, 6, 16)
    norms = heads.norm(dim=(1, 2))
    values = torch.linalg.svdvals(heads.double())
    holds = {
        "iid": bool(norms.min() > 0.5 * norms.max()),
        "head scales 1e±3": bool(norms.max() > 10 * norms.min()),
        "tiny 1e-6": bool(made.abs().max() < 1e-5),
        "one zero head": int((norms == 0).sum()) == 1,
        "equal heads": bool((heads == heads[0]).all()),
        "rank-2 heads": bool((values[:, 2] < 1e-5 * values[:, 0]).all()),
        "orthonormal heads": bool(((values - 1).abs() < 1e-5).all()),
        "ill-conditioned": bool((values[:, 0] > 1e3 * values[:, -1]).all()),
        "integers |x| ≤ 3": bool((made == made.round()).all() and made.abs().max() <= 3),
    }
    assert holds[family]
    assert made.equal(of_family(family, (24, 16), layout, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_the_floor_is_between_a_large_and_an_absent_fault(kind: str) -> None:
    large = 1.0 if kind == "row boundary" else 0.1
    assert caught_by(KINDS[kind], "float32", large) in KINDS[kind].checks
    assert caught_by(KINDS[kind], "float32", 0.0) == ""


@pytest.mark.slow
def test_the_floor_is_bisected_to_one_decade() -> None:
    found = floor("scale", KINDS["scale"], "float32")
    assert found.smallest is not None
    assert found.largest_missed is not None
    assert found.smallest == pytest.approx(10 * found.largest_missed)
    # Rounding of float32 is 6e-8, and five steps and a norm make some ten of it.
    assert 1e-7 < found.smallest < 1e-3


def test_every_table_has_a_cell_for_every_column() -> None:
    fault = FAULTS["heads-permuted"]
    tables = [
        shown.trial_table([Trial(fault, "cut.placement")]),
        shown.matrix_table([Row(fault, {"cut.placement": "failed"})]),
        shown.check_table(),
        shown.family_table([Visibility(fault, dict.fromkeys(FAMILIES, "visible"))]),
        shown.floor_table([Floor("scale", "float32", "of the update", None, 0.1, "")]),
    ]
    assert all(len(cells) == len(t.columns) for t in tables for cells in t.rows)
    assert [len(t.rows) for t in tables] == [1, 1, len(CHECKS), 1, 1]
    assert "X" in tables[1].rows[0]
    assert "none" in tables[4].rows[0]
