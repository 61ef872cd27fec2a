"""Reading a capture: whole tensors, one at a time, put together from what each rank wrote."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import file_digest
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonsplit.errors import EvidenceError
from muonsplit.evidence.description import (
    DTYPES,
    PARTS,
    Description,
    Piece,
    Weight,
    decoded,
    file_of,
    said_by,
)
from muonsplit.evidence.saved import Entry

# Bytes that may be read through open files before they are closed: what is mapped counts as held.
_KEPT = 256 << 20
# Cells that the spans of one tensor's pieces may cut it into.
_MOST_CELLS = 1 << 24
_MOST_NAMED = 8


@dataclass(frozen=True)
class Captured:
    """A complete capture of one step.

    Attributes:
        path: Its directory.
        descriptions: What each rank wrote, by rank.
    """

    path: Path
    descriptions: tuple[Description, ...]

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """What there is: of before, gradients, momentum_before, after and momentum."""
        return tuple(part for part in PARTS if any(part in d.files for d in self.descriptions))

    @cached_property
    def weights(self) -> Mapping[str, Weight]:
        """Every parameter that was to be recorded, by name."""
        return {name: w for d in self.descriptions for name, w in d.weights.items()}

    @property
    def steps(self) -> int | None:
        """Steps between before and after; None where they could not be counted."""
        return self.descriptions[0].steps

    def settings(self, name: str) -> Mapping[str, float]:
        """The hyperparameters of a weight's param group as the step began: ``lr`` and the like.

        Raises:
            EvidenceError: If there is no such weight.
        """
        if name not in self.weights:
            raise EvidenceError(f"{self.path} has no weight {name!r}.")
        return self.weights[name].settings

    def left_out(self, part: str) -> Mapping[str, str]:
        """Why weights are not in a part, by name."""
        return {n: why for d in self.descriptions for n, why in d.left_out.get(part, {}).items()}

    def momentum_key(self, name: str) -> str | None:
        """The key of the optimizer's state that a weight's momentum was taken from."""
        return next((d.momentum[name] for d in self.descriptions if name in d.momentum), None)

    def part(self, part: str) -> "CapturedPart":
        """One part, to be read like a checkpoint.

        Raises:
            EvidenceError: If the capture has no such part, or ranks disagree about a tensor.
        """
        if part not in self.parts:
            there = ", ".join(self.parts) or "nothing"
            raise EvidenceError(f"{self.path} has no {part!r}; it has {there}.")
        held: dict[str, dict[int, Piece]] = {}
        for d in self.descriptions:
            if part in d.files:
                for name, piece in d.files[part].pieces.items():
                    held.setdefault(name, {})[d.rank] = piece
        if part in ("before", "after"):
            for name in self.weights:
                held.setdefault(name, {})
        entries = {name: _entry(name, self.weights[name], pieces) for name, pieces in held.items()}
        return CapturedPart(self.path, part, len(self.descriptions), entries, held)


@dataclass(frozen=True)
class CapturedPart:
    """One part of a capture, as :class:`~muonsplit.evidence.saved.Saved` describes it."""

    path: Path
    part: str
    world: int
    entries: Mapping[str, Entry]
    _pieces: Mapping[str, Mapping[int, Piece]] = field(repr=False)
    _open: dict[int, Any] = field(default_factory=dict[int, Any], repr=False, init=False)
    _mapped: list[int] = field(default_factory=lambda: [0], repr=False, init=False)

    @property
    def step(self) -> int | None:
        """A capture does not name its training step."""
        return None

    def read(self, name: str) -> Tensor:
        """A whole tensor, from the pieces of all ranks; a piece of several has to be the same.

        Raises:
            EvidenceError: If there is none, rows of it are missing or held twice, or a file is not
                what its description says.
        """
        if name not in self.entries:
            raise EvidenceError(f"{self.path} has no {name!r} in {self.part!r}.")
        entry, pieces = self.entries[name], self._pieces[name]
        axes = _axes(name, entry, pieces)
        _check_cover(f"{name!r} ({self.part})", axes, pieces)
        # Only now is the whole no larger than what files really hold.
        files = {rank: self._checked(rank, name, piece) for rank, piece in pieces.items()}
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        target, first = whole.view(axes), dict[Any, int]()
        for rank, piece in pieces.items():
            fresh = first.setdefault(piece.spans, rank) == rank
            local = self._tensor(rank, name, files[rank])
            for mine, theirs in _boxes(piece):
                if fresh:
                    target[theirs] = local[mine]
                elif not _same(target[theirs], local[mine]):
                    raise EvidenceError(
                        f"{name!r} ({self.part}) differs between ranks {first[piece.spans]} and "
                        f"{rank}, which hold the same rows of it.",
                        "The ranks of this run have come apart.",
                    )
        return whole

    def _checked(self, rank: int, name: str, piece: Piece) -> Any:
        """The file of a rank, in which a tensor has the shape that was promised."""
        path = self.path / file_of(rank, self.world, self.part)
        safetensors: Any = import_module("safetensors")
        try:
            if rank not in self._open:
                self._open[rank] = safetensors.safe_open(str(path), framework="pt", device="cpu")
            found = self._open[rank]
            shape = tuple(found.get_slice(name).get_shape())
        except (safetensors.SafetensorError, OSError) as error:
            raise EvidenceError(f"{path} is damaged: {error}.") from None
        if shape != piece.local:
            raise EvidenceError(
                f"{path} holds {shape} of {name!r}, and its description {piece.local}."
            )
        return found

    def _tensor(self, rank: int, name: str, file: Any) -> Tensor:
        x = file.get_tensor(name)
        if x.dtype != self.entries[name].dtype:
            raise EvidenceError(
                f"{self.path / file_of(rank, self.world, self.part)} holds {name!r} as {x.dtype}, "
                f"and its description says {self.entries[name].dtype}."
            )
        self._mapped[0] += x.numel() * x.element_size()
        if self._mapped[0] > _KEPT:
            self._open.clear()
            self._mapped[0] = 0
        return x


def is_capture(path: Path) -> bool:
    """Whether a directory holds files of a capture, complete or not."""
    try:
        return any(said_by(entry.name) for entry in path.iterdir())
    except OSError:
        return False


def open_capture(directory: Path, *, verify: bool = False) -> Captured:
    """Opens a complete capture; no tensor is read.

    Args:
        directory: Where :func:`~muonsplit.evidence.capture.capture` wrote.
        verify: Whether every file is read once to compare its SHA-256.

    Raises:
        EvidenceError: If ranks are missing or disagree, or a file is not what was written.
    """
    try:
        named = [said_by(entry.name) for entry in directory.iterdir()]
    except OSError as error:
        raise EvidenceError(f"{directory} cannot be read: {error.strerror}.") from None
    said = [name for name in named if name is not None]
    if not said:
        raise EvidenceError(f"{directory} holds no capture.")
    worlds = sorted({name.world for name in said})
    if len(worlds) > 1:
        raise EvidenceError(
            f"{directory} holds captures of {_listed(worlds)} ranks, not of one run."
        )
    there = {name.rank for name in said if name.part is None and not name.unfinished}
    _all_ranks(directory, worlds[0], there)
    descriptions: list[Description] = []
    for rank in range(worlds[0]):
        path = directory / file_of(rank, worlds[0])
        found = decoded(path)
        if (found.rank, found.world) != (rank, worlds[0]):
            raise EvidenceError(f"{path} describes rank {found.rank} of {found.world}.")
        _check_files(directory, found, verify)
        descriptions.append(found)
    _agree(directory, descriptions)
    return Captured(directory, tuple(descriptions))


def _all_ranks(directory: Path, world: int, there: set[int]) -> None:
    count = sum(rank < world for rank in there)
    if count == world and len(there) == world:
        return
    if beyond := sorted(rank for rank in there if rank >= world):
        raise EvidenceError(f"{directory} has rank {_listed(beyond)} of {world} ranks.")
    missing: list[int] = []
    for rank in range(world):
        if rank not in there:
            missing.append(rank)
        if len(missing) > _MOST_NAMED:
            break
    raise EvidenceError(
        f"{directory} is incomplete: of {world} ranks {world - count} did not finish, "
        f"rank {_listed(missing)} among them.",
        "A rank that was ended inside the capture leaves no description; capture another step.",
    )


def _check_files(directory: Path, found: Description, verify: bool) -> None:
    for part, said in found.files.items():
        path = directory / file_of(found.rank, found.world, part)
        if part not in PARTS:
            raise EvidenceError(f"Rank {found.rank} describes a part {part[:40]!r}, which is none.")
        try:
            size = path.stat().st_size
            if size != said.size:
                raise EvidenceError(f"{path} has {size} bytes; its description says {said.size}.")
            if verify:
                with path.open("rb") as file:
                    digest = file_digest(file, "sha256").hexdigest()
                if digest != said.sha256:
                    raise EvidenceError(
                        f"{path} was changed since it was written: its SHA-256 is another."
                    )
        except OSError as error:
            raise EvidenceError(f"{path} cannot be read: {error.strerror}.") from None
        for name in said.pieces:
            if name not in found.weights:
                raise EvidenceError(f"{path} holds {name!r}, which is none of its weights.")


def _agree(directory: Path, descriptions: Sequence[Description]) -> None:
    for key in ("format", "torch", "muonsplit", "optimizer", "steps"):
        apart = Counter(repr(getattr(d, key))[:40] for d in descriptions)
        if len(apart) > 1:
            raise EvidenceError(
                f"{directory} is of several runs: the ranks say {key} {_listed(sorted(apart))}."
            )
    first: dict[str, tuple[int, Weight]] = {}
    for d in descriptions:
        for name, weight in d.weights.items():
            rank, usual = first.setdefault(name, (d.rank, weight))
            if weight != usual:
                raise EvidenceError(
                    f"{directory} is of several runs: ranks {rank} and {d.rank} do not agree on "
                    f"the shape, dtype or hyperparameters of {name!r}."
                )


def _entry(name: str, weight: Weight, pieces: Mapping[int, Piece]) -> Entry:
    kinds = {(piece.shape, piece.dtype, piece.flat) for piece in pieces.values()}
    if len(kinds) > 1:
        raise EvidenceError(f"Ranks {_listed(sorted(pieces))} hold {name!r} in different forms.")
    shape, dtype, _ = kinds.pop() if kinds else (weight.shape, weight.dtype, False)
    if dtype not in DTYPES or shape != weight.shape or any(size < 0 for size in shape):
        raise EvidenceError(f"{name!r} cannot be of shape {shape} and dtype {dtype[:40]!r}.")
    return Entry(shape, DTYPES[dtype])


def _axes(name: str, entry: Entry, pieces: Mapping[int, Piece]) -> tuple[int, ...]:
    """The axes that spans are of: the tensor's own, or its elements."""
    flat = any(piece.flat for piece in pieces.values())
    axes = (math.prod(entry.shape),) if flat else entry.shape
    for rank, piece in pieces.items():
        inside = all(
            0 <= a < b <= size
            for size, spans in zip(axes, piece.spans, strict=False)
            for a, b in spans
        )
        if len(piece.spans) != len(axes) or not all(piece.spans) or not inside:
            raise EvidenceError(f"Rank {rank} describes rows of {name!r} that are none of {axes}.")
    return axes


