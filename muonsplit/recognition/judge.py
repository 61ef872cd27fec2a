"""Plan against truth, weight by weight."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from muonsplit.geometry import Decision, Plan
from muonsplit.geometry.leaf import SPLITTABLE
from muonsplit.truth.answer import Truth

Outcome = Literal["right", "declined", "wrong", "unknown"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the rules say of one weight, beside what the model computes.

    Attributes:
        decision: The rules' answer.
        truth: The model's own.
        outcome: ``right``; ``declined`` where the model has heads that the rules leave whole, with
            their reason; ``wrong`` where the rules cut what the model does not; or ``unknown``
            where no truth was found.
        objection: What is wrong, in words.
    """

    decision: Decision
    truth: Truth
    outcome: Outcome
    objection: str

    @property
    def counted(self) -> bool:
        """Whether recognition is expected: a 2-D attention projection whose rows have heads."""
        splittable = self.decision.kind in SPLITTABLE and len(self.decision.shape) == 2
        return splittable and self.truth.state == "heads"

    @property
    def differs(self) -> bool:
        """Whether recognition is at fault: a wrong cut, or heads that it did not find.

        Gates, indexers, and fused weights of a dialect that keeps them whole are found, and left
        whole on purpose.
        """
        missed = self.outcome == "declined" and self.counted and self.decision.heads is None
        return self.outcome == "wrong" or missed


def judge(plan: Plan, truths: Mapping[str, Truth]) -> Iterator[Judgement]:
    """Judges every Muon weight of a plan for which there is a truth, in model order."""
    for decision in plan.decisions:
        truth = truths.get(decision.name)
        if truth is not None:
            yield judged(decision, truth)


def judged(decision: Decision, truth: Truth) -> Judgement:
    """Judges one weight."""
    outcome, objection = _outcome(decision, truth)
    return Judgement(decision, truth, outcome, objection)


def _outcome(decision: Decision, truth: Truth) -> tuple[Outcome, str]:
    if truth.state == "unknown":
        return "unknown", truth.evidence
    objection = truth.objection(decision.layout)
    if not objection:
        return "right", ""
    return ("declined" if decision.layout is None else "wrong"), objection
