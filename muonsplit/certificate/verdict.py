"""Results and the verdict they come to."""

from collections.abc import Iterable
from dataclasses import dataclass, field
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
        truth: The cut that the model's own computation shows, or why it shows none.
        planned: The planned cut.
        observed: The observed cut, or an empty string if it was not looked at.
        blocks: Rows of each observed block as stretches from start to stop; a stack's rows are
            counted through. Empty if it was not looked at.
        diverged: Check that found something against it first, or an empty string.
    """

    weight: str
    leaf: str
    shape: tuple[int, ...]
    truth: str
    planned: str
    observed: str
    blocks: tuple[tuple[tuple[int, int], ...], ...]
    diverged: str


@dataclass(frozen=True, slots=True)
class Spectrum:
    """What one step made of one planned block, for the reader's eye; four significant digits.

    Attributes:
        weight: Parameter name.
        block: Number of the block, from 0.
        norm_before: Frobenius norm of what was to be orthogonalised.
        norm_after: Frobenius norm of the update.
        before: Singular values of what was to be orthogonalised, over its norm, the largest first.
        after: Singular values of the update.
    """

    weight: str
    block: int
    norm_before: float
    norm_after: float
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ModelResult:
    """What a subject came to on one model.

    Attributes:
        model: Name of the model.
        config: SHA-256 of its config in canonical form.
        full: Muon weights of the full-size model.
        split: How many of them the plan splits.
        weights: The Muon weights of the miniature the subject was run on.
        spectra: Blocks of the first weight of each leaf, and of those that diverged.
        floor: The largest bound that each kind of comparison used: what is off by more than twice
            as much was seen, in every weight.
        results: One for each check.
        way: How it was divided among ranks; empty on one process.
        alone: How far each sharded update is from that of one process; 0 for the same bits.
    """

    model: str
    config: str
    full: int
    split: int
    weights: tuple[WeightResult, ...]
    spectra: tuple[Spectrum, ...]
    floor: dict[str, float]
    results: tuple[CheckResult, ...]
    way: str = ""
    alone: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The model, and how it was divided."""
        return labelled(self.model, self.way)

    @property
    def verdict(self) -> Verdict:
        """The verdict on this model."""
        return verdict_of(self.results, CHECKS)


def labelled(model: str, way: str) -> str:
    """A model, and how it is divided among ranks."""
    return f"{model}, {way}" if way else model


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
