"""What a member holds of one weight's blocks, and whether they have to travel."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from muonsplit.layout import Block, Layout
from muonsplit.sharding.held import of_region
from muonsplit.sharding.local import sharded
from muonsplit.sharding.members import Members, members
from muonsplit.sharding.pieces import Share, shares


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """One weight, and what those who hold it have of its blocks.

    Attributes:
        shape: Shape of the whole weight.
        layout: How the whole is cut; None for one block, or one for each matrix of a stack.
        members: Those who hold it.
        shares: Its blocks; none if one member holds the weight.
        travels: Whether a block is divided among several members.
        as_it_is: Whether the local tensor, cut by ``local``, is nothing but whole blocks.
        local: That layout.
    """

    shape: tuple[int, ...]
    layout: Layout | None
    members: Members
    shares: tuple[Share, ...] = ()
    travels: bool = False
    as_it_is: bool = True
    local: Layout | None = None

    def cut(self) -> Iterator[tuple[Block, tuple[int, ...]]]:
        """The blocks of the layout that are divided, and the ranks that each is divided among."""
        if self.layout is None or not self.travels:
            return
        for block, share in zip(self.layout.blocks(), self.shares, strict=True):
            if len(share.pieces) > 1:
                yield block, tuple(self.members.ranks[piece.member] for piece in share.pieces)


def holding(name: str, weight: Tensor, layout: Layout | None) -> Holding:
    """What this process, and the others that hold a weight, have of its blocks.

    Args:
        name: What the weight is called in errors.
        weight: Two axes or, without a layout, three.
        layout: How the whole weight is cut.

    Raises:
        InputError: As for :func:`members`.
        LayoutError: If the weight is a partial sum.
    """
    found = members(name, weight)
    if len(found.regions) == 1:
        return Holding(tuple(weight.shape), layout, found, local=layout)
    return _holding(tuple(weight.shape), layout, found)


@lru_cache(maxsize=4096)
def _holding(shape: tuple[int, ...], layout: Layout | None, found: Members) -> Holding:
    blocks = shares(shape, layout, found.regions)
    if any(len(share.pieces) > 1 for share in blocks):
        return Holding(shape, layout, found, blocks, travels=True, as_it_is=False)
    shard = of_region(shape, found.held)
    if layout is None or not shard.spans:
        # Whole experts, or nothing: a matrix that is one block and does not travel is one member's.
        return Holding(shape, layout, found, blocks)
    local = sharded(layout, shard, "gather")
    as_it_is = local.outcome == "heads"
    return Holding(shape, layout, found, blocks, as_it_is=as_it_is, local=local.layout)
