"""Whether a cut would look as it does by chance, if another one were true.

If a cut is true, its blocks know nothing of each other: turning each on its own changes nothing.
If a candidate's blocks would then be larger than they were seen to be, rows of different blocks
were made orthogonal to each other, and that cut is not true.

Nor do its blocks know of cuts inside them: mixing the rows of each changes nothing. If the parts
of a block would then be larger than they were seen to be, those were made orthogonal by
themselves, and again that cut is not true.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.audit.cuts import refines
from muonsplit.audit.spectra import largest
from muonsplit.layout import Layout

# Degrees of freedom of the scatter. So many standard errors are then exceeded once in a thousand
# cases, of which the least gain is exceeded in few.
_FREEDOM = 8
# Chosen: what a gain must exceed; Lanczos errs by less than 1e-3.
_LEAST, _ERRORS = 1.02, 4.5
# The longest side whose eigenvectors are computed, and the longest whose values are turned if they
# fill their space: a second.
_MOST_SIDE, _MOST_FULL = 2048, 512
# Blocks of a candidate that are looked at; where only the largest counts, it is drawn more often.
_MOST_BLOCKS, _MOST_MIXED = 32, 8
# A direction is lifted if it has this share of the largest energy: the bands of all schedules are
# narrower.
_LIFTED = 0.1


class Gain(NamedTuple):
    """How much larger a candidate's blocks would be by chance than they were seen to be.

    Attributes:
        gain: The factor, in the geometric mean.
        error: Standard error of the logarithm of that.
    """

    gain: float
    error: float

    @property
    def rules_out(self) -> bool:
        """Whether it is no accident, so that what was taken for true is not."""
        return self.gain > _LEAST and math.log(self.gain) > _ERRORS * self.error


class Part(NamedTuple):
    """Rows of a change of weights.

    Attributes:
        rows: Which rows these are.
        columns: Which columns, if they are its columns.
        values: ``[rows, directions]``.
    """

    rows: list[int]
    columns: list[int]
    values: Tensor


class Coordinates(NamedTuple):
    """A change of weights, along one axis of cuts.

    Attributes:
        plain: As it is.
        free: In the directions that are turned.
    """

    plain: Part
    free: Part


def coordinates(change: Tensor) -> Coordinates:
    """The rows of a change in coordinates of the directions that they could have taken.

    Independent rows fill the space they are in, as far as there are enough of them. If fewer than
    half as many directions were lifted as they could fill, they share a smaller space, and are
    turned in that; directions that were not lifted have little energy, and are left out. Else they
    are turned in the space of all columns.

    Args:
        change: ``[rows, cols]``; of a large one some rows stand for all.
    """
    change = change.float()
    plain, directions = _plain(change), _lifted(change)
    if directions is None:
        return Coordinates(plain, plain)
    many = directions.shape[1]
    mixed, _ = torch.linalg.qr(torch.randn(many, many, generator=_source(0)))
    free = change @ (directions @ mixed)
    return Coordinates(plain, Part(list(range(len(free))), [], free))


def _plain(change: Tensor) -> Part:
    """Rows or columns that stand for all."""
    rows, columns = (list(range(side)) for side in change.shape)
    step = -(-min(change.shape) // _MOST_FULL)
    # What is orthogonal stays so in some of its rows, if they are fewer than its columns, or else
    # in some of its columns.
    if len(rows) <= len(columns):
        return Part(rows[::step], columns, change[::step])
    return Part(rows, columns[::step], change[:, ::step])


def _lifted(change: Tensor) -> Tensor | None:
    """The directions that were lifted, ``[cols, directions]``; None if they fill their space.

    Where there are many rows and many columns, some rows show them.
    """
    rows, cols = change.shape
    part = change if min(rows, cols) <= _MOST_SIDE else change[:: -(-rows // _MOST_SIDE)]
    part = part / part.abs().max().clamp(min=1e-38)
    wide = part.shape[0] <= cols
    energies, V = torch.linalg.eigh(part @ part.mT if wide else part.mT @ part)
    energies, V = energies.flip(0), V.flip(1)
    many = int((energies >= _LIFTED * energies[0]).sum())
    if many >= len(energies) / 2:
        return None
    return part.mT @ (V[:, :many] / energies[:many].sqrt()) if wide else V[:, :many]


def compared(
    along: Callable[[int], Coordinates], candidate: Layout | None, other: Layout | None
) -> Gain:
    """How much larger a candidate's blocks would be by chance, if another cut were true.

    Args:
        along: The change by the axis of a cut.
        candidate: The cut that is asked about.
        other: The cut that is taken for true.
    """
    # Turning larger blocks turns those inside along with them: nothing would change.
    if candidate is not None and refines(candidate, other):
        return mixed(along(candidate.axis), candidate, other, 0)
    return Gain(1.0, math.inf) if other is None else turned(along(other.axis), candidate, other, 0)


def turned(given: Coordinates, candidate: Layout | None, other: Layout, seed: int) -> Gain:
    """A candidate's blocks after each block of another cut was turned, beside what was seen.

    Args:
        given: The change, its rows along the other cut's axis.
        candidate: The cut that is asked about.
        other: The cut that is taken for true.
        seed: Seeds the turns, which permute coordinates and change their signs.
    """
    across = candidate is not None and candidate.axis != other.axis
    rows, columns, values = given.plain if across else given.free
    theirs, free = groups(other, rows), values.shape[1]
    mine = _some(groups(candidate, columns if across else rows), _MOST_BLOCKS)
    source = _source(seed)
    seen = _tops(values, mine, across)
    tops: list[Tensor] = []
    for _ in range(_draws(len(mine))):
        moved = torch.empty_like(values)
        for group in theirs:
            order = torch.randperm(free, generator=source)
            signs = torch.randint(2, (free,), generator=source) * 2 - 1
            moved[group] = values[group][:, order] * signs
        tops.append(_tops(moved, mine, across))
    return _gain(torch.stack(tops), seen)


def mixed(given: Coordinates, candidate: Layout, other: Layout | None, seed: int) -> Gain:
    """A candidate's largest block after the rows of a coarser cut's were mixed, beside the seen.

    Only the largest is compared: rows of unequal energy are made equal by mixing.

    Args:
        given: The change.
        candidate: The cut that is asked about.
        other: A coarser cut along the same axis, that is taken for true.
        seed: Seeds the mixing, by permutations.
    """
    rows, _, values = given.free
    theirs, mine = groups(other, rows), _some(groups(candidate, rows), _MOST_MIXED)
    source = _source(seed)
    seen = _tops(values, mine, False).amax(0, keepdim=True)
    tops: list[Tensor] = []
    for _ in range(_draws(1)):
        moved = torch.empty_like(values)
        for group in theirs:
            order = torch.randperm(len(group), generator=source)
            moved[group] = values[group[order]]
        tops.append(_tops(moved, mine, False).amax(0, keepdim=True))
    return _gain(torch.stack(tops), seen)


def _source(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _draws(blocks: int) -> int:
    return 1 + -(-_FREEDOM // blocks)


def _gain(drawn: Tensor, seen: Tensor) -> Gain:
    """From logarithms of tops, ``[draws, blocks]`` and ``[blocks]``.

    What was seen scatters as much as what was drawn, and is there once only.
    """
    drawn, seen = (x[..., seen.isfinite()] for x in (drawn, seen))
    if not seen.numel():
        return Gain(1.0, math.inf)
    draws, blocks = drawn.shape
    gains = drawn.mean(0) - seen
    error = float((drawn.var(0).mean() * (1 + 1 / draws) / blocks).sqrt())
    if blocks > 2:
        error = max(error, float(gains.std()) / blocks**0.5)
    return Gain(math.exp(float(gains.mean())), error)


def groups(layout: Layout | None, rows: Sequence[int]) -> list[Tensor]:
    """Which of the given rows are in one block: their places among those given."""
    if layout is None:
        return [torch.arange(len(rows))]
    owner = torch.empty(layout.rows, dtype=torch.int64)
    for number, block in enumerate(layout.blocks()):
        for start, stop in block.spans:
            owner[start:stop] = number
    owners = owner[torch.tensor(rows)]
    order = owners.argsort(stable=True)
    return list(order.split(owners.unique(return_counts=True)[1].tolist()))


def _some(blocks: list[Tensor], most: int) -> list[Tensor]:
    """Blocks that stand for all where there are many."""
    return blocks[:: -(-len(blocks) // most)]


def _tops(values: Tensor, blocks: list[Tensor], across: bool) -> Tensor:
    """Logarithms of the largest singular values of blocks of rows, or of columns."""
    if across:
        return torch.cat([largest(values[:, block].unsqueeze(0)) for block in blocks]).log()
    if len(blocks) == 1:
        return largest(values.unsqueeze(0)).log()
    alike: dict[int, list[Tensor]] = {}
    for block in blocks:
        alike.setdefault(len(block), []).append(block)
    tops = [largest(values[torch.stack(same)]) for same in alike.values()]
    return torch.cat(tops).log()
