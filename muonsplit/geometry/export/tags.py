"""Forms that say something of each parameter: DeepSpeed, Megatron, xtuner, prime-rl."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from muonsplit.geometry.export.rows import (
    cut_of,
    equal_heads,
    parameters,
    refuse_stacks,
    refused,
    row_blocks,
)
from muonsplit.geometry.plan import Decision, Plan
from muonsplit.layout import Layout

Tags = dict[str, dict[str, Any]]


def deepspeed_tags(plan: Plan) -> Tags:
    """The attributes DeepSpeed's Muon reads off each parameter.

    ``use_muon`` sorts the parameters, ``muon_num_heads`` cuts one and ``muon_head_dim`` lets the
    count be found again on a shard; the last two are None where a weight stays whole, because
    DeepSpeed's own tagger may have set them. That tagger runs in ``deepspeed.initialize`` when
    the config names the Muon optimizer, and writes over what it finds: set these afterwards.
    ZeRO 1 and 2 read the count anew at every step.

    Raises:
        LayoutError: If a weight is not cut into equal blocks of consecutive rows.

    Source:
        DeepSpeed 0.19.8, ``deepspeed/__init__.py`` (``set_optimizer_flags``) and
        ``runtime/zero/muon/original_muon.py`` (``_per_head_orthogonalize``); pull request #8384.
    """
    tags: Tags = {}
    for d in plan.decisions:
        layout = cut_of(d)
        heads, rows = (
            (None, None) if layout is None else equal_heads(d, layout, "DeepSpeed's muon_num_heads")
        )
        tags[d.name] = {"use_muon": True, "muon_num_heads": heads, "muon_head_dim": rows}
    whole = {"use_muon": False, "muon_num_heads": None, "muon_head_dim": None}
    return tags | {d.name: dict(whole) for d in plan.others}


def megatron_tags(plan: Plan) -> Tags:
    """The attributes Megatron-LM's ``TensorParallelMuon`` reads off each parameter.

    Its rows are ``view(groups, sum(qkv_split_shapes))``, and each shape is one matrix across the
    groups: exactly a joined layout. Blocks that are not joined are spelled as one group, so the
    shapes are then those of the unsharded weight, and a tensor-parallel shard is an error there.
    Megatron's own tagger gives every ``linear_qkv.weight`` the shapes of the config, and the
    optimizer copies attributes when it is built: set these in between.

    Raises:
        LayoutError: If the blocks are columns, a role is joined from several segments, or a
            weight is no matrix, which Megatron leaves to its scalar optimizer.

    Source:
        NVIDIA/Megatron-LM d98e8a6, ``megatron/core/optimizer/emerging_optimizers.py``
        (``TensorParallelMuon.orthogonalize``, ``_is_muon_excluded``). The ``QKVLayout`` of pull
        requests #6326 and #7085 is not merged.
    """
    form = "Megatron's qkv_split_shapes"
    refuse_stacks(plan, form, "is read on 2-D weights, and others go to the scalar optimizer")
    tags: Tags = {}
    for d in plan.decisions:
        layout = cut_of(d)
        tags[d.name] = {"use_muon": True, "is_qkv": layout is not None}
        if layout is not None:
            tags[d.name]["qkv_split_shapes"] = _qkv_split_shapes(d, layout, form)
    return tags | {d.name: {"use_muon": False, "is_qkv": False} for d in plan.others}


def _qkv_split_shapes(decision: Decision, layout: Layout, form: str) -> list[int]:
    if not layout.joined or layout.axis:
        return row_blocks(decision, layout, form)
    roles = [segment.role for segment in layout.segments]
    if len(set(roles)) < len(roles):
        raise refused(decision, form, "makes a matrix of each segment, and here one joins several")
    return [segment.rows for segment in layout.segments]


def xtuner_split_sizes(plan: Plan) -> dict[str, list[int]]:
    """The rows of each block, by name, of the weights that xtuner's Muon is to cut.

    A model hands them to the optimizer by parameter, through ``get_muon_split_sizes()`` of any
    of its modules; see :func:`by_parameter`. Which parameters are Muon's at all xtuner decides
    by name and shape. Rows that the sizes do not reach would get no update: these reach all.

    Raises:
        LayoutError: If the blocks are not consecutive rows, or a weight is a stack, which
            xtuner flattens to one matrix.

    Source:
        InternLM/xtuner b934f46, ``xtuner/v1/optim/muon.py`` (``_muonsplit_newton_schulz``),
        ``xtuner/v1/config/optim.py``; pull requests #2001 and #2030.
    """
    form = "xtuner's get_muon_split_sizes"
    refuse_stacks(plan, form, "cuts matrices, and xtuner flattens a stack to a single one")
    return _sizes(plan, form)


def prime_rl_partitions(plan: Plan) -> dict[str, list[int]]:
    """The rows of each block, by name, as prime-rl's ``muon_head_partitions`` describes them.

    Raises:
        LayoutError: If the blocks of a weight are not consecutive rows.

    Source:
        The descriptions of PrimeIntellect-ai/prime-rl pull requests #4114 and #4119 (the latter
        closed, not merged). The repository at 559b447 has no such method, so that this form has
        been driven by nothing.
    """
    return _sizes(plan, "prime-rl's muon_head_partitions")


def _sizes(plan: Plan, form: str) -> dict[str, list[int]]:
    return {
        d.name: row_blocks(d, layout, form)
        for d in plan.decisions
        if (layout := cut_of(d)) is not None
    }


def apply_tags(model: nn.Module, tags: Mapping[str, Mapping[str, Any]]) -> None:
    """Sets the attributes of :func:`deepspeed_tags` or :func:`megatron_tags` on a model.

    Args:
        model: The model the plan was made of; its parameters are tagged in place.
        tags: Attributes of every parameter, by name.

    Raises:
        LayoutError: If the names are not exactly the model's.
    """
    for parameter, attributes in parameters(model, tags):
        for name, value in attributes.items():
            setattr(parameter, name, value)


def by_parameter(
    model: nn.Module, sizes: Mapping[str, list[int]]
) -> dict[nn.Parameter, tuple[int, ...]]:
    """What ``get_muon_split_sizes()`` returns: :func:`xtuner_split_sizes` by parameter.

    Raises:
        LayoutError: If the model has no parameter of a name.
    """
    rest = {name: None for name, _ in model.named_parameters() if name not in sizes}
    found = parameters(model, {**rest, **sizes})
    return {parameter: tuple(rows) for parameter, rows in found if rows is not None}
