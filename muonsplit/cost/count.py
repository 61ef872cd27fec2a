"""What each rank of a device mesh multiplies and sends for a list of weights.

The rule is that of :mod:`muonsplit.muon.sharded`. Weights go in batches. Those of a batch that have
cut blocks and are divided along the same axes of the mesh are shared out together over the ranks
along these axes; ranks that differ on the others are replicas, and do the same work again.

    whole block, one holder       orthogonalised there, nothing is sent
    cut block                     pieces go there to its owner, in the dtype of the update,
                                  and come back to where they were, in the dtype of the result
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch

from muonsplit.dialect import Arithmetic
from muonsplit.layout import Layout
from muonsplit.newton_schulz import Backend
from muonsplit.newton_schulz.program import program
from muonsplit.newton_schulz.rounding import carrier, result_dtype
from muonsplit.sharding import Region, region
from muonsplit.sharding.pieces import Piece, Share, Tile, block_regions, owners

# Elements of whole weights that PerHeadMuon steps at once.
AT_ONCE: Mapping[Backend, int] = {"torch": 1 << 26, "triton": 1 << 31}

# Any device that is no CPU; none has to be there.
ACCELERATOR = torch.device("meta")


class Weight(NamedTuple):
    """A weight, as far as its cost goes.

    Attributes:
        name: What it is called.
        shape: Of the whole weight.
        layout: How it is cut into blocks; None for one, or one for each matrix of a stack.
        placements: One for each axis of the mesh, as a DTensor has them.
        dtype: Of the update that is sent: the parameter's, or float32 where the buffer is.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout | None
    placements: tuple[Any, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Load:
    """What the ranks of a mesh do in one step, by rank, the last axis of the mesh fastest.

    Attributes:
        flop: Multiplications and additions of the iterations' products.
        there: Bytes of pieces that are sent to owners.
        back: Bytes of results that owners send.
        calls: All-to-all calls of each rank: two where anything of a batch has to be sent.
    """

    flop: list[int]
    there: list[int]
    back: list[int]
    calls: int = 0

    @classmethod
    def none(cls, ranks: int) -> "Load":
        """No load."""
        return cls([0] * ranks, [0] * ranks, [0] * ranks)


@dataclass(frozen=True, slots=True)
class Divided:
    """One weight, over each group of ranks that hold it together.

    Attributes:
        axes: Axes of the mesh along which it is divided.
        members: Ranks of a group.
        replicas: Groups, each of which does everything.
        shares: Its blocks.
        flop: Operations of each block.
        there: Bytes of an element on its way to an owner.
        back: Bytes of an element of a result.
    """

    axes: tuple[int, ...]
    members: int
    replicas: int
    shares: tuple[Share, ...]
    flop: tuple[int, ...]
    there: int
    back: int

    @property
    def cut(self) -> int:
        """Blocks that no member holds whole."""
        return sum(len(share.pieces) > 1 for share in self.shares)

    @property
    def lacking(self) -> int:
        """Elements that are outside the largest piece of their block: the fewest to be sent."""
        return sum(prod(s.shape) - max(p.elements for p in s.pieces) for s in self.shares)


def load(
    weights: Iterable[Weight],
    mesh: Sequence[int],
    arithmetic: Arithmetic,
    *,
    at_once: int = AT_ONCE["torch"],
    device: torch.device = ACCELERATOR,
) -> Load:
    """What each rank does in one step.

    Args:
        weights: In the order in which the optimizer has them.
        mesh: Shape of the mesh.
        arithmetic: What is computed on a block.
        at_once: Elements of whole weights that are stepped at once.
        device: Its type decides the dtype of the iteration.

    Raises:
        LayoutError: If a placement says which sum, not which rows.
    """
    counter = Counter(mesh, arithmetic, device)
    for batch in batched(weights, at_once):
        counter.add(batch)
    return counter.load


class Counter:
    """Adds up batches on one mesh; what is alike is counted once.

    Args:
        mesh: As :func:`load` takes it, as the other arguments are.
        arithmetic: What is computed on a block.
        device: Where.
    """

    def __init__(
        self, mesh: Sequence[int], arithmetic: Arithmetic, device: torch.device = ACCELERATOR
    ) -> None:
        self.mesh, self.arithmetic, self.device = tuple(mesh), arithmetic, device
        self._divided: dict[object, Divided] = {}
        self._batches: dict[object, tuple[Load, int]] = {}
        self._times: dict[object, int] = {}

    def add(self, batch: Sequence[Weight]) -> int:
        """Adds a batch.

        Returns:
            Its blocks that have one owner, which holds some of them.
        """
        key = tuple(weight[1:] for weight in batch)
        if key not in self._batches:
            self._batches[key] = self._counted([self.divided(weight) for weight in batch])
        self._times[key] = self._times.get(key, 0) + 1
        return self._batches[key][1]

    def begin(self) -> None:
        """Begins anew; what was counted once is kept."""
        self._times.clear()

    @property
    def load(self) -> Load:
        """What was added."""
        total, calls = Load.none(prod(self.mesh)), 0
        for key, times in self._times.items():
            one = self._batches[key][0]
            for sums, values in zip(_lists(total), _lists(one), strict=True):
                for rank, value in enumerate(values):
                    sums[rank] += times * value
            calls += times * one.calls
        return Load(*_lists(total), calls)

    def divided(self, weight: Weight) -> Divided:
        """The weight's blocks and who holds them."""
        key = weight[1:]
        if key not in self._divided:
            self._divided[key] = self._divide(weight)
        return self._divided[key]

    def _divide(self, weight: Weight) -> Divided:
        placements = zip(self.mesh, weight.placements, strict=True)
        axes = tuple(i for i, (n, p) in enumerate(placements) if n > 1 and not p.is_replicate())
        mesh = [self.mesh[axis] for axis in axes]
        along = [weight.placements[axis] for axis in axes]
        places = product(*map(range, mesh))
        regions = (region(weight.shape, mesh, place, along) for place in places)
        shares = shares_of(weight.shape, weight.layout, regions)
        dtype = self.arithmetic.dtype_on(self.device)
        each = {
            shape: program(self.arithmetic, *shape, dtype).operations(*sorted(shape))
            for shape in {share.shape[-2:] for share in shares}
        }
        return Divided(
            axes=axes,
            members=prod(mesh),
            replicas=prod(self.mesh) // prod(mesh),
            shares=shares,
            flop=tuple(each[share.shape[-2:]] for share in shares),
            there=weight.dtype.itemsize,
            back=sent_back(weight.dtype, self.arithmetic, self.device).itemsize,
        )

    def _counted(self, batch: Sequence[Divided]) -> tuple[Load, int]:
        together: dict[tuple[tuple[int, ...], bool], list[Divided]] = {}
        for weight in batch:
            together.setdefault((weight.axes, weight.cut > 0), []).append(weight)
        total, calls, owned = Load.none(prod(self.mesh)), 0, 0
        for (axes, cut), weights in together.items():
            one, found = _shared_out(weights, cut)
            owned += found
            calls += one.calls
            for rank, member in enumerate(_members(self.mesh, axes)):
                for sums, values in zip(_lists(total), _lists(one), strict=True):
                    sums[rank] += values[member]
        return Load(*_lists(total), calls), owned


def sent_back(
    update: torch.dtype, arithmetic: Arithmetic, device: torch.device = ACCELERATOR
) -> torch.dtype:
    """The dtype in which results are sent back.

    Args:
        update: Dtype of the update.
        arithmetic: Where it puts the scale: all on the update, whose dtype that then is, or not.
        device: Where the iteration runs.
    """
    if arithmetic.scale_on in ("update", "result"):
        return update
    if arithmetic.form == "fast":
        return arithmetic.dtype_on(device)
    like = torch.empty(0, dtype=update, device=device)
    return carrier(result_dtype(like, arithmetic), like, arithmetic)


def batched(weights: Iterable[Weight], at_once: int) -> Iterator[list[Weight]]:
    """Consecutive weights that are stepped at once."""
    some: list[Weight] = []
    size = 0
    for weight in weights:
        if some and size + prod(weight.shape) > at_once:
            yield some
            some, size = [], 0
        some.append(weight)
        size += prod(weight.shape)
    if some:
        yield some


def shares_of(
    shape: Sequence[int], layout: Layout | None, regions: Iterable[Region]
) -> tuple[Share, ...]:
    """As :func:`muonsplit.sharding.pieces.shares`, in time that grows with what there is.

    A tile tells how many elements it has and not where they are: pieces of one size share theirs.

    Args:
        shape: Shape of the whole weight.
        layout: How it is cut.
        regions: What each member holds.
    """
    blocks, axis = block_regions(shape, layout), layout.axis if layout is not None else 0
    cuts = sorted((a, b, i) for i, block in enumerate(blocks) for a, b in block[axis])
    starts = [start for start, _, _ in cuts]
    held: list[dict[int, int]] = [{} for _ in blocks]
    for member, found in enumerate(regions):
        across = prod(_length(spans) for i, spans in enumerate(found) if i != axis)
        for start, stop in found[axis] if across else ():
            first, last = bisect_right(starts, start) - 1, bisect_left(starts, stop)
            for a, b, i in cuts[first:last]:
                rows = min(b, stop) - max(a, start)
                held[i][member] = held[i].get(member, 0) + rows * across
    tiles = {n: (Tile((slice(0, n),), ()),) for sizes in held for n in sizes.values()}
    return tuple(
        Share(
            tuple(_length(spans) for spans in block),
            tuple(Piece(member, tiles[n]) for member, n in sizes.items()),
        )
        for block, sizes in zip(blocks, held, strict=True)
    )


def _shared_out(weights: Sequence[Divided], cut: bool) -> tuple[Load, int]:
    """The load of each member of a group, and how many blocks have an owner that holds some."""
    members, owned = weights[0].members, 0
    one = Load.none(members)
    if cut:
        found = owners([weight.shares for weight in weights], members)
    else:
        found = [[share.pieces[0].member for share in weight.shares] for weight in weights]
    for weight, chosen in zip(weights, found, strict=True):
        for share, flop, owner in zip(weight.shares, weight.flop, chosen, strict=True):
            one.flop[owner] += flop
            sizes = {piece.member: piece.elements for piece in share.pieces}
            owned += owner in sizes and sum(sizes.values()) == prod(share.shape)
            for member, elements in sizes.items():
                if member != owner:
                    one.there[member] += elements * weight.there
                    one.back[owner] += elements * weight.back
    return Load(*_lists(one), 2 if cut else 0), owned


def _members(mesh: Sequence[int], axes: Sequence[int]) -> Iterator[int]:
    """The place of each rank of a mesh in its group along some axes."""
    for place in product(*map(range, mesh)):
        member = 0
        for axis in axes:
            member = member * mesh[axis] + place[axis]
        yield member


def _lists(load: Load) -> tuple[list[int], list[int], list[int]]:
    return load.flop, load.there, load.back


def _length(spans: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in spans)
