"""Certifying on several ranks: what conforms, what is found, and what ends in one clear error."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from muonsplit.certificate.run import Question, certify
from muonsplit.certificate.statement import statement
from muonsplit.certificate.statement import text as written
from muonsplit.certificate.verdict import Verdict
from muonsplit.checks import CHECKS
from muonsplit.errors import SubjectError, UsageError
from muonsplit.sharding.ways import WAYS, Sharding
from muonsplit.subjects.drive import part
from muonsplit.subjects.limits import MARK
from muonsplit.subjects.ranks import Ranks, driver_for
from tests_cpu.sharded import OF_SHARDS, asked, statuses, wrong

RANKED = Path(__file__).parent / "subjects" / "ranked.py"
dist = pytest.mark.dist


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks("builtin:reference", 2, timeout=120) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks("builtin:reference", 4, timeout=120) as ranks:
        yield ranks


@dist
@pytest.mark.parametrize("way", ["ddp", "tp", "fsdp"])
def test_the_reference_conforms_on_two_ranks_bit_by_bit(two: Ranks, way: str) -> None:
    found = asked(two, "builtin:reference", way)
    assert found.verdict is Verdict.CONFORMS, wrong(found)
    [model] = found.models
    assert model.label == f"llama, {way}"
    # Every weight was compared with the step of one process, and has its bits.
    assert model.alone == {w.weight: 0.0 for w in model.weights}
    skipped = {check for check, status in statuses(found).items() if status == "skipped"}
    expected = {"recognition.nothing", "state.gradient", "inputs.shapes", "sharding.cut_heads"}
    expected |= {"sharding.uneven"} if way == "ddp" else set()
    assert skipped == expected | ({"sharding.mean"} if way == "tp" else set())


@dist
@pytest.mark.parametrize(
    ("model", "way", "cuts"),
    [
        # Two heads of keys on four ranks: each holds half a head.
        ("llama", "fsdp", True),
        ("llama", "tp", True),
        ("llama", "hsdp", False),
        ("deepseek-v2-lite", "tp-fsdp", False),
    ],
)
def test_the_reference_conforms_on_four_ranks_bit_by_bit(
    four: Ranks, model: str, way: str, cuts: bool
) -> None:
    found = asked(four, "builtin:reference", way, model, only=OF_SHARDS)
    assert wrong(found) == []
    said = statuses(found)
    assert set(said.values()) <= {"passed", "skipped"}
    assert said["sharding.cut_heads"] == ("passed" if cuts else "skipped")
    assert said["sharding.invariance"] == "passed"
    assert set(found.models[0].alone.values()) == {0.0}


@dist
def test_torch_under_fsdp_is_right_but_for_bits_and_for_empty_shards(two: Ranks) -> None:
    found = asked(two, "torch", "fsdp", dialect="torch-2.13", only=OF_SHARDS)
    # A matrix of one row on two ranks; torch says that it cannot.
    assert {check for check, *_ in wrong(found)} == {"sharding.uneven"}
    assert {weight for _, weight, _ in wrong(found)} == {"d.up_proj.weight"}
    assert all("RuntimeError" in message for *_, message in wrong(found))
    # DTensor adds up bfloat16 products rank by rank: wide matrices come out with other bits.
    off = [value for value in found.models[0].alone.values() if value]
    assert off
    assert max(off) < 0.05


@dist
def test_two_runs_with_one_seed_are_equal_byte_by_byte(two: Ranks) -> None:
    only = ["cut.rows", "sharding.agreement", "sharding.invariance"]
    one, other = (asked(two, "builtin:reference", "fsdp", only=only) for _ in range(2))
    assert written(statement(one)) == written(statement(other))
    ours = statement(one)["predicate"]["muonsplit"]
    assert (ours["world"], ours["models"][0]["way"]) == (2, "fsdp")


@dist
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dies", "Rank 1: The subject's process ended by itself with exit code 7."),
        ("raises", "Rank 1: The subject raised RuntimeError: not on this rank"),
        ("hangs", "The subject took longer than 10 s for one run and was ended."),
    ],
)
def test_a_rank_that_goes_wrong_is_a_finding_that_names_it(name: str, said: str) -> None:
    began = time.monotonic()
    with Ranks(f"file:{RANKED}:{name}", 2, timeout=10) as ranks:
        marks = [worker._mark for worker in ranks._workers]  # pyright: ignore[reportPrivateUsage]
        found = certify(ranks, Question(ways=["fsdp"], only=["subject.answers"]))
    assert said in wrong(found)[0][2]
    # Far from the day that gloo would wait; machines are slow when they are shared.
    assert time.monotonic() - began < 120
    assert [mark for mark in marks if running(mark)] == []


def running(mark: str) -> list[int]:
    """Processes that carry the mark of a worker."""
    wanted = f"{MARK}={mark}".encode()
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and wanted in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@dist
def test_ranks_that_find_different_subjects_are_an_error() -> None:
    with (
        Ranks(f"file:{RANKED}:differs", 2) as ranks,
        pytest.raises(SubjectError, match=r"Rank 1 finds another subject .* than rank 0: dialect"),
    ):
        certify(ranks, Question(ways=["ddp"]))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def launched(*each: list[str], world: int) -> list[subprocess.CompletedProcess[str]]:
    """Runs a command a rank, as a launcher does."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "muonsplit", *arguments],
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, arguments in enumerate(each)
    ]
    try:
        ends = [p.communicate(timeout=200) for p in processes]
    finally:
        for p in processes:
            p.send_signal(signal.SIGKILL)
    return [
        subprocess.CompletedProcess(p.args, p.returncode, *end)
        for p, end in zip(processes, ends, strict=True)
    ]


