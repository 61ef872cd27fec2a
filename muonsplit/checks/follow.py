"""Several steps beside the same steps in float64."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.checks.case import Case, Stated, largest_bounds
from muonsplit.checks.registry import BLIND, Finding, UndecidedError
from muonsplit.geometry import Decision
from muonsplit.muon import advance_momentum, apply_, directions
from muonsplit.subjects.drive import Outcome

Tensors = Mapping[str, Tensor]
Steps = Sequence[Tensors]


def followed(
    case: Case, steps: Steps, start: Tensors, outcome: Outcome, dtype: torch.dtype = torch.float32
) -> Iterator[Finding]:
    """A finding for each weight that is elsewhere after several steps than in float64.

    Args:
        case: Says what is expected.
        steps: The gradients of each step.
        start: Where the parameters began.
        outcome: What the subject made of them.
        dtype: Dtype of the parameters.
    """
    arithmetic = case.dialect.arithmetic
    stated = case.stated_by(outcome)
    for d, exact in recurrences(case, steps, start, stated, dtype):
        after = outcome.after[-1][d.name]
        off, limit = exact.compare(after)
        if limit > BLIND:
            if spoken(case, d, steps, start[d.name], stated[d.name], after):
                continue
            raise UndecidedError(f"rounding alone may move {d.name} by {limit:.2g} of its way")
        case.allow("momentum" if dtype == torch.float32 else f"momentum in {name_of(dtype)}", limit)
        if not off <= limit:
            said = f"after {len(steps)} steps off by {off:.3g}, {limit:.3g} allowed"
            form = f"{arithmetic.momentum}, nesterov={arithmetic.nesterov}"
            numbers = {"off": off, "allowed": limit}
            yield Finding(d.name, said, form, "other momentum", numbers)


class Exact(NamedTuple):
    """A weight after several exact steps.

    Attributes:
        before: Where it began.
        after: Where it ends.
        slack: How far rounding may take it from there, in Frobenius norm.
    """

    before: Tensor
    after: Tensor
    slack: float

    def compare(self, seen: Tensor) -> tuple[float, float]:
        """How far an observed weight is off and may be, relative to how far it went."""
        moved = float((self.after - self.before).norm())
        return float((seen.double() - self.after).norm()) / moved, self.slack / moved


def recurrences(
    case: Case,
    steps: Steps,
    start: Tensors,
    stated: Mapping[str, Sequence[Stated]],
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[Decision, Exact]]:
    """Decay, momentum and update of each weight over several steps, in float64.

    Args:
        case: Says what is expected.
        steps: The gradients of each step.
        start: Where the weights began.
        stated: Hyperparameters of each weight in each step.
        dtype: Dtype of parameter, gradient and buffer, which they are rounded to.

    Raises:
        UndecidedError: If the learning rate of the next weight is not known.
    """
    exact, weights = case.dialect.arithmetic.exact(), case.weights
    updates = [_updates(case, d, steps, stated[d.name]) for d in weights]
    limits = iter(_limits(case, list(zip(weights, updates, strict=True)), dtype))
    for d, each in zip(weights, updates, strict=True):
        if not all(at.known for at in stated[d.name]):
            raise UndecidedError(f"the learning rate of {d.name} is neither given nor stated")
        before = start[d.name].double()
        p, slack = before.clone(), 0.0
        wanteds = directions(each, [d.layout] * len(each), exact)
        for at, wanted in zip(stated[d.name], wanteds, strict=True):
            apply_(p, wanted, exact, at.lr, at.weight_decay)
            slack += at.lr * next(limits) * float(wanted.scaled.norm())
            slack += torch.finfo(dtype).eps * float(p.norm())
        yield d, Exact(before, p, slack)


def _updates(case: Case, d: Decision, steps: Steps, stated: Sequence[Stated]) -> list[Tensor]:
    """What each step orthogonalises of a weight; float64."""
    arithmetic, buffer = case.dialect.arithmetic, torch.zeros(d.shape, dtype=torch.float64)
    return [
        advance_momentum(step[d.name].double(), buffer, arithmetic, each.momentum, count).clone()
        for count, (step, each) in enumerate(zip(steps, stated, strict=True), 1)
    ]


def decayed(case: Case, d: Decision, stated: Sequence[Stated]) -> Tensor:
    """What decay alone leaves of a weight, by element where its blocks decay at other rates.

    Args:
        case: Says how the dialect decays.
        d: The weight.
        stated: Its hyperparameters in each step.

    Returns:
        A factor for each element, float64.
    """
    exact = case.dialect.arithmetic.exact()
    still = case.first_direction(d)
    still = still._replace(update=torch.zeros_like(still.update))
    kept = torch.ones(d.shape, dtype=torch.float64)
    for each in stated:
        apply_(kept, still, exact, each.lr, each.weight_decay)
    return kept


def spoken(
    case: Case, d: Decision, steps: Steps, start: Tensor, stated: Sequence[Stated], after: Tensor
) -> bool:
    """Whether a weight has every bit that the dialect's own rounding gives it.

    Asked where rounding alone could hide a fault: what has the dialect's bits speaks the dialect.

    Args:
        case: Says what the dialect is.
        d: The weight.
        steps: The gradients of each step.
        start: Where the weight began; its dtype is that of buffer and step.
        stated: Its hyperparameters in each step.
        after: Where it is after them.
    """
    # A CPU's own half-precision products sum in another order than emulated ones; both are legal.
    for halves in ("emulated", "native"):
        arithmetic = replace(case.dialect.arithmetic, halves=halves)
        p = start.clone()
        wide = arithmetic.buffer_dtype == "float32"
        buffer = torch.zeros_like(p, dtype=torch.float32 if wide else p.dtype)
        for count, (step, each) in enumerate(zip(steps, stated, strict=True), 1):
            gradient = step[d.name].to(p.dtype)
            update = advance_momentum(gradient, buffer, arithmetic, each.momentum, count)
            direction = directions([update], [d.layout], arithmetic)[0]
            apply_(p, direction, arithmetic, each.lr, each.weight_decay)
        if p.equal(after):
            return True
    return False


def _limits(
    case: Case, weights: Sequence[tuple[Decision, Sequence[Tensor]]], dtype: torch.dtype
) -> list[float]:
    """The largest error of each update's direction, with what the dtype of its buffer adds."""
    updates = [(d, update) for d, each in weights for update in each]
    arithmetic = case.dialect.arithmetic
    limits = largest_bounds(updates, arithmetic)
    if dtype == torch.float32:
        return limits
    # In each step the buffer is rounded twice, and the Nesterov step beside it once; what they
    # make of an otherwise exact update is that of one cast, and independent of it.
    cast = replace(arithmetic, cpu_dtype="float32", pre_cast=name_of(dtype))
    casts = largest_bounds(updates, cast)
    counts = [count for _, each in weights for count in range(1, len(each) + 1)]
    return [
        (limit**2 + (2 * count + 1) * one**2) ** 0.5
        for limit, one, count in zip(limits, casts, counts, strict=True)
    ]


def name_of(dtype: torch.dtype) -> str:
    """A dtype as a dialect names it."""
    return str(dtype).removeprefix("torch.")
