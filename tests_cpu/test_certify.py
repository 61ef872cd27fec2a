"""Certifying: verdicts on sound subjects, on torch's own, and on subjects that misbehave."""

import json
from pathlib import Path

import pytest

from muonsplit.certificate.run import Certificate, Question, certify
from muonsplit.certificate.statement import canonical, statement, write
from muonsplit.certificate.verdict import CheckResult, Verdict, verdict_of
from muonsplit.checks import CHECKS
from muonsplit.dialect import DIALECTS
from muonsplit.errors import SubjectError, UsageError
from muonsplit.faulty.trial import first_to_fail
from muonsplit.subjects.process import InProcess, Worker
from tests_cpu.certificates import first_asked

SUBJECTS = Path(__file__).parent / "subjects"


def failed(certificate: Certificate) -> set[str]:
    return {r.check for m in certificate.models for r in m.results if r.status == "failed"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "seed"),
    [
        ("glm-5.2", 0),
        ("glm-5.2-0.8b", 1),
        ("kimi-k3", 0),
        ("kimi-k3-0.40b", 1),
        ("deepseek-v2-lite", 0),
        ("deepseek-v2-lite", 1),
    ],
)
def test_reference_conforms(model: str, seed: int) -> None:
    found = certify(InProcess("builtin:reference"), Question(models=[model], seed=seed))
    assert found.verdict is Verdict.CONFORMS, failed(found)
    assert found.models[0].split > 0
    assert all(w.observed == w.planned for w in found.models[0].weights)


@pytest.mark.parametrize("model", ["llama", "llama-odd", "gpt-neox-20b", "pythia-1b"])
def test_reference_conforms_quickly(model: str) -> None:
    found = certify(InProcess("builtin:reference"), Question(models=[model]))
    assert found.verdict is Verdict.CONFORMS, failed(found)


def test_every_check_runs_on_a_grouped_query_model() -> None:
    found = certify(InProcess("builtin:reference"), Question(models=["llama"]))
    assert [r.check for r in found.models[0].results] == list(CHECKS)
    skipped = {r.check for r in found.models[0].results if r.status != "passed"}
    # It is told the heads, its dialect says that gradients may be overwritten, and it is alone.
    sharded = {check for check in CHECKS if check.startswith("sharding.")}
    assert skipped == {"recognition.nothing", "state.gradient", *sharded}


def test_torch_per_head_violates_by_not_splitting() -> None:
    found = certify(InProcess("torch"), Question(models=["llama"]))
    assert found.verdict is Verdict.VIOLATES
    assert failed(found) == {"recognition.split"}
    findings = [f for r in found.models[0].results for f in r.findings]
    assert len(findings) == 6  # q, k and v of two layers
    assert all("whole matrix observed where" in f.message for f in findings)
    assert all(
        f.numbers["off if whole matrix"] < 0.1 < f.numbers["off if as planned"] for f in findings
    )


def test_torch_without_nesterov_normalises_its_own_bfloat16_buffer() -> None:
    # In 2.13 `bfloat16()` of a bfloat16 buffer is the buffer, and is divided in place.
    question = Question(models=["llama"], dialect="torch-2.13:nesterov=false")
    found = certify(InProcess("torch:nesterov=false"), question)
    assert failed(found) == {"inputs.dtype"}
    assert {f.weight for r in found.models[0].results for f in r.findings} == {
        w.weight for w in found.models[0].weights
    }


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_torch_under_its_own_dialect_conforms(seed: int) -> None:
    question = Question(models=["llama", "deepseek-v2-lite"], dialect="torch-2.13", seed=seed)
    assert certify(InProcess("torch"), question).verdict is Verdict.CONFORMS


@pytest.mark.slow
def test_torch_conforms_on_weights_with_few_columns() -> None:
    # bfloat16 on 448 × 8 leaves some rows bit-equal by rounding: they are not blocks of their own.
    found = certify(InProcess("torch"), Question(models=["glm-5.2"], dialect="torch-2.13"))
    assert found.verdict is Verdict.CONFORMS, failed(found)


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_is_spoken_without_being_accused(name: str) -> None:
    factory = name.replace("-", "_").replace(".", "_")
    driver = InProcess(f"file:{SUBJECTS / 'dialects.py'}:{factory}")
    found = certify(driver, Question(models=["llama"]))
    # It casts to float16 before it normalises, as optimuon does, and overflows on large gradients.
    overflows = name == "optimuon-0.1.1"
    assert failed(found) == ({"inputs.scale"} if overflows else set())
    assert found.verdict is (Verdict.VIOLATES if overflows else Verdict.CONFORMS)


