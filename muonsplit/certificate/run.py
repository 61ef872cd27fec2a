"""Certifying: a subject, a dialect and models come to a certificate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from muonsplit.certificate.verdict import (
    CheckResult,
    ModelResult,
    Verdict,
    WeightResult,
    verdict_of,
)
from muonsplit.checks import CHECKS, Check, Finding
from muonsplit.checks.case import Case
from muonsplit.checks.registry import SkipError, UndecidedError, check_named
from muonsplit.dialect import Dialect, dialect_named
from muonsplit.errors import SubjectFaultError, UnobservableError
from muonsplit.geometry import Decision, plan
from muonsplit.models.load import ModelSpec, build, resolve
from muonsplit.models.miniature import miniature
from muonsplit.subjects.process import Driver, Worker

# Without these nothing that follows means anything.
_GATES = ("subject.answers", "subject.repeatable", "model.miniature")

Progress = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a subject was certified for.

    Attributes:
        subject: Connection string.
        described: What the subject declares, its version and digest.
        dialect: The dialect it was held to.
        seed: Root of every random draw.
        isolated: Whether it ran in a process of its own.
        checks: Ids of the checks that were asked for.
        models: One result a model.
    """

    subject: str
    described: dict[str, Any]
    dialect: Dialect
    seed: int
    isolated: bool
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
        seed: Root of every random draw.
        only: Ids of the checks to run, besides those that gate the rest; all by default.
        progress: Told the model and check that begin.
    """

    models: Sequence[str] = ()
    dialect: str | None = None
    seed: int = 0
    only: Sequence[str] = ()
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
    checks = [c for c in CHECKS.values() if c.id in wanted or c.id in _GATES]
    asked = None if question.dialect is None else dialect_named(question.dialect)
    specs = [resolve(name) for name in dict.fromkeys(question.models)]
    described = driver.describe()
    dialect = asked or dialect_named(described["dialect"]).asked_per_head()
    specs = specs or [resolve(name) for name in described["models"]]
    results: list[ModelResult] = []
    for spec in specs:
        question.progress(spec.name, "plan")
        case = _case(spec, driver, described, dialect, question.seed)
        results.append(_model_result(spec.name, case, checks, question.progress))
    return Certificate(
        driver.spec,
        described,
        dialect,
        question.seed,
        isinstance(driver, Worker),
        tuple(c.id for c in checks),
        tuple(results),
    )


def _case(
    spec: ModelSpec, driver: Driver, described: dict[str, Any], dialect: Dialect, seed: int
) -> Case:
    small = miniature(spec.config)
    model = build(small)
    return Case(
        driver,
        small,
        {name: tuple(p.shape) for name, p in model.named_parameters()},
        plan(model, dialect),
        plan(build(spec.config), dialect),
        dialect,
        seed,
        "hyper" in described["takes"],
    )


def _model_result(
    name: str, case: Case, checks: Sequence[Check], progress: Progress
) -> ModelResult:
    results: list[CheckResult] = []
    for check in checks:
        progress(name, check.id)
        results.append(_result(check, case, results))
    weights = tuple(_weight_result(d, case) for d in case.plan.decisions)
    return ModelResult(
        name, len(case.full.decisions), len(case.full.split), weights, tuple(results)
    )


def _weight_result(d: Decision, case: Case) -> WeightResult:
    blocks, planned = case.blocks(d), str(d.layout or "whole")
    if d.layout is None and len(d.shape) == 3:
        planned = f"{d.shape[0]} experts, each whole"
    seen = case.seen_rows.get(d.name)
    observed = ""
    if seen is not None:
        observed = planned if set(seen.blocks) == set(blocks) else str(seen)
    leaf, diverged = f"{d.owner}.{d.leaf}", case.diverged.get(d.name, "")
    return WeightResult(d.name, leaf, d.shape, planned, observed, diverged)


def _result(check: Check, case: Case, before: Sequence[CheckResult]) -> CheckResult:
    closed = next((r for r in before if r.check in _GATES and r.status != "passed"), None)
    if closed is not None:
        return CheckResult(check.id, "skipped", f"{closed.check} did not pass")
    judged = len(case.weights)
    if judged == 0:
        return CheckResult(check.id, "skipped", "every weight has diverged before")
    findings: list[Finding] = []
    try:
        findings.extend(_found(check, case))
    except SkipError as skip:
        return CheckResult(check.id, "skipped", str(skip), judged=judged)
    except (UndecidedError, UnobservableError) as undecided:
        return CheckResult(check.id, "undecided", str(undecided), judged=judged)
    except SubjectFaultError as fault:
        findings.append(Finding("", fault.message, tail=fault.tail))
    for finding in findings:
        case.diverged.setdefault(finding.weight, check.id)
    return CheckResult(check.id, "failed" if findings else "passed", "", tuple(findings), judged)


def _found(check: Check, case: Case) -> list[Finding]:
    """What a check finds; what it found before it could not go on counts."""
    findings: list[Finding] = []
    try:
        for finding in check.run(case):
            findings.append(finding)
    except UndecidedError:
        if not findings:
            raise
    return findings
