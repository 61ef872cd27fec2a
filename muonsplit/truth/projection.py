"""Which calls multiply an activation with a weight, and along which dimensions."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

_CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d}
_SUMS = {torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm}
_GROUPED = {F.grouped_mm, getattr(torch, "_grouped_mm", None)}
_PRODUCTS: set[Any] = {
    *(torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__),
    *_GROUPED,
}


@dataclass(frozen=True, slots=True)
class Projection:
    """One call that multiplies an activation with a weight.

    Attributes:
        place: Where the activation stands among the arguments: an index or a keyword.
        activation: The activation.
        weight: The weight, or what was made of it: a transpose, a slice.
        columns: The activation's dimensions that the weight contracts, or runs along with.
        axis: The axis of ``weight`` that is the output's last dimension; None if it is not one.
        dense: Whether every column meets every other: one matrix, not one a head or an expert.
    """

    place: int | str
    activation: Tensor
    weight: Tensor
    columns: tuple[int, ...]
    axis: int | None
    dense: bool

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cut: bool) -> Tensor:
        """Makes the call, with the activation detached if it is to be cut off there."""
        if cut and isinstance(self.place, int):
            args = (*args[: self.place], self.activation.detach(), *args[self.place + 1 :])
        elif cut:
            kwargs = {**kwargs, str(self.place): self.activation.detach()}
        return _grouped_mm(*args, **kwargs) if func in _GROUPED else func(*args, **kwargs)


class _Arguments:
    """Arguments by index or name, in the order torch documents them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs

    def __call__(self, place: int, *names: str) -> tuple[int | str, Any]:
        if place < len(self._args):
            return place, self._args[place]
        name = next((name for name in names if name in self._kwargs), names[0])
        return name, self._kwargs.get(name)


def projection(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_weight: Callable[[Any], bool]
) -> Projection | None:
    """Reads a call of a torch function as a projection, if it is one.

    Args:
        func: The function.
        args: Its arguments.
        kwargs: The same, by name.
        is_weight: Tells what is made of parameters alone.
    """
    argument = _Arguments(args, kwargs)
    if func is F.linear or func in _CONVOLUTIONS:
        (place, x), (_, weight) = argument(0, "input"), argument(1, "weight")
        if not is_weight(weight):
            return None
        if func is F.linear:
            return Projection(place, x, weight, (x.ndim - 1,), 0, True)
        channels = x.ndim - weight.ndim + 1
        # A grouped convolution leaves channels apart: it is no place where heads are mixed.
        dense = weight.shape[1] == x.shape[channels]
        return Projection(place, x, weight, (channels,), None, True) if dense else None
    if func in _SUMS:
        return _matmul(argument(1, "mat1", "batch1"), argument(2, "mat2", "batch2"), is_weight)
    if func in _PRODUCTS:
        second = argument(1, "other", "mat2", "mat_b")
        return _matmul(argument(0, "input", "mat_a"), second, is_weight)
    if func is torch.einsum and len(args) == 3 and isinstance(args[0], str):
        return _einsum(args, is_weight)
    return None


def _matmul(
    first: tuple[int | str, Any], second: tuple[int | str, Any], is_weight: Callable[[Any], bool]
) -> Projection | None:
    for (place, x), (_, weight), contracted in ((first, second, -1), (second, first, -2)):
        if not is_weight(weight) or is_weight(x) or min(x.ndim, weight.ndim) < 2:
            continue
        batch = (d for d in range(3, 1 + min(x.ndim, weight.ndim)) if weight.shape[-d] > 1)
        columns = (*sorted(x.ndim - d for d in batch), x.ndim + contracted)
        axis = 1 if contracted == -1 else None
        return Projection(place, x, weight, columns, axis, weight.ndim == 2)
    return None


def _einsum(args: tuple[Any, ...], is_weight: Callable[[Any], bool]) -> Projection | None:
    for x, w in ((1, 2), (2, 1)):
        if is_weight(args[w]) and not is_weight(args[x]):
            columns = _shared(args[0], x - 1, args[x].ndim)
            return Projection(x, args[x], args[w], columns, None, args[w].ndim == 2)
    return None


def _shared(equation: str, operand: int, ndim: int) -> tuple[int, ...]:
    """Dimensions of one of two einsum operands whose label the other has too."""
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    head, dots, tail = terms[operand].partition("...")
    places: Iterable[tuple[str, int]] = zip(head, range(len(head)), strict=True)
    if dots:
        places = [*places, *zip(tail, range(ndim - len(tail), ndim), strict=True)]
    return tuple(sorted(place for label, place in places if label in terms[1 - operand]))


def _grouped_mm(x: Tensor, weights: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
    """Torch's grouped product, which has no float64: each span of rows times its own matrix."""
    starts = [0, *offs.tolist()]
    parts = [x[a:b] @ w for a, b, w in zip(starts, starts[1:], weights, strict=False)]
    return torch.cat([*parts, x.new_zeros(len(x) - starts[-1], weights.shape[-1])])
