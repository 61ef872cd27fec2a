"""Results and the verdict they come to."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from muonsplit.checks import CHECKS, Finding

Status = Literal["passed", "failed", "skipped", "undecided"]


class Verdict(Enum):
    """What a certificate says; the value is the exit code."""

    CONFORMS = 0
    VIOLATES = 1
    INCONCLUSIVE = 2

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check came to on one model.

    Attributes:
        check: Id of the check.
        status: Whether it passed, failed, did not apply, or could not tell.
        reason: Why it did not apply or could not tell.
        findings: What it found.
        judged: Muon weights it was asked about.
    """

    check: str
    status: Status
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    judged: int = 0


@dataclass(frozen=True, slots=True)
class WeightResult:
    """What became of one Muon weight of the miniature.

    Attributes:
        weight: Parameter name.
        leaf: Owner's class and leaf, as ``Owner.leaf``.
        shape: Its shape.
        planned: The planned cut.
        observed: The observed cut, or an empty string if it was not looked at.
        diverged: Check that found something against it first, or an empty string.
    """

    weight: str
    leaf: str
    shape: tuple[int, ...]
    planned: str
    observed: str
    diverged: str


@dataclass(frozen=True, slots=True)
class ModelResult:
    """What a subject came to on one model.

    Attributes:
        model: Name of the model.
        full: Muon weights of the full-size model.
        split: How many of them the plan splits.
        weights: The Muon weights of the miniature the subject was run on.
        results: One for each check.
    """

    model: str
    full: int
    split: int
    weights: tuple[WeightResult, ...]
    results: tuple[CheckResult, ...]

    @property
    def verdict(self) -> Verdict:
        """The verdict on this model."""
        return verdict_of(self.results, CHECKS)


def verdict_of(results: Iterable[CheckResult], every: Iterable[str] = ()) -> Verdict:
    """What results come to.

    Args:
        results: Of one model or several.
        every: Ids of the checks without which nothing conforms.

    Returns:
        Violates if a check failed; inconclusive if one could not tell or was not asked, or none
        passed.
    """
    found = list(results)
    statuses = {result.status for result in found}
    if "failed" in statuses:
        return Verdict.VIOLATES
    asked_all = set(every) <= {result.check for result in found}
    if "undecided" in statuses or "passed" not in statuses or not asked_all:
        return Verdict.INCONCLUSIVE
    return Verdict.CONFORMS
