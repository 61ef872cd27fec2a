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

MOST_PROBES = 96


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
        """The distinct sets that moved together, by their first line."""
        return tuple(sorted(set(self.moved.values()), key=lambda block: min(block, default=-1)))

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
        """Whether the observed blocks cover every line."""
        return self.next_line() is None

    def next_line(self) -> int | None:
        """The first line that no probe has accounted for, or None."""
        covered: set[int] = set()
        for line, block in self.moved.items():
            # A displaced block says how many lines belong together, not which.
            covered |= block if line in block else set(range(line, line + max(1, len(block))))
        return next((line for line in range(self.lines) if line not in covered), None)

    def __str__(self) -> str:
        if self.whole:
            return f"whole ({self.lines} lines move together)"
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


def scan_rows(gradients: Tensors, base: Tensors, probe: Probe, *key: object) -> dict[str, Cut]:
    """Finds the row blocks of every matrix at once.

    Args:
        gradients: One gradient a parameter; vectors are left alone.
        base: Parameters after a step with them.
        probe: Steps a fresh subject.
        key: Seeds the sign changes.

    Returns:
        A cut for each parameter of two or more dimensions; a stack's rows are counted through.
    """
    lines = {name: g.numel() // g.shape[-1] for name, g in gradients.items() if g.ndim > 1}
    return _scan(gradients, base, probe, lines, flip_row, _moved_rows, *key, "rows")


def scan_columns(gradients: Tensors, base: Tensors, probe: Probe, *key: object) -> dict[str, Cut]:
    """Finds the column blocks of every matrix at once; see :func:`scan_rows`."""
    lines = {name: g.shape[-1] for name, g in gradients.items() if g.ndim > 1}
    return _scan(gradients, base, probe, lines, flip_column, _moved_columns, *key, "columns")


def _scan(
    gradients: Tensors,
    base: Tensors,
    probe: Probe,
    lines: Mapping[str, int],
    flip: Callable[..., Tensor],
    moved: Callable[[Tensor], frozenset[int]],
    *key: object,
) -> dict[str, Cut]:
    cuts = {name: Cut(count) for name, count in lines.items()}
    for _ in range(MOST_PROBES):
        chosen = {name: line for name, cut in cuts.items() if (line := cut.next_line()) is not None}
        if not chosen:
            break
        changed = {name: flip(gradients[name], line, *key, name) for name, line in chosen.items()}
        after = probe({**gradients, **changed})
        for name, line in chosen.items():
            differs = after[name].view(torch.int32) != base[name].view(torch.int32)
            cuts[name].moved[line] = moved(differs)
    return cuts


def _moved_rows(differs: Tensor) -> frozenset[int]:
    return frozenset(differs.flatten(0, -2).any(-1).nonzero().flatten().tolist())


def _moved_columns(differs: Tensor) -> frozenset[int]:
    return frozenset(differs.flatten(0, -2).any(0).nonzero().flatten().tolist())
