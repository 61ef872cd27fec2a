"""Whether a cut would look as it does by chance, if another one were true.

If a cut is true, its blocks know nothing of each other: turning each on its own changes nothing.
If a candidate's blocks would then be larger than they were seen to be, rows of different blocks
were made orthogonal to each other, and that cut is not true.

Nor do its blocks know of cuts inside them: mixing the rows of each changes nothing. If the parts
of a block would then be larger than they were seen to be, those were made orthogonal by
themselves, and again that cut is not true.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.audit.spectra import largest
from muonsplit.layout import Layout

# Draws, where there are too few blocks to tell their scatter.
_DRAWS = 3
# Chosen: what a gain must exceed; Lanczos errs by less than 1e-3.
_LEAST, _ERRORS = 1.02, 6.0
# The longest side whose eigenvectors are computed: seconds.
_MOST_SIDE = 2048
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


class Coordinates(NamedTuple):
    """Rows of a change of weights in the coordinates that are turned.

    Attributes:
        rows: Which rows these are.
        columns: ``[rows, cols]``, as they are.
        values: ``[rows, directions]``.
        free: How many of the directions are turned; the others are left alone.
    """

    rows: list[int]
    columns: Tensor
    values: Tensor
    free: int


def coordinates(change: Tensor) -> Coordinates:
    """The rows of a change in coordinates of the directions that they could have taken.

    Independent rows fill the space they are in, as far as there are enough of them. If fewer than
    half as many directions were lifted as they could fill, they share a smaller space, and are
    turned in that; directions that were not lifted have little energy, and are left alone. Else
    they are turned in the space of all columns.

    Args:
        change: ``[rows, cols]``; of a large one some rows stand for all.
    """
    step = -(-change.shape[0] // _MOST_SIDE) if min(change.shape) > _MOST_SIDE else 1
    rows = list(range(0, change.shape[0], step))
    part = (change if step == 1 else change[rows]).float()
    part = part / part.abs().max().clamp(min=1e-38)
    wide = part.shape[0] <= part.shape[1]
    energies, V = torch.linalg.eigh(part @ part.mT if wide else part.mT @ part)
    energies, V = energies.flip(0).clamp(min=0), V.flip(1)
    lifted = int((energies >= _LIFTED * energies[0]).sum())
    if lifted >= min(part.shape) / 2:
        return Coordinates(rows, part, part, part.shape[1])
    values = V * energies.sqrt() if wide else part @ V
    source = torch.Generator().manual_seed(0)
    mixed, _ = torch.linalg.qr(torch.randn(lifted, lifted, generator=source))
    values[:, :lifted] = values[:, :lifted] @ mixed
    return Coordinates(rows, part, values, lifted)


def turned(given: Coordinates, candidate: Layout | None, other: Layout, seed: int) -> Gain:
    """A candidate's blocks after each block of another cut was turned, beside what was seen.

    Args:
        given: The change, its rows along the other cut's axis.
        candidate: The cut that is asked about.
        other: The cut that is taken for true.
        seed: Seeds the turns, which permute coordinates and change their signs.
    """
    across = candidate is not None and candidate.axis != other.axis
    values = given.columns if across else given.values
    free = values.shape[1] if across else given.free
    theirs = groups(other, given.rows)
    mine = groups(candidate, range(values.shape[1]) if across else given.rows)
    source = torch.Generator().manual_seed(seed)
    seen = _tops(values, mine, across)
    gains: list[Tensor] = []
    for _ in range(_DRAWS if len(mine) < _DRAWS else 1):
        moved = values.clone()
        for group in theirs:
            order = torch.randperm(free, generator=source)
            signs = torch.randint(2, (free,), generator=source) * 2 - 1
            moved[group, :free] = values[group][:, order] * signs
        gains.append(_tops(moved, mine, across) - seen)
    return _gain(torch.cat(gains))


def mixed(given: Coordinates, candidate: Layout, other: Layout | None, seed: int) -> Gain:
    """A candidate's largest block after the rows of a coarser cut's were mixed, beside the seen.

    Only the largest is compared: rows of unequal energy are made equal by mixing.

    Args:
        given: The change.
        candidate: The cut that is asked about.
        other: A coarser cut along the same axis, that is taken for true.
        seed: Seeds the mixing, by random rotations.
    """
    mine = groups(candidate, given.rows)
    source = torch.Generator().manual_seed(seed)
    seen = _tops(given.values, mine, False).max()
    gains: list[Tensor] = []
    for _ in range(_DRAWS):
        moved = torch.empty_like(given.values)
        for group in groups(other, given.rows):
            side = len(group)
            rotation, _ = torch.linalg.qr(torch.randn(side, side, generator=source))
            moved[group] = rotation @ given.values[group]
        gains.append(_tops(moved, mine, False).max() - seen)
    return _gain(torch.stack(gains))


def _gain(logarithms: Tensor) -> Gain:
    found = logarithms[logarithms.isfinite()]
    if len(found) < 2:
        return Gain(1.0, math.inf)
    return Gain(math.exp(float(found.mean())), float(found.std()) / len(found) ** 0.5)


def groups(layout: Layout | None, rows: Sequence[int]) -> list[list[int]]:
    """Which of the given rows are in one block: their places among those given."""
    if layout is None:
        return [list(range(len(rows)))]
    owner: dict[int, int] = {}
    for number, block in enumerate(layout.blocks()):
        for start, stop in block.spans:
            owner.update(dict.fromkeys(range(start, stop), number))
    found: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        found.setdefault(owner[row], []).append(place)
    return list(found.values())


def _tops(values: Tensor, blocks: list[list[int]], across: bool) -> Tensor:
    """Logarithms of the largest singular values of blocks of rows, or of columns."""
    parts = (values[:, block] if across else values[block] for block in blocks)
    return torch.cat([largest(part.unsqueeze(0)) for part in parts]).log()
