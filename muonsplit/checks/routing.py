"""Is it Muon where it should be?"""

from torch import Tensor

from muonsplit.checks.case import Case
from muonsplit.checks.registry import Finding, Findings, SkipError, UndecidedError, check
from muonsplit.geometry.leaf import SPLITTABLE
from muonsplit.observe.cut import Cut

# Exact in every dtype, so that a scale-invariant update keeps its bits up to ε.
_LOUDER = 16.0
# Whatever grows with the gradient, be it by its fourth root, grows by more; what changes by less is
# orthogonalised in another arithmetic, for which there are other checks.
_GROWS = 2.0
_NEXT_TO_NOTHING = 1e-3


@check("model.recognised", "the rules decide every attention weight of the model")
def recognised(case: Case) -> Findings:
    """No attention weight is declined because its geometry is missing, ambiguous or does not fit.

    Undecided if one is: it stays whole in the plan, and whether that is right is not known.
    """
    if not case.dialect.per_head:
        raise SkipError("the dialect asks for no heads")
    if not any(d.kind in SPLITTABLE for d in case.full.decisions):
        raise UndecidedError("the model has no leaf known to hold heads")
    if missed := case.full.missed():
        raise UndecidedError(f"attention weights stay whole: {'; '.join(missed)}")
    yield from ()


@check("model.truth", "the plan cuts the miniature where its own computation has heads")
def truth(case: Case) -> Findings:
    """Compares the plan with the views that the miniature's forward pass takes.

    Undecided if the plan cuts what the model does not, or leaves whole what it reads by heads and
    no rule of the dialect says so: what follows would hold the subject to a mistake of ours.
    """
    apart = [j for j in case.truths.values() if j.differs]
    if apart:
        one = apart[0]
        raise UndecidedError(
            f"plan and truth differ on {len(apart)} weights, first on {one.decision.name}: "
            f"{one.objection}"
        )
    yield from ()


@check("independence.weights", "no weight's update depends on another weight's gradient")
def weights(case: Case) -> Findings:
    """Gives every second weight another, much louder gradient: the rest must keep their update.

    Clipping the orthogonalised update by a global norm couples all weights and shrinks each
    (DeepSpeed's default of 1.0 does so under ZeRO). Clipping raw gradients is harmless: the update
    does not depend on their size.
    """
    if case.coupled:
        name, change = max(case.coupled.items(), key=lambda item: item[1])
        said = (
            f"{len(case.coupled)} of {len(case.plan.decisions)} weights change with the gradients "
            f"of others, {name} by {change:.3g}"
        )
        yield Finding("", said, "weights do not see each other", "coupled by a common factor")


@check("routing.muon", "every Muon weight moves, by an orthogonalised update")
def muon(case: Case) -> Findings:
    """Each weight moves, its rows are multiplied with each other, and size does not matter.

    A gradient sixteen times as large must give the same update. SGD scales with the gradient,
    AdamW moves each element alone, and a block that is left raw does both. Seen in public:
    zero.Init placeholders of one dimension sent every weight to AdamW (DeepSpeed #8438), no
    optimizer math outside ZeRO (#8441).
    """
    base = case.base.after[0]
    # Only what Muon trains: how AdamW's gradients enter a common clipping is not asked here.
    larger = {d.name: case.gradients[d.name] * _LOUDER for d in case.plan.decisions}
    louder = case.probe({**case.gradients, **larger})
    for d in case.weights:
        update, again = case.update(d.name, base), case.update(d.name, louder)
        if not update.any():
            yield Finding(d.name, "did not move at all", "trained by Muon", "unchanged")
            continue
        alone = _alone(case.rows[d.name])
        if alone and len(case.blocks(d)[0]) > 1:
            said = f"{_span(alone)} move alone: an elementwise update, as of AdamW or SGD"
            yield Finding(d.name, said, "trained by Muon", str(case.rows[d.name]))
            continue
        grown = _grown(update, again)
        if not grown <= _GROWS:
            said = "grows with the gradient: what is added is not orthogonalised"
            wanted = f"as large with {_LOUDER:g} times the gradient"
            yield Finding(d.name, said, wanted, f"{grown:.3g} times", {"grown": grown})


def _grown(update: Tensor, again: Tensor) -> float:
    """By how much the norm of a row has grown, at most, among those that are not nothing."""
    before, after = (x.view(-1, x.shape[-1]).norm(dim=1) for x in (update, again))
    seen = before > _NEXT_TO_NOTHING * before.max()
    return float((after[seen] / before[seen]).max())


@check("routing.others", "embedding and output head are not orthogonalised")
def others(case: Case) -> Findings:
    """Changes signs in one row of the embedding's and the head's gradient: no other row may move.

    An orthogonalised update mixes rows; AdamW and SGD do not, and which of them is used is not
    asked. Seen in public: DeepSpeed #7641, Moonlight and others trained `lm_head` or the embedding
    by Muon.
    """
    for d in case.plan.others:
        cut = case.rows.get(d.name)
        if d.kind in ("embedding", "head") and cut is not None and max(map(len, cut.blocks)) > 1:
            yield Finding(d.name, f"the {d.kind} is orthogonalised", "not by Muon", str(cut))


def _alone(cut: Cut) -> list[int]:
    return sorted(line for line, block in cut.moved.items() if block == frozenset((line,)))


def _span(lines: list[int]) -> str:
    return f"row {lines[0]}" if len(lines) == 1 else f"rows {lines[0]} to {lines[-1]}"
