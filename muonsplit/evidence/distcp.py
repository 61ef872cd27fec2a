"""Checkpoints that ``torch.distributed.checkpoint`` wrote: an index and files of chunks.

The index, ``.metadata``, is a pickle. It is read without making any object that it names: each
becomes a plain record, only names that such an index is made of are accepted, and the records are
checked before a file is opened. Chunks are read by ``torch.load`` with ``weights_only=True``.

Nothing in an index can be run, but Python's unpickler makes a list as long as any number that a
crafted or damaged one gives for a place in it, and may run out of memory over that.
"""

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from muonsplit.errors import EvidenceError
from muonsplit.evidence.saved import Entry
from muonsplit.evidence.tensors import checked, entry_of, member

INDEX = ".metadata"

_DCP = "torch.distributed.checkpoint"
# Where torch 2.0 to 2.2 had the description of a tensor.
_EARLIER = "torch.distributed._shard.sharded_tensor.metadata"
# All that indices of torch 2.13 name, besides dtypes.
_NAMED = {
    *(
        (f"{_DCP}.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *((_EARLIER, name) for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(
        (module, name)
        # Python 3.13 moved them.
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    ),
}
_STEP = ("step", "global_step")


class _Record:
    # Stands for an object of the index: its state, without any behaviour.
    state: Any = None

    def __init__(self, *_built_with: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path
        self._stand_ins: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) not in _NAMED:
            raise EvidenceError(
                f"{self._path} names {module}.{name}, which no index of {_DCP} needs; it was not "
                "loaded.",
                "Do not load this checkpoint with torch either, unless you trust who made it.",
            )
        # A class of its own for each index: a pickle may change what it is given.
        return self._stand_ins.setdefault((module, name), type(name, (_Record,), {}))


class _Piece(NamedTuple):
    # One chunk: where it lies in the tensor, and its bytes in a file.
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int


class Distributed:
    """Tensors of a folder with a ``.metadata``; see :class:`~muonsplit.evidence.saved.Saved`.

    Names are the index's own: what was nested is joined by dots, as in ``model.norm.weight``.

    Args:
        path: The folder.

    Raises:
        EvidenceError: If the index is damaged or names what no index does, or a file that it
            names is missing, cut short or outside of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.entries, self._pieces, others = _index(path / INDEX)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise _damaged(path / INDEX, error) from error
        self.step = self._step(others)

    def read(self, name: str) -> Tensor:
        """One tensor from its chunks, one chunk at a time."""
        entry = entry_of(self, name)
        pieces = self._pieces[name]
        _check_cover(name, entry, pieces)
        if len(pieces) == 1:
            return self._chunk(name, pieces[0], entry.dtype)
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        for piece in pieces:
            spans = zip(piece.offsets, piece.sizes, strict=True)
            place = tuple(slice(start, start + size) for start, size in spans)
            whole[place] = self._chunk(name, piece, entry.dtype)
        return whole

    def _chunk(self, name: str, piece: _Piece, dtype: torch.dtype) -> Tensor:
        found = _load(piece)
        if not isinstance(found, Tensor):
            raise EvidenceError(f"{name!r} in {piece.file} is a {type(found).__name__}, no tensor.")
        return checked(found.detach(), Entry(piece.sizes, dtype), name, piece.file)

    def _step(self, others: Mapping[str, _Piece]) -> int | None:
        found: set[int] = set()
        # Optimizer states have steps too, one a weight, but deeper.
        named = (n for n in {**others, **self.entries} if n.split(".")[-1] in _STEP)
        for name in (n for n in named if n.count(".") <= 1):
            if name in self.entries and math.prod(self.entries[name].shape) != 1:
                continue
            try:
                value = self.read(name).item() if name in self.entries else _load(others[name])
            except EvidenceError:  # not needed to read the weights
                continue
            if type(value) is int:
                found.add(value)
        return found.pop() if len(found) == 1 else None


def _index(
    path: Path,
) -> tuple[dict[str, Entry], dict[str, list[_Piece]], dict[str, _Piece]]:
    state = _fields(_unpickled(path), "Metadata")
    stored: dict[tuple[str, tuple[int, ...] | None], tuple[Path, int, int]] = {}
    files: dict[str, tuple[Path, int]] = {}
    for key, record in state["storage_data"].items():
        at = _fields(key, "MetadataIndex")
        # What is no tensor has no offset.
        where = None if at.get("offset") is None else _whole_numbers(at["offset"])
        stored[at["fqn"], where] = _place(path, record, files)
    entries: dict[str, Entry] = {}
    pieces: dict[str, list[_Piece]] = {}
    others: dict[str, _Piece] = {}
    for name, record in state["state_dict_metadata"].items():
        if not isinstance(name, str):
            raise TypeError(f"{name!r} as the name of a tensor")
        if type(record).__name__ == "BytesStorageMetadata":
            others[name] = _Piece((), (), *stored[name, None])
            continue
        said = _fields(record, "TensorStorageMetadata")
        dtype = said["properties"].state[0]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{dtype!r} as the dtype of {name!r}")
        entries[name] = Entry(_whole_numbers(said["size"]), dtype)
        pieces[name] = [
            _Piece(offsets, sizes, *_stored_at(stored, name, offsets))
            for offsets, sizes in map(_chunk_of, said["chunks"])
        ]
    return entries, pieces, others


def _unpickled(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _Unpickler(file, path).load()
    except EvidenceError:
        raise
    except Exception as error:  # damaged pickles raise nearly anything
        raise _damaged(path, error) from error


def _fields(record: Any, kind: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise TypeError(f"a {type(record).__name__} where a {kind} belongs")
    return dict(record.state)


def _whole_numbers(sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, tuple) or not all(type(n) is int and 0 <= n < 1 << 62 for n in sizes):
        raise ValueError(f"{sizes!r:.100} as sizes")
    return sizes


def _chunk_of(record: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    said = _fields(record, "ChunkStorageMetadata")
    return _whole_numbers(said["offsets"]), _whole_numbers(said["sizes"])


def _place(index: Path, record: Any, files: dict[str, tuple[Path, int]]) -> tuple[Path, int, int]:
    said = _fields(record, "_StorageInfo")
    if said.get("transform_descriptors"):
        raise EvidenceError(
            f"{index} says that its files are transformed: {said['transform_descriptors']!r:.100}.",
            "Save the checkpoint without extensions.",
        )
    name = said["relative_path"]
    if name not in files:
        file = member(index, name)
        files[name] = file, file.stat().st_size
    file, size = files[name]
    start, length = _whole_numbers((said["offset"], said["length"]))
    if start + length > size:
        raise EvidenceError(
            f"{file} ends at byte {size}; {index.name} has a chunk there up to byte "
            f"{start + length}.",
            "It is cut short or of another checkpoint; copy it again.",
        )
    return file, start, length


def _stored_at(
    stored: Mapping[tuple[str, tuple[int, ...] | None], tuple[Path, int, int]],
    name: str,
    offsets: tuple[int, ...],
) -> tuple[Path, int, int]:
    found = stored.get((name, offsets)) or (None if any(offsets) else stored.get((name, None)))
    if found is None:
        raise ValueError(f"no file for the chunk of {name!r} at {list(offsets)}")
    return found


def _check_cover(name: str, entry: Entry, pieces: Sequence[_Piece]) -> None:
    # As many elements as the tensor has, inside of it, none twice: then all are there. Files as
    # large as that: then no more memory is asked for than there is to read.
    shape, width = entry.shape, entry.dtype.itemsize
    inside = all(
        len(p.offsets) == len(p.sizes) == len(shape)
        and all(o + n <= rows for o, n, rows in zip(p.offsets, p.sizes, shape, strict=True))
        and math.prod(p.sizes) * width <= p.length
        for p in pieces
    )
    count = sum(math.prod(p.sizes) for p in pieces)
    if not inside or count != math.prod(shape) or any(_overlaps(pieces)):
        raise EvidenceError(
            f"The {len(pieces)} chunks of {name!r} do not make up its shape {list(shape)}.",
            "The checkpoint is damaged, or some ranks did not save.",
        )


def _overlaps(pieces: Sequence[_Piece]) -> Iterator[bool]:
    filled = [p for p in pieces if math.prod(p.sizes)]
    if len(filled) < 2:
        return
    starts = torch.tensor([p.offsets for p in filled])
    ends = starts + torch.tensor([p.sizes for p in filled])
    for at in range(1, len(filled)):
        apart = (ends[:at] <= starts[at]) | (starts[:at] >= ends[at])
        yield not bool(apart.any(dim=1).all())


def _load(piece: _Piece) -> Any:
    utils: Any = import_module(f"{_DCP}.utils")
    try:
        with piece.file.open("rb") as file:
            view = utils._create_file_view(file, piece.start, piece.length)
            return torch.load(view, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises nearly anything on damaged files
        first = str(error).strip().splitlines()[:1]
        raise EvidenceError(
            f"A chunk of {piece.length} bytes at byte {piece.start} of {piece.file} cannot be "
            f"read: {type(error).__name__}: {(first or [''])[0]:.200}",
            "The file is damaged, or holds what is not safe to load; it was not loaded.",
        ) from error


def _damaged(path: Path, error: Exception) -> EvidenceError:
    return EvidenceError(
        f"{path} is no index that {_DCP} wrote: {type(error).__name__}: {error!s:.200}.",
        "Copy the whole checkpoint again.",
    )
