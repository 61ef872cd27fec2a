"""Whether two truths of one weight, found in different ways, say the same."""

from typing import Literal

from muonsplit.truth.answer import Run, Truth

Agreement = Literal["agree", "coupled", "differ", "silent"]


def agreement(views: Truth, gradients: Truth) -> tuple[Agreement, str]:
    """Holds what a model's views say against what its gradients say.

    Args:
        views: From :func:`muonsplit.truth.views.views`.
        gradients: Of the same weight of the same model.

    Returns:
        ``agree``; ``coupled`` where several heads of the views are one to the gradients (heads
        that are subtracted from each other); ``differ``; or ``silent`` where one of them does not
        speak; and why.
    """
    for name, truth in (("views", views), ("gradients", gradients)):
        if truth.state == "unknown":
            return "silent", f"{name}: {truth.evidence}"
    if (views.state, gradients.state) == ("none", "none"):
        return "agree", ""
    if views.state == "none":
        # A gate multiplies: its rows are used in one piece, and each reaches the head that it
        # multiplies, by its one column or as the one row of that head.
        if "one column a row" in gradients.evidence.split("; "):
            return "agree", "a gate, channel by channel"
        if all(run.stop - run.start == 1 for run in gradients.runs if run.heads):
            return "agree", "a gate, a row a head"
        return "differ", f"views: {views.evidence}; gradients: {gradients.layout}"
    if gradients.state == "none":
        return "differ", f"views: {views.layout}; gradients: {gradients.evidence}"
    if views.axis == gradients.axis and views.rows != gradients.rows:
        return "silent", f"of more than two dimensions: {views.rows} and {gradients.rows} rows"
    if (views.axis, views.rows) != (gradients.axis, gradients.rows):
        return "differ", f"views: axis {views.axis}; gradients: axis {gradients.axis}"
    return _partitions(views, gradients)


def _partitions(views: Truth, gradients: Truth) -> tuple[Agreement, str]:
    """Each head of the gradients is one of the views', or several."""
    seen: dict[frozenset[int], set[frozenset[int]]] = {}
    for run in gradients.runs:
        for other in views.runs:
            if run.heads and other.heads and _overlap(run, other):
                seen.setdefault(other.heads, set()).add(run.heads)
    split = [heads for heads, found in seen.items() if len(found) > 1]
    if split:
        return "differ", f"views: {views.layout}; gradients cut inside a head: {gradients.layout}"
    distinct = {next(iter(found)) for found in seen.values()}
    if len(distinct) < len(seen):
        return "coupled", f"{len(seen)} heads of the views are {len(distinct)} to the gradients"
    return "agree", ""


def _overlap(one: Run, other: Run) -> bool:
    return one.start < other.stop and other.start < one.stop
