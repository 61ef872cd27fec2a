"""The checks on one model: which apply, what they find, and what a reader is shown of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from muonsplit.certificate.verdict import (
    CheckResult,
    ModelResult,
    Spectrum,
    Status,
    WeightResult,
    labelled,
)
from muonsplit.checks import Check, Finding
from muonsplit.checks.case import Case, matrices
from muonsplit.checks.registry import SkipError, UndecidedError
from muonsplit.errors import LackingError, RefusedError, SubjectFaultError, UnobservableError
from muonsplit.geometry import Decision
from muonsplit.observe.cut import stretches

# Without these nothing that follows means anything.
GATES = ("subject.answers", "subject.repeatable", "model.miniature")

_LONGEST = 8192
_WORST: tuple[Status, ...] = ("failed", "undecided", "passed", "skipped")

Progress = Callable[[str, str], None]


def model_result(
    name: str,
    config: str,
    case: Case,
    checks: Sequence[Check],
    progress: Progress,
    *,
    draws: int = 1,
    apart: bool = False,
) -> ModelResult:
    """Runs checks on one model.

    Args:
        name: Name of the model.
        config: Digest of its config.
        case: The subject on it.
        checks: In the order in which they run.
        progress: Told the model and the check that begins.
        draws: How often every check is asked, each time with other gradients.
        apart: Whether a weight is judged by every check, also after it has diverged.
    """
    results = _results(name, case, checks, progress, apart)
    for number in range(1, draws):
        again = replace(case, seed=f"{case.seed}, draw {number}")
        found = _results(f"{name}, draw {number + 1}", again, checks, progress, apart)
        results = [_merged(one, other) for one, other in zip(results, found, strict=True)]
    weights = tuple(_weight_result(d, case) for d in case.plan.decisions)
    spectra = tuple(spectrum for d in _shown(case) for spectrum in _spectra(d, case))
    full, split = len(case.full.decisions), len(case.full.split)
    floor = dict(sorted(case.floor.items()))
    alone = dict(sorted(case.alone.items()))
    found = (name, config, full, split, weights, spectra, floor, tuple(results))
    return ModelResult(*found, case.way, alone)


def _results(
    name: str, case: Case, checks: Sequence[Check], progress: Progress, apart: bool
) -> list[CheckResult]:
    results: list[CheckResult] = []
    for check in checks:
        progress(labelled(name, case.way), check.id)
        results.append(_result(check, case, results))
        if not apart:
            for finding in results[-1].findings:
                case.diverged.setdefault(finding.weight, check.id)
    return results


def _merged(one: CheckResult, other: CheckResult) -> CheckResult:
    """What two draws of the same check come to: the worse of both."""
    if (one.status, other.status) == ("failed", "failed"):
        return replace(one, findings=(*one.findings, *other.findings))
    return min(one, other, key=lambda result: _WORST.index(result.status))


def _weight_result(d: Decision, case: Case) -> WeightResult:
    blocks, planned = case.blocks(d), str(d.layout or "whole")
    if d.layout is None and len(d.shape) == 3:
        planned = f"{d.shape[0]} experts, each whole"
    seen, truth = case.seen_rows.get(d.name), case.truths[d.name].truth
    observed, rows = "", ()
    if seen is not None:
        observed = planned if set(seen.blocks) == set(blocks) else str(seen)
        rows = tuple(map(stretches, seen.blocks))
    leaf, diverged = f"{d.owner}.{d.leaf}", case.diverged.get(d.name, "")
    shown = str(truth.layout or truth.state)
    return WeightResult(d.name, leaf, d.shape, shown, planned, observed, rows, diverged)


def _shown(case: Case) -> list[Decision]:
    """The first weight of each leaf, and the first of it that diverged, if there was a step."""
    if "first_step" not in case.__dict__:
        return []
    kept: dict[tuple[str, str, bool], Decision] = {}
    for d in case.plan.decisions:
        if len(d.shape) == 2:
            kept.setdefault((d.owner, d.leaf, d.name in case.diverged), d)
    return list(kept.values())


def _spectra(d: Decision, case: Case) -> list[Spectrum]:
    drawn, after = case.first_step
    pairs = zip(
        matrices(case.direction(d.name, drawn), d.layout),
        matrices(case.update(d.name, after), d.layout),
        strict=True,
    )
    return [_spectrum(d.name, i, before, made) for i, (before, made) in enumerate(pairs)]


def _spectrum(weight: str, block: int, before: Tensor, after: Tensor) -> Spectrum:
    norms = [_rounded(float(x.norm())) for x in (before, after)]
    seen = [torch.linalg.svdvals(x).tolist() for x in (before / before.norm(), after)]
    values = [tuple(map(_rounded, found)) for found in seen]
    return Spectrum(weight, block, norms[0], norms[1], values[0], values[1])


def _rounded(value: float) -> float:
    """Four significant digits: for the reader's eye, not to compute with."""
    return float(f"{value:.4g}")


def _result(check: Check, case: Case, before: Sequence[CheckResult]) -> CheckResult:
    closed = next((r for r in before if r.check in GATES and r.status != "passed"), None)
    if closed is not None:
        return CheckResult(check.id, "skipped", f"{closed.check} did not pass")
    if case.ended:
        return CheckResult(check.id, "skipped", case.ended)
    judged = len(case.weights)
    if judged == 0:
        return CheckResult(check.id, "skipped", "every weight has diverged before")
    findings: list[Finding] = []
    try:
        findings.extend(_found(check, case))
    except (SkipError, LackingError) as skip:
        return CheckResult(check.id, "skipped", str(skip), judged=judged)
    except RefusedError as refused:
        if check.id in GATES:
            raise
        said = f"the subject says that it cannot: {_clipped(refused.message)}"
        return CheckResult(check.id, "skipped", said, judged=judged)
    except (UndecidedError, UnobservableError) as undecided:
        return CheckResult(check.id, "undecided", str(undecided), judged=judged)
    except SubjectFaultError as fault:
        findings.append(Finding("", _clipped(fault.message), tail=_clipped(fault.tail)))
    return CheckResult(check.id, "failed" if findings else "passed", "", tuple(findings), judged)


def _clipped(text: str) -> str:
    """What a subject says, as far as anybody reads."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"


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
