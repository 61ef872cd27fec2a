"""Is what is carried from step to step, and added beside the update, as declared?"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from muonsplit.checks.case import Case, Stated
from muonsplit.checks.follow import decayed, followed, recurrences, spoken
from muonsplit.checks.registry import BLIND, Finding, Findings, UndecidedError, check
from muonsplit.geometry import Decision
from muonsplit.observe import gradients

_STEPS = 3
# Strong, so that an update decayed along with the parameter shows in half precision too.
_DECAY = 5.0
# As large as an update, so that neither hides the other.
_START = 0.05


@check("state.momentum", "several steps accumulate momentum as the dialect does")
def momentum(case: Case) -> Findings:
    """Three steps with different gradients, compared with the same three in float64.

    Fails for a missing or misplaced Nesterov step, a coefficient that is off by more than rounding
    can be, a buffer that is normalised in place (torch.optim.Muon 2.13 in bfloat16) or not kept.
    """
    steps = [case.conditioned("step", i) for i in range(_STEPS)]
    yield from followed(case, steps, case.start, case.run(steps))


@check("state.decay", "weight decay shrinks the parameter by lr × decay before each update")
def decay(case: Case) -> Findings:
    """Three steps with decay from two starts, compared with each other and with float64.

    Between the two runs the updates cancel: what is left shrinks by 1 − rate·decay a step, exactly,
    the rate being the learning rate or, where the dialect says so, the adjusted one.
    One run must also follow the recurrences, so that nothing else changes when decay is on. Fails
    for decay folded into the gradient, applied after the update, twice or once only, from an
    adjusted learning rate, and for an option that turns something else off.
    """
    steps = [case.conditioned("decay", i) for i in range(_STEPS)]
    starts = [gradients.draw(case.shapes, case.seed, "decay", i, size=_START) for i in range(2)]
    decaying = replace(case.hyper, weight_decay=_DECAY)
    runs = [case.run(steps, start, decaying) for start in starts]
    stated = case.stated_by(runs[0], _DECAY)
    for d, exact in recurrences(case, steps, starts[0], stated):
        kept = decayed(case, d, stated[d.name])
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
        limit += 2 * _folded(case, d, stated[d.name]) / float(before.norm())
        off = float((after - kept * before).norm() / before.norm())
        case.allow("decay", limit)
        if not off <= limit:
            factor, wanted = (
                float((x * before).sum() / before.square().sum()) for x in (after, kept * before)
            )
            said = f"the parameter is kept by a factor {factor:.8g}, not {wanted:.8g}"
            numbers = {"factor": factor, "off": off, "allowed": limit}
            yield Finding(d.name, said, f"{wanted:.8g}", f"{factor:.8g}", numbers)
            continue
        end = runs[0].after[-1][d.name]
        off, limit = exact.compare(end)
        if limit > BLIND:
            if spoken(case, d, steps, starts[0][d.name], stated[d.name], end):
                continue
            raise UndecidedError(f"rounding alone may move {d.name} by {limit:.2g} of its way")
        if not off <= limit:
            said = f"with decay the update is another: off by {off:.3g}, {limit:.3g} allowed"
            numbers = {"off": off, "allowed": limit}
            yield Finding(d.name, said, "decay, then the update", "something else", numbers)


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
