"""Goldens of numbers: blocks under every dialect, and weights of every golden model's miniature."""

import json
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from muonsplit.dialect import DEFAULT_DIALECT, DIALECTS, Arithmetic
from muonsplit.errors import GoldenError
from muonsplit.goldens.golden import Golden, tensor_differences
from muonsplit.models import load
from muonsplit.models.miniature import miniature
from muonsplit.newton_schulz import scale_factor, singular_value_oracle
from muonsplit.observe.gradients import generator

# (blocks, rows, columns): wide, tall with a ratio that is no integer, square.
_SHAPES = {"wide": (3, 12, 32), "tall": (3, 28, 8), "square": (2, 16, 16)}
# How a plan writes a weight that is cut into equal blocks.
_HEADS = re.compile(r"[a-z_]+ (\d+)×\d+")


def numerics() -> Iterator[Golden]:
    """One for each dialect."""
    return (_golden("numeric", name, _numeric) for name in DIALECTS)


def updates() -> Iterator[Golden]:
    """One for each golden model."""
    return (_golden("update", model, _update) for model in load.golden_models())


def _golden(folder: str, name: str, make: Callable[[str], bytes]) -> Golden:
    path = load.golden_root() / folder / f"{name}.safetensors"
    return Golden(f"{folder}/{name}", path, lambda: make(name), tensor_differences)


def _numeric(name: str) -> bytes:
    tensors: dict[str, Tensor] = {}
    for label, shape in _SHAPES.items():
        given = _integers(shape, "numeric", label).double()
        tensors[f"{label}.input"] = given
        tensors[f"{label}.expected"] = _updates(given, DIALECTS[name].arithmetic)
    rule = {"rule": "fp64 SVD polynomial, arithmetic of the dialect, scaled by the block's shape"}
    return save(tensors, metadata={"dialect": name, **rule})


def _integers(shape: tuple[int, ...], *key: object) -> Tensor:
    return torch.randint(-3, 4, shape, generator=generator(*key))


def _updates(blocks: Tensor, arithmetic: Arithmetic) -> Tensor:
    return singular_value_oracle(blocks, arithmetic) * scale_factor(arithmetic, *blocks.shape[1:])


class _Weight(NamedTuple):
    """A weight of a miniature.

    Attributes:
        blocks: How many equal blocks the accepted plan makes of it.
        kind: What else of the model is alike.
    """

    name: str
    shape: tuple[int, ...]
    blocks: int
    kind: tuple[object, ...]


def _update(model: str) -> bytes:
    """Gradients and what the default dialect's step makes of them, unless rounded.

    Of every block the first row and the sum of all rows are kept: each knows every row of the
    block, hence where it begins and ends, and they are a fraction of its size.
    """
    arithmetic = DIALECTS[DEFAULT_DIALECT].arithmetic
    tensors: dict[str, Tensor] = {}
    for weight in _representatives(model):
        given = _integers(weight.shape, "update", model, weight.name)
        made = _updates(given.double().view(weight.blocks, -1, weight.shape[-1]), arithmetic)
        tensors[f"{weight.name}.gradient"] = given.to(torch.int8)
        tensors[f"{weight.name}.expected"] = torch.stack([made[:, 0], made.sum(1)], dim=1)
    rule = "fp64 SVD polynomial by block; of each [first row, sum of rows]"
    return save(tensors, metadata={"model": model, "dialect": DEFAULT_DIALECT, "rule": rule})


def _representatives(model: str) -> list[_Weight]:
    """The smallest weight of each cut, and of each kind that stays whole."""
    smallest: dict[tuple[object, ...], _Weight] = {}
    for weight in _weights(model):
        best = smallest.setdefault(weight.kind, weight)
        if torch.Size(weight.shape).numel() < torch.Size(best.shape).numel():
            smallest[weight.kind] = weight
    return list(smallest.values())


def _weights(model: str) -> Iterator[_Weight]:
    """Weights of a miniature that Muon trains, cut as the accepted plan of the full model says.

    A miniature divides all head counts by one number and keeps the names of its first layers, so
    its heads are read off the text of ``plan.json``; no rule is asked about the miniature.
    """
    config = load.resolve(model).config
    small = miniature(config)
    share = Fraction(small["num_attention_heads"], config["num_attention_heads"])
    shapes = {name: tuple(p.shape) for name, p in load.build(small).named_parameters()}
    for decision in _accepted_plan(model):
        if (shape := shapes.get(decision["name"])) is not None:
            yield _cut(decision, shape, share)


def _accepted_plan(model: str) -> list[dict[str, Any]]:
    path = load.golden_root() / "models" / model / "plan.json"
    try:
        return json.loads(path.read_text())["decisions"]
    except (OSError, ValueError, KeyError) as error:
        hint = f"First accept plan/{model}."
        raise GoldenError(f"{path} holds no plan to cut weights by: {error}.", hint) from error


def _cut(decision: dict[str, Any], shape: tuple[int, ...], share: Fraction) -> _Weight:
    name, layout = decision["name"], decision["layout"]
    if layout is None:
        experts = shape[0] if len(shape) == 3 else 1
        return _Weight(name, shape, experts, (decision["kind"], len(shape)))
    written = _HEADS.fullmatch(layout)
    heads = int(written[1]) * share if written else Fraction()
    if not heads or heads.denominator > 1 or shape[0] % heads.numerator:
        raise GoldenError(f"{name} of shape {shape} is no 1/{1 / share} of the heads of {layout}.")
    return _Weight(name, shape, heads.numerator, (heads.numerator, shape))
