"""Which member of a group orthogonalises which block, and what has to travel for it.

A block that one member holds is its own. A block that several hold is put together by the one that
holds most of it, and its result goes back to where its rows are: fewer bytes than fetching it
everywhere, and it is orthogonalised once.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from muonsplit.layout import Layout
from muonsplit.sharding.held import Region, Spans, length

Slices = tuple[slice, ...]


class Tile(NamedTuple):
    """A box that lies in one piece both in a block and in what a member holds.

    Attributes:
        block: Where in the block.
        local: Where in the member's local tensor.
    """

    block: Slices
    local: Slices

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return prod(s.stop - s.start for s in self.block)


class Piece(NamedTuple):
    """What one member holds of one block.

    Attributes:
        member: Its place in the group.
        tiles: Where, in the order in which it is sent.
    """

    member: int
    tiles: tuple[Tile, ...]

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return sum(tile.elements for tile in self.tiles)


@dataclass(frozen=True, slots=True)
class Share:
    """One block of a weight, and who holds what of it.

    Attributes:
        shape: Shape of the block, axes as in the weight.
        pieces: One for each member that holds something, in the order of members.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def cost(self) -> int:
        """What orthogonalising it costs beside other blocks: the Gram product's multiplications."""
        short, long = sorted(self.shape[-2:])
        return short * short * long


def shares(
    shape: Sequence[int], layout: Layout | None, regions: Sequence[Region]
) -> tuple[Share, ...]:
    """The blocks of a weight, each with what the members of a group hold of it.

    Args:
        shape: Shape of the whole weight, two axes or, for a stack of matrices, three.
        layout: How it is cut; None for one block, or one for each matrix of a stack.
        regions: What each member holds; together everything, and nothing twice.
    """
    blocks, axis = block_regions(shape, layout), 0 if layout is None else layout.axis
    cuts = sorted((a, b, i) for i, block in enumerate(blocks) for a, b in block[axis])
    starts = [start for start, _, _ in cuts]
    pieces: list[list[Piece]] = [[] for _ in blocks]
    for member, region in enumerate(regions):
        # Blocks lie along one axis: those that a member touches are found without asking all.
        touched = {
            i
            for start, stop in region[axis]
            for _, _, i in cuts[bisect_right(starts, start) - 1 : bisect_left(starts, stop)]
        }
        for i in touched:
            if tiles := tuple(_tiles(blocks[i], region)):
                pieces[i].append(Piece(member, tiles))
    return tuple(
        Share(tuple(length(spans) for spans in block), tuple(held))
        for block, held in zip(blocks, pieces, strict=True)
    )


def block_regions(shape: Sequence[int], layout: Layout | None) -> list[Region]:
    """Where the blocks of a weight are, in the order of :meth:`Layout.blocks`."""
    whole: list[Spans] = [((0, size),) for size in shape]
    if layout is not None:
        cut = [block.spans for block in layout.blocks()]
        return [(*whole[: layout.axis], c, *whole[layout.axis + 1 :]) for c in cut]
    if len(shape) == 3:
        return [(((i, i + 1),), *whole[1:]) for i in range(shape[0])]
    return [tuple(whole)]


def cuts(layout: Layout | None, shape: Sequence[int], regions: Sequence[Region]) -> bool:
    """Whether no member holds the whole of some block.

    Args:
        layout: How the weight is cut; None for one block, or one for each matrix of a stack.
        shape: Its whole shape.
        regions: What each member holds; several may hold the same.
    """
    found = shares(shape, layout, regions)
    return any(max(p.elements for p in b.pieces) < prod(b.shape) for b in found)


def owners(weights: Sequence[Sequence[Share]], members: int) -> list[list[int]]:
    """The member that orthogonalises each block of each weight.

    Whoever holds most of a block; among equals, whoever has least to do, the dearest blocks being
    given away first. It depends on shapes alone, so that every member comes to the same.

    Args:
        weights: The shares of each weight.
        members: Members of the group.
    """
    found = [[-1] * len(blocks) for blocks in weights]
    load = [0] * members
    contested: list[tuple[int, int, int, list[int]]] = []  # members ascending
    # Weights that are alike have the same shares.
    most: dict[int, list[int]] = {}
    for w, blocks in enumerate(weights):
        for b, share in enumerate(blocks):
            best = most.get(id(share))
            if best is None:
                best = most[id(share)] = _most(share)
            if len(best) == 1:
                found[w][b] = best[0]
                load[best[0]] += share.cost
            else:
                contested.append((-share.cost, w, b, best))
    for cost, w, b, best in sorted(contested):
        chosen = min(best, key=load.__getitem__)  # the first of those that have least
        found[w][b] = chosen
        load[chosen] -= cost
    return found


def _most(share: Share) -> list[int]:
    """Those who hold most of a block, ascending."""
    elements = [piece.elements for piece in share.pieces]
    largest = max(elements)
    return [p.member for p, n in zip(share.pieces, elements, strict=True) if n == largest]


def _tiles(block: Region, region: Region) -> Iterator[Tile]:
    axes = [tuple(_common(b, r)) for b, r in zip(block, region, strict=True)]
    for parts in product(*axes):
        yield Tile(tuple(p[0] for p in parts), tuple(p[1] for p in parts))


def _common(block: Spans, held: Spans) -> Iterator[tuple[slice, slice]]:
    """The intervals that two lists share: where in the first, and where in the second."""
    row = 0
    for a, b in block:
        local = 0
        for c, d in held:
            start, stop = max(a, c), min(b, d)
            if start < stop:
                yield (
                    slice(row + start - a, row + stop - a),
                    slice(local + start - c, local + stop - c),
                )
            local += d - c
        row += b - a
