"""Where rows are mixed, and what that says of heads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from muonsplit.truth.answer import Run, Truth
from muonsplit.truth.rows import CPU, NO_ROW, Origin, Rows, condensed, squeezed

# A residual stream carries its layers' rows on; what entered this many projections in one piece
# has told what it had to tell.
_ENOUGH = 4
# Spreads head numbers over 64 bits, so that a sum of them tells one set of heads from another
# (an odd number near 2⁶⁴ divided by the golden ratio).
_SPREAD = -7046029254386353131


@dataclass
class _Seen:
    """What was seen of one axis of one weight.

    Attributes:
        rows: Size of the axis.
        heads: For each attention product, the number of heads and the rows each was given.
        whole: Which rows were used in one piece.
        all_whole: Whether all of them were.
        apart: Which rows were used by heads.
        times: How often rows were used in one piece.
        lost: Operations that could not be followed.
    """

    rows: int
    heads: list[tuple[int, tuple[Run, ...]]] = field(default_factory=list)
    whole: Tensor = field(init=False)
    apart: Tensor = field(init=False)
    all_whole: bool = False
    times: int = 0
    lost: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.whole, self.apart = torch.zeros(2, self.rows, dtype=torch.bool, device=CPU)

    @property
    def done(self) -> bool:
        """Whether more uses would tell no more."""
        return self.times >= _ENOUGH or bool(self.apart.all())


class Mixings:
    """Collects, for each weight and axis, in which heads its rows were used.

    Args:
        shapes: Shape of each weight.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._seen = {
            (name, axis): _Seen(shape[-2:][axis])
            for name, shape in shapes.items()
            for axis in (0, 1)
        }
        self._done: set[tuple[str, int]] = set()
        self._looked_at: dict[object, tuple[Run, ...]] = {}
        self._told: dict[object, tuple[Run, ...]] = {}

    def settled(self, origin: Origin) -> bool:
        """Whether a weight's rows have told all they can."""
        return origin.projected and (origin.name, origin.axis) in self._done

    def reached(self, name: str) -> bool:
        """Whether anything at all was seen of a weight."""
        return any(
            seen.heads or seen.times or seen.lost
            for seen in (self._seen[name, axis] for axis in (0, 1))
        )

    def lose(self, rows: Rows, operation: str) -> None:
        """Notes that rows went into an operation that cannot be followed."""
        for origin in rows:
            if origin.projected:
                self._seen[origin.name, origin.axis].lost.add(operation)

    def whole(self, rows: Rows) -> None:
        """Rows that are summed over in one piece."""
        for origin, maps in rows.items():
            if origin.projected:
                seen = self._seen[origin.name, origin.axis]
                if not seen.all_whole:
                    for row in maps:
                        used = squeezed(row).flatten()
                        seen.whole[used[used != NO_ROW].long()] = True
                    seen.all_whole = bool(seen.whole.all())
                seen.times += 1
                self._note(origin, seen)

    def heads(self, origin: Origin, row: Tensor) -> None:
        """Rows used apart from each other.

        Args:
            origin: Whose rows.
            row: A map whose first dimension counts the heads.
        """
        seen = self._seen[origin.name, origin.axis]
        runs = self._runs_of(row, seen.rows)
        if not runs:
            return
        seen.heads.append((row.shape[0], runs))
        for run in runs:
            seen.apart[run.start : run.stop] = True
        self._note(origin, seen)

    def _runs_of(self, row: Tensor, rows: int) -> tuple[Run, ...]:
        """Equal layers give equal maps: each is looked at once."""
        row = row.reshape(row.shape[0], -1)
        key = (rows, row.shape, row.numpy().tobytes())
        found = self._looked_at.get(key)
        if found is None:
            found = self._looked_at[key] = _runs(row, rows)
        return found

    def _note(self, origin: Origin, seen: _Seen) -> None:
        if seen.done:
            self._done.add((origin.name, origin.axis))

    def attention(self, operands: list[Rows]) -> None:
        """Query, key and value of one attention: ``[..., heads, time, width]``."""
        for rows in operands:
            for origin, maps in rows.items():
                flat = [condensed(row).flatten(0, -3) for row in maps]
                self.heads(origin, _overlaid(flat, [0]))

    def product(self, a: tuple[Rows, str], b: tuple[Rows, str], kept: str) -> None:
        """Two operands multiplied and summed.

        Args:
            a: What the first carries, and the labels of its dimensions as einsum writes them.
            b: The same of the second.
            kept: The labels of the output.
        """
        batch = [label for label in kept if label in a[1] and label in b[1]]
        operands = [
            ({origin: list(map(condensed, maps)) for origin, maps in rows.items()}, labels)
            for rows, labels in (a, b)
        ]
        sizes: dict[str, int] = {}
        for found, labels in operands:
            for row in (row for maps in found.values() for row in maps):
                for label, size in zip(labels, row.shape, strict=True):
                    sizes[label] = max(size, sizes.get(label, 1))
        for found, labels in operands:
            for origin, maps in found.items():
                self._mixed(origin, maps, labels, batch, kept, sizes)

    def _mixed(
        self,
        origin: Origin,
        maps: list[Tensor],
        labels: str,
        batch: list[str],
        kept: str,
        sizes: dict[str, int],
    ) -> None:
        apart = list(batch)
        summed = [dim for dim, label in enumerate(labels) if label not in kept]
        if any(row.shape[dim] > 1 for row in maps for dim in summed):
            # These rows are added up; those at other indices are not among them.
            apart += [label for label in labels if label in kept and label not in apart]
        apart = [label for label in apart if sizes.get(label, 1) > 1]
        if not apart:
            self.whole({origin: maps})
            return
        dims = [labels.index(label) for label in apart]
        # A weight that has not met an input is followed on, unless the product splits it.
        if origin.projected or any(row.shape[dim] > 1 for row in maps for dim in dims):
            full = [
                row.expand(
                    [
                        sizes[label] if label in apart else size
                        for label, size in zip(labels, row.shape, strict=True)
                    ]
                )
                for row in maps
            ]
            self.heads(Origin(origin.name, origin.axis, True), _overlaid(full, dims))

    def truth(self, name: str) -> Truth:
        """What all that says of one weight: the axis whose rows were used apart, else of rows."""
        found = [self._truth(axis, self._seen[name, axis]) for axis in (0, 1)]
        told = [truth for truth in found if truth.state != "unknown"]
        apart = [truth for truth in told if truth.state == "heads"]
        return (apart or told or found)[0]

    def _truth(self, axis: int, seen: _Seen) -> Truth:
        used = seen.apart | seen.whole
        if not bool(used.all()):
            missing = seen.rows - int(used.sum())
            lost = f"lost in {', '.join(sorted(seen.lost))}" if seen.lost else "not reached"
            return Truth("unknown", axis, seen.rows, (), f"{missing} of {seen.rows} rows: {lost}")
        if not seen.heads:
            return Truth("none", axis, seen.rows, (), "its rows are summed over in one piece")
        key = (seen.rows, tuple((count, id(runs)) for count, runs in seen.heads))
        runs = self._told.get(key)
        if runs is None:
            runs = self._told[key] = _together(seen)
        count = len({head for run in runs for head in run.heads})
        if count < 2:
            return Truth("none", axis, seen.rows, (), "every head is given the same rows")
        return Truth("heads", axis, seen.rows, runs, f"rows meet only inside each of {count} heads")


