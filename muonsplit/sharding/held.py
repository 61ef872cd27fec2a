"""Which rows of a weight a rank holds: a type, and the ways frameworks divide weights.

Llama q_proj, rank 1 of 4       rows 1024–2047 of 4096
Phi-3 q | k | v, rank 1 of 4    rows 768–1535, 3264–3455, 4032–4223 of 4608
ZeRO-3, any weight              a flat slice, which begins and ends inside a row
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from muonsplit.errors import LayoutError
from muonsplit.layout import Layout

Spans = tuple[tuple[int, int], ...]
# For each axis of a whole tensor, the intervals that are held, in the order they are stored.
Region = tuple[Spans, ...]

_NOUNS = ("rows", "columns")


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of one weight.

    "Rows" are columns where ``axis`` is 1, and slices of a stack of matrices' own axis beyond.

    Attributes:
        size: Rows of the whole weight, without padding.
        spans: Half-open intervals of the rows that are held, in the order in which they are
            stored; none if the rank holds nothing. Neighbours are merged.
        axis: The axis of the rows.
        partial: Intervals within the spans whose rows are held in part only.
        padding: Trailing rows of the local tensor that are no rows of the weight; trailing
            elements, if it is flat.
        flat: Whether the local tensor is a slice of the flattened weight, not a matrix.

    Raises:
        LayoutError: If the spans overlap, are empty or reach outside the weight, or a partial
            row is not held at all.
    """

    size: int
    spans: Spans
    axis: int = 0
    partial: Spans = ()
    padding: int = 0
    flat: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", _joined(self.spans))
        object.__setattr__(self, "partial", _joined(sorted(self.partial)))
        inside = all(_apart(sorted(spans), self.size) for spans in (self.spans, self.partial))
        held = all(any(a <= c < d <= b for a, b in self.spans) for c, d in self.partial)
        if self.size < 1 or self.axis < 0 or self.padding < 0 or not inside or not held:
            raise LayoutError(
                "A shard holds disjoint, non-empty intervals of a weight's rows, partial ones "
                f"among them, and padding of 0 or more, got {self!r}."
            )

    @classmethod
    def whole(cls, size: int, axis: int = 0) -> "Shard":
        """The shard of a rank that holds everything."""
        return cls(size, ((0, size),), axis)

    @property
    def rows(self) -> int:
        """Rows held, whole or in part, without padding."""
        return length(self.spans)

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds the whole weight as it is."""
        return self.spans == ((0, self.size),) and not self.partial

    def origin(self, start: int, stop: int) -> Spans:
        """Where in the whole weight the local rows ``start`` to ``stop`` come from, in order."""
        return _take(self.spans, start, stop)

    def __str__(self) -> str:
        noun = _NOUNS[self.axis] if self.axis < len(_NOUNS) else f"slices of axis {self.axis}"
        held = ", ".join(f"{a}–{b - 1}" for a, b in self.spans)
        unit = "elements" if self.flat else noun
        return (
            (f"{noun} {held} of {self.size}" if held else f"none of {self.size} {noun}")
            + (f", {length(self.partial)} of them in part" if self.partial else "")
            + (f", and {self.padding} {unit} of padding" if self.padding else "")
        )


def column_parallel(
    weight: Layout | int, rank: int, world: int, *, replicate: bool = False, padded: bool = False
) -> Shard:
    """The shard that column-parallel tensor parallelism gives a rank.

    The axis is cut as ``torch.chunk`` cuts it, groups and all. Parts that stand one after another
    (``q | k | v``, one group) are cut each on its own, as vLLM's ``QKVParallelLinear`` stores them.

    Args:
        weight: The layout of the whole weight, or its rows.
        rank: Place of the rank in its tensor-parallel group.
        world: Size of that group.
        replicate: Whether a part with fewer heads than ranks is repeated, one head a rank, as
            vLLM does; without it heads are cut, as Megatron-core does.
        padded: Whether every rank is given the same number of rows, the last ones with padding.

    Raises:
        LayoutError: If there is no such rank, heads do not divide the ranks they are repeated
            on, or padding would not be at the end.
    """
    layout = Layout.whole(weight) if isinstance(weight, int) else weight
    if not 0 <= rank < world:
        raise LayoutError(f"There is no rank {rank} among {world}; ranks run from 0.")
    if layout.groups > 1 and not (replicate and world > layout.groups):
        parts = [(0, layout.rows, layout.groups)]
    else:
        # More ranks than groups: the ranks that share a group divide its parts.
        sharing = _divided(world, layout.groups, layout)
        start = layout.rows // layout.groups * (rank // sharing)
        rank, world = rank % sharing, sharing
        parts: list[tuple[int, int, int]] = []
        for segment in layout.segments:
            parts.append((start, start + segment.rows, segment.heads))
            start += segment.rows
    spans: list[tuple[int, int]] = []
    padding = 0
    for start, stop, heads in parts:
        if replicate and heads < world:
            width, copies = (stop - start) // heads, _divided(world, heads, layout)
            first = start + width * (rank // copies)
            spans.append((first, first + width))
            continue
        part = _chunk(((start, stop),), rank, world)
        spans += part
        padding += -(-(stop - start) // world) - length(part)
    if padded and len(parts) > 1 and any((b - a) % world for a, b, _ in parts):
        raise LayoutError(
            f"{world} ranks do not divide each part of {layout}; padding would stand between them."
        )
    return Shard(layout.rows, tuple(spans), layout.axis, padding=padding if padded else 0)


def flat(shape: Sequence[int], start: int, stop: int, padding: int = 0) -> Shard:
    """The shard that holds elements ``start`` to ``stop`` of the flattened weight.

    FSDP1's flat parameter and ZeRO's partitions cut weights so; the first and the last row may
    be held in part.

    Args:
        shape: Shape of the whole weight.
        start: First element.
        stop: One past the last; equal to ``start`` if the rank holds nothing.
        padding: Elements that follow in the local tensor and are none of the weight.

    Raises:
        LayoutError: If the interval is not inside the weight.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise LayoutError(
            f"Elements {start} to {stop} are no slice of a weight of shape {tuple(shape)}, which "
            f"has {math.prod(shape)}."
        )
    rows, width = _rows(shape), math.prod(shape[1:])
    if start == stop:
        return Shard(rows, (), padding=padding, flat=True)
    first, last = start // width, -(-stop // width)
    cut = {row for row, inside in ((first, start % width), (last - 1, stop % width)) if inside}
    partial = tuple((row, row + 1) for row in cut)
    return Shard(rows, ((first, last),), partial=partial, padding=padding, flat=True)


