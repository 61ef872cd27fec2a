"""Geometry → layout: what a dialect makes of the heads of a weight."""

from dataclasses import replace

from muonsplit.dialect import SplitRule
from muonsplit.errors import LayoutError
from muonsplit.geometry.candidates import HeadGeometry
from muonsplit.geometry.leaf import Kind
from muonsplit.layout import Layout

ROLES: dict[Kind, str] = {
    "query": "q",
    "key": "k",
    "value": "v",
    "mla_query_up": "q",
    "mla_key_value_up": "kv",
    "fused_qkv": "qkv",
}


def cut(
    kind: Kind, geometry: HeadGeometry, split: SplitRule, axis: int, one_order: bool
) -> tuple[Layout | None, str]:
    """The layout the split rule makes of a geometry, and a reason where it makes none.

    Args:
        kind: What the leaf is.
        geometry: The confirmed heads.
        split: The dialect's rule.
        axis: Where the weight's outputs are.
        one_order: Whether the order of Q, K and V in a fused weight is known.
    """
    heads, width, finest = geometry.heads, geometry.width, geometry.layout
    if split.heads_per_block is None:
        return None, "the dialect keeps every weight whole"
    layout = Layout.heads(ROLES[kind], heads, width)
    if kind == "fused_qkv":
        said = f"fused QKV of {heads} heads of {width} rows"
        if split.fused_qkv == "whole":
            return None, f"{said}: the dialect keeps it whole"
        if split.fused_qkv == "projections":
            if not one_order or len({segment.role for segment in finest.segments}) < 2:
                return None, f"{said}: which rows are Q, K and V is not known of this owner"
            return replace(finest, joined=True, axis=axis), ""
        layout = finest
    if kind == "mla_key_value_up" and split.mla_key_value == "apart":
        if len(finest.segments) < 2:
            return None, "declined: kv is to be cut into K and V, but their widths are not stated"
        layout = finest
    if kind == "query" and split.gated_query == "apart":
        layout = finest
    try:
        return replace(layout.per_block(split.heads_per_block), axis=axis), ""
    except LayoutError as error:
        return None, f"declined: {error}"
