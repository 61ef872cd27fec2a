"""The same subject on other models: bare weights of chosen shapes, no split, no heads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from muonsplit.checks.case import Case
from muonsplit.checks.registry import SkipError
from muonsplit.errors import SubjectFaultError
from muonsplit.geometry import Decision, Plan
from muonsplit.geometry.leaf import Kind
from muonsplit.layout import Layout
from muonsplit.models.bare import BARE

# Name → rows and columns, and how they are cut.
Weights = Mapping[str, tuple[Sequence[int], Layout | None]]


def ordinary(case: Case) -> Case:
    """The subject on what any that needs nothing but weights and layouts can be built on.

    As many heads as there are ranks, so that no shard cuts one.

    Args:
        case: The subject on its own model.
    """
    n = 1 if case.sharding is None else case.sharding.world
    weights: Weights = {
        "a.q_proj.weight": ((32 * n, 48), Layout.heads("q", 4 * n, 8)),
        "a.k_proj.weight": ((16 * n, 48), Layout.heads("k", 2 * n, 8)),
        "a.v_proj.weight": ((16 * n, 48), Layout.heads("v", 2 * n, 8)),
        "a.up_proj.weight": ((64, 48), None),
    }
    return _on(case, weights)


def bare(case: Case, weights: Weights) -> Case:
    """The subject on a model of nothing but named weights.

    Args:
        case: The subject on its own model.
        weights: Shapes and layouts by name; whole where the dialect asks for no heads.

    Raises:
        SkipError: If the subject finds the heads itself, for such a model has none to find; if it
            raises on ordinary bare weights; or if it was seen before that it does not split.
    """
    if case.described["recognises"]:
        raise SkipError("the subject finds the heads itself, and bare weights show none")
    if case.plan.split and all(d.name in case.diverged for d in case.plan.split):
        raise SkipError("every weight that is split has diverged before")
    usual = ordinary(case)
    try:
        usual.run([usual.gradients])
    except SubjectFaultError as fault:
        if not fault.raised:
            raise
        raise SkipError(f"the subject cannot be built on bare weights: {fault.message}") from None
    return _on(case, weights)


def _on(case: Case, weights: Weights) -> Case:
    decisions = tuple(
        _decision(name, tuple(shape), layout if case.dialect.per_head else None)
        for name, (shape, layout) in weights.items()
    )
    # Optimizers for what Muon does not train are given something too.
    beside = _decision("embed_tokens.weight", (16, 8), None, "embedding")
    shapes = {d.name: d.shape for d in (beside, *decisions)}
    config = {"model_type": BARE, "weights": {name: list(shape) for name, shape in shapes.items()}}
    plan = Plan(case.dialect.name, decisions, (beside,))
    return replace(
        case, config=config, shapes=shapes, asked=plan, full=plan, truths={}, diverged={}, alone={}
    )


def _decision(
    name: str, shape: tuple[int, ...], layout: Layout | None, kind: Kind = "other"
) -> Decision:
    leaf = name.split(".")[-2]
    return Decision(name, shape, "", leaf, kind, layout, None, None, "given", "given")


def unsplit(case: Case) -> Case:
    """The subject on its own model, with the split off.

    Raises:
        SkipError: If the dialect asks for no heads, or nothing says how to turn the split off.
    """
    if not case.plan.split:
        raise SkipError("the plan splits no weight of this model")
    if case.described["recognises"] and not case.described["off"]:
        raise SkipError("the subject declares no option that turns the split off")
    whole = tuple(replace(d, layout=None) for d in case.asked.decisions)
    return replace(case, asked=replace(case.asked, decisions=whole))