def _overlaid(maps: list[Tensor], heads: list[int]) -> Tensor:
    """Every map's rows beside each other, head by head: ``[heads, rows]``."""
    flat: list[Tensor] = []
    for row in maps:
        rest = [dim for dim in range(row.ndim) if dim not in heads]
        count = torch.Size(row.shape[dim] for dim in heads).numel()
        flat.append(row.permute(*heads, *rest).reshape(count, -1))
    most = max(row.shape[0] for row in flat)
    return torch.cat([row.expand(most, -1) for row in flat], 1)


def _runs(row: Tensor, rows: int) -> tuple[Run, ...]:
    """The rows that each set of heads was given, in order."""
    heads = torch.arange(row.shape[0], device=CPU)[:, None].expand(row.shape[0], row[0].numel())
    used = row.reshape(row.shape[0], -1).long()
    kept = used != NO_ROW
    pairs = torch.unique(used[kept] * row.shape[0] + heads[kept])
    at, head = pairs // row.shape[0], pairs % row.shape[0]
    code = torch.zeros(rows, dtype=torch.long, device=CPU).index_add_(0, at, (head + 1) * _SPREAD)
    changes = (code[1:] != code[:-1]).nonzero().flatten() + 1
    bounds = [0, *changes.tolist(), rows]
    first = torch.searchsorted(at, torch.tensor([*bounds[:-1], rows], device=CPU)).tolist()
    last = torch.searchsorted(at, torch.tensor(bounds[:-1], device=CPU), right=True).tolist()
    listed = head.tolist()
    found = (
        Run(start, stop, frozenset(listed[a:b]))
        for start, stop, a, b in zip(bounds, bounds[1:], first, last, strict=False)
    )
    return tuple(run for run in found if run.heads)


def _together(seen: _Seen) -> tuple[Run, ...]:
    """Every row once, as the first product that took it by heads saw it, heads counted alike."""
    most = max(count for count, _ in seen.heads)
    owner = torch.zeros(seen.rows, dtype=torch.long, device=CPU)
    owners = [frozenset[int]()]
    for count, runs in seen.heads:
        # Grouped heads: key g serves queries g·r to g·r + r − 1.
        ratio = most // count if most % count == 0 else 1
        for start, stop, heads in runs:
            free = owner[start:stop]
            if bool((free == 0).any()):
                free[free == 0] = len(owners)
                owners.append(frozenset(h * ratio + i for h in heads for i in range(ratio)))
    bounds = [0, *((owner[1:] != owner[:-1]).nonzero().flatten() + 1).tolist(), seen.rows]
    pieces = [(a, b, owners[int(owner[a])]) for a, b in pairwise(bounds)]
    alike = _alike([heads for _, _, heads in pieces])
    return tuple(Run(a, b, frozenset(alike[h] for h in heads)) for a, b, heads in pieces)


def _alike(sets: Sequence[frozenset[int]]) -> dict[int, int]:
    """Numbers heads anew, those that always stand together as one: windows are no heads."""
    where: dict[int, list[int]] = {}
    for index, heads in enumerate(sets):
        for head in heads:
            where.setdefault(head, []).append(index)
    numbers: dict[tuple[int, ...], int] = {}
    return {head: numbers.setdefault(tuple(at), len(numbers)) for head, at in sorted(where.items())}
