"""Outputs of the commonest operations by shape alone.

On ``meta`` torch works out shapes, strides and dtypes in Python, at a hundred microseconds an
operation; most of a forward pass is additions, multiplications and projections.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_BINARY = frozenset(
    {"add", "sub", "mul", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"}
)
_UNARY = frozenset({"silu", "gelu", "sigmoid", "tanh", "relu", "rsqrt", "sqrt", "exp", "neg"})


def shaped(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What an operation on meta tensors gives, if it is a common one called in the plain way."""
    if name == "linear":
        return _linear(*args, **kwargs) if len(args) > 1 else None
    if name == "scaled_dot_product_attention":
        return _attention(*args[:3]) if len(args) > 2 else None
    made: Callable[..., Tensor | None] | None = None
    if name in _BINARY and len(args) == 2:
        made = _binary
    elif name in _UNARY and len(args) == 1:
        made = _unary
    elif name == "pow" and len(args) == 2 and type(args[1]) in (int, float):
        made, args = _unary, args[:1]
    return None if kwargs or made is None else made(*args)


def _linear(x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    if not (_on_meta(x) and _on_meta(weight)) or weight.ndim != 2:
        return None
    if x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        return None
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device="meta")


def _attention(query: Any, key: Any, value: Any) -> Tensor | None:
    if not all(_on_meta(x) and x.ndim > 2 for x in (query, key, value)):
        return None
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        return None
    return torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device="meta")


def _binary(a: Any, b: Any) -> Tensor | None:
    for value in (a, b):
        if not _on_meta(value) and type(value) not in (int, float):
            return None
    shapes = [value.shape for value in (a, b) if isinstance(value, Tensor)]
    try:
        shape = shapes[0] if len(shapes) == 1 else torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return None
    return torch.empty(shape, dtype=torch.result_type(a, b), device="meta")


def _unary(x: Any) -> Tensor | None:
    if not _on_meta(x) or not x.is_floating_point():
        return None
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _on_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
