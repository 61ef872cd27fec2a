"""What the written forms share: the rows of each block, and the refusal of what a form cannot say.

A form never approximates. Where a framework has no way to spell a layout, the export is an error
that names the weight.
"""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

from muonsplit.errors import LayoutError
from muonsplit.geometry.plan import Decision, Plan
from muonsplit.layout import Layout

Value = TypeVar("Value")

_ANOTHER = "Plan with a dialect whose blocks it can take; gram-newton-schulz takes any layout."
_CUT_ONLY = (
    "To export only the weights that are cut: dataclasses.replace(plan, decisions=plan.split)."
)


def cut_of(decision: Decision) -> Layout | None:
    """The layout of a weight that is really cut; None if it is one block of rows."""
    layout = decision.layout
    if layout is None or (layout.is_whole and layout.axis == 0):
        return None
    return layout


def row_blocks(decision: Decision, layout: Layout, form: str) -> list[int]:
    """The rows of each block, first to last, for a form that lists them.

    Args:
        decision: The weight.
        layout: How it is cut.
        form: What the framework reads, for the error.

    Raises:
        LayoutError: If the blocks are columns, or the rows of one are not consecutive.
    """
    if layout.axis:
        raise refused(decision, form, "lists blocks of rows, and these are blocks of columns")
    if any(len(block.spans) > 1 for block in layout.blocks()):
        raise refused(decision, form, "lists consecutive rows, and a joined block gathers its own")
    return [block.rows for block in layout.blocks()]


def equal_heads(decision: Decision, layout: Layout, form: str) -> tuple[int, int]:
    """Number and rows of equal blocks, for a form that gives only their count.

    Raises:
        LayoutError: If the blocks are not equal, or not blocks of consecutive rows.
    """
    rows = row_blocks(decision, layout, form)
    if len(set(rows)) > 1:
        sizes = ", ".join(map(str, sorted(set(rows))))
        raise refused(decision, form, f"counts blocks of one size, and these have {sizes} rows")
    return len(rows), rows[0]


def refuse_stacks(plan: Plan, form: str, treatment: str) -> None:
    """Raises for stacks of matrices where a framework does not take them one by one.

    Args:
        plan: The plan; it holds every matrix of a stack to be a block.
        form: What the framework reads, for the error.
        treatment: What the framework does with a stack instead.
    """
    for decision in plan.decisions:
        if len(decision.shape) > 2:
            raise refused(decision, form, treatment, _CUT_ONLY)


def refused(decision: Decision, form: str, why: str, hint: str = _ANOTHER) -> LayoutError:
    """The error for a weight that a form cannot express.

    Args:
        decision: The weight.
        form: What the framework reads.
        why: The rest of the sentence "it …".
        hint: What to do about it.
    """
    how = f"cut as {decision.layout}" if decision.layout is not None else "whole"
    return LayoutError(
        f"{form} cannot express {decision.name} {decision.shape}, which the plan has {how}: "
        f"it {why}.",
        hint,
    )


def parameters(model: nn.Module, named: Mapping[str, Value]) -> list[tuple[nn.Parameter, Value]]:
    """The parameters of a model beside what an export says of each.

    Raises:
        LayoutError: If the names differ: the export is of another model, or of another wrapping.
    """
    found = dict(model.named_parameters())
    odd = sorted(found.keys() ^ named.keys())
    if odd:
        raise LayoutError(
            f"The export names {len(named)} parameters and the model has {len(found)}; only one "
            f"of them knows {', '.join(odd[:3])}{', …' if len(odd) > 3 else ''}.",
            "Export the plan of the very module that is trained, wrapped as it is then.",
        )
    return [(parameter, named[name]) for name, parameter in found.items()]
