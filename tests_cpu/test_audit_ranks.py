"""One step on several ranks, captured and audited on one process: what certify says of it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import muonsplit
from muonsplit import Hyper, Layout, PerHeadMuon, subject
from muonsplit.certificate.verdict import Verdict
from muonsplit.dialect import DEFAULT_DIALECT, dialect_named
from muonsplit.geometry.shard import tensor_parallel_axes
from muonsplit.models.load import build
from muonsplit.subjects.connect import connect
from muonsplit.subjects.ranks import Ranks
from tests_cpu import audited as runs
from tests_cpu.audited import DECAY, LR, MODELS, audited
from tests_cpu.ranks import run
from tests_cpu.sharded import asked
from tests_cpu.test_sharded_training import divide

pytestmark = pytest.mark.dist

GATHER = f"{DEFAULT_DIALECT}:cut_heads=gather"
REFERENCE, LOCAL = "builtin:reference", "tests_cpu.test_audit_ranks:rows_of_shards"
WAYS = [
    ("fsdp", 2),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("fsdp", 4), ("tp", 2), ("tp", 4), ("tp-fsdp", 4))
    ),
]
STEPS = 3


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


class RowsOfShards(torch.optim.Optimizer):
    """Muon of PerHeadMuon on what a rank holds, as if that were the whole."""

    def __init__(
        self, model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper
    ) -> None:
        settings: dict[str, Any] = {
            "lr": hyper.lr,
            "momentum": hyper.momentum,
            "weight_decay": hyper.weight_decay,
        }
        super().__init__(list(model.named_parameters()), settings)  # pyright: ignore[reportArgumentType]
        self.named = dict(model.named_parameters())
        # They share the memory of what is held.
        self.pieces = {n: nn.Parameter(local(p.detach())) for n, p in self.named.items()}
        self.inner = PerHeadMuon(self.pieces.items(), dict.fromkeys(layouts), **settings)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for name, p in self.named.items():
            self.pieces[name].grad = None if p.grad is None else local(p.grad)
        self.inner.step()
        self.state.update(
            {p: self.inner.state[self.pieces[name]] for name, p in self.named.items()}
        )


@subject(dialect=GATHER, recognises=False, ways=("fsdp",))
def rows_of_shards(
    model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper
) -> RowsOfShards:
    """Each rank orthogonalises the rows that it holds."""
    return RowsOfShards(model, layouts, hyper)


def captured(spec: str, way: str, folder: Path) -> None:
    """Takes some steps, the last of them captured, on the same sequences on every rank."""
    torch.manual_seed(0)
    model = build(MODELS["odd"](), "cpu")
    planned = muonsplit.plan(model, dialect_named(GATHER))
    divide(model, way, tensor_parallel_axes(planned))
    factory: Any = connect(spec, Path()).factory
    optimizer = factory(model, planned.layouts(), Hyper(LR, 0.95, DECAY))
    for step in range(STEPS):
        ids = torch.randint(runs.VOCABULARY, (4, 32))
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        if step < STEPS - 1:
            optimizer.step()
            continue
        with muonsplit.capture(optimizer, folder, model):
            optimizer.step()


def step_of(folder: Path, spec: str, way: str, world: int) -> Any:
    (folder / "config.json").write_text(json.dumps(MODELS["odd"]()))
    run(world, captured, spec, way, folder / "step", limit=900)
    return audited(folder / "step", None, GATHER, config=folder)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(REFERENCE, 2, timeout=600) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(REFERENCE, 4, timeout=600) as ranks:
        yield ranks


def certified(ranks: Ranks, spec: str, way: str) -> dict[str, bool]:
    """Whether the observed cut is the planned one, by leaf."""
    only = ["recognition.split", "recognition.whole", "cut.rows"]
    [model] = asked(ranks, spec, way, only=only).models
    assert all(w.observed for w in model.weights)
    return by_leaf(model.weights)


def by_leaf(weights: Any) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for w in weights:
        found[w.leaf] = w.observed == w.planned and found.get(w.leaf, True)
    return found


@pytest.mark.parametrize(("way", "world"), WAYS)
def test_what_ranks_wrote_is_read_as_certify_observes(
    tmp_path: Path, request: pytest.FixtureRequest, way: str, world: int
) -> None:
    found = step_of(tmp_path, REFERENCE, way, world)
    assert found.verdict is Verdict.CONFORMS, [(w.weight, w.reason) for w in found.weights]
    assert found.evidence.kind == "capture"
    assert found.settings.lr_given
    assert found.settings.lr == (LR, LR) or found.settings.lr[0] == pytest.approx(LR)
    best = {(w.explained[0].input, w.explained[0].coefficients) for w in found.weights}
    assert best == {("Nesterov step, averaged", "jordan, 5 steps")}
    ranks = request.getfixturevalue({2: "two", 4: "four"}[world])
    assert by_leaf(found.weights) == certified(ranks, REFERENCE, way)


def test_shards_that_are_taken_for_the_whole_are_read_as_such(tmp_path: Path, two: Ranks) -> None:
    found = step_of(tmp_path, LOCAL, "fsdp", 2)
    assert found.verdict is Verdict.VIOLATES
    for w in found.weights:
        halves = Layout.heads("part", 2, w.shape[0] // 2)
        observed = None if w.observed in ("", "whole") else Layout.parse(w.observed)
        assert observed is not None, (w.weight, w.reason)
        assert observed.same_cut(halves), (w.weight, w.observed)
        assert w.outcome == "otherwise"
    assert set(by_leaf(found.weights).values()) == {False}
    assert False in certified(two, LOCAL, "fsdp").values()
