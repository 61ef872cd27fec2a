"""Runs a forward pass and notes what every weight is multiplied with.

Where an activation meets a weight, in a *projection*, it is noted with its graph, and then
detached. So the graph of what enters a projection ends at the projections that feed it: it holds
one attention, not the model. What is a weight is decided by what was computed from parameters
alone, what is a projection by the product itself.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from muonsplit.truth.graph import Graph, hold
from muonsplit.truth.projection import Projection, projection

_NARROW = {torch.float16, torch.bfloat16, torch.float32}


@dataclass(frozen=True, slots=True)
class Product:
    """What came of one weight and one activation.

    Attributes:
        output: Its last dimension is the weight's ``axis``.
        axis: 0 for ``x @ W.T``, 1 for ``x @ W``.
    """

    output: Tensor
    axis: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that enters one or more projections.

    Attributes:
        value: A copy with its graph, safe from what the model later writes in place.
        columns: Its dimensions that the weights contract, or run along with.
        readers: Names of the weights.
    """

    value: Tensor
    columns: tuple[int, ...]
    readers: set[str]


@dataclass(slots=True)
class Record:
    """What a forward pass did with its weights.

    Attributes:
        entries: What entered projections, in order of execution.
        products: By name, for weights multiplied as they are stored.
        used: Names of weights that anything was computed with.
        tables: Names of weights that were looked up in.
    """

    entries: list[Entry] = field(default_factory=list[Entry])
    products: dict[str, list[Product]] = field(default_factory=dict[str, list[Product]])
    used: set[str] = field(default_factory=set[str])
    tables: set[str] = field(default_factory=set[str])


class Recorder(TorchFunctionMode):
    """Fills a record, cuts the graph at projections, and keeps everything in float64.

    Args:
        model: Whose weights are followed.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.record = Record()
        # What is made of parameters, from which of them. Tensors are kept beside their ids: an
        # id may be given again once its tensor is gone. Buffers are constants to them.
        self._made: dict[int, tuple[Tensor, frozenset[str]]] = {}
        self._made |= {id(b): (b, frozenset[str]()) for b in model.buffers()}
        self._made |= {id(p): (p, frozenset((name,))) for name, p in model.named_parameters()}
        self._stored = {id(p): name for name, p in model.named_parameters()}
        self._entered: dict[tuple[int, tuple[int, ...]], tuple[Tensor, Entry]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Sees every call of a torch function."""
        args = tuple(map(_widened, args))
        kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
        func = Tensor.double if func in (Tensor.float, Tensor.half, Tensor.bfloat16) else func
        values = (*args, *kwargs.values())
        names = self._names(values)
        self.record.used |= names
        subject = next(_tensors(values), None)
        if not self._is_weight(subject) and (held := hold(func, args, kwargs)) is not None:
            return held
        if not names:
            return func(*args, **kwargs)
        if func is F.embedding:
            self.record.tables |= names
            return func(*args, **kwargs)
        if found := projection(func, args, kwargs, self._is_weight):
            return self._project(found, func, args, kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return _open(func)(*args, **kwargs)
        return self._follow(func(*args, **kwargs), names, values)

    def _names(self, values: Iterable[Any]) -> set[str]:
        found = (self._made.get(id(tensor)) for tensor in _tensors(values))
        return {name for entry in found if entry for name in entry[1]}

    def _is_weight(self, value: Any) -> bool:
        return bool(self._names([value]))

    def _follow(self, result: Any, names: set[str], values: Iterable[Any]) -> Any:
        """What is computed from parameters alone is a weight too: a transpose, a slice, a sum."""
        floats = (tensor for tensor in _tensors(values) if tensor.is_floating_point())
        if all(id(tensor) in self._made for tensor in floats):
            for tensor in _tensors([result]):
                self._made[id(tensor)] = (tensor, frozenset(names))
        return result

    def _project(
        self, found: Projection, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        self._enter(found)
        # A matrix a head, or one that every head shares, may stand inside an attention, before
        # its output projection: it is looked at, and let through.
        whole = found.dense and not self._is_spread(found)
        output = found.call(func, args, kwargs, cut=whole)
        name = self._stored.get(id(found.weight))
        if name and whole and found.axis is not None:
            self.record.products.setdefault(name, []).append(Product(output, found.axis))
        return output

    def _is_spread(self, found: Projection) -> bool:
        """Whether features became positions since the last projection, as heads do."""
        shape = found.activation.shape
        positions = math.prod(shape) // max(1, math.prod(shape[c] for c in found.columns))
        nodes = Graph.behind([found.activation]).nodes
        return any(
            product.output.grad_fn in nodes
            and product.output.numel() // product.output.shape[-1] < positions
            for products in self.record.products.values()
            for product in products
        )

    def _enter(self, found: Projection) -> None:
        key = (id(found.activation), found.columns)
        if key not in self._entered:
            with torch.enable_grad():
                entry = Entry(found.activation.clone(), found.columns, set[str]())
            self._entered[key] = (found.activation, entry)
            self.record.entries.append(entry)
        self._entered[key][1].readers.update(self._names([found.weight]))


def _widened(value: Any) -> Any:
    """A model that asks for a narrower dtype gets float64: absent must not look like small."""
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _open(func: Any) -> Callable[..., Any]:
    """A torch function written in Python, without the guard that hides its inside from a mode."""
    guards = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    unguarded = {**func.__globals__, **dict.fromkeys(guards, _never)}
    inside = type(func)(func.__code__, unguarded, func.__name__, func.__defaults__)
    inside.__kwdefaults__ = func.__kwdefaults__
    return inside


def _never(*_: object) -> bool:
    return False
