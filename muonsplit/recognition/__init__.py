"""Recognition: the plan held against the truth, on one model or on every architecture."""

from muonsplit.recognition.judge import Judgement, Outcome, judge
from muonsplit.recognition.planned import planned

__all__ = ["Judgement", "Outcome", "judge", "planned"]
