"""Is what is carried from step to step, and added beside the update, as declared?"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.checks.case import Case, Stated
from muonsplit.checks.registry import BLIND, Finding, Findings, UndecidedError, check
from muonsplit.geometry import Decision
from muonsplit.muon import advance_momentum, apply_, directions
from muonsplit.observe import gradients

_STEPS = 3
# Strong, so that an update decayed along with the parameter shows in half precision too.
_DECAY = 5.0
# As large as an update, so that neither hides the other.
_START = 0.05

Steps = Sequence[Mapping[str, Tensor]]


@check("state.momentum", "several steps accumulate momentum as the dialect does")
def momentum(case: Case) -> Findings:
    """Three steps with different gradients, compared with the same three in float64.

    Fails for a missing or misplaced Nesterov step, a coefficient that is off by more than rounding
    can be, a buffer that is normalised in place (torch.optim.Muon 2.13 in bfloat16) or not kept.
    """
    steps = [case.conditioned("step", i) for i in range(_STEPS)]
    outcome = case.run(steps)
    for d in case.weights:
        stated = [case.stated(d.name, settings) for settings in outcome.settings]
        exact = _recurrence(case, d, steps, case.start[d.name], stated)
        off, limit = exact.compare(outcome.after[-1][d.name])
        if not off <= limit:
            said = f"after {_STEPS} steps off by {off:.3g}, {limit:.3g} allowed"
            form = (
                f"{case.dialect.arithmetic.momentum}, nesterov={case.dialect.arithmetic.nesterov}"
            )
            yield Finding(d.name, said, form, "other momentum", {"off": off, "allowed": limit})


@check("state.decay", "weight decay shrinks the parameter by lr × decay before each update")
def decay(case: Case) -> Findings:
    """Three steps with decay from two starts, compared with each other and with float64.

    Between the two runs the updates cancel: what is left shrinks by 1 − rate·decay a step, exactly,
    the rate being the learning rate or, where the dialect says so, the adjusted one.
    One run must also follow the recurrence, so that nothing else changes when decay is on. Fails
    for decay folded into the gradient, applied after the update, twice or once only, from an
    adjusted learning rate, and for an option that turns something else off.
    """
    steps = [case.conditioned("decay", i) for i in range(_STEPS)]
    starts = [gradients.draw(case.shapes, case.seed, "decay", i, size=_START) for i in range(2)]
    runs = [case.run(steps, start, _DECAY) for start in starts]
    for d in case.weights:
        stated = [case.stated(d.name, settings, _DECAY) for settings in runs[0].settings]
        kept = _kept(case, d, stated)
        before, after = (
            (pair[1][d.name].double() - pair[0][d.name].double())
            for pair in (starts, [run.after[-1] for run in runs])
        )
        # Either run rounds the decayed and the updated parameter in each step, to half an ulp.
        sizes = (
            float(run.after[-1][d.name].norm() + s[d.name].norm())
            for run, s in zip(runs, starts, strict=True)
        )
        limit = _STEPS * torch.finfo(torch.float32).eps * sum(sizes) / float(before.norm())
        limit += 2 * _folded(case, d, stated) / float(before.norm())
        off = float((after - kept * before).norm() / before.norm())
        if not off <= limit:
            factor, wanted = (
                float((x * before).sum() / before.square().sum()) for x in (after, kept * before)
            )
            said = f"the parameter is kept by a factor {factor:.8g}, not {wanted:.8g}"
            numbers = {"factor": factor, "off": off, "allowed": limit}
            yield Finding(d.name, said, f"{wanted:.8g}", f"{factor:.8g}", numbers)
            continue
        exact = _recurrence(case, d, steps, starts[0][d.name], stated)
        off, limit = exact.compare(runs[0].after[-1][d.name])
        if not off <= limit:
            said = f"with decay the update is another: off by {off:.3g}, {limit:.3g} allowed"
            numbers = {"off": off, "allowed": limit}
            yield Finding(d.name, said, "decay, then the update", "something else", numbers)


class _Exact(NamedTuple):
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
        """How far an observed weight is off and may be, relative to how far it went.

        Raises:
            UndecidedError: If rounding alone may take it about as far as a fault does.
        """
        moved = float((self.after - self.before).norm())
        limit = self.slack / moved
        if limit > BLIND:
            raise UndecidedError(f"rounding alone may move a weight by {limit:.2g} of its way")
        return float((seen.double() - self.after).norm()) / moved, limit


def _kept(case: Case, d: Decision, stated: Sequence[Stated]) -> Tensor:
    """What decay alone leaves of a weight, by element where its blocks decay at other rates."""
    exact = case.dialect.arithmetic.exact()
    still = case.first_direction(d)
    still = still._replace(update=torch.zeros_like(still.update))
    kept = torch.ones(d.shape, dtype=torch.float64)
    for each in stated:
        apply_(kept, still, exact, each.lr, each.weight_decay)
    return kept


def _folded(case: Case, d: Decision, stated: Sequence[Stated]) -> float:
    """How far one run may be off where decay is rounded with the update, to half an ulp of both."""
    arithmetic = case.dialect.arithmetic
    if arithmetic.decay != "folded_rounded":
        return 0.0
    largest = float(case.start[d.name].norm()) + _START * case.start[d.name].numel() ** 0.5
    one = case.first_direction(d)
    rates = [rate for _, _, rate in one.parts(one.update)]
    # A block's singular values differ between draws by the spread of the polynomial, below two.
    steps = ((2 * float(one.update.norm()) + s.weight_decay * largest) * s.lr for s in stated)
    return sum(steps) * max(rates) * 2 * arithmetic.roundoff


def _recurrence(
    case: Case, d: Decision, steps: Steps, start: Tensor, stated: Sequence[Stated]
) -> _Exact:
    """Decay, momentum and update of a weight over several steps, in float64."""
    if not all(each.known for each in stated):
        raise UndecidedError(f"the learning rate of {d.name} is neither given nor stated")
    arithmetic, exact = case.dialect.arithmetic, case.dialect.arithmetic.exact()
    p = start.double().clone()
    buffer, slack = torch.zeros_like(p), 0.0
    for count, (step, each) in enumerate(zip(steps, stated, strict=True), 1):
        gradient = step[d.name].double()
        update = advance_momentum(gradient, buffer, arithmetic, each.momentum, count)
        bound = case.bound(d, update)
        wanted = directions([update], [d.layout], exact)[0]
        apply_(p, wanted, exact, each.lr, each.weight_decay)
        slack += each.lr * bound * float(wanted.scaled.norm())
        slack += torch.finfo(torch.float32).eps * float(p.norm())
    return _Exact(start.double(), p, slack)
