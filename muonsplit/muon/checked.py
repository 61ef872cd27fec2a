"""What the reference optimizer refuses, before it has changed anything."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from muonsplit.dialect import Dialect, dialect_named
from muonsplit.errors import CutHeadError, InputError, UsageError
from muonsplit.layout import Layout
from muonsplit.muon.blocks import refuse_layout
from muonsplit.newton_schulz import refuse
from muonsplit.sharding import CutHeads, Members, agree, holding, members, on_mesh
from muonsplit.sharding.local import HINT

Layouts = Mapping[str, Layout | None]


def dialect(value: Any) -> Dialect:
    """A dialect, or the one of a name."""
    if isinstance(value, Dialect):
        return value
    if not isinstance(value, str):
        kind = type(value).__name__
        raise UsageError(f"dialect must be a Dialect or the name of one, got {kind}.")
    return dialect_named(value)


def layouts(value: Any) -> dict[str, Layout | None]:
    """Layouts by parameter name."""
    if not isinstance(value, Mapping):
        raise UsageError(
            f"layouts must map parameter names to layouts, got {repr(value)[:60]}.",
            "muonsplit.plan(model).layouts() does.",
        )
    found: dict[Any, Any] = dict(value)
    for name, layout in found.items():
        refuse_layout(f"The layout of {name!r},", layout)
    return found


def cut_heads(value: Any) -> None:
    """Refuses what is no choice."""
    if value not in get_args(CutHeads):
        known = ", ".join(sorted(get_args(CutHeads)))
        raise UsageError(f"cut_heads must be one of {known}, got {repr(value)[:60]}.")


def hyperparameters(group: Mapping[str, Any]) -> None:
    """Refuses numbers that are none, negative or too large."""
    for name in ("lr", "adamw_lr", "weight_decay", "eps"):
        refuse.number(name, group[name])
    refuse.number("momentum", group["momentum"], below=1.0)
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise InputError(f"betas must be two numbers in [0, 1), got {repr(betas)[:60]}.")
    for beta in betas:
        refuse.number(f"betas {betas!r}: each", beta, below=1.0)


def pairs(params: Any, known: Iterable[str]) -> None:
    """Refuses named parameters that no optimizer can take; what is otherwise wrong torch says."""
    if not isinstance(params, (list, tuple)):
        return
    names, seen = set(known), set[int]()
    for item in params:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Tensor)):
            continue
        name, weight = item
        if name in names:
            raise InputError(f"{name!r} names two parameters; layouts are found by name.")
        if id(weight) in seen:
            raise InputError(f"{name!r} is a parameter that was given before by another name.")
        names.add(name)
        seen.add(id(weight))
        if not weight.is_leaf:
            raise InputError(f"{name} is no leaf: it is computed from other tensors.")
        if not weight.is_floating_point() or weight.layout is not torch.strided:
            kind = f"{weight.dtype}, {weight.layout}"
            raise InputError(f"{name} is {kind}; a parameter must be dense and floating-point.")
        members(name, weight)


def weight(name: str, shape: Sequence[int], layout: Layout | None) -> None:
    """Refuses a layout that does not fit the weight it is given for."""
    shape = tuple(shape)
    wanted = "2-D" if layout else "2-D or 3-D"
    if len(shape) not in ((2,) if layout else (2, 3)):
        raise InputError(f"{name} has shape {shape}; Muon needs it {wanted}.")
    if layout and layout.rows != shape[layout.axis]:
        raise InputError(f"{name} has shape {shape}, its layout {layout} does not fit.")


def gradient(name: str, p: Tensor, state: Mapping[str, Any]) -> None:
    """Refuses a gradient, or a state, that a step cannot take."""
    assert p.grad is not None
    if p.grad.layout is not torch.strided or not p.grad.is_floating_point():
        raise InputError(
            f"The gradient of {name} is {p.grad.dtype}, {p.grad.layout}; it must be dense and "
            "floating-point.",
            "Train embeddings with sparse gradients by another optimizer.",
        )
    members(name, p)
    if _mesh(p.grad) != _mesh(p):
        raise InputError(
            f"The gradient of {name} is on {_mesh(p.grad)}, the parameter on {_mesh(p)}."
        )
    for key, held in state.items():
        if not isinstance(held, Tensor):
            continue
        if held.shape != p.shape:
            shapes = f"{tuple(held.shape)}, the parameter {tuple(p.shape)}"
            raise InputError(f"The state {key} of {name} has shape {shapes}.")
        if (_mesh(held), _placements(held)) != (_mesh(p), _placements(p)):
            raise InputError(
                f"The state {key} of {name} is placed {_placements(held)} on {_mesh(held)}, the "
                f"parameter {_placements(p)} on {_mesh(p)}.",
                "Load it by torch.distributed.checkpoint, which divides it as the parameter is.",
            )


def uncut(named: Mapping[str, Tensor], layouts: Layouts, choice: CutHeads) -> Layouts:
    """The layouts by which weights are cut, given which heads no rank holds whole.

    Args:
        named: Every parameter.
        layouts: How the weights are to be cut.
        choice: What becomes of a layout whose blocks are divided among ranks.

    Raises:
        CutHeadError: If that is refused, or no split would be left; on every rank alike.
    """
    split = {n: layout for n, layout in layouts.items() if layout and not layout.is_whole}
    said: dict[str, str] = {}
    for name, layout in split.items():
        cut = list(holding(name, named[name], layout).cut())
        if cut:
            block, ranks = cut[0]
            more = f" and {len(cut) - 1} more blocks" if len(cut) > 1 else ""
            said[name] = f"{name}, {layout}: {block.role}[{block.head}] on ranks {ranks}{more}"
    if choice == "gather" or not said:
        return layouts
    listed = "; ".join(said.values())
    if choice == "raise":
        raise CutHeadError(f"Shards cut heads: {listed}.", HINT)
    if len(said) == len(split):
        raise CutHeadError(f"Shards cut heads of every weight that is split: {listed}.", HINT)
    warnings.warn(f"Shards cut heads, these weights are left whole: {listed}. {HINT}", stacklevel=4)
    return {**layouts, **{n: Layout.whole(split[n].rows, split[n].axis) for n in said}}


def alike(groups: Sequence[Mapping[str, Any]], layouts: Layouts, arithmetic: str) -> None:
    """Makes sure that those who hold weights together have the same optimizer.

    Every rank that holds a DTensor of these groups has to call it.

    Args:
        groups: The param groups.
        layouts: How the Muon weights are cut.
        arithmetic: What is computed on a block.

    Raises:
        InputError: On every rank of a group alike, if some of them differ.
    """
    shared: dict[tuple[int, ...], tuple[Members, list[tuple[str, str, Any]]]] = {}
    for i, group in enumerate(groups):
        for name, p in zip(group["param_names"], group["params"], strict=True):
            found = members(name, p)
            if len(found.ranks) > 1:
                shared.setdefault(found.ranks, (found, []))[1].append((f"{i} {name}", name, p))
    # In one order on every rank, also on those that are in some of the groups only.
    for ranks in sorted(shared):
        found, weights = shared[ranks]
        facts = {
            "the version of muonsplit": _version(),
            "arithmetic": arithmetic,
            "names": "\n".join(place for place, _, _ in weights),
            "shapes": str([tuple(p.shape) for _, _, p in weights]),
            "placements": str([(tuple(p.device_mesh.shape), p.placements) for _, _, p in weights]),
            "dtypes": str([p.dtype for _, _, p in weights]),
            "layouts": str([str(layouts.get(name, "AdamW")) for _, name, _ in weights]),
        }
        agree(facts, found)


def _version() -> str:
    # The package's own front door, which is above this room.
    import muonsplit

    return muonsplit.__version__


def _mesh(tensor: Any) -> Any:
    return tensor.device_mesh if on_mesh(tensor) else None


def _placements(tensor: Any) -> Any:
    return tuple(tensor.placements) if on_mesh(tensor) else None
