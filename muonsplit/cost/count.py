"""What each rank of a device mesh multiplies and sends for a list of weights.

The rule is that of :mod:`muonsplit.muon.sharded`. Weights that are divided along the same axes of
the mesh are shared out together, all of them at once, over the ranks along these axes; ranks that
differ on the others are replicas, and do the same work again. What travels does so batch by batch.

    whole block, one holder       orthogonalised there, nothing is sent
    cut block                     pieces go there to its owner, in the dtype of the update,
                                  and come back to where they were, in the dtype of the result
"""

from collections import Counter as Tally
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
from muonsplit.sharding import owners, region
from muonsplit.sharding.pieces import Share, shares

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


class Block(NamedTuple):
    """One block of a weight.

    Attributes:
        flop: Operations that it takes.
        elements: How many it has.
        held: How many of them each member that holds some has.
        once: Whether these are all of them, each once.
    """

    flop: int
    elements: int
    held: Mapping[int, int]
    once: bool


@dataclass(frozen=True, slots=True, eq=False)
class Divided:
    """One weight, over each group of ranks that hold it together.

    Attributes:
        axes: Axes of the mesh along which it is divided.
        members: Ranks of a group.
        replicas: Groups, each of which does everything.
        shares: Its blocks, as they are shared out.
        blocks: What they cost.
        held: Elements of all blocks that each member has.
        there: Bytes of an element on its way to an owner.
        back: Bytes of an element of a result.
    """

    axes: tuple[int, ...]
    members: int
    replicas: int
    shares: tuple[Share, ...]
    blocks: tuple[Block, ...]
    held: tuple[int, ...]
    there: int
    back: int

    @property
    def cut(self) -> int:
        """Blocks that no member holds whole."""
        return sum(len(block.held) > 1 for block in self.blocks)

    @property
    def lacking(self) -> int:
        """Elements that are outside the largest piece of their block: the fewest to be sent."""
        return sum(block.elements - max(block.held.values()) for block in self.blocks)


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
    return Counter(mesh, arithmetic, device).count(batched(weights, at_once))[0]


class Counter:
    """Counts what steps cost on one mesh; weights that are alike are divided once.

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

    def count(self, batches: Iterable[Sequence[Weight]]) -> tuple[Load, int]:
        """What a step costs.

        Args:
            batches: All weights of the step; those of a batch travel together.

        Returns:
            The load of each rank, and how many blocks have one owner, which holds some of them.
        """
        together: dict[tuple[int, ...], list[Divided]] = {}
        total, calls, owned = Load.none(prod(self.mesh)), 0, 0
        for batch in batches:
            found = [self.divided(weight) for weight in batch]
            calls += 2 * len({weight.axes for weight in found if weight.cut})
            for weight in found:
                together.setdefault(weight.axes, []).append(weight)
        for axes, weights in together.items():
            one, some = _shared_out(weights)
            owned += some
            for rank, member in enumerate(_members(self.mesh, axes)):
                for sums, values in zip(_lists(total), _lists(one), strict=True):
                    sums[rank] += values[member]
        return Load(*_lists(total), calls), owned

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
        regions = [region(weight.shape, mesh, place, along) for place in places]
        cut = shares(weight.shape, weight.layout, regions)
        dtype = self.arithmetic.dtype_on(self.device)
        each = {
            shape: program(self.arithmetic, *shape, dtype).operations(*sorted(shape))
            for shape in {share.shape[-2:] for share in cut}
        }
        blocks = tuple(_block(share, each[share.shape[-2:]]) for share in cut)
        held = [0] * prod(mesh)
        for block in blocks:
            for member, elements in block.held.items():
                held[member] += elements
        return Divided(
            axes=axes,
            members=prod(mesh),
            replicas=prod(self.mesh) // prod(mesh),
            shares=cut,
            blocks=blocks,
            held=tuple(held),
            there=weight.dtype.itemsize,
            back=sent_back(weight.dtype, self.arithmetic, self.device).itemsize,
        )


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


def _shared_out(weights: Sequence[Divided]) -> tuple[Load, int]:
    """The load of each member of a group, and how many blocks have an owner that holds some."""
    one, owned = Load.none(weights[0].members), 0
    for weight, times in Tally(weights).items():
        for member, elements in enumerate(weight.held):
            one.there[member] += times * elements * weight.there
    chosen = owners([weight.shares for weight in weights], weights[0].members)
    for weight, its in zip(weights, chosen, strict=True):
        for block, owner in zip(weight.blocks, its, strict=True):
            # What an owner holds itself is not sent.
            stays = block.held.get(owner, 0)
            one.flop[owner] += block.flop
            one.there[owner] -= stays * weight.there
            one.back[owner] += (block.elements - stays) * weight.back
            owned += stays > 0 and block.once
    return one, owned


def _block(share: Share, flop: int) -> Block:
    elements, held = prod(share.shape), {p.member: p.elements for p in share.pieces}
    return Block(flop, elements, held, sum(held.values()) == elements)


def _members(mesh: Sequence[int], axes: Sequence[int]) -> Iterator[int]:
    """The place of each rank of a mesh in its group along some axes."""
    for place in product(*map(range, mesh)):
        member = 0
        for axis in axes:
            member = member * mesh[axis] + place[axis]
        yield member


def _lists(load: Load) -> tuple[list[int], list[int], list[int]]:
    return load.flop, load.there, load.back
