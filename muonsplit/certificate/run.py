"""Certifying: a subject, a dialect and models come to a certificate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from muonsplit.certificate.verdict import CheckResult, ModelResult, Verdict, verdict_of
from muonsplit.checks import CHECKS, Check, Finding
from muonsplit.checks.case import Case
from muonsplit.checks.registry import SkipError, UndecidedError, check_named
from muonsplit.dialect import Dialect, dialect_named
from muonsplit.errors import SubjectFaultError
from muonsplit.geometry import plan
from muonsplit.models.load import ModelSpec, build, resolve
from muonsplit.models.miniature import miniature
from muonsplit.subjects.process import Driver, InProcess, Worker

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
        """Conforms only if it does on every model."""
        return verdict_of(chain.from_iterable(model.results for model in self.models))


def certify(
    subject: str = "builtin:reference",
    models: Sequence[str] = (),
    dialect: str | None = None,
    *,
    seed: int = 0,
    only: Sequence[str] = (),
    in_process: bool = False,
    timeout: float = 60.0,
    progress: Progress = lambda model, check: None,
) -> Certificate:
    """Certifies a subject.

    Args:
        subject: Connection string; see :mod:`muonsplit.subjects.connect`.
        models: Models to certify on; by default those the subject declares.
        dialect: Dialect to hold it to; by default the one it declares, asked per head.
        seed: Root of every random draw.
        only: Ids of the checks to run, besides those that gate the rest; all by default.
        in_process: Runs the subject in this process, for debugging.
        timeout: Seconds one run of the subject may take.
        progress: Told the model and check that begin.

    Raises:
        MuonsplitError: If the question itself is wrong: no such subject, model, dialect, check.
    """
    chosen = _chosen(only)
    asked = dialect_named(dialect) if dialect is not None else None
    driver = InProcess(subject) if in_process else Worker(subject, timeout)
    with driver:
        described = driver.describe()
        held_to = asked or dialect_named(described["dialect"]).asked_per_head()
        specs = [resolve(name) for name in models or described["models"]]
        results = [
            _certify_model(spec, driver, described, held_to, seed, chosen, progress)
            for spec in specs
        ]
    ids = tuple(c.id for c in chosen)
    return Certificate(subject, described, held_to, seed, not in_process, ids, tuple(results))


def _chosen(only: Sequence[str]) -> list[Check]:
    wanted = {check_named(id).id for id in only} or set(CHECKS)
    return [c for c in CHECKS.values() if c.id in wanted or c.id in _GATES]


def _certify_model(
    spec: ModelSpec,
    driver: Driver,
    described: dict[str, Any],
    dialect: Dialect,
    seed: int,
    checks: Sequence[Check],
    progress: Progress,
) -> ModelResult:
    progress(spec.name, "plan")
    full = plan(build(spec.config), dialect)
    small = miniature(spec.config)
    model = build(small)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    knows_hyper = "hyper" in described["takes"]
    case = Case(driver, small, shapes, plan(model, dialect), full, dialect, seed, knows_hyper)
    results: list[CheckResult] = []
    for check in checks:
        progress(spec.name, check.id)
        results.append(_result(check, case, results))
    return ModelResult(
        spec.name,
        len(full.decisions),
        len(full.split),
        len(case.plan.decisions),
        tuple(results),
    )


def _result(check: Check, case: Case, before: Sequence[CheckResult]) -> CheckResult:
    closed = next((r for r in before if r.check in _GATES and r.status != "passed"), None)
    if closed is not None:
        return CheckResult(check.id, "skipped", f"{closed.check} did not pass")
    judged = len(case.weights)
    if judged == 0:
        return CheckResult(check.id, "skipped", "every weight has diverged before")
    try:
        findings = tuple(check.run(case))
    except SkipError as skip:
        return CheckResult(check.id, "skipped", str(skip), judged=judged)
    except UndecidedError as undecided:
        return CheckResult(check.id, "undecided", str(undecided), judged=judged)
    except SubjectFaultError as fault:
        findings = (Finding("", fault.message, tail=fault.tail),)
    for finding in findings:
        case.diverged.setdefault(finding.weight, check.id)
    return CheckResult(check.id, "failed" if findings else "passed", "", findings, judged)
