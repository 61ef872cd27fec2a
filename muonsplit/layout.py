"""How one weight is cut into blocks. Everything else speaks this type.

A weight's *axis* (its output rows, or its columns for a Conv1D) is ``groups`` times the
``segments``, in order; a segment is ``heads`` blocks of ``width`` consecutive rows with one role.

    q_proj of Llama            q 32×128
    GLM-5.2 kv_b, K|V apart    64 × (k 192 | v 256)
    Falcon-40B                 8 × (q 16×64 | k 64 | v 64)
    the same as Q, K, V        8 × (q 16×64 | k 64 | v 64), joined
    GPT-2 c_attn               q 12×64 | k 12×64 | v 12×64, axis 1
    not cut                    whole 4096
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, cat

from muonsplit.errors import CutHeadError, LayoutError

WHOLE = "all"

_ROLE = r"[a-z][a-z0-9_]*"
_COUNT = r"[1-9][0-9]{0,17}"
_SEGMENT = re.compile(rf"({_ROLE}) (?:({_COUNT})×)?({_COUNT})")
_GROUPED = re.compile(rf"({_COUNT}) × \((.+)\)")


class Segment(NamedTuple):
    """``heads`` blocks of ``width`` consecutive rows with one role."""

    role: str
    heads: int
    width: int

    @property
    def rows(self) -> int:
        """Rows the segment takes in one group."""
        return self.heads * self.width

    def __str__(self) -> str:
        count = f"{self.heads}×" if self.heads > 1 else ""
        return f"{self.role} {count}{self.width}"


class Block(NamedTuple):
    """Rows of a weight that are orthogonalised as one matrix.

    Attributes:
        role: The role of its segment.
        head: Its index among the blocks of that role.
        spans: Half-open row intervals, ascending; more than one only when joined.
    """

    role: str
    head: int
    spans: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(stop - start for start, stop in self.spans)

    def __str__(self) -> str:
        return f"{self.role}[{self.head}] rows " + ", ".join(f"{a}–{b - 1}" for a, b in self.spans)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a weight is cut along ``axis``.

    Attributes:
        segments: What one group holds, in order.
        groups: How often the segments repeat.
        axis: 0 if the blocks are rows, 1 if they are columns (Conv1D stores weights transposed).
        joined: Whether the blocks of one role, across heads and groups, are one matrix.

    Raises:
        LayoutError: If a field is not what its type says, or the parts do not make a layout.
    """

    segments: tuple[Segment, ...]
    groups: int = 1
    axis: int = 0
    joined: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.segments, tuple) or not self.segments:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"A layout needs a tuple of segments, got {self.segments!r}.")
        object.__setattr__(self, "segments", tuple(_segment(s) for s in self.segments))
        _positive("groups", self.groups)
        if type(self.axis) is not int or self.axis not in (0, 1):
            raise LayoutError(f"A layout cuts axis 0 or 1, got axis={self.axis!r}.")
        if not isinstance(self.joined, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"joined is true or false, got {self.joined!r}.")

    @classmethod
    def whole(cls, rows: int, axis: int = 0) -> "Layout":
        """The layout of a weight that is not cut."""
        return cls((Segment(WHOLE, 1, rows),), axis=axis)

    @classmethod
    def heads(cls, role: str, heads: int, width: int, axis: int = 0) -> "Layout":
        """``heads`` equal blocks of ``width`` rows."""
        return cls((Segment(role, heads, width),), axis=axis)

    @property
    def rows(self) -> int:
        """Rows (columns, for axis 1) the layout covers."""
        return self.groups * self._group_rows

    @property
    def is_whole(self) -> bool:
        """Whether the weight is one block."""
        if self.joined:
            return len({segment.role for segment in self.segments}) == 1
        return self.groups * sum(segment.heads for segment in self.segments) == 1

    @property
    def _group_rows(self) -> int:
        return sum(segment.rows for segment in self.segments)

    def blocks(self) -> tuple[Block, ...]:
        """The blocks in order of their first row; together they cover every row once."""
        pieces = list(self._pieces())
        if self.joined:
            spans: dict[str, list[tuple[int, int]]] = {}
            for role, start, stop in pieces:
                spans.setdefault(role, []).append((start, stop))
            return tuple(Block(role, 0, _merge(found)) for role, found in spans.items())
        seen: dict[str, int] = {}
        blocks: list[Block] = []
        for role, start, stop in pieces:
            blocks.append(Block(role, seen.get(role, 0), ((start, stop),)))
            seen[role] = seen.get(role, 0) + 1
        return tuple(blocks)

    def _pieces(self) -> Iterator[tuple[str, int, int]]:
        start = 0
        for _ in range(self.groups):
            for role, heads, width in self.segments:
                for _ in range(heads):
                    yield role, start, start + width
                    start += width

    def same_cut(self, other: "Layout") -> bool:
        """Whether both cut the same axis at the same rows, whatever the roles are called."""
        mine, theirs = ({block.spans for block in x.blocks()} for x in (self, other))
        return mine == theirs and (self.axis == other.axis or len(mine) == 1)

    def batches(self, weight: Tensor) -> list[Tensor]:
        """The blocks of a weight, equal widths together.

        Args:
            weight: Shape ``[rows, cols]``; ``[cols, rows]`` for axis 1.

        Returns:
            Tensors ``[B, width, cols]``, each block output rows by inputs. They are views of the
            weight, without a copy, except where a joined role has to gather strided rows.

        Raises:
            LayoutError: If the weight is not 2-D or its size on the axis is not ``rows``.
        """
        matrix = self._oriented(weight)
        if self.joined:
            return [
                (cat(spans) if len(spans) > 1 else spans[0]).unsqueeze(0)
                for block in self.blocks()
                for spans in [[matrix[start:stop] for start, stop in block.spans]]
            ]
        return list(self._views(matrix))

    def write(self, batches: Iterable[Tensor], weight: Tensor) -> None:
        """Copies what was made from :meth:`batches` into the same rows of a weight.

        Args:
            batches: One tensor for each that ``batches`` gave, of the same shape.
            weight: Shape as for ``batches``; written in place.
        """
        matrix = self._oriented(weight)
        if not self.joined:
            for target, batch in zip(self._views(matrix), batches, strict=True):
                target.copy_(batch)
            return
        for block, batch in zip(self.blocks(), batches, strict=True):
            row = 0
            for start, stop in block.spans:
                matrix[start:stop].copy_(batch[0, row : row + stop - start])
                row += stop - start

    def _oriented(self, weight: Tensor) -> Tensor:
        if weight.ndim != 2 or weight.shape[self.axis] != self.rows:
            raise LayoutError(
                f"The layout {self} covers {self.rows} rows on axis {self.axis} of a 2-D weight, "
                f"got a weight of shape {tuple(weight.shape)}."
            )
        return weight.mT if self.axis else weight

    def _views(self, matrix: Tensor) -> Iterator[Tensor]:
        grouped = matrix.unflatten(0, (self.groups, self._group_rows))
        start = 0
        runs = _runs(self.segments)
        for heads, width in runs:
            blocks = grouped[:, start : start + heads * width].unflatten(1, (heads, width))
            start += heads * width
            if len(runs) == 1:
                yield matrix.unflatten(0, (self.groups * heads, width))
            elif self.groups <= heads:
                yield from blocks.unbind(0)
            else:
                yield from blocks.unbind(1)

    def shard(self, start: int, stop: int) -> "Layout":
        """The layout of rows ``start`` to ``stop`` of the weight, as a shard holds them.

        Raises:
            LayoutError: If the interval is empty or reaches outside the weight.
            CutHeadError: If a boundary falls inside a block; the message names it.
        """
        if not 0 <= start < stop <= self.rows:
            raise LayoutError(f"Rows {start} to {stop} are no shard of the {self.rows} of {self}.")
        kept: list[Segment] = []
        for block in self.blocks():
            inside = sum(max(0, min(b, stop) - max(a, start)) for a, b in block.spans)
            if 0 < inside < block.rows:
                raise CutHeadError(
                    f"The shard of rows {start} to {stop} of {self} cuts {block}: it would hold "
                    f"{inside} of its {block.rows} rows.",
                    "Shard at a multiple of the head width, or gather the head before its update.",
                )
            if inside and not self.joined:
                kept.append(Segment(block.role, 1, block.rows))
        if self.joined:
            pieces = [p for p in self._pieces() if start <= p[1] and p[2] <= stop]
            kept = [Segment(role, 1, b - a) for role, a, b in pieces]
        segments, groups = compress(kept)
        return Layout(segments, groups, self.axis, self.joined)

    def per_block(self, heads: int) -> "Layout":
        """The layout that takes ``heads`` consecutive heads as one block.

        Raises:
            LayoutError: If a segment's head count is not a multiple, or the layout is joined.
        """
        _positive("heads", heads)
        if self.joined and heads > 1:
            raise LayoutError(f"{self} is joined: its blocks already hold every head of a role.")
        for segment in self.segments:
            if segment.heads % heads:
                raise LayoutError(
                    f"{heads} heads a block do not divide the {segment.heads} consecutive heads "
                    f"of {segment.role!r} in {self}."
                )
        grouped = tuple(Segment(s.role, s.heads // heads, s.width * heads) for s in self.segments)
        return Layout(grouped, self.groups, self.axis, self.joined)

    def __str__(self) -> str:
        only = self.segments[0]
        if only.role == WHOLE and len(self.segments) == only.heads == self.groups == 1:
            text = f"whole {only.width}"
        else:
            text = " | ".join(map(str, self.segments))
            text = f"{self.groups} × ({text})" if self.groups > 1 else text
        return text + (", axis 1" if self.axis else "") + (", joined" if self.joined else "")

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Reads what ``str`` writes, and nothing else.

        Raises:
            LayoutError: If the text is not the written form of a layout.
        """
        body, joined = _strip(text, ", joined")
        body, axis = _strip(body, ", axis 1")
        if body.startswith("whole "):
            body = f"{WHOLE} {body.removeprefix('whole ')}"
        groups = 1
        if grouped := _GROUPED.fullmatch(body):
            groups, body = int(grouped[1]), grouped[2]
        matches = [_SEGMENT.fullmatch(part) for part in body.split(" | ")]
        segments = tuple(Segment(m[1], int(m[2] or 1), int(m[3])) for m in matches if m)
        if len(segments) == len(matches):
            layout = cls(segments, groups, int(axis), joined)
            if str(layout) == text:
                return layout
        raise LayoutError(
            f"{text!r} is no layout; expected the form of 'q 32×128', '64 × (k 192 | v 256)', "
            "'q 12×64 | k 12×64 | v 12×64, axis 1' or 'whole 4096'."
        )


def _segment(value: Any) -> Segment:
    try:
        segment = Segment(*value)
    except TypeError:
        raise LayoutError(f"A segment is (role, heads, width), got {value!r}.") from None
    role: Any = segment.role
    # `whole` is how a layout of one block is written.
    if not isinstance(role, str) or not re.fullmatch(_ROLE, role) or role == "whole":
        raise LayoutError(f"A role is a lower-case word such as 'q', not 'whole', got {role!r}.")
    _positive(f"heads of {role!r}", segment.heads)
    _positive(f"width of {role!r}", segment.width)
    return segment


def _positive(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LayoutError(f"{what} must be a positive integer, got {value!r}.")


def _strip(text: str, suffix: str) -> tuple[str, bool]:
    return text.removesuffix(suffix), text.endswith(suffix)


def _merge(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged = [spans[0]]
    for start, stop in spans[1:]:
        if start == merged[-1][1]:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def _runs(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Adjacent segments of one width, as (blocks, width)."""
    runs: list[tuple[int, int]] = []
    for _, heads, width in segments:
        if runs and runs[-1][1] == width:
            runs[-1] = (runs[-1][0] + heads, width)
        else:
            runs.append((heads, width))
    return runs


def compress(pieces: Sequence[Segment]) -> tuple[tuple[Segment, ...], int]:
    """The shortest segments and their repetition that spell the same single-head pieces."""
    segments: list[Segment] = []
    for piece in pieces:
        if segments and (segments[-1].role, segments[-1].width) == (piece.role, piece.width):
            segments[-1] = segments[-1]._replace(heads=segments[-1].heads + 1)
        else:
            segments.append(piece)
    for period in range(1, len(segments)):
        groups, rest = divmod(len(segments), period)
        if rest == 0 and segments == segments[:period] * groups:
            return tuple(segments[:period]), groups
    return tuple(segments), 1
