"""From which columns each row reaches to which rows are one head.

A row's *support* is the set of columns, of the tensor that enters the output projection, that it
influences. Queries and keys reach whole heads, and every row of a head the same; values and output
gates reach one column a head; latents reach every column. Supports are bit sets: bit c is column c.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from muonsplit.truth.answer import Run, Truth


@dataclass(frozen=True, slots=True)
class Reach:
    """What the lines of one weight reach.

    Attributes:
        axis: The axis the lines lie on.
        supports: One bit set of columns a line.
        far: For each line, whether it is remembered: it reaches the present from most of the
            past, as keys and values do, and not from the present alone, as queries and gates do.
    """

    axis: int
    supports: tuple[int, ...]
    far: tuple[bool, ...]

    @property
    def is_empty(self) -> bool:
        """Whether no line reaches anything."""
        return not any(self.supports)

    def union(self, other: "Reach") -> "Reach":
        """What a weight reaches that is used twice."""
        supports = tuple(a | b for a, b in zip(self.supports, other.supports, strict=True))
        far = tuple(a or b for a, b in zip(self.far, other.far, strict=True))
        return Reach(self.axis, supports, far)


def column_classes(reaches: Iterable[Reach], columns: int) -> list[int]:
    """Divides the columns into heads: bit sets, by first column; empty if there are none.

    Sets that several rows of one weight share are where rows are mixed: they generate the
    classes, as atoms. A set that only one row has does so too (a decay, a row a head) unless it
    crosses another: a value row of grouped-query attention reaches one column in *each* of its
    heads, across them. Single columns and all columns divide nothing.

    Args:
        reaches: Of all weights that feed one projection.
        columns: How many columns enter it.
    """
    reaches = list(reaches)
    every = (1 << columns) - 1
    mixed: set[int] = set()
    lone: set[int] = set()
    for reach in reaches:
        for support, rows in Counter(reach.supports).items():
            if support.bit_count() > 1 and support != every:
                (mixed if rows > 1 else lone).add(support)
    lone -= mixed
    bodies = sorted(mixed) + sorted(
        s for s in lone if not any(_cross(s, other) for other in (*mixed, *lone))
    )
    classes = _atoms(bodies, columns)
    # Heads of one row everywhere are no heads: a reshape that reads a channel in several places.
    wide = any(_has_rows_together(reach, classes) for reach in reaches)
    return classes if len(classes) > 1 and wide else []


def _cross(one: int, other: int) -> bool:
    return bool(one & other and one & ~other and other & ~one)


def _atoms(bodies: Sequence[int], columns: int) -> list[int]:
    atoms: dict[tuple[int, ...], int] = {}
    for column in range(columns):
        inside = tuple(i for i, body in enumerate(bodies) if body >> column & 1)
        if inside:
            atoms[inside] = atoms.get(inside, 0) | 1 << column
    return list(atoms.values())


def _has_rows_together(reach: Reach, classes: Sequence[int]) -> bool:
    found = Counter(heads for s in reach.supports if (heads := _heads(s, classes)))
    return any(rows > 1 and len(heads) < len(classes) for heads, rows in found.items())


def _heads(support: int, classes: Sequence[int]) -> frozenset[int]:
    return frozenset(i for i, columns in enumerate(classes) if support & columns)


def _channelwise(support: int, classes: Sequence[int]) -> bool:
    return all((support & columns).bit_count() < 2 for columns in classes)


def judge(reach: Reach, classes: Sequence[int]) -> Truth | None:
    """The heads of one weight, or None if its rows do not tell them apart.

    Rows of one head that are used differently are different runs: [query | gate], [key | value].

    Args:
        reach: Of the weight.
        classes: As :func:`column_classes` gives them.
    """
    kinds = [
        (_heads(support, classes), _channelwise(support, classes), far)
        for support, far in zip(reach.supports, reach.far, strict=True)
    ]
    if len({heads for heads, _, _ in kinds if heads}) < 2:
        return None
    runs: list[Run] = []
    for (heads, _, _), lines in groupby(kinds):
        start = runs[-1].stop if runs else 0
        runs.append(Run(start, start + sum(1 for _ in lines), heads))
    return Truth("heads", reach.axis, len(kinds), tuple(runs), _seen(kinds, classes, runs))


def _seen(
    kinds: Sequence[tuple[frozenset[int], bool, bool]], classes: Sequence[int], runs: Sequence[Run]
) -> str:
    words = [f"rows tell apart {len(classes)} heads of what enters the output projection"]
    serving = [channelwise for heads, channelwise, _ in kinds if heads]
    if all(serving):
        words.append("one column a row")
    elif any(serving):
        words.append("one column a row in part of each head")
    if all(run.stop - run.start == 1 for run in runs):
        words.append("one row a head")
    if len(serving) < len(kinds):
        words.append(f"{len(kinds) - len(serving)} rows reach nothing")
    return "; ".join(words)
