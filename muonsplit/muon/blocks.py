"""Orthogonalisation by layout: weights to blocks, equal blocks together, blocks to weights."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.errors import InputError, LayoutError
from muonsplit.layout import Layout
from muonsplit.muon.scale import Factors, factors
from muonsplit.newton_schulz import (
    Backend,
    accelerated,
    newton_schulz,
    orthogonalize_into,
    refuse,
    rounding_of,
)
from muonsplit.newton_schulz.fast import may_share
from muonsplit.newton_schulz.gram import gram_pays
from muonsplit.newton_schulz.rounding import carrier, result_dtype

# Parts of a tensor, each with a rate of its own.
Rates = Sequence[tuple[tuple[slice, ...], float]]


class Direction(NamedTuple):
    """What a step subtracts from a weight: learning rate × rate × update.

    Attributes:
        update: Shape of the weight, or of what is held of it. Where all of the scale is on it, it
            has the weight's dtype, else that of the iteration.
        rate: The part of the scale that goes on the learning rate; by parts of the tensor where
            blocks differ, which together are all of it.
    """

    update: Tensor
    rate: float | Rates

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
        if not isinstance(self.rate, Sequence):
            yield weight, self.update, self.rate
            return
        for at, rate in self.rate:
            yield weight[at], self.update[at], rate


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
    wholes: Sequence[Sequence[int]] | None = None,
) -> list[Direction]:
    """:func:`orthogonalize` on many weights; equal blocks of all of them are one batch.

    Args:
        updates: What momentum made of the gradients.
        layouts: One for each.
        arithmetic: What is computed on a block.
        backend: As :func:`muonsplit.newton_schulz.newton_schulz` takes it.
        wholes: Shapes of the whole weights, where updates are shards or blocks of them: a scale
            may be by the whole matrix.
    """
    refuse.arithmetic(arithmetic)
    refuse.backend(backend)
    if len(updates) != len(layouts):
        raise InputError(f"There are {len(updates)} updates and {len(layouts)} layouts.")
    for update, layout in zip(updates, layouts, strict=True):
        refuse.tensor("update", update, (2, 3))
        refuse_layout("layout", layout)
    shapes = [update.shape for update in updates] if wholes is None else wholes
    with torch.no_grad():
        weights = [_Weight(*x) for x in zip(updates, layouts, shapes, strict=True)]
        return _directions(weights, arithmetic, backend)


def empty_direction(
    update: Tensor,
    layout: Layout | None,
    arithmetic: Arithmetic,
    backend: Backend,
    whole: Sequence[int],
) -> Tensor:
    """A tensor like the direction that :func:`directions` makes of a weight, for a shard of it.

    Args:
        update: The shard.
        layout: How the whole weight is cut.
        arithmetic: What is computed on a block.
        backend: Where.
        whole: Shape of the whole weight.
    """
    if arithmetic.scale_on in ("update", "result"):
        dtype = update.dtype
    elif arithmetic.form == "fast" and backend == "torch":
        dtype = arithmetic.dtype_on(update.device)
    else:
        dtype = carrier(result_dtype(update, arithmetic), update, arithmetic)
    matrix = whole[-2:]
    half = dtype in (torch.bfloat16, torch.float16) and backend == "torch"
    if half and layout is None and matrix[0] > matrix[1]:
        # Only its shape matters, and it takes no memory.
        together = may_share(update.new_empty(()).expand(*matrix))
        like = (min(whole[0], 2) if len(whole) == 3 else 1, gram_pays(*matrix), together)
        if _transposed(arithmetic, update.dtype, update.device, *like):
            return update.new_empty(update.mT.shape, dtype=dtype).mT
    return update.new_empty(update.shape, dtype=dtype)


@lru_cache
def _transposed(
    arithmetic: Arithmetic,
    dtype: torch.dtype,
    device: torch.device,
    blocks: int,
    pays: bool,
    together: bool,
) -> bool:
    """Whether the direction of a tall whole weight lies transposed, seen on the smallest such.

    It makes no difference to its numbers, but torch adds it otherwise to half-precision weights.

    Args:
        arithmetic: What is computed.
        dtype: Of the update.
        device: Of the update.
        blocks: 1, or 2 for a stack of matrices.
        pays: As :func:`gram_pays`.
        together: As :func:`may_share`.
    """
    rows, cols = {
        (True, True): (8, 4),
        (True, False): (6, 3),
        (False, True): (12, 8),
        (False, False): (6, 5),
    }[pays, together]
    small = torch.zeros((blocks, rows, cols), dtype=dtype, device=device)
    return not directions([small], [None], arithmetic)[0].update.is_contiguous()


def _directions(
    weights: Sequence["_Weight"], arithmetic: Arithmetic, backend: Backend
) -> list[Direction]:
    alike: dict[tuple[object, ...], list[tuple[_Weight, int]]] = {}
    for weight in weights:
        for i, batch in enumerate(weight.batches):
            factor = weight.factors(batch, arithmetic).update
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
        return result.to(weight.update.dtype).mul_(weight.factors(result, arithmetic).result)
    return result.to(weight.update.dtype) if arithmetic.scale_on == "update" else result


class _Weight:
    """One weight and its blocks, before and after."""

    def __init__(self, update: Tensor, layout: Layout | None, whole: Sequence[int]) -> None:
        self.update, self.layout = update, layout
        self._matrix = whole[::-1] if layout is not None and layout.axis else whole
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

    def factors(self, blocks: Tensor, arithmetic: Arithmetic) -> Factors:
        """The scale of blocks of a shape."""
        return factors(arithmetic, blocks.shape, self._matrix)

    def direction(self, arithmetic: Arithmetic) -> Direction:
        """The blocks put together, and what is left of their scale."""
        if not self.batches:
            return Direction(self.update.clone(), 1.0)
        update = self._joined(self.batches)
        rates = {batch.shape[-2]: self.factors(batch, arithmetic).rate for batch in self.batches}
        if len(set(rates.values())) == 1:
            return Direction(update, *set(rates.values()))
        assert self.layout is not None
        before = (slice(None),) * self.layout.axis
        by_rows = [
            ((*before, slice(*span)), rates[block.rows])
            for block in self.layout.blocks()
            for span in block.spans
        ]
        return Direction(update, by_rows)

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
