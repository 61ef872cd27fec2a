"""Several steps beside the same steps in float64."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.checks.case import Case, Stated, matrices
from muonsplit.checks.registry import BLIND, Finding, UndecidedError
from muonsplit.geometry import Decision
from muonsplit.muon import advance_momentum, apply_, directions
from muonsplit.observe.tolerance import rounding_bound
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
    for d in case.weights:
        stated = [case.stated(d.name, settings) for settings in outcome.settings]
        exact = recurrence(case, d, steps, start[d.name], stated, dtype)
        after = outcome.after[-1][d.name]
        off, limit = exact.compare(after)
        if limit > BLIND:
            if spoken(case, d, steps, start[d.name], stated, after):
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


def recurrence(
    case: Case,
    d: Decision,
    steps: Steps,
    start: Tensor,
    stated: Sequence[Stated],
    dtype: torch.dtype = torch.float32,
) -> Exact:
    """Decay, momentum and update of a weight over several steps, in float64.

    Args:
        case: Says what is expected.
        d: The weight.
        steps: The gradients of each step.
        start: Where the weight began.
        stated: Its hyperparameters in each step.
        dtype: Dtype of parameter, gradient and buffer, which they are rounded to.

    Raises:
        UndecidedError: If the learning rate is not known.
    """
    if not all(each.known for each in stated):
        raise UndecidedError(f"the learning rate of {d.name} is neither given nor stated")
    arithmetic, exact = case.dialect.arithmetic, case.dialect.arithmetic.exact()
    p = start.double().clone()
    buffer, slack = torch.zeros_like(p), 0.0
    for count, (step, each) in enumerate(zip(steps, stated, strict=True), 1):
        gradient = step[d.name].double()
        update = advance_momentum(gradient, buffer, arithmetic, each.momentum, count)
        bound = _bound(case, d, update, dtype, count)
        wanted = directions([update], [d.layout], exact)[0]
        apply_(p, wanted, exact, each.lr, each.weight_decay)
        slack += each.lr * bound * float(wanted.scaled.norm())
        slack += torch.finfo(dtype).eps * float(p.norm())
    return Exact(start.double(), p, slack)


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


def _bound(case: Case, d: Decision, update: Tensor, dtype: torch.dtype, count: int) -> float:
    """The largest error of an update's direction, with what the dtype of its buffer adds."""
    bound = case.bound(d, update)
    if dtype == torch.float32:
        return bound
    # In each step the buffer is rounded twice, and the Nesterov step beside it once; what they
    # make of an otherwise exact update is that of one cast, and independent of it.
    arithmetic = case.dialect.arithmetic
    cast = replace(arithmetic, cpu_dtype="float32", pre_cast=name_of(dtype))
    one = max(rounding_bound(matrix, cast) for matrix in matrices(update, d.layout))
    return float((bound**2 + (2 * count + 1) * one**2) ** 0.5)


def name_of(dtype: torch.dtype) -> str:
    """A dtype as a dialect names it."""
    return str(dtype).removeprefix("torch.")
