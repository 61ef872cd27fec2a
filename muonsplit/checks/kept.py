"""Is what an optimizer keeps between steps right, and does it survive what happens to a run?"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.checks.case import Case, axis_of, cast, largest_bounds, lines_first
from muonsplit.checks.follow import decayed, name_of
from muonsplit.checks.registry import BLIND, Finding, Findings, SkipError, UndecidedError, check
from muonsplit.checks.variants import unsplit
from muonsplit.errors import SubjectFaultError
from muonsplit.muon import advance_momentum
from muonsplit.observe.fit import compare, fit, hypotheses
from muonsplit.subjects.drive import Saved

# Each step rounds the buffer twice, by half an ulp of float32 each; thrice as much is allowed.
_BUFFER = 3 * 3 * torch.finfo(torch.float32).eps


@check("state.buffer", "what is kept for a weight is the momentum of its gradients")
def buffer(case: Case) -> Findings:
    """After three steps one tensor of a weight's state has the direction of the momentum.

    Momentum is recomputed in float64 from the gradients; its size is not asked, since an average
    and a sum differ by a factor and by nothing else. Fails for a buffer that holds the update, or
    the weight decay, or is kept in half precision.
    """
    steps = [case.conditioned("buffer", i) for i in range(3)]
    outcome = case.run(steps, state=True)
    for d in case.weights:
        held = {k: x for k, x in outcome.state[-1].items() if k.rpartition("/")[0] == d.name}
        if not held:
            raise SkipError("the subject shows no state of the size of its weights")
        beta = case.stated(d.name, outcome.settings[-1]).momentum
        exact = _momentum(case, [step[d.name] for step in steps], beta)
        found = [compare(name, tensor, exact) for name, tensor in held.items()]
        best = min(found, key=lambda fit: fit.residual)
        if not best.residual <= _BUFFER:
            said = f"the buffer is off by {best.residual:.3g}, {_BUFFER:.3g} allowed"
            numbers = {"off": best.residual, "allowed": _BUFFER}
            planned = f"momentum, {case.dialect.arithmetic.momentum}"
            yield Finding(d.name, said, planned, best.hypothesis.rpartition("/")[2], numbers)


def _momentum(case: Case, gradients: Sequence[Tensor], beta: float) -> Tensor:
    kept = torch.zeros_like(gradients[0], dtype=torch.float64)
    for count, gradient in enumerate(gradients, 1):
        advance_momentum(gradient.double(), kept, case.dialect.arithmetic.exact(), beta, count)
    return kept


@check("state.gradient", "a step leaves the gradient as it was")
def gradient(case: Case) -> Findings:
    """Compares every gradient before and after a step, bit by bit.

    What reads gradients after a step, a norm for the log or another optimizer, reads something
    else otherwise (DeepSpeed #8432). Dialects that write into them say so.
    """
    if case.dialect.arithmetic.gradient == "overwritten":
        raise SkipError("the dialect says that a step writes into gradients")
    written = set(case.base.overwritten[0])
    for d in case.weights:
        if d.name in written:
            yield Finding(d.name, "the step wrote into its gradient", "as it was", "other numbers")


@check("state.nonfinite", "an infinite gradient does no harm that is not seen")
def nonfinite(case: Case) -> Findings:
    """One element of one head's gradient is infinite, in the second of three steps.

    Other weights go on as if it were not, or the step is skipped, and the next is as if it had not
    been. The head itself is skipped too, and then the others of its weight go on likewise, or says
    so by infinity or NaN, and then it alone. Seen in public: finite nonsense applied (DeepSpeed
    0.19.8 by reading, per head without Nesterov), a momentum poisoned for good with zero updates
    ever after (DeepSpeed #8432).
    """
    if case.coupled:
        raise SkipError("all weights are coupled: see independence.weights")
    struck = next((d for d in case.weights if len(case.blocks(d)) > 1), case.weights[0])
    steps = [case.conditioned("nonfinite", i) for i in range(3)]
    lines, axis = sorted(case.blocks(struck)[0]), axis_of(struck.layout)
    bad = {**steps[1], struck.name: steps[1][struck.name].clone()}
    lines_first(bad[struck.name], axis)[lines[-1], 0] = torch.inf
    runs = [case.run(some).after for some in ([steps[0], bad, steps[2]], steps, steps[::2])]
    limits = case.rounding(steps[1])
    for d in case.weights:
        held = [
            [lines_first(after[d.name], axis if d is struck else 0) for after in run]
            for run in runs
        ]
        hit = torch.zeros(len(held[0][0]), dtype=torch.bool)
        hit[lines if d is struck else []] = True
        slack = 2 * limits[d.name]
        said = _harm(_Runs(*held), hit, slack)
        if said:
            planned = "as if it were finite, or skipped, or not finite itself"
            whose = "its own" if d is struck else f"an element of the gradient of {struck.name}"
            yield Finding(d.name, f"{said} when {whose} is infinite", planned, "finite")


class _Runs(NamedTuple):
    """One weight after each step, lines first.

    Attributes:
        seen: With the infinite gradient in the second step.
        without: With a finite one.
        skipped: Without that step.
    """

    seen: list[Tensor]
    without: list[Tensor]
    skipped: list[Tensor]


def _harm(runs: _Runs, hit: Tensor, slack: float) -> str:
    """What an infinite gradient did to a weight that it must not do; empty for nothing."""
    before, after, last = runs.seen

    def same(one: Tensor, other: Tensor, lines: Tensor) -> bool:
        moved = float((other - before)[lines].norm())
        return float((one - other)[lines].norm()) <= slack * moved

    if not after[hit].isfinite().all():  # it says so itself; only its own head may
        return "" if after[~hit].isfinite().all() else "other heads are not finite either"
    still = bool((after[~hit] == before[~hit]).all()) and bool((~hit).any())
    if not still and not same(after, runs.without[1], ~hit):
        return "other lines move otherwise"
    if not same(last, runs.skipped[1] if still else runs.without[2], ~hit):
        return "a step later other lines are elsewhere"
    if not bool((after[hit] == before[hit]).all()):
        return "it takes a finite step"
    if not last[hit].isfinite().all():
        return ""
    return "" if same(last, runs.skipped[1], hit) else "what is kept for it stays spoilt"


@check("state.resume", "a run that is saved and loaded goes on with the same bits")
def resume(case: Case) -> Findings:
    """Two steps, then state and weights go into a fresh subject, which takes the third.

    Compared bit by bit with three steps in one go, in float32 and, where it takes them, bfloat16
    parameters. Fails for state that is not saved, not loaded, or loaded for another weight, and
    for a float32 buffer that torch's `load_state_dict` rounded to the dtype of its parameter.
    """
    reported = set[str]()
    for dtype in (torch.float32, torch.bfloat16):
        steps = [cast(case.conditioned("resume", i), dtype) for i in range(3)]
        start = cast(case.start, dtype)
        try:
            once = case.run(steps, start).after[-1]
        except SubjectFaultError as fault:
            if not fault.raised or dtype == torch.float32:
                raise
            return  # it refuses bfloat16 parameters
        again = case.run(steps, start, saved=Saved(2, case.plan.layouts())).after[-1]
        for d in case.weights:
            if d.name not in reported and not torch.equal(once[d.name], again[d.name]):
                reported.add(d.name)
                off = float((once[d.name] - again[d.name]).norm() / once[d.name].norm())
                said = f"after it was saved and loaded in {name_of(dtype)} it is off by {off:.3g}"
                yield Finding(d.name, said, "the same bits", "others", {"off": off})


@check("state.split", "a state saved with the split off does not turn it off")
def split(case: Case) -> Findings:
    """One step with the split off, then its state goes into a subject with the split on.

    The next update must be cut as planned. Seen in public: torch restores every option of a
    param group, the cut among them (VeOmni).
    """
    whole = unsplit(case)
    first, second = (case.conditioned("toggled", i) for i in range(2))
    saved = Saved(1, whole.plan.layouts(), case.described["off"])
    outcome = case.run([first, second], saved=saved)
    exact, judged = case.dialect.arithmetic.exact(), 0
    cut = [d for d in case.weights if d.layout is not None]
    if not cut:
        raise SkipError("every weight that is split has diverged before")
    for d in cut:
        beta = case.stated(d.name, outcome.settings[-1]).momentum
        kept = torch.zeros(d.shape, dtype=torch.float64)
        given = [step[d.name].double() for step in (first, second)]
        ahead = [advance_momentum(g, kept, exact, beta, i) for i, g in enumerate(given, 1)][-1]
        once, twice = (after[d.name].double() for after in outcome.after)
        seen = decayed(case, d, [case.stated(d.name, outcome.settings[-1])]) * once - twice
        fits = fit(seen, ahead, hypotheses(d.layout, d.shape[0]), case.dialect.arithmetic)
        planned = next(found for found in fits if found.hypothesis == "as planned")
        limit = largest_bounds([(d, ahead)], case.dialect.arithmetic)[0]
        judged += limit <= BLIND or fits[0] is planned
        if limit <= BLIND and not planned.residual <= limit:
            said = f"after loading a state saved unsplit it is cut otherwise: {fits[0]}"
            numbers = {f"off if {found.hypothesis}": found.residual for found in fits}
            yield Finding(d.name, said, str(d.layout), fits[0].hypothesis, numbers)
    if not judged:
        raise UndecidedError("rounding alone may turn every weight as far as another cut")
