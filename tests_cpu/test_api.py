"""Certifying from Python and from pytest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import muonsplit
from muonsplit.api import NonconformanceError, Session, spec_of
from muonsplit.certificate.verdict import Verdict
from muonsplit.errors import SubjectError, UsageError
from tests_cpu.subjects import good

BOUNDARY = "faulty:boundary-off-by-one"


def asked(**more: object) -> dict[str, object]:
    return {"models": ["llama"], "in_process": True, "only": ["cut.rows"], **more}


def test_a_factory_is_certified_in_its_own_process() -> None:
    found = muonsplit.certify(good.build, models=["llama"])
    assert found.verdict is Verdict.CONFORMS
    assert found.isolated
    assert found.subject.endswith("good.py:build")


def test_what_does_not_conform_raises_with_the_cause_first() -> None:
    with pytest.raises(NonconformanceError, match=r"^llama: cut.rows: model\.layers\.0") as raised:
        muonsplit.certify(BOUNDARY, **asked())
    assert raised.value.certificate.verdict is Verdict.VIOLATES


def test_or_is_returned() -> None:
    assert muonsplit.certify(BOUNDARY, **asked(on_fail="return")).verdict is Verdict.VIOLATES


def test_what_is_expected_to_fail_does_not_raise_and_changes_no_verdict() -> None:
    found = muonsplit.certify(BOUNDARY, **asked(expected_failures={"cut.rows": "issue 12"}))
    assert found.verdict is Verdict.VIOLATES


def test_what_is_expected_to_fail_and_passes_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"cut\.rows was expected to fail"):
        muonsplit.certify("builtin:reference", **asked(expected_failures={"cut.rows": "old"}))


def test_an_expectation_of_no_check_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"cut\.roes"):
        muonsplit.certify("builtin:reference", **asked(expected_failures={"cut.roes": "typo"}))


def test_inconclusive_raises_too() -> None:
    with pytest.raises(NonconformanceError, match=r"subject\.repeatable is undecided"):
        muonsplit.certify("faulty:rounded-at-random", **asked())


def test_a_nested_factory_is_refused() -> None:
    @muonsplit.subject(dialect="jordan", recognises=True)
    def build(model: object) -> None: ...

    with pytest.raises(UsageError, match="top level"):
        spec_of(build)


def test_threads_are_as_they_were() -> None:
    import torch

    before = torch.get_num_threads()
    muonsplit.certify("builtin:reference", **asked())
    assert torch.get_num_threads() == before


def test_reports_are_written(tmp_path: Path) -> None:
    muonsplit.certify("builtin:reference", **asked(report=tmp_path / "out"))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"certificate.json", "junit.xml", "report.md", "report.html"}


def test_smoke_asks_on_the_first_model_only() -> None:
    session = Session(subject="builtin:reference", profile="smoke")
    assert {model for model, _ in session.asked()} == {"llama"}


@muonsplit.parametrize_with_checks(
    "builtin:reference", models=["llama"], in_process=True, only=["cut.rows", "cut.columns"]
)
def test_with_checks(check) -> None:  # type: ignore[no-untyped-def]
    check()


def inner(folder: Path, *options: str, test: str = "") -> tuple[int, str]:
    """Runs pytest in a folder of its own."""
    (folder / "test_inner.py").write_text(test or "def test_nothing(): ...\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return ran.returncode, ran.stdout + ran.stderr


def test_without_its_option_the_plugin_imports_nothing(tmp_path: Path) -> None:
    test = """
import sys

def test_nothing():
    assert "muonsplit.pytest_plugin" in sys.modules
    assert not {"torch", "muonsplit.api", "muonsplit.errors"} & set(sys.modules)
"""
    code, said = inner(tmp_path, "--strict-markers", test=test)
    assert code == 0, said


@pytest.mark.slow
def test_the_plugin_adds_a_test_for_each_check(tmp_path: Path) -> None:
    options = (f"--muonsplit={BOUNDARY}", "--muonsplit-model=llama", "--muonsplit-report=out")
    code, said = inner(tmp_path, *options)
    assert code == 1, said
    assert f"muonsplit[{BOUNDARY}-llama-cut.rows]" in said
    assert "llama: cut.rows: model.layers.0.self_attn.q_proj.weight" in said
    assert "Traceback" not in said
    assert "INTERNALERROR" not in said
    assert (tmp_path / "out" / "faulty-boundary-off-by-one" / "certificate.json").is_file()


@pytest.mark.slow
def test_what_is_expected_to_fail_is_an_xfail(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmuonsplit_expected_failures =\n    cut.rows: known\n"
    )
    options = (f"--muonsplit={BOUNDARY}", "--muonsplit-model=llama")
    code, said = inner(tmp_path, *options)
    assert code == 0, said
    assert "1 xfailed" in said


@pytest.mark.parametrize(
    ("option", "said"),
    [("--muonsplit=nothing-of-that-name", "names no subject"), ("--muonsplit=torch:", "colon")],
)
def test_a_wrong_subject_is_an_error_of_usage(tmp_path: Path, option: str, said: str) -> None:
    code, found = inner(tmp_path, option, "--muonsplit-model=llama")
    assert code not in (0, 1), found
    assert said in found
    assert "INTERNALERROR" not in found


def test_a_subject_that_is_none_is_an_error_here_too() -> None:
    with pytest.raises(SubjectError, match="names no subject"):
        muonsplit.certify("nothing-of-that-name", models=["llama"])
