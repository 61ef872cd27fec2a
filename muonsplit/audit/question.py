"""What is asked of a run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from muonsplit.audit.matched import Matched
from muonsplit.audit.state import State
from muonsplit.dialect import Dialect
from muonsplit.evidence.saved import Saved

# How many are done, of how many, and the weight that begins.
Progress = Callable[[int, int, str], None]


class Told(NamedTuple):
    """What is known of how one weight was trained.

    Attributes:
        lr: Learning rate; None to fit it.
        weight_decay: Weight decay; None to fit it.
        beta: Momentum coefficient; None for the dialect's.
    """

    lr: float | None = None
    weight_decay: float | None = None
    beta: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a run.

    Attributes:
        matched: Checkpoints and plan, brought together.
        dialect: The dialect that the run is held to.
        recorded: The step's inputs: ``gradients``, ``momentum``, ``momentum_before``.
        told: What is known of how a weight was trained, by its name.
        steps: Optimizer steps between the checkpoints.
        kind: ``checkpoints`` or ``capture``.
        state: Where to put down what is known already, and take it up again.
        progress: Told how many are done, of how many, and the weight that begins.
    """

    matched: Matched
    dialect: Dialect
    recorded: Mapping[str, Saved] = field(default_factory=dict[str, Saved])
    told: Callable[[str], Told] = lambda name: Told()
    steps: int = 1
    kind: str = "checkpoints"
    state: State = field(default_factory=State)
    progress: Progress = lambda done, of, name: None