def test_another_arithmetic_is_not_the_declared_one() -> None:
    found = certify(
        InProcess("builtin:reference"), Question(models=["llama"], dialect="moonlight+per-head")
    )
    assert failed(found) == {"arithmetic.scale"}


def test_own_subject_in_its_own_process_conforms_to_its_own_dialect() -> None:
    with Worker(f"file:{SUBJECTS / 'good.py'}:build") as worker:
        found = certify(worker, Question(models=["llama"]))
        assert found.verdict is Verdict.CONFORMS, failed(found)
        # Read from its param groups: it takes no hyperparameters of ours.
        assert found.described["takes"] == ["layouts", "model"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "RuntimeError: no heads here"),
        ("hangs", "took longer than 3 s"),
        ("exits", "exit code 7"),
        ("reshapes", "it was (80, 64)"),
        ("poisons", "NaN or infinity"),
        ("drops", "no parameter model.embed_tokens.weight"),
    ],
)
def test_misbehaving_subject_is_a_finding(name: str, said: str) -> None:
    with Worker(f"file:{SUBJECTS / 'bad.py'}:{name}", timeout=3) as worker:
        found = certify(worker, Question(models=["llama"]))
    assert found.verdict is Verdict.VIOLATES
    first = first_asked(found)
    assert first.check == "subject.answers"
    assert said in first.findings[0].message
    assert [r.status for r in found.models[0].results if r is not first] == ["skipped"] * (
        len(CHECKS) - 1
    )


def test_the_last_lines_of_a_dead_subject_are_kept() -> None:
    with Worker(f"file:{SUBJECTS / 'bad.py'}:exits") as worker:
        found = certify(worker, Question(models=["llama"]))
    assert "goodbye" in first_asked(found).findings[0].tail


def test_plain_sgd_is_not_muon() -> None:
    found = certify(InProcess(f"file:{SUBJECTS / 'bad.py'}:sgd"), Question(models=["llama"]))
    assert failed(found) == {"routing.muon"}


def test_the_example_of_the_docs_conforms(tmp_path: Path) -> None:
    text = (SUBJECTS.parent.parent / "docs" / "subject.md").read_text()
    (tmp_path / "mine.py").write_text(text.split("```python\n")[1].split("```")[0])
    found = certify(InProcess(f"file:{tmp_path / 'mine.py'}:build"), Question())
    assert found.verdict is Verdict.CONFORMS, failed(found)


def subtle(name: str, *, dialect: str | None = None) -> Certificate:
    question = Question(models=["llama"], dialect=dialect)
    return certify(InProcess(f"file:{SUBJECTS / 'subtle.py'}:{name}"), question)


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("whole_when_decaying", "state.decay"),
        ("decay_after_update", "state.decay"),
        ("decay_once", "state.decay"),
        ("pairs_share_a_norm", "independence.heads"),
        ("value_by_query", "independence.weights"),
        ("one_head_turned_another_large", "independence.copies"),
    ],
)
def test_subtle_fault_is_caught(name: str, check: str) -> None:
    assert first_to_fail(subtle(name)) == check


def test_size_is_judged_more_sharply_than_direction_in_half_precision() -> None:
    assert failed(subtle("five_percent_too_large", dialect="moonlight+per-head")) >= {
        "arithmetic.scale"
    }


@pytest.mark.parametrize("name", ["decays_of_its_own", "schedules_itself", "rate_in_a_tensor"])
def test_unusual_but_right_is_not_accused(name: str) -> None:
    found = subtle(name)
    assert found.verdict is Verdict.CONFORMS, failed(found)


