"""The cut, by observation: change the signs in one row of a gradient, see which rows move.

All weights are probed at once; each probe is a fresh subject at zero state, compared bit by bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from muonsplit.observe.gradients import flip_column, flip_row

Tensors = Mapping[str, Tensor]
# Gradients of one step → parameters after it, from zero state.
Probe = Callable[[Tensors], Tensors]
# Name, parameter after a probe, axis → the lines that moved.
Moved = Callable[[str, Tensor, int], frozenset[int]]

# Lines that move alone are elementwise updates; a few say so, the rest need no probe each.
_LONE_LINES = 3
# Half heads of the largest published model; a subject cut finer is wrong long before.
_MOST_PROBES = 512
# How many roundings may separate two updates that differ by a common factor only.
_ROUNDINGS = 32.0


@dataclass(slots=True)
class Cut:
    """How one weight is cut along one axis, as observed.

    Attributes:
        lines: Rows (or columns) the weight has.
        moved: For each line that was changed, the lines of the update that moved.
    """

    lines: int
    moved: dict[int, frozenset[int]] = field(default_factory=dict)

    @property
    def blocks(self) -> tuple[frozenset[int], ...]:
        """The sets of lines that move together, by their first line.

        Sets that overlap are one: in low precision a line may keep its bits by rounding although
        it is in the block, and the probes of its neighbours show that it is.
        """
        blocks: list[frozenset[int]] = []
        for found in self.moved.values():
            apart = [block for block in blocks if not block & found]
            blocks = [*apart, found.union(*(block for block in blocks if block & found))]
        return tuple(sorted(blocks, key=lambda block: min(block, default=-1)))

    @property
    def whole(self) -> bool:
        """Whether every line moves with every other."""
        return self.blocks == (frozenset(range(self.lines)),)

    @property
    def displaced(self) -> tuple[int, ...]:
        """Lines whose change moved a set that they are not in."""
        return tuple(line for line, block in self.moved.items() if block and line not in block)

    @property
    def complete(self) -> bool:
        """Whether the observed blocks account for every line."""
        return self._uncovered() is None

    def next_line(self) -> int | None:
        """The first line that still has to be probed, or None."""
        lone = sum(block <= {line} for line, block in self.moved.items())
        return self._uncovered() if lone < min(_LONE_LINES, self.lines) else None

    def _uncovered(self) -> int | None:
        covered: set[int] = set()
        for line, block in self.moved.items():
            # A displaced block says how many lines belong together, not which.
            covered |= block if line in block else set(range(line, line + max(1, len(block))))
        return next((line for line in range(self.lines) if line not in covered), None)

    def __str__(self) -> str:
        if self.whole:
            return "whole"
        sizes = [len(block) for block in self.blocks]
        if sizes and max(sizes) <= 1:
            return "single lines: nothing is orthogonalised"
        spelled = (
            f"{len(sizes)} blocks of {sizes[0]}"
            if len(set(sizes)) == 1
            else (
                f"{len(sizes)} blocks of "
                + ", ".join(map(str, sizes[:8]))
                + (", …" * (len(sizes) > 8))
            )
        )
        if any(max(b) - min(b) + 1 != len(b) for b in self.blocks if b):
            spelled += ", strided"
        return spelled if self.complete else f"at least {spelled}"


def scan(axis: int, gradients: Tensors, probe: Probe, moved: Moved, *key: object) -> dict[str, Cut]:
    """Finds how every matrix is cut along one axis, all at once.

    Args:
        axis: 0 for rows, 1 for columns; a stack's rows are counted through.
        gradients: One gradient a parameter; vectors are left alone.
        probe: Steps a fresh subject.
        moved: Tells which lines of a parameter moved.
        key: Seeds the sign changes.

    Returns:
        A cut for each parameter of two or more dimensions.
    """
    flip = flip_column if axis else flip_row
    matrices = {name: g for name, g in gradients.items() if g.ndim > 1}
    cuts = {n: Cut(g.shape[-1] if axis else g.numel() // g.shape[-1]) for n, g in matrices.items()}
    for _ in range(_MOST_PROBES):
        chosen = {name: line for name, cut in cuts.items() if (line := cut.next_line()) is not None}
        if not chosen:
            break
        changed = {n: flip(gradients[n], line, *key, axis, n) for n, line in chosen.items()}
        after = probe({**gradients, **changed})
        for name, line in chosen.items():
            cuts[name].moved[line] = moved(name, after[name], axis)
    return cuts


def differing_lines(after: Tensor, base: Tensor, axis: int) -> frozenset[int]:
    """Lines of a parameter in which any bit differs; float32, shape ``[..., cols]``."""
    differs = (after.view(torch.int32) != base.view(torch.int32)).flatten(0, -2)
    return frozenset(differs.any(1 - axis).nonzero().flatten().tolist())


def turned_lines(update: Tensor, base: Tensor, axis: int, roundoff: float) -> frozenset[int]:
    """Lines of an update that point elsewhere, whatever common factor both were multiplied by.

    Where all weights are coupled through one factor, as by clipping, every bit differs; lines
    that were only scaled still have their direction up to rounding.

    Args:
        update: Shape ``[..., cols]``, float64.
        base: The update it is compared with.
        axis: 0 for rows, 1 for columns.
        roundoff: Relative error of one element of either.
    """
    lines, others = (x.flatten(0, -2) if axis == 0 else x.flatten(0, -2).mT for x in (update, base))
    factor = (lines * others).sum(1) / others.square().sum(1).clamp(min=1e-300)
    off = (lines - factor.unsqueeze(1) * others).norm(dim=1)
    allowed = _ROUNDINGS * roundoff * lines.norm(dim=1)
    return frozenset((off > allowed).nonzero().flatten().tolist())


def stretches(lines: frozenset[int]) -> tuple[tuple[int, int], ...]:
    """A set of lines as stretches from start to stop, in order."""
    found: list[tuple[int, int]] = []
    for line in sorted(lines):
        if found and found[-1][1] == line:
            found[-1] = (found[-1][0], line + 1)
        else:
            found.append((line, line + 1))
    return tuple(found)
