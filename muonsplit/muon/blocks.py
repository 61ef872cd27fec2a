"""Orthogonalisation by layout: weights to blocks, equal blocks together, blocks to weights."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.errors import InputError, LayoutError
from muonsplit.layout import Layout
from muonsplit.newton_schulz import (
    Backend,
    accelerated,
    newton_schulz,
    orthogonalize_into,
    refuse,
    rounding_of,
    scale_factor,
)


class Direction(NamedTuple):
    """What a step subtracts from a weight: learning rate × rate × update.

    Attributes:
        update: Shape of the weight. Where all of the scale is on it, it has the weight's dtype,
            else that of the iteration.
        rate: The part of the scale that goes on the learning rate, by the rows of a block where
            blocks differ.
        layout: How the weight is cut, where they do.
    """

    update: Tensor
    rate: float | Mapping[int, float]
    layout: Layout | None = None

    @property
    def scaled(self) -> Tensor:
        """The update with all of its scale."""
        if self.rate == 1.0:
            return self.update
        scaled = self.update.clone()
        for part, _, rate in self.parts(scaled):
            part.mul_(rate)
        return scaled

    def parts(self, weight: Tensor) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Views of a weight that have one rate, each with its update and that rate.

        A rate is a number, not a tensor of them: products with one are rounded otherwise.
        """
        if not isinstance(self.rate, Mapping):
            yield weight, self.update, self.rate
            return
        assert self.layout is not None
        matrices = [x.mT if self.layout.axis else x for x in (weight, self.update)]
        for block in self.layout.blocks():
            for start, stop in block.spans:
                part, update = (x[start:stop] for x in matrices)
                yield part, update, self.rate[block.rows]


