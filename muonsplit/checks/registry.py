"""Checks: plain functions with a stable id, a text that explains them, and findings."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from muonsplit.checks.case import Case
from muonsplit.errors import UsageError

# Beyond this rounding alone could turn a block about as far as a structural fault does.
BLIND = 0.3


class SkipError(Exception):
    """Raised by a check that does not apply; says why."""


class UndecidedError(Exception):
    """Raised by a check that applies but cannot tell; says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as planned.

    Attributes:
        weight: Parameter name, or an empty string if it concerns the whole run.
        message: What is wrong, in one line.
        planned: What the plan says.
        observed: What the subject did.
        numbers: Measurements behind it, by name.
        tail: Last lines of the subject's process, if it failed.
    """

    weight: str
    message: str
    planned: str = ""
    observed: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    tail: str = ""


Findings = Iterator[Finding]


@dataclass(frozen=True, slots=True)
class Check:
    """A check.

    Attributes:
        id: Stable id, ``stage.what``.
        title: What holds if it passes.
        run: Yields what does not hold; may raise SkipError or UndecidedError.
    """

    id: str
    title: str
    run: Callable[[Case], Findings]

    @property
    def explain(self) -> str:
        """What is done, what fails it, and where such a fault was seen."""
        return "\n".join(line.strip() for line in (self.run.__doc__ or "").strip().splitlines())


CHECKS: dict[str, Check] = {}


def check(
    id: str, title: str
) -> Callable[[Callable[[Case], Findings]], Callable[[Case], Findings]]:
    """Registers a check. They run in the order of registration; see :mod:`muonsplit.checks`."""

    def register(run: Callable[[Case], Findings]) -> Callable[[Case], Findings]:
        CHECKS[id] = Check(id, title, run)
        return run

    return register


def check_named(id: str) -> Check:
    """Looks a check up.

    Raises:
        UsageError: If there is none of that id.
    """
    if id not in CHECKS:
        raise UsageError(f"There is no check {id!r}.", f"Known: {', '.join(CHECKS)}.")
    return CHECKS[id]
