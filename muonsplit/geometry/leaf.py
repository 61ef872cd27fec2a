"""Leaf → kind: what a weight's name claims to be. A name is a claim; shape and owner decide."""

import re
from typing import Literal, NamedTuple

Kind = Literal[
    "query",
    "key",
    "value",
    "mla_query_up",
    "mla_key_value_up",
    "fused_qkv",
    "mla_down",
    "output",
    "gate",
    "indexer",
    "other",
    "embedding",
    "head",
    "vector",
    "convolution",
]

_WRAPPER_PARTS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)
_WRAPPER_LEAVES = frozenset({"linear", "base_layer"})

# Exact names only: `wq_b` is not `wq`, `dense_h_to_4h` is not `dense`.
_LEAVES: dict[Kind, frozenset[str]] = {
    "query": frozenset(
        {"q_proj", "query", "query_proj", "wq", "Wq", "project_q", "q", "q_lin", "q_attn", "to_q"}
        | {"q_linear", "linear_q", "query_key", "q_gate_proj"}
    ),
    "key": frozenset(
        {"k_proj", "key", "key_proj", "wk", "Wk", "project_k", "k", "k_lin", "to_k"}
        | {"k_linear", "linear_k"}
    ),
    "value": frozenset(
        {"v_proj", "value", "value_proj", "wv", "Wv", "project_v", "v", "v_lin", "to_v"}
        | {"v_linear", "linear_v"}
    ),
    "mla_query_up": frozenset({"q_b_proj", "q_up_proj", "wq_b", "linear_q_up_proj"}),
    "mla_key_value_up": frozenset({"kv_b_proj", "kv_up_proj", "wkv_b", "linear_kv_up_proj"}),
    "fused_qkv": frozenset(
        {"query_key_value", "qkv_proj", "qkv", "c_attn", "Wqkv", "wqkv", "in_proj_weight"}
        | {"in_proj_qkv", "in_proj_qkvz", "kv_proj", "kv", "to_kv", "to_qkv", "linear_qkv"}
    ),
    "mla_down": frozenset(
        {"q_a_proj", "kv_a_proj", "kv_a_proj_with_mqa", "wq_a", "wkv_a"}
        | {"linear_q_down_proj", "linear_kv_down_proj"}
    ),
    "output": frozenset(
        {"o_proj", "out_proj", "wo", "dense", "c_proj", "attention_out", "o", "out_lin", "to_out"}
    ),
    "gate": frozenset({"g_proj", "g_a_proj", "g_b_proj", "gate_proj", "f_a_proj", "f_b_proj"}),
}

SPLITTABLE: frozenset[Kind] = frozenset(
    {"query", "key", "value", "mla_query_up", "mla_key_value_up", "fused_qkv"}
)


_WEIGHT = re.compile(r"\.(parametrizations\.weight\.original[0-9]*|weight)$")


class Place(NamedTuple):
    """Where a parameter sits, with wrappers read through.

    Attributes:
        owner: Path of the module that holds the leaf, as the model spells it.
        leaf: Name of the module that holds the weight, or of the bare parameter.
    """

    owner: str
    leaf: str


def locate(name: str) -> Place:
    """Finds owner and leaf of a parameter.

    ``…self_attn.q_proj.weight`` has leaf ``q_proj``; so have ``…q_proj.linear.weight``,
    ``…q_proj.base_layer.weight`` and ``…q_proj.parametrizations.weight.original``. A bare
    parameter such as ``…self_attn.in_proj_weight`` is its own leaf.

    Args:
        name: Parameter name as ``named_parameters()`` gives it.
    """
    parts = holder(name).split(".")
    while len(parts) > 1 and parts[-1] in _WRAPPER_PARTS | _WRAPPER_LEAVES:
        parts.pop()
    return Place(".".join(parts[:-1]), parts[-1])


def holder(name: str) -> str:
    """Path of the module whose ``weight`` a parameter is; of a bare parameter, its own name."""
    return _WEIGHT.sub("", name)


def kind_of(leaf: str) -> Kind:
    """The kind a leaf's name claims, by exact match; ``other`` if none."""
    for kind, names in _LEAVES.items():
        if leaf in names:
            return kind
    return "other"
