"""The form of optax: which axes of a reshaped weight are reduced, put out, or left as a batch."""

from typing import Any

from muonsplit.geometry.export.rows import cut_of, equal_heads, refused
from muonsplit.geometry.plan import Decision, Plan
from muonsplit.layout import Layout

_FORM = "optax's MuonDimensionNumbers"


def optax_dimensions(plan: Plan) -> dict[str, dict[str, Any] | None]:
    """For each weight the shape to hold it in, and the fields of its ``MuonDimensionNumbers``.

    Axes that neither field names are batch axes, each index of which is orthogonalised on its
    own: so the heads have to be an axis. The reshape is of the weight as torch holds it, outputs
    by inputs, and moves nothing in memory. Parameters that Muon does not train are None, which
    is how optax's masks tell them too.

    Returns:
        ``{"reshape": […], "reduction_axis": […], "output_axis": […]}`` by name.

    Raises:
        LayoutError: If the blocks of a weight differ in size, so that no reshape separates them.

    Source:
        optax 0.2.8, ``optax/contrib/_muon.py`` (``MuonDimensionNumbers``,
        ``_compute_muon_reshape``).
    """
    trained: dict[str, dict[str, Any] | None] = {d.name: _dimensions(d) for d in plan.decisions}
    return trained | {d.name: None for d in plan.others}


def _dimensions(decision: Decision) -> dict[str, Any]:
    layout = cut_of(decision)
    if layout is None:
        last = len(decision.shape) - 1
        return _written(list(decision.shape), [last], [last - 1])
    split, output = _split(decision, layout)
    if layout.axis:
        return _written([decision.shape[0], *split], [0], [axis + 1 for axis in output])
    return _written([*split, decision.shape[1]], [len(split)], output)


def _split(decision: Decision, layout: Layout) -> tuple[list[int], list[int]]:
    """How the cut axis is unfolded, and which of its parts are the rows of one block."""
    if not layout.joined or all(len(block.spans) == 1 for block in layout.blocks()):
        # Which axis it is does not matter here, only the rows along it.
        along = Layout(layout.segments, layout.groups, 0, layout.joined)
        return list(equal_heads(decision, along, _FORM)), [1]
    rows = {segment.rows for segment in layout.segments}
    roles = {segment.role for segment in layout.segments}
    if len(rows) > 1 or len(roles) < len(layout.segments):
        raise refused(decision, _FORM, "names axes, and these joined blocks differ in rows")
    return [layout.groups, len(layout.segments), rows.pop()], [0, 2]


def _written(shape: list[int], reduction: list[int], output: list[int]) -> dict[str, Any]:
    return {"reshape": shape, "reduction_axis": reduction, "output_axis": output}