@dist
def test_ranks_of_a_launcher_make_one_report(tmp_path: Path) -> None:
    command = ["certify", "builtin:reference", "--model", "llama", "--sharding", "fsdp"]
    command += ["--seed", "1", "--only", "sharding.invariance", "--report", str(tmp_path)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*launcher, "--master-port", str(free_port()), "-m", "muonsplit", *command],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.stdout.count("builtin:reference under") == 1
    made = json.loads((tmp_path / "certificate.json").read_text())["predicate"]["muonsplit"]
    assert made["world"] == 2
    assert made["summary"][0]["failed"] == made["summary"][0]["undecided"] == 0
    # Not every check was asked for: inconclusive, which rank 0 says and the launcher passes on.
    assert "exitcode  : 2" in run.stderr


@dist
def test_ranks_that_were_asked_for_different_things_all_say_so() -> None:
    base = ["certify", "builtin:reference", "--model", "llama", "--sharding", "ddp", "--seed"]
    ends = launched([*base, "1"], [*base, "2"], world=2)
    assert [end.returncode for end in ends] == [64, 64]
    for end in ends:
        assert "The ranks are not alike: the command is" in end.stderr
        assert "seed=2" in end.stderr
        assert "Traceback" not in end.stderr


@dist
def test_a_number_of_ranks_that_no_run_can_have_is_said_on_every_rank() -> None:
    command = ["certify", "builtin:reference", "--sharding", "ddp"]
    ends = launched(command, command, command, world=3)
    assert [end.returncode for end in ends] == [64, 64, 64]
    assert all("a power of two" in end.stderr for end in ends)


@pytest.mark.parametrize(
    ("way", "world", "said"),
    [
        ("hsdp", 2, "hsdp needs a mesh of 4 ranks or more, got 2"),
        ("tp-fsdp", 2, "tp-fsdp needs a mesh of 4 ranks"),
        ("fsdp", 3, "a power of two up to 64, got 3"),
        ("fsdp", 0, "got 0"),
        ("fsdp", 1 << 20, "got 1048576"),
        ("zero", 2, "There is no way of sharding 'zero'"),
    ],
)
def test_a_mesh_that_does_not_fit_is_an_error(way: str, world: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Sharding(way, world)


def test_ranks_that_cannot_be_are_errors() -> None:
    with pytest.raises(UsageError, match="got 6"):
        driver_for("builtin:reference", 6)
    with pytest.raises(UsageError, match="2 ranks do not run in one process"):
        driver_for("builtin:reference", 2, in_process=True)


def test_ways_are_of_several_ranks() -> None:
    with (
        driver_for("builtin:reference", in_process=True) as driver,
        pytest.raises(UsageError, match="fsdp divides a model among ranks, and there is one"),
    ):
        certify(driver, Question(models=["llama"], ways=["fsdp"]))


@pytest.mark.parametrize("shape", [(7,), (6, 5), (16, 64), (3, 4, 8)])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_parts_of_a_gradient_have_it_as_their_mean_to_the_last_bit(
    shape: tuple[int, ...], parts: int
) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    each = [part(whole, number, parts) for number in range(parts)]
    assert torch.equal(sum(each[1:], each[0]) / parts, whole)
    # Every element is one part's, and no part is the gradient.
    assert torch.equal(sum(p != 0 for p in each), torch.ones(shape, dtype=torch.int64))
    if len(shape) > 1 and min(shape[-2:]) >= parts:
        assert all((p.flatten(0, -2) != 0).any(dim=1).all() for p in each)
        assert all((p != 0).flatten(0, -2).any(dim=0).all() for p in each)


def test_an_infinite_gradient_stays_one_in_its_part_alone() -> None:
    whole = torch.ones(4, 4)
    whole[1, 2] = torch.inf
    first, second = (part(whole, number, 2) for number in range(2))
    assert torch.isinf(second[1, 2])
    assert torch.isfinite(first).all()


def test_every_check_of_shards_is_asked() -> None:
    assert set(OF_SHARDS) <= set(CHECKS)
    assert {c for c in CHECKS if c.startswith("sharding.")} <= set(OF_SHARDS)
    assert set(WAYS) == {"ddp", "tp", "fsdp", "hsdp", "tp-fsdp", "engine"}