def orthogonalize(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
    """Orthogonalises one weight's update block by block, each scaled by its own shape.

    Args:
        update: Shape ``[rows, cols]``, or ``[experts, rows, cols]`` without a layout: every
            expert is then a block.
        layout: How the weight is cut; None keeps it whole.
        arithmetic: What is computed on a block.

    Returns:
        Same shape; the dtype of the update or of the iteration.

    Raises:
        InputError: If the update is not a floating-point matrix or stack of matrices, or a block
            has one row.
        LayoutError: If the layout does not fit.
    """
    return directions([update], [layout], arithmetic)[0].scaled


def directions(
    updates: Sequence[Tensor],
    layouts: Sequence[Layout | None],
    arithmetic: Arithmetic,
    backend: Backend = "torch",
) -> list[Direction]:
    """:func:`orthogonalize` on many weights; equal blocks of all of them are one batch.

    Args:
        updates: What momentum made of the gradients.
        layouts: One for each.
        arithmetic: What is computed on a block.
        backend: As :func:`muonsplit.newton_schulz.newton_schulz` takes it.
    """
    refuse.arithmetic(arithmetic)
    refuse.backend(backend)
    if len(updates) != len(layouts):
        raise InputError(f"There are {len(updates)} updates and {len(layouts)} layouts.")
    for update, layout in zip(updates, layouts, strict=True):
        refuse.tensor("update", update, (2, 3))
        refuse_layout("layout", layout)
    with torch.no_grad():
        return _directions(updates, layouts, arithmetic, backend)


def _directions(
    updates: Sequence[Tensor],
    layouts: Sequence[Layout | None],
    arithmetic: Arithmetic,
    backend: Backend,
) -> list[Direction]:
    weights = [_Weight(u, layout) for u, layout in zip(updates, layouts, strict=True)]
    alike: dict[tuple[object, ...], list[tuple[_Weight, int]]] = {}
    for weight in weights:
        for i, batch in enumerate(weight.batches):
            factor = weight.inner_factor(batch.shape[-2:], arithmetic)
            key = (*batch.shape[-2:], batch.dtype, batch.device, factor)
            alike.setdefault(key, []).append((weight, i))
    for (*_, factor), places in alike.items():
        assert isinstance(factor, float)
        found = _orthogonalized(places, arithmetic, backend, factor)
        for (weight, i), result in zip(places, found, strict=True):
            weight.batches[i] = _left(result, weight, arithmetic)
    return [weight.direction(arithmetic) for weight in weights]


def _orthogonalized(
    places: Sequence[tuple["_Weight", int]], arithmetic: Arithmetic, backend: Backend, factor: float
) -> Sequence[Tensor]:
    """Batches of blocks of one shape, orthogonalised together, times what goes on the update."""
    sources = [weight.batches[i] for weight, i in places]
    if arithmetic.form == "fast" and backend == "torch":
        found = [weight.target(i, arithmetic) for weight, i in places]
        orthogonalize_into(sources, found, arithmetic)
    else:
        together = sources[0] if len(sources) == 1 else torch.cat(sources)
        if backend == "triton":
            return accelerated(together, arithmetic, factor).split([len(s) for s in sources])
        found = newton_schulz(together, arithmetic).split([len(s) for s in sources])
    if factor != 1.0:
        found = [rounding_of(x, arithmetic)(x.mul_(factor)) for x in found]
    return found


def _left(result: Tensor, weight: "_Weight", arithmetic: Arithmetic) -> Tensor:
    """Blocks as they leave: in the weight's dtype where all of the scale is on them."""
    if arithmetic.scale_on == "result":
        factor = weight.factor(result.shape[-2:], arithmetic)
        return result.to(weight.update.dtype).mul_(factor)
    return result.to(weight.update.dtype) if arithmetic.scale_on == "update" else result


class _Weight:
    """One weight and its blocks, before and after."""

    def __init__(self, update: Tensor, layout: Layout | None) -> None:
        self.update, self.layout = update, layout
        self.batches = self._cut()
        self._views: list[Tensor] = []

    def _cut(self) -> list[Tensor]:
        if self.layout is None:
            whole = self.update if self.update.ndim == 3 else self.update.unsqueeze(0)
            return [whole] if whole.numel() else []
        return self.layout.batches(self.update)

    def target(self, i: int, arithmetic: Arithmetic) -> Tensor:
        """Where the result of a batch may be written: into the whole update, if it is a view."""
        dtype = arithmetic.dtype_on(self.update.device)
        if self.layout is None or self.layout.joined:
            return self.batches[i].new_empty(self.batches[i].shape, dtype=dtype)
        if not self._views:
            self._written = self.update.new_empty(self.update.shape, dtype=dtype)
            self._views = self.layout.batches(self._written)
        return self._views[i]

    def factor(self, shape: Sequence[int], arithmetic: Arithmetic) -> float:
        """The scale of a block of a shape."""
        if arithmetic.scale_per == "matrix":
            return self.matrix_factor(arithmetic)
        return scale_factor(arithmetic, *shape)

    def inner_factor(self, shape: Sequence[int], arithmetic: Arithmetic) -> float:
        """The part of it that goes on the update, in the dtype of the iteration."""
        if arithmetic.scale_on == "update":
            return self.factor(shape, arithmetic)
        if arithmetic.scale_on != "result" and arithmetic.scale_per == "block_on_matrix":
            return self.factor(shape, arithmetic) / self.matrix_factor(arithmetic)
        return 1.0

    def matrix_factor(self, arithmetic: Arithmetic) -> float:
        """The scale of the whole matrix, output × input."""
        rows, cols = self.update.shape[-2:]
        across = self.layout is not None and self.layout.axis
        return scale_factor(arithmetic, *((cols, rows) if across else (rows, cols)))

    def direction(self, arithmetic: Arithmetic) -> Direction:
        """The blocks put together, and what is left of their scale."""
        if not self.batches:
            return Direction(self.update.clone(), 1.0)
        update = self._joined(self.batches)
        if arithmetic.scale_on in ("update", "result"):
            return Direction(update, 1.0)
        if arithmetic.scale_per == "block_on_matrix":
            return Direction(update, self.matrix_factor(arithmetic))
        factors = [self.factor(batch.shape[-2:], arithmetic) for batch in self.batches]
        if len(set(factors)) == 1:
            return Direction(update, factors[0])
        by_rows = {b.shape[-2]: f for b, f in zip(self.batches, factors, strict=True)}
        return Direction(update, by_rows, self.layout)

    def _joined(self, batches: Sequence[Tensor]) -> Tensor:
        if self.layout is None:
            return batches[0].reshape(self.update.shape)
        if self._views and all(a is b for a, b in zip(batches, self._views, strict=True)):
            return self._written
        result = batches[0].new_empty(self.update.shape)
        self.layout.write(batches, result)
        return result


def refuse_layout(name: str, layout: Any) -> None:
    """Refuses what is no layout, and blocks of one row.

    Raises:
        LayoutError: If it is neither a layout nor None.
        InputError: If a block has one row: a vector has nothing to orthogonalise.
    """
    if layout is None:
        return
    if not isinstance(layout, Layout):
        raise LayoutError(f"{name} must be a Layout, or None for whole, got {layout!r}.")
    if any(rows == 1 for rows in _block_rows(layout)):
        raise InputError(
            f"{name} {layout} has blocks of one row; a vector has nothing to orthogonalise.",
            "Leave the weight whole, or train it with AdamW.",
        )


def _block_rows(layout: Layout) -> Iterator[int]:
    if not layout.joined:
        yield from (segment.width for segment in layout.segments)
        return
    for role in {segment.role for segment in layout.segments}:
        yield layout.groups * sum(s.rows for s in layout.segments if s.role == role)
