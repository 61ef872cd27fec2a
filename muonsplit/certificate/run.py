"""Certifying: a subject, a dialect and models come to a certificate."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product
from typing import Any, Literal

from torch import nn

from muonsplit.certificate.battery import GATES, Progress, model_result
from muonsplit.certificate.canonical import canonical, digest
from muonsplit.certificate.verdict import ModelResult, Verdict, verdict_of
from muonsplit.checks import CHECKS
from muonsplit.checks.case import Case
from muonsplit.checks.registry import check_named
from muonsplit.dialect import Dialect, dialect_named
from muonsplit.errors import UsageError
from muonsplit.geometry import Plan, plan
from muonsplit.models.load import Config, ModelSpec, build, ready, resolve
from muonsplit.models.miniature import miniature
from muonsplit.recognition.judge import Judgement, judge
from muonsplit.sharding.ways import Sharding, fits
from muonsplit.subjects.process import Driver
from muonsplit.truth.views import views

Profile = Literal["smoke", "ci", "thorough"]
_DRAWS = 3


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a subject was certified for.

    Attributes:
        subject: Connection string.
        described: What the subject declares, its version and digest.
        dialect: The dialect it was held to.
        profile: How much was asked: ``smoke``, ``ci`` or ``thorough``.
        seed: Root of every random draw.
        isolated: Whether it ran in a process of its own.
        world: Ranks that it ran on.
        checks: Ids of the checks that were asked for.
        models: One result a model, and a way of sharding it.
    """

    subject: str
    described: dict[str, Any]
    dialect: Dialect
    profile: Profile
    seed: int
    isolated: bool
    world: int
    checks: tuple[str, ...]
    models: tuple[ModelResult, ...]

    @property
    def verdict(self) -> Verdict:
        """Conforms only if it does on every model, and only if every check was asked for."""
        return verdict_of(chain.from_iterable(model.results for model in self.models), CHECKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a subject.

    Attributes:
        models: Models to certify on; by default those the subject declares.
        dialect: Dialect to hold it to; by default the one it declares, asked per head.
        profile: ``smoke`` asks on the first model only; ``thorough`` asks every check three
            times, with other gradients.
        seed: Root of every random draw.
        ways: Ways of sharding a model among the driver's ranks; by default those the subject
            declares, as far as the ranks are enough for them.
        only: Ids of the checks to run, besides those that gate the rest; all by default.
        apart: Whether a weight is judged by every check, also after it has diverged.
        progress: Told the model and check that begin.
    """

    models: Sequence[str] = ()
    dialect: str | None = None
    profile: Profile = "ci"
    seed: int = 0
    ways: Sequence[str] = ()
    only: Sequence[str] = ()
    apart: bool = False
    progress: Progress = lambda model, check: None


def certify(driver: Driver, question: Question) -> Certificate:
    """Certifies a subject.

    Args:
        driver: Runs the subject.
        question: What is asked of it.

    Raises:
        MuonsplitError: If the question itself is wrong: no such subject, model, dialect, check.
    """
    wanted = {check_named(id).id for id in question.only} or set(CHECKS)
    checks = [c for c in CHECKS.values() if c.id in wanted or c.id in GATES]
    asked = None if question.dialect is None else dialect_named(question.dialect)
    specs = [resolve(name) for name in dict.fromkeys(question.models)]
    ready()  # the subject's own process does the same meanwhile
    described = driver.describe()
    dialect = asked or dialect_named(described["dialect"]).asked_per_head()
    specs = specs or [resolve(name) for name in described["models"]]
    if question.profile == "smoke":
        specs = specs[:1]
    ways = asked_ways(question.ways, described["ways"], driver.world)
    results: list[ModelResult] = []
    for spec, way in product(specs, ways):
        question.progress(spec.name, "plan")
        case = case_of(spec, driver, described, dialect, question.seed, way)
        found = model_result(
            spec.name,
            digest(spec.config),
            case,
            checks,
            question.progress,
            draws=_DRAWS if question.profile == "thorough" else 1,
            apart=question.apart,
        )
        results.append(found)
    return Certificate(
        driver.spec,
        described,
        dialect,
        question.profile,
        question.seed,
        driver.isolated,
        driver.world,
        tuple(c.id for c in checks),
        tuple(results),
    )


def asked_ways(asked: Sequence[str], declared: Sequence[str], world: int) -> list[str]:
    """The ways of sharding that are asked about; one that is empty on a single process.

    Args:
        asked: What is asked for by name; nothing for what the subject declares.
        declared: The ways that the subject claims to work under.
        world: Number of ranks.

    Raises:
        UsageError: If ways are asked of one process, or no declared one fits the ranks.
    """
    if world == 1:
        if asked:
            raise UsageError(
                f"{asked[0]} divides a model among ranks, and there is one.",
                "Ask for more: --world-size 2.",
            )
        return [""]
    for way in asked:
        Sharding(way, world)  # refuses what is none, or needs more ranks
    fitting = list(dict.fromkeys(asked)) or [way for way in declared if fits(way, world)]
    if not fitting:
        raise UsageError(
            f"The subject declares to work under {', '.join(declared) or 'no sharding'}, and none "
            f"of that fits {world} ranks.",
            "Name one: --sharding fsdp.",
        )
    return fitting


def case_of(
    spec: ModelSpec,
    driver: Driver,
    described: dict[str, Any],
    dialect: Dialect,
    seed: int,
    way: str = "",
) -> Case:
    """A subject on the miniature of a model.

    Args:
        spec: The model.
        driver: Runs the subject.
        described: What the subject declares.
        dialect: The dialect it is held to.
        seed: Root of every random draw.
        way: How it is divided among the driver's ranks; empty on one process.
    """
    model = _planned(canonical(spec.config), dialect)
    return Case(
        driver,
        model.small,
        model.shapes,
        model.plan,
        model.full,
        dialect,
        seed,
        described,
        model.truths,
        way,
    )


@dataclass(frozen=True, slots=True)
class _Planned:
    """What is known of a model before any subject sees it.

    Attributes:
        small: Config of its miniature.
        shapes: Shape of every parameter of that.
        plan: The plan of the miniature.
        full: The plan of the model.
        truths: What the miniature computes.
    """

    small: Config
    shapes: dict[str, tuple[int, ...]]
    plan: Plan
    full: Plan
    truths: dict[str, Judgement]


@lru_cache(maxsize=16)  # the corpus asks of one model a hundred times
def _planned(config: str, dialect: Dialect) -> _Planned:
    given: Config = json.loads(config)
    small = miniature(given)
    model = build(small)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    truths = _truths(model, dialect)
    return _Planned(small, shapes, plan(model, dialect), plan(build(given), dialect), truths)


def _truths(model: nn.Module, dialect: Dialect) -> dict[str, Judgement]:
    """The truth beside a plan of single heads, which is all that a truth can be compared with."""
    if dialect.per_head:
        fused = dialect.split.fused_qkv
        single = replace(
            dialect.split, heads_per_block=1, fused_qkv="whole" if fused == "whole" else "heads"
        )
        dialect = replace(dialect, split=single)
    return {j.decision.name: j for j in judge(plan(model, dialect), views(model))}
