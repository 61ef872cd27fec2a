"""Released DeepSpeed 0.19.8, by our own observation: what is right and what is silently wrong."""

import pytest

from muonsplit.certificate.run import Certificate, Question, certify
from muonsplit.certificate.verdict import Verdict
from muonsplit.errors import SubjectError
from muonsplit.subjects.process import Worker

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.downstream


def certified(spec: str, *models: str, dialect: str | None = None) -> Certificate:
    with Worker(spec, timeout=300) as worker:
        return certify(worker, Question(models=models, dialect=dialect))


def findings(certificate: Certificate) -> list[tuple[str, str, str, str]]:
    return [
        (result.check, found.weight, found.planned, found.observed)
        for model in certificate.models
        for result in model.results
        for found in result.findings
    ]


@pytest.mark.parametrize("spec", ["deepspeed", "deepspeed:stage=1", "deepspeed:stage=2"])
def test_per_head_where_the_tag_survives(spec: str) -> None:
    found = certified(spec)
    assert [m.model for m in found.models] == ["llama", "deepseek-v2-lite"]
    assert found.verdict is Verdict.CONFORMS, findings(found)


def test_stage_3_advances_momentum_in_a_step_that_it_skips() -> None:
    # In float32 `step` finds the norm invalid only after every Muon update has been made.
    found = certified("deepspeed:stage=3")
    assert {check for check, *_ in findings(found)} == {"state.nonfinite"}
    struck = {m.weights[0].weight for m in found.models}
    others = {w.weight for m in found.models for w in m.weights} - struck
    assert others <= {weight for _, weight, *_ in findings(found)}


def test_the_standard_iteration_speaks_its_own_dialect() -> None:
    spec = "deepspeed:ns_method=standard"
    found = certified(spec, "llama", dialect="deepspeed-0.19.8-standard")
    assert found.verdict is Verdict.CONFORMS, findings(found)


def test_stage_0_drops_every_tag() -> None:
    found = certified("deepspeed:stage=0", "llama")
    assert found.verdict is Verdict.VIOLATES
    assert len(findings(found)) == 6
    assert {(check, observed) for check, _, _, observed in findings(found)} == {
        ("recognition.split", "whole")
    }


def test_alignment_padding_drops_every_tag() -> None:
    # Weights of 45 × 30 elements are no multiple of 16 bytes, so the flat partition is padded.
    spec = "deepspeed:stage=1,parameter_alignment=true"
    found = certified(spec, "llama-odd")
    assert {check for check, *_ in findings(found)} == {"recognition.split"}
    assert certified("deepspeed:stage=1", "llama-odd").verdict is Verdict.CONFORMS
    assert certified(spec, "llama").verdict is Verdict.CONFORMS


def test_the_indexer_is_split_as_if_it_were_attention() -> None:
    found = certified("deepspeed:stage=1", "glm-5.2")
    # The miniature's indexer has 2 heads of 32 rows; 4 × 16 is num_attention_heads × head_dim.
    assert {
        (check, weight.split(".")[-2], planned, observed)
        for check, weight, planned, observed in findings(found)
    } == {("recognition.whole", "wq_b", "whole", "4 blocks of 16")}
    assert len(findings(found)) == 4


def test_clipping_couples_all_weights_and_shrinks_them() -> None:
    found = certified("deepspeed:stage=1,gradient_clipping=1.0", "llama")
    checks = [check for check, *_ in findings(found)]
    assert checks[0] == "independence.weights"
    assert set(checks[1:]) == {"arithmetic.scale"}
    # What clipping hides from a comparison of bits is still seen: the cut is right.
    assert all(w.observed == w.planned for w in found.models[0].weights)


@pytest.mark.parametrize(
    ("options", "said"),
    [("stage=4", "stage"), ("stag=1", "stag"), ("parameter_alignment=true", "stage")],
)
def test_options_that_do_not_exist_are_errors(options: str, said: str) -> None:
    with pytest.raises(SubjectError, match=said):
        certified(f"deepspeed:{options}", "llama")
