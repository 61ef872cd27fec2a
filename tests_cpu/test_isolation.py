"""Subjects that do harm: each ends in a finding, and nothing of it is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muonsplit.certificate.run import Question, certify
from muonsplit.certificate.verdict import Verdict
from muonsplit.subjects.limits import MARK, Tail, end_all
from muonsplit.subjects.process import Worker
from tests_cpu.certificates import first_asked

BAD = Path(__file__).parent / "subjects" / "bad.py"
pytestmark = pytest.mark.slow


def first_finding(name: str, *, timeout: float = 60.0, memory: float = 8.0) -> tuple[str, str]:
    with Worker(f"file:{BAD}:{name}", timeout, memory) as worker:
        found = certify(worker, Question(models=["llama"]))
    assert found.verdict is Verdict.VIOLATES
    first = first_asked(found)
    assert first.check == "subject.answers"
    return first.findings[0].message, first.findings[0].tail


def alive(process: int) -> bool:
    """Whether a process runs; one that has ended and waits to be counted does not."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "State:\tZ" not in status


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("forks", "took longer than 3 s"),
        ("forks_and_exits", "exit code 3"),
        ("ignores_sigterm", "took longer than 3 s"),
    ],
)
def test_nothing_it_started_is_left(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = tmp_path / "numbers"
    monkeypatch.setenv("TOLD_NUMBERS", str(numbers))
    message, _ = first_finding(name, timeout=3)
    assert said in message
    told = [int(line) for line in numbers.read_text().split()]
    assert told
    assert [process for process in told if alive(process)] == []


def test_what_is_ended_is_gone_though_it_takes_time_to_die() -> None:
    mark = "mark-of-a-test"
    code = "b = bytearray(1 << 30); b[::4096] = b'1' * (1 << 18); print(flush=True); input()"
    big = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, MARK: mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert big.stdout is not None
    assert big.stdout.readline()
    end_all(mark)
    assert not alive(big.pid)
    assert big.wait() == -signal.SIGKILL


def test_a_gibibyte_of_output_is_not_kept() -> None:
    message, tail = first_finding("prints", timeout=120)
    assert "RuntimeError: hoarse" in message
    assert len(tail) <= 8192


def test_its_own_folder_is_all_it_can_delete_by_accident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_text("yes")
    monkeypatch.chdir(tmp_path)
    with Worker(f"file:{BAD}:deletes_its_folder") as worker:
        found = certify(worker, Question(models=["llama"], only=["routing.muon"]))
    assert (tmp_path / "kept").read_text() == "yes"
    # It answered after all, and is judged by what it did: it is plain SGD.
    statuses = {r.check: r.status for r in found.models[0].results}
    assert statuses["subject.answers"] == "passed"
    assert statuses["routing.muon"] == "failed"


def test_memory_has_a_limit() -> None:
    message, _ = first_finding("eats", memory=1.0)
    assert "memory" in message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("answers_endlessly", "at most"),
        ("answers_nonsense", "something else"),
        ("answers_deeply", "something else"),
        ("answers_something", "something else"),
    ],
)
def test_a_forged_answer_is_a_finding(name: str, said: str) -> None:
    message, _ = first_finding(name, timeout=20)
    assert said in message


def test_files_and_modules_are_found_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_from_here.py").write_text((BAD.parent / "good.py").read_text())
    monkeypatch.chdir(tmp_path)
    for spec in ("file:mine_from_here.py:build", "mine_from_here:build"):
        with Worker(spec) as worker:
            assert worker.describe()["dialect"] == "moonlight"


def test_the_tail_is_what_was_written_last() -> None:
    tail = Tail()
    os.write(tail.writing, b"first\n" * 5000)
    os.write(tail.writing, b"last\n")
    tail.opened()
    time.sleep(0.05)
    lines = tail.lines(2)
    assert lines == "first\nlast"
