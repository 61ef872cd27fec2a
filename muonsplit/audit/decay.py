"""How much of a change is weight decay."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from muonsplit.audit.question import Question
from muonsplit.evidence.saved import Saved

# Weights that the decay is fitted on.
_MOST = 16


class Decay(NamedTuple):
    """What weights lose in proportion to themselves.

    Attributes:
        taken: Learning rate times weight decay, all steps together.
        doubt: How far that may be off; 0 if it was given.
    """

    taken: float
    doubt: float


def fitted(before: Saved, after: Saved, names: Sequence[str]) -> Decay:
    """Fits the decay: the median of each weight's projection of its change on itself.

    An update has a projection on its weight too, of either sign, which the median and its scatter
    take for noise. Where the scatter is larger than the median, nothing is taken off.

    Args:
        before: The earlier checkpoint.
        after: The later one.
        names: Weights that are trained alike.
    """
    step = max(1, len(names) // _MOST)
    shares = list[float]()
    for name in names[::step][:_MOST]:
        earlier = before.read(name).double()
        later = after.read(name).double()
        square = earlier.square().sum()
        share = float((earlier * (earlier - later)).sum() / square) if square > 0 else 0.0
        if share == share:
            shares.append(share)
        del earlier, later
    if not shares:
        return Decay(0.0, 0.0)
    middle = median(shares)
    scatter = 1.4826 * median(abs(share - middle) for share in shares) / len(shares) ** 0.5
    if middle <= 3 * scatter or len(shares) < 4:
        return Decay(0.0, max(abs(middle), scatter))
    return Decay(middle, 3 * scatter)


class Lost:
    """What weights lose by decay: as it is told, or fitted once for all of those left."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._fitted: Decay | None = None

    def of(self, name: str) -> Decay:
        """What one weight lost."""
        told, arithmetic = self._question.told(name), self._question.dialect.arithmetic
        if told.weight_decay == 0 or arithmetic.decay.startswith("folded"):
            return Decay(0.0, 0.0)
        if told.weight_decay and told.lr and arithmetic.decay_rate == "base":
            return Decay(told.weight_decay * told.lr * self._question.steps, 0.0)
        return self._fit()

    def _fit(self) -> Decay:
        if self._fitted is None:
            matched = self._question.matched
            there = [d.name for d in matched.decisions if d.name not in matched.missing]
            self._fitted = self._question.state.once(
                "decay", "", Decay, lambda: fitted(*matched.both, there)
            )
        return self._fitted