def of_parameter(parameter: Any, rank: int | None = None) -> Shard:
    """What this rank holds of a parameter.

    Read are the placements of a DTensor (FSDP2, tensor parallelism, both), the partition of
    DeepSpeed's ``zero.Init``, and a plain parameter, which is whole. Tensor parallelism that swaps
    plain parameters (Megatron, AutoTP) leaves nothing to read: see :func:`column_parallel`.

    Args:
        parameter: A parameter or tensor; its values are not looked at.
        rank: The rank in ZeRO's partition group, where the parameter does not tell.

    Raises:
        LayoutError: If the parameter is a partial sum, or a piece whose place it does not tell.
    """
    if hasattr(parameter, "ds_shape"):
        return _zero(parameter, rank)
    if hasattr(parameter, "placements") and hasattr(parameter, "device_mesh"):
        return _placed(parameter)
    shape = tuple(parameter.shape)
    if getattr(parameter, "_fsdp_flattened", False) or 0 in shape:
        raise LayoutError(
            f"A parameter of shape {shape} is a piece of a flat FSDP parameter, or a placeholder: "
            "which elements of its weight it holds is not told.",
            "Give the shard as flat(shape, start, stop).",
        )
    return Shard.whole(_rows(shape))


def region(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> Region:
    """What one place of a device mesh holds of a DTensor.

    Replays the placements in the order in which they were made, so that any place can be asked
    about, on any mesh, without one: from the first mesh axis to the last; but a strided one that
    stands before the tensor parallelism it divides, as FSDP2 puts it, comes after that. Where the
    rows do not divide, torch's ``distribute_tensor`` would place others than FSDP2 holds.

    Args:
        shape: Shape of the whole tensor.
        mesh: Shape of the mesh.
        coordinate: The place, one index for each axis of the mesh.
        placements: One for each axis of the mesh: ``Shard``, FSDP2's strided shard, ``Replicate``.

    Raises:
        LayoutError: If a placement says which sum, not which rows.
    """
    held: list[Spans] = [((0, size),) for size in shape]
    for axis in sorted(range(len(mesh)), key=lambda axis: _divides_later(axis, mesh, placements)):
        place, world, placement = coordinate[axis], mesh[axis], placements[axis]
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if placement.is_partial() or dim is None:
            raise LayoutError(
                f"A parameter placed {placement} holds no rows of its weight.",
                "Redistribute it to Shard or Replicate first.",
            )
        pieces = getattr(placement, "split_factor", 1)
        pieces = 1 if _divides_later(axis, mesh, placements) else pieces
        parts = [_chunk(held[dim], i, pieces) for i in range(pieces)]
        held[dim] = _joined(span for part in parts for span in _chunk(part, place, world))
    return tuple(held)


def _divides_later(axis: int, mesh: Sequence[int], placements: Sequence[Any]) -> bool:
    """Whether a placement is FSDP2's of what later axes of the mesh have divided."""
    pieces = getattr(placements[axis], "split_factor", None)
    later = [
        (n, hasattr(p, "split_factor"))
        for n, p in zip(mesh[axis + 1 :], placements[axis + 1 :], strict=True)
        if getattr(p, "dim", None) == getattr(placements[axis], "dim", None)
    ]
    plain = bool(later) and not any(strided for _, strided in later)
    return pieces is not None and plain and math.prod(n for n, _ in later) == pieces


def of_region(shape: Sequence[int], held: Region) -> Shard:
    """A region of a tensor as a shard of one axis; rows are held in part if another is cut too.

    Args:
        shape: Shape of the whole tensor.
        held: The region.
    """
    if not all(held):
        return Shard(_rows(shape), ())
    divided = [dim for dim, spans in enumerate(held) if spans != ((0, shape[dim]),)]
    if not divided:
        return Shard.whole(_rows(shape))
    axis = divided[0]
    partial = held[axis] if len(divided) > 1 else ()
    return Shard(shape[axis], held[axis], axis, partial)


def _placed(parameter: Any) -> Shard:
    """A DTensor's region as a shard of one axis."""
    shape, mesh = tuple(parameter.shape), parameter.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Shard(_rows(shape), ())
    return of_region(shape, region(shape, mesh.shape, coordinate, parameter.placements))


def _zero(parameter: Any, rank: int | None) -> Shard:
    """ZeRO's partition: equal flat slices, the last ones with padding."""
    shape, partition = tuple(parameter.ds_shape), getattr(parameter, "ds_tensor", None)
    if partition is None and tuple(parameter.shape) == shape:
        return Shard.whole(_rows(shape))
    rank = getattr(parameter, "ds_zero_partition_rank", None) if rank is None else rank
    if partition is None or rank is None:
        raise LayoutError(
            "A ZeRO placeholder without ds_tensor or ds_zero_partition_rank does not tell which "
            f"slice of a weight of shape {shape} is held.",
            "Give of_parameter the rank in its partition group.",
        )
    size, total = getattr(partition, "ds_numel", partition.numel()), math.prod(shape)
    start, stop = min(rank * size, total), min((rank + 1) * size, total)
    return flat(shape, start, stop, size - (stop - start))


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _divided(world: int, count: int, layout: Layout) -> int:
    if world % count:
        raise LayoutError(f"{count} heads or groups of {layout} do not divide {world} ranks.")
    return world // count


def _chunk(spans: Iterable[tuple[int, int]], rank: int, world: int) -> Spans:
    """The rank-th of ``world`` consecutive parts, as ``torch.chunk`` sizes them; may be none."""
    spans = tuple(spans)
    part = -(-length(spans) // world)
    return _take(spans, rank * part, (rank + 1) * part)


def _take(spans: Spans, start: int, stop: int) -> Spans:
    taken: list[tuple[int, int]] = []
    row = 0
    for a, b in spans:
        first, last = max(start - row, 0), min(stop - row, b - a)
        if first < last:
            taken.append((a + first, a + last))
        row += b - a
    return tuple(taken)


def _joined(spans: Iterable[tuple[int, int]]) -> Spans:
    joined: list[tuple[int, int]] = []
    for a, b in spans:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        else:
            joined.append((a, b))
    return tuple(joined)


def _apart(ordered: Sequence[tuple[int, int]], size: int) -> bool:
    ends = (0, *(stop for _, stop in ordered))
    return all(end <= a < b <= size for end, (a, b) in zip(ends, ordered, strict=False))


def length(spans: Iterable[tuple[int, int]]) -> int:
    """Rows in intervals."""
    return sum(b - a for a, b in spans)
