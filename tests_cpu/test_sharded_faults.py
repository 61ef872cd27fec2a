"""Each planted fault of sharding is caught first by the check it names; what is right conforms."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from muonsplit.certificate.run import Certificate, Question, certify
from muonsplit.certificate.verdict import Verdict
from muonsplit.faulty import FAULTS, trial
from muonsplit.faulty.trial import tried
from muonsplit.subjects.process import Driver
from muonsplit.subjects.ranks import Ranks

pytestmark = pytest.mark.dist

# Seconds that a run may take; it is what one hang costs, and far more than a step.
_PATIENCE = 20
# Checks that run behind all others, so that all others are asked first.
_LATE = ("sharding.uneven", "sharding.invariance", "sharding.resume")

Subject = Callable[[str, int], Driver]


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    """Gives the driver of a subject; ranks are started once for each number of them."""
    with ExitStack() as stack:
        drivers: dict[int, Ranks] = {}

        def of(name: str, world: int) -> Driver:
            if world not in drivers:
                drivers[world] = stack.enter_context(Ranks("faulty:none", world, _PATIENCE))
            drivers[world].spec = f"faulty:{name}"
            return drivers[world]

        yield of


def _named(names: list[str]) -> list[object]:
    late = [FAULTS[name].check in _LATE for name in names]
    return [
        pytest.param(n, marks=pytest.mark.slow) if slow else n
        for n, slow in zip(names, late, strict=True)
    ]


@pytest.mark.parametrize("name", _named([n for n, fault in FAULTS.items() if fault.world > 1]))
def test_fault_is_caught_first_by_its_check(subject: Subject, name: str) -> None:
    fault = FAULTS[name]
    assert tried(subject(name, fault.world), fault) == fault.check


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world", "way"),
    [
        ("gathers-whole-weights", 2, "tp"),
        ("gathers-whole-weights", 2, "fsdp"),
        ("reduces-by-itself", 2, "engine"),
        ("refuses-cut-heads", 4, "fsdp"),
    ],
)
def test_what_the_faults_are_planted_in_conforms(
    subject: Subject, name: str, world: int, way: str
) -> None:
    found = certify(subject(name, world), Question(ways=[way]))
    accused = {
        r.check: [f.message for f in r.findings] or r.reason
        for r in found.models[0].results
        if r.status in ("failed", "undecided")
    }
    assert found.verdict is Verdict.CONFORMS, accused


@pytest.mark.slow
def test_what_heads_are_cut_in_gathers_them(subject: Subject) -> None:
    # On four ranks every check takes a minute; these are what the faults planted there break.
    only = ["sharding.cut_heads", "recognition.split", "cut.rows", "arithmetic.direction"]
    found = certify(subject("gathers-whole-weights", 4), Question(ways=["fsdp"], only=only))
    assert {r.check: r.status for r in found.models[0].results if r.check in only} == dict.fromkeys(
        only, "passed"
    )


def _asked(subject: Subject, name: str) -> Certificate:
    fault = FAULTS[name]
    question = Question(ways=[fault.way], only=[fault.check])
    return certify(subject(name, fault.world), question)


@pytest.mark.parametrize(
    ("name", "observed"),
    [
        # Keys and values have 2 heads of 8 rows, of which each of 4 ranks holds 4.
        ("part-of-a-head", "each rank's part"),
        ("split-dropped-in-silence", "the whole matrix"),
        ("heads-gathered-where-dropped", "whole heads"),
    ],
)
def test_a_cut_head_is_named_with_what_explains_it(
    subject: Subject, name: str, observed: str
) -> None:
    findings = [f for r in _asked(subject, name).models[0].results for f in r.findings]
    weights = {f"model.layers.{i}.self_attn.{kv}_proj.weight" for i in (0, 1) for kv in "kv"}
    assert {f.weight for f in findings} == weights
    assert {f.observed for f in findings} == {observed}


def test_a_parameter_that_muon_does_not_train_is_named_too(subject: Subject) -> None:
    findings = [
        f for r in _asked(subject, "norms-not-reduced").models[0].results for f in r.findings
    ]
    assert "model.norm.weight" in {f.weight for f in findings}
    assert not any("proj" in f.weight for f in findings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("empty-rank-skips-a-collective", f"took longer than {_PATIENCE} s"),
        ("crash-on-an-empty-shard", "Rank 1: The subject raised"),
    ],
)
def test_a_weight_with_fewer_rows_than_ranks_is_named_by_its_shape(
    subject: Subject, name: str, said: str
) -> None:
    findings = [f for r in _asked(subject, name).models[0].results for f in r.findings]
    assert [f.weight for f in findings] == ["d.up_proj.weight"]
    # One row on two ranks: the second holds nothing.
    assert findings[0].message.startswith("1 × 10 on 2 ranks: ")
    assert said in findings[0].message


@pytest.mark.slow
def test_a_momentum_that_is_lost_is_named_and_so_is_the_way_it_was_lost(subject: Subject) -> None:
    found = _asked(subject, "momentum-of-the-first-rank")
    findings = [f for r in found.models[0].results for f in r.findings]
    assert findings
    assert all("saved on all ranks, resumed on one" in f.message for f in findings)


@pytest.mark.slow
def test_the_corpus_is_tried_on_as_many_ranks_as_each_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("stale-head-count-on-shard", "slice-reduced", "updates-averaged")
    monkeypatch.setattr(trial, "FAULTS", {name: FAULTS[name] for name in names})
    found = list(trial.trials())
    assert [(t.fault.name, t.first) for t in found] == [
        ("stale-head-count-on-shard", "cut.rows"),
        ("slice-reduced", "sharding.agreement"),
        ("updates-averaged", "sharding.mean"),
    ]
