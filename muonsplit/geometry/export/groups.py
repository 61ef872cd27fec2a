"""Forms that are torch param groups: dion, muonium, gram-newton-schulz, optimuon.

A group is written with the names of its parameters; :func:`bind_groups` puts the parameters in.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.errors import LayoutError
from muonsplit.geometry.export.rows import cut_of, parameters, refuse_stacks, row_blocks
from muonsplit.geometry.plan import Decision, Plan
from muonsplit.layout import Layout

Groups = list[dict[str, Any]]
Split = Callable[[Tensor], list[Tensor]]
Recombine = Callable[[Sequence[Tensor]], Tensor]

# What each framework calls the two functions that cut a weight and put it together again.
FUNCTIONS: Mapping[str, tuple[str, str]] = {
    "gram-newton-schulz": ("param_split_fn", "param_recombine_fn"),
    "optimuon": ("ns_split_fn", "ns_recombine_fn"),
}


def dion_groups(plan: Plan) -> Groups:
    """Param groups for dion's Muon: ``num_heads`` for equal blocks, else ``split_sizes``.

    Weights that are cut alike share a group; ``flatten`` has to stay False, its default.

    Raises:
        LayoutError: If the blocks of a weight are not consecutive rows.

    Source:
        microsoft/dion 0a059a4, ``dion/megabatch_base.py`` (``_resolve_num_heads``,
        ``_resolve_split_sizes``); pull requests #62 and #90.
    """

    def options(d: Decision, layout: Layout) -> dict[str, Any]:
        rows = row_blocks(d, layout, "dion's split_sizes")
        return {"num_heads": len(rows)} if len(set(rows)) == 1 else {"split_sizes": rows}

    return _with_adamw(_grouped(plan, options), plan)


def muonium_groups(plan: Plan) -> Groups:
    """Param groups for muonium's Muon: ``split_sizes`` of every weight that is cut.

    Raises:
        LayoutError: If the blocks of a weight are not consecutive rows.

    Source:
        muonium 0.2.0, ``muonium/optim/optim.py`` (``_validate_split_sizes``).
    """
    return _with_adamw(
        _grouped(plan, lambda d, x: {"split_sizes": row_blocks(d, x, "muonium's split_sizes")}),
        plan,
    )


def gram_newton_schulz_groups(plan: Plan) -> Groups:
    """Param groups for gram-newton-schulz: the layout that its two functions are made from.

    Any layout can be told, because the framework is handed the functions themselves; see
    :func:`split_functions`. Parameters that Muon does not train belong to its
    ``scalar_optimizer`` and are in no group.

    Source:
        gram-newton-schulz 0.1.6, ``muon/muon_utils/muon_matrix_split_utils.py``.
    """
    return _grouped(plan, _spelled)


def optimuon_groups(plan: Plan) -> Groups:
    """Param groups for optimuon: the layout that its two functions are made from.

    Raises:
        LayoutError: If a weight is a stack, which optimuon flattens to one matrix.

    Source:
        optimuon 0.1.1, ``optimuon/_muon.py`` (``ns_split_fn``, ``ns_recombine_fn``).
    """
    refuse_stacks(plan, "optimuon's ns_split_fn", "cuts matrices, and a stack is flattened to one")
    return _grouped(plan, _spelled)


def _spelled(_: Decision, layout: Layout) -> dict[str, Any]:
    return {"layout": str(layout), "split_sizes": [block.rows for block in layout.blocks()]}


def _grouped(plan: Plan, options: Callable[[Decision, Layout], dict[str, Any]]) -> Groups:
    groups: dict[Hashable, dict[str, Any]] = {}
    for d in plan.decisions:
        layout = cut_of(d)
        chosen = {} if layout is None else options(d, layout)
        group = groups.setdefault(repr(chosen), {"params": [], **chosen})
        group["params"].append(d.name)
    return list(groups.values())


def _with_adamw(groups: Groups, plan: Plan) -> Groups:
    named = [{**group, "algorithm": "muon"} for group in groups]
    others = [d.name for d in plan.others]
    return named + ([{"params": others, "algorithm": "adamw"}] if others else [])


def bind_groups(
    model: nn.Module,
    groups: Iterable[Mapping[str, Any]],
    functions: tuple[str, str] | None = None,
) -> Groups:
    """The same groups with the model's parameters, for the optimizer's constructor.

    Args:
        model: The model the plan was made of.
        groups: What one of the functions above wrote.
        functions: Entry of :data:`FUNCTIONS`, for a framework that is handed functions: each
            group's layout is replaced by the two that are made from it.

    Raises:
        LayoutError: If a name is not one of the model's, or stands in two groups.
    """
    written = [dict(group) for group in groups]
    names = [name for group in written for name in group["params"]]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise LayoutError(f"{twice} stands in two param groups; a parameter is in one.")
    listed = {name: name for name in names}
    rest = {name: name for name, _ in model.named_parameters() if name not in listed}
    found = {name: parameter for parameter, name in parameters(model, listed | rest)}
    for group in written:
        group["params"] = [found[name] for name in group["params"]]
        if functions is not None and "layout" in group:
            del group["split_sizes"]
            group.update(zip(functions, split_functions(group.pop("layout")), strict=True))
    return written


def split_functions(layout: Layout | str) -> tuple[Split, Recombine]:
    """The two functions that take a weight apart into its blocks and put it together again.

    Args:
        layout: The layout, or how ``str`` writes it.

    Returns:
        ``split`` makes the list of blocks, each ``[block rows, inputs]`` whatever the axis;
        ``recombine`` makes the weight of such a list, in a tensor of its own.
    """
    cut = Layout.parse(layout) if isinstance(layout, str) else layout

    def split(weight: Tensor) -> list[Tensor]:
        return [block for batch in cut.batches(weight) for block in batch.unbind(0)]

    def recombine(blocks: Sequence[Tensor]) -> Tensor:
        inputs = blocks[0].shape[-1]
        weight = blocks[0].new_empty((inputs, cut.rows) if cut.axis else (cut.rows, inputs))
        rest = iter(blocks)
        sizes = [batch.size(0) for batch in cut.batches(weight)]
        cut.write([torch.stack(list(islice(rest, size))) for size in sizes], weight)
        return weight

    return split, recombine
