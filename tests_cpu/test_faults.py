"""Each planted fault is caught first by the check it names, and no check is without a fault."""

import pytest

from muonsplit.certificate.run import Question, certify
from muonsplit.certificate.verdict import Verdict
from muonsplit.checks import CHECKS
from muonsplit.faulty import FAULTS
from muonsplit.faulty.trial import first_to_fail
from muonsplit.subjects.process import InProcess

# Nothing can plant these: they judge the harness's own model.
_OF_THE_HARNESS = {"model.miniature", "model.recognised"}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seed", [0, 7])
def test_fault_is_caught_first_by_its_check(name: str, seed: int) -> None:
    found = certify(InProcess(f"faulty:{name}"), Question(seed=seed))
    assert first_to_fail(found) == FAULTS[name].check
    assert found.verdict is not Verdict.CONFORMS


def test_every_check_has_a_fault_that_it_catches_first() -> None:
    assert {fault.check for fault in FAULTS.values()} == set(CHECKS) - _OF_THE_HARNESS


def test_the_corpus_has_the_public_faults_of_per_head_muon() -> None:
    assert sum(fault.kind == "per-head Muon" for fault in FAULTS.values()) == 12
    assert all(fault.origin and fault.summary.endswith(".") for fault in FAULTS.values())


def test_a_finding_names_weight_plan_and_observation() -> None:
    found = certify(InProcess("faulty:query-count-for-key-value"), Question())
    findings = [f for r in found.models[0].results for f in r.findings]
    # Llama 3 has 32 query and 8 key heads; the miniature 8 and 2 of 8 rows, 16 rows in all.
    assert {(f.planned, f.observed) for f in findings} == {
        ("k 2×8", "8 blocks of 2"),
        ("v 2×8", "8 blocks of 2"),
    }
    assert len(findings) == 4