@pytest.mark.parametrize(
    ("name", "check"),
    [("hides_its_rate", "arithmetic.scale"), ("half_precision", "subject.answers")],
)
def test_what_cannot_be_judged_is_inconclusive(name: str, check: str) -> None:
    found = subtle(name)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert first_to_fail(found) == check
    assert failed(found) == set()


@pytest.mark.parametrize("model", ["transformers:mamba2"])
def test_a_model_without_recognised_heads_is_inconclusive(model: str) -> None:
    found = certify(InProcess("builtin:reference"), Question(models=[model]))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert first_to_fail(found) == "model.recognised"


def test_a_partial_run_does_not_conform() -> None:
    question = Question(models=["llama"], only=["cut.rows"])
    found = certify(InProcess("builtin:reference"), question)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.models[0].verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("spec", ["builtin:reference", "mine:build", "file:torch.py:build"])
def test_a_file_in_the_current_folder_shadows_no_library(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch.py", "json.py", "mine.py"):
        (tmp_path / name).write_text((SUBJECTS / "good.py").read_text())
    monkeypatch.chdir(tmp_path)
    with Worker(spec) as worker:
        assert certify(worker, Question(models=["llama"])).verdict is Verdict.CONFORMS


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nosuch.module:build", "cannot be imported"),
        ("nosuch", "names no subject"),
        ("builtin:nosuch", "has no factory"),
        ("file:/nowhere/x.py:build", "does not exist"),
        (f"file:{SUBJECTS / 'bad.py'}:undeclared", "declares nothing"),
        ("deepspeed:stage", "key=value"),
        ("torch:lr=1", "takes no option 'lr'"),
        ("torch:", "stops at its colon"),
        ("faulty:", "stops at its colon"),
        ("file:x.py", "names no factory"),
        (f"file:{SUBJECTS / 'subtle.py'}:contradicts_itself", "find the heads itself"),
    ],
)
def test_subject_that_cannot_be_connected_is_an_error(spec: str, said: str) -> None:
    with pytest.raises(SubjectError, match=said) as error:
        certify(InProcess(spec), Question())
    assert error.value.exit_code >= 64


def test_unknown_check_dialect_and_model_are_errors() -> None:
    for question in (Question(only=["no"]), Question(dialect="no"), Question(models=["no"])):
        with pytest.raises(UsageError):
            certify(InProcess("builtin:reference"), question)


def test_only_runs_the_gates_and_what_was_asked() -> None:
    found = certify(InProcess("builtin:reference"), Question(models=["llama"], only=["cut.rows"]))
    assert found.checks == ("subject.answers", "subject.repeatable", "model.miniature", "cut.rows")


def test_verdicts() -> None:
    def result(status: str) -> CheckResult:
        return CheckResult("x", status)  # type: ignore[arg-type]

    assert verdict_of([result("passed"), result("skipped")]) is Verdict.CONFORMS
    assert verdict_of([result("passed"), result("undecided")]) is Verdict.INCONCLUSIVE
    assert verdict_of([result("undecided"), result("failed")]) is Verdict.VIOLATES
    assert verdict_of([result("skipped")]) is Verdict.INCONCLUSIVE
    assert verdict_of([]) is Verdict.INCONCLUSIVE


def test_two_runs_are_equal_byte_by_byte(tmp_path: Path) -> None:
    texts = []
    for run in ("one", "two"):
        with Worker("torch") as worker:
            certificate = certify(worker, Question(models=["llama"]))
        texts.append(write(certificate, tmp_path / run).read_bytes())
    assert texts[0] == texts[1]


def test_statement_is_an_in_toto_test_result(tmp_path: Path) -> None:
    certificate = certify(InProcess("torch"), Question(models=["llama"]))
    made = statement(certificate)
    assert made["_type"] == "https://in-toto.io/Statement/v1"
    assert made["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert made["predicate"]["result"] == "FAILED"
    assert made["predicate"]["failedTests"] == ["llama/recognition.split"]
    assert len(made["subject"][0]["digest"]["sha256"]) == 64
    path = write(certificate, tmp_path)
    assert path.read_text() == canonical(made) + "\n"
    assert json.loads(path.read_text()) == json.loads(json.dumps(made))
    assert [p.name for p in tmp_path.iterdir()] == ["certificate.json"]
