"""What the reference optimizer refuses, before it has changed anything."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muonsplit.dialect import Dialect, dialect_named
from muonsplit.errors import InputError, UsageError
from muonsplit.layout import Layout
from muonsplit.muon.blocks import refuse_layout
from muonsplit.newton_schulz import refuse

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
    for key, held in state.items():
        if isinstance(held, Tensor) and held.shape != p.shape:
            shapes = f"{tuple(held.shape)}, the parameter {tuple(p.shape)}"
            raise InputError(f"The state {key} of {name} has shape {shapes}.")
