"""Orthogonalisation of what several ranks hold together.

Whoever holds most of a block puts it together, orthogonalises it whole, as one process would, and
gives every other holder the result for its rows. Blocks that one rank holds stay where they are.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.layout import Layout
from muonsplit.muon.blocks import Direction, Rates, directions, empty_direction
from muonsplit.muon.scale import factors
from muonsplit.newton_schulz import Backend
from muonsplit.sharding import Holding, owners, swap
from muonsplit.sharding.pieces import Piece, Share

# Which weight of a batch, which block of it.
_Place = tuple[int, int]


def owners_together(holdings: Sequence[Holding]) -> list[list[int]]:
    """Who orthogonalises each block of each weight, as places among those who hold the weight.

    Decided over all weights at once: batch by batch, what is alone in its batch would always go to
    the first member.

    Args:
        holdings: What is held of each weight that a step may touch, alike on every rank.
    """
    found: list[list[int]] = [[] for _ in holdings]
    for weights in _by_group(holdings):
        members = holdings[weights[0]].members
        # All weights count as work, and every rank has to see the same.
        chosen = owners([holdings[w].shares for w in weights], len(members.ranks))
        for w, each in zip(weights, chosen, strict=True):
            found[w] = each
    return found


def directions_together(
    updates: Sequence[Tensor],
    holdings: Sequence[Holding],
    owned: Sequence[Sequence[int]],
    arithmetic: Arithmetic,
    backend: Backend = "torch",
) -> list[Direction]:
    """What members of groups subtract from what they hold of weights.

    All members have to call it with the same weights, each with its own part of them.

    Args:
        updates: What momentum made of the local gradients.
        holdings: What is held of each weight, and by whom.
        owned: Who orthogonalises each block; see :func:`owners_together`.
        arithmetic: What is computed on a block.
        backend: As :func:`muonsplit.newton_schulz.newton_schulz` takes it.

    Returns:
        A direction for each local tensor.
    """
    plain = [w for w, held in enumerate(holdings) if held.as_it_is]
    groups = [_Group(some, updates, holdings, owned) for some in _by_group(holdings)]
    places = [(group, place) for group in groups for place in group.blocks]
    given = [updates[w] for w in plain] + [group.blocks[place] for group, place in places]
    layouts = [holdings[w].local for w in plain]
    layouts += [_alone(group.blocks[w, b], holdings[w].layout) for group, (w, b) in places]
    wholes = [holdings[w].shape for w in (*plain, *(w for _, (w, _) in places))]
    found = directions(given, layouts, arithmetic, backend, wholes)
    result = dict(zip(plain, found[: len(plain)], strict=True))
    for (group, place), direction in zip(places, found[len(plain) :], strict=True):
        group.blocks[place] = direction.update
    for group in groups:
        local = {
            w: empty_direction(updates[w], held.layout, arithmetic, backend, held.shape)
            for w, held in group.held.items()
        }
        group.carry(local, to_owners=False)
        for w, update in local.items():
            result[w] = Direction(update, _rates(holdings[w], arithmetic))
    return [result[w] for w in range(len(updates))]


def _by_group(holdings: Sequence[Holding]) -> list[list[int]]:
    """The weights that the same ranks hold, where some of them have to be put together.

    The groups are in one order on every rank.
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for w, held in enumerate(holdings):
        if len(held.members.ranks) > 1:
            found.setdefault(held.members.ranks, []).append(w)
    return [
        found[ranks]
        for ranks in sorted(found)
        if not all(holdings[w].as_it_is for w in found[ranks])
    ]


class _Group:
    """The weights of a batch that the same ranks hold, and the blocks that this rank owns.

    To make one is to fetch what those blocks lack.

    Attributes:
        held: What is held of the weights whose blocks are put together, by place in the batch.
        blocks: Those blocks, whole; first their updates, later what they became.
    """

    def __init__(
        self,
        weights: Sequence[int],
        updates: Sequence[Tensor],
        holdings: Sequence[Holding],
        owned: Sequence[Sequence[int]],
    ) -> None:
        self._members = holdings[weights[0]].members
        self._owners = {w: owned[w] for w in weights}
        self.held = {w: holdings[w] for w in weights if not holdings[w].as_it_is}
        self.blocks: dict[_Place, Tensor] = {
            (w, b): updates[w].new_empty(share.shape)
            for w, held in self.held.items()
            for b, share in enumerate(held.shares)
            if self._owners[w][b] == self._members.me
        }
        self.carry(updates, to_owners=True)

    def carry(self, local: Mapping[int, Tensor] | Sequence[Tensor], *, to_owners: bool) -> None:
        """Copies pieces of local tensors to the blocks, or of blocks to the local tensors."""
        me = self._members.me
        sent: list[list[Tensor]] = [[] for _ in self._members.ranks]
        received: list[list[Tensor]] = [[] for _ in self._members.ranks]
        for (w, b), piece, owner in self._pieces():
            for tile in piece.tiles:
                here = local[w][tile.local] if piece.member == me else None
                there = self.blocks[w, b][tile.block] if owner == me else None
                source, target = (here, there) if to_owners else (there, here)
                other = owner if piece.member == me else piece.member
                if source is not None and target is not None:
                    target.copy_(source)
                elif source is not None:
                    sent[other].append(source)
                elif target is not None:
                    received[other].append(target)
        if any(held.travels for held in self.held.values()):
            swap(sent, received, self._members)

    def _pieces(self) -> Iterator[tuple[_Place, Piece, int]]:
        """What this rank holds, or owns, of each block, and the block's owner."""
        me = self._members.me
        for w, held in self.held.items():
            for b, share in enumerate(held.shares):
                owner = self._owners[w][b]
                for piece in share.pieces:
                    if me in (piece.member, owner):
                        yield (w, b), piece, owner


def _alone(block: Tensor, layout: Layout | None) -> Layout | None:
    """How a block that stands alone is cut: not at all, but it may be stored transposed."""
    return Layout.whole(block.shape[1], 1) if layout is not None and layout.axis else None


def _rates(held: Holding, arithmetic: Arithmetic) -> float | Rates:
    """What is left of the scale for the learning rate, from the shapes of a weight's blocks."""
    across = held.layout is not None and held.layout.axis == 1

    def rate(share: Share) -> float:
        shapes = (share.shape[-2:], held.shape[-2:])
        return factors(arithmetic, *(s[::-1] if across else s for s in shapes)).rate

    rates = [rate(share) for share in held.shares]
    if len(set(rates)) == 1:
        return rates[0]
    return [
        (tile.local, rate)
        for share, rate in zip(held.shares, rates, strict=True)
        for piece in share.pieces
        if piece.member == held.members.me
        for tile in piece.tiles
    ]