def _check_cover(what: str, axes: Sequence[int], pieces: Mapping[int, Piece]) -> None:
    """Makes sure that every element is held, and none by pieces that are not the same."""
    spans = {piece.spans for piece in pieces.values()}
    edges = [
        sorted({0, size, *(edge for held in spans for span in held[axis] for edge in span)})
        for axis, size in enumerate(axes)
    ]
    if math.prod(map(len, edges)) > _MOST_CELLS:
        raise EvidenceError(f"{what} is cut into more than {_MOST_CELLS} parts.")
    place = [{edge: i for i, edge in enumerate(some)} for some in edges]
    count = torch.zeros([len(some) - 1 for some in edges], dtype=torch.int32)
    for held in spans:
        for box in product(*held):
            count[tuple(slice(place[i][a], place[i][b]) for i, (a, b) in enumerate(box))] += 1
    for wrong, said in ((count == 0, "is missing"), (count > 1, "is held more than once")):
        if wrong.any():
            # The cells that are wrong along the first axis, and along the others there.
            rows = _runs(wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong, edges[0])
            noun = "elements" if len(axes) == 1 else "rows"
            others = [f"columns {_runs(wrong.any(0), edges[1])}" for _ in (0,) if wrong.dim() == 2]
            where = ", ".join([f"{noun} {rows}", *others])
            hint = "Plain tensors that are shards need placements; see muonsplit.capture."
            raise EvidenceError(f"Of {what}, of {tuple(axes)}, {where} {said}.", hint)


def _runs(wrong: Tensor, edges: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for bad, (a, b) in zip(wrong.tolist(), pairwise(edges), strict=True):
        if bad and runs and runs[-1][1] == a:
            runs[-1][1] = b
        elif bad:
            runs.append([a, b])
    return _listed([f"{a}–{b - 1}" for a, b in runs])


def _boxes(piece: Piece) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Where each block of a piece is: in the local tensor, and in the whole."""
    sides: list[list[tuple[slice, slice]]] = []
    for spans in piece.spans:
        start, side = 0, list[tuple[slice, slice]]()
        for a, b in spans:
            side.append((slice(start, start + b - a), slice(a, b)))
            start += b - a
        sides.append(side)
    for box in product(*sides):
        yield tuple(mine for mine, _ in box), tuple(theirs for _, theirs in box)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether the bits are the same: NaN is itself, and -0 is not 0."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _listed(some: Sequence[object]) -> str:
    named = ", ".join(map(str, some[:_MOST_NAMED]))
    return named if len(some) <= _MOST_NAMED else f"{named} and more"
