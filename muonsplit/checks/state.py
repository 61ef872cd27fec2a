"""Is what is carried from step to step, and added beside the update, as declared?"""

import torch

from muonsplit.checks.case import Case
from muonsplit.checks.registry import Finding, Findings, SkipError, check
from muonsplit.muon import advance_momentum, orthogonalize
from muonsplit.observe import gradients
from muonsplit.subjects.protocol import Hyper

_STEPS = 3
_DECAY = 0.1


@check("state.momentum", "several steps accumulate momentum as the dialect does")
def momentum(case: Case) -> Findings:
    """Three steps with different gradients, compared with the same three in float64.

    Fails for a missing or misplaced Nesterov step, another coefficient, a buffer that is
    normalised in place (torch.optim.Muon 2.13 in bfloat16) or not kept.
    """
    if not case.knows_lr:
        raise SkipError("the subject states no learning rate, so steps cannot be added up")
    steps = [case.conditioned("step", i) for i in range(_STEPS)]
    after = case.run(steps).after[-1]
    arithmetic, exact = case.dialect.arithmetic, case.dialect.arithmetic.exact()
    for d in case.weights:
        buffer = torch.zeros(d.shape, dtype=torch.float64)
        total, slack = torch.zeros_like(buffer), 0.0
        for step in steps:
            gradient, beta = step[d.name].double(), case.setting("momentum", d.name, case.beta)
            update = advance_momentum(gradient, buffer, arithmetic, beta)
            wanted = orthogonalize(update, d.layout, exact)
            slack += case.bound(d, update) * float(wanted.norm())
            total += wanted
        off = float((case.update(d.name, after) - total).norm() / total.norm())
        limit = slack / float(total.norm())
        if not off <= limit:
            said = f"after {_STEPS} steps off by {off:.3g}, {limit:.3g} allowed"
            form = f"{arithmetic.momentum}, nesterov={arithmetic.nesterov}"
            yield Finding(d.name, said, form, "other momentum", {"off": off, "allowed": limit})


@check("state.decay", "weight decay shrinks the parameter by lr × decay, and does nothing else")
def decay(case: Case) -> Findings:
    """Two runs differ only in the initial parameters; their difference must shrink by 1 − lr·decay.

    The update cancels, so no model of it is needed. Decay folded into the gradient, taken from an
    adjusted learning rate, or rounded by a foreach kernel shows as another factor or direction.
    """
    if not case.knows_lr:
        raise SkipError("the subject states no learning rate, so decay cannot be judged")
    starts = [gradients.draw(case.shapes, case.seed, "decay", i) for i in range(2)]
    runs = [case.run([case.gradients], start, _DECAY) for start in starts]
    for d in case.weights:
        before = starts[1][d.name].double() - starts[0][d.name].double()
        after = runs[1].after[0][d.name].double() - runs[0].after[0][d.name].double()
        given = _DECAY if case.knows_hyper else 0.0
        stated = runs[0].settings.get(d.name, {}).get("weight_decay", given)
        wanted = 1 - case.setting("lr", d.name, Hyper().lr) * stated
        # Either run rounds the decayed and the updated parameter once, each to half an ulp.
        size = sum(float(s[d.name].double().norm()) for s in starts)
        limit = 2 * torch.finfo(torch.float32).eps * size / float(before.norm())
        off = float((after - wanted * before).norm() / before.norm())
        if not off <= limit:
            factor = float((after * before).sum() / before.square().sum())
            said = f"the parameter is kept by a factor {factor:.8g}, not {wanted:.8g}"
            numbers = {"factor": factor, "off": off, "allowed": limit}
            yield Finding(d.name, said, f"{wanted:.8g}", f"{factor:.8g}", numbers)
