"""No cheat gets a certificate: each is run as anybody's subject is, in a process of its own."""

import pytest

from muonsplit.certificate.run import Question, certify
from muonsplit.certificate.verdict import Verdict
from muonsplit.errors import SubjectError
from muonsplit.faulty import CHEATS
from muonsplit.faulty.trial import first_to_fail
from muonsplit.subjects.process import InProcess, Worker

# The first of them are enough, and all of them are not slower to deceive than some.
_ASKED = ("routing.muon", "recognition.split", "cut.rows")
_PATIENCE_S = 10.0


def _caught(spec: str) -> str:
    with Worker(spec, timeout=_PATIENCE_S) as worker:
        found = certify(worker, Question(models=["llama"], only=_ASKED))
    assert found.verdict is not Verdict.CONFORMS
    return first_to_fail(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATS)
def test_cheat_is_defeated(name: str) -> None:
    assert _caught(f"faulty:{name}")


@pytest.mark.slow
def test_what_defeats_cheats_accuses_nobody_else() -> None:
    assert _caught("builtin:reference") == ""


@pytest.mark.parametrize("name", CHEATS)
def test_cheat_is_kept_out_of_this_process(name: str) -> None:
    with pytest.raises(SubjectError, match="would damage this process"):
        certify(InProcess(f"faulty:{name}"), Question(only=["routing.muon"]))
