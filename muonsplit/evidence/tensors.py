"""Checkpoints in safetensors: one file, shards under an index, or a folder of files."""

import json
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonsplit.errors import EvidenceError
from muonsplit.evidence.saved import Entry, Saved

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"

_STEP = ("step", "global_step")
# What transformers' Trainer writes beside the weights.
_TRAINER = "trainer_state.json"
# An index of 100,000 weights takes about 10 MB.
_LARGEST_JSON = 1 << 28

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F4": torch.float4_e2m1fn_x2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


class _Header(NamedTuple):
    entries: dict[str, Entry]
    metadata: Mapping[str, str]


class Safetensors:
    """Tensors of safetensors files; see :class:`~muonsplit.evidence.saved.Saved`.

    All headers are read at once, so that a missing or damaged shard is found before any work. A
    file is open only while something is read from it.

    Args:
        path: What the caller asked for: a file or a folder.
        files: The files that hold the tensors.
        places: File of each tensor, from an index; without it all tensors of all files.

    Raises:
        EvidenceError: If a file is missing or damaged, lacks a tensor that ``places`` has there,
            holds one that another file holds too, or names another step than another file.
    """

    def __init__(
        self, path: Path, files: Iterable[Path], places: Mapping[str, Path] | None = None
    ) -> None:
        headers = {file: _header(file) for file in files}
        self.path = path
        self._places = dict(_all_places(headers) if places is None else places)
        self.entries = {name: _found(headers, f, name) for name, f in self._places.items()}
        folder = path if path.is_dir() else path.parent
        self.step = _step(path, [h.metadata for h in headers.values()], folder / _TRAINER)

    def read(self, name: str) -> Tensor:
        """One tensor, mapped from its file; changing it changes no file."""
        entry = entry_of(self, name)
        file = self._places[name]
        with _opened(file) as held:
            return checked(held.get_tensor(name), entry, name, file)


def from_index(path: Path) -> Safetensors:
    """The shards that an index names.

    Args:
        path: A ``*.safetensors.index.json`` as transformers writes it, with a ``weight_map`` from
            tensor names to names of files beside it.

    Raises:
        EvidenceError: If it is no such index, leads out of its folder, or :class:`Safetensors`
            refuses what it names.
    """
    index = read_json(path)
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise EvidenceError(
            f"{path} has no weight_map from tensor names to files.",
            "Give an index as transformers' save_pretrained writes it.",
        )
    places = {name: member(path, shard) for name, shard in listed.items()}
    return Safetensors(path.parent, dict.fromkeys(places.values()), places)


def member(index: Path, name: object) -> Path:
    """The file beside an index that the index names.

    Links are followed, as a model hub's cache is made of them; the name itself may not lead out.

    Args:
        index: The index.
        name: What it says.

    Raises:
        EvidenceError: If that is no relative path below the index's folder, or no file is there.
    """
    said = f"{index} names {name!r:.200} as a file of the checkpoint"
    if not isinstance(name, str) or not name or "\0" in name:
        raise EvidenceError(f"{said}; expected the name of a file beside it.")
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or name[1:2] == ":":
        raise EvidenceError(
            f"{said}, which leads out of its folder.", "Nothing outside of a checkpoint is read."
        )
    file = index.parent / name
    if not file.is_file():
        raise EvidenceError(
            f"{said}, and there is no such file.", "Copy all shards of the checkpoint, then retry."
        )
    return file


def entry_of(saved: Saved, name: str) -> Entry:
    """What a checkpoint says of one tensor.

    Raises:
        EvidenceError: If it holds no such tensor.
    """
    if name not in saved.entries:
        raise EvidenceError(f"{saved.path} holds no tensor {name!r}.")
    return saved.entries[name]


def checked(tensor: Tensor, entry: Entry, name: str, file: Path) -> Tensor:
    """A tensor that is what was said of it.

    Raises:
        EvidenceError: If its shape or dtype is another.
    """
    found = Entry(tuple(tensor.shape), tensor.dtype)
    if found != entry:
        raise EvidenceError(
            f"{name!r} in {file} is {found.dtype} of shape {list(found.shape)}; the index says "
            f"{entry.dtype} of shape {list(entry.shape)}.",
            "The files may be of different checkpoints.",
        )
    return tensor


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        EvidenceError: If it cannot be read as JSON, or is too large for an index.
    """
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise EvidenceError(f"{path} is larger than {_LARGEST_JSON} bytes; an index is not.")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EvidenceError(f"{path} is not readable JSON: {error}.") from error


@contextmanager
def _opened(file: Path) -> Generator[Any, None, None]:
    try:
        safetensors: Any = import_module("safetensors")
    except ImportError as error:
        said = "Reading safetensors needs the safetensors package."
        raise EvidenceError(said, "Install muonsplit[check].") from error
    try:
        with safetensors.safe_open(file, framework="pt", device="cpu") as held:
            yield held
    except (safetensors.SafetensorError, OSError) as error:
        raise EvidenceError(
            f"{file} cannot be read as safetensors: {error}.",
            "It may be cut short or still being written; copy it again.",
        ) from error


def _header(file: Path) -> _Header:
    with _opened(file) as held:
        slices = {name: held.get_slice(name) for name in held.keys()}  # noqa: SIM118
        entries = {
            name: _entry(file, name, cut.get_dtype(), cut.get_shape())
            for name, cut in slices.items()
        }
        return _Header(entries, held.metadata() or {})


def _entry(file: Path, name: str, code: str, shape: list[int]) -> Entry:
    if code not in _DTYPES:
        raise EvidenceError(
            f"{name!r} in {file} is stored as {code}, which torch has no dtype for."
        )
    if code == "F4":
        # The file counts values; torch counts bytes, which hold two.
        shape = [*shape[:-1], shape[-1] // 2]
    return Entry(tuple(shape), _DTYPES[code])


def _all_places(headers: Mapping[Path, _Header]) -> dict[str, Path]:
    places: dict[str, Path] = {}
    for file, header in headers.items():
        for name in header.entries:
            if name in places:
                raise EvidenceError(
                    f"{name!r} is in {places[name].name} and in {file.name} of {file.parent}.",
                    "Give a folder of one checkpoint whose files hold whole tensors, or one file.",
                )
            places[name] = file
    return places


def _found(headers: Mapping[Path, _Header], file: Path, name: str) -> Entry:
    entries = headers[file].entries
    if name not in entries:
        raise EvidenceError(
            f"The index has {name!r} in {file}, which does not hold it.",
            "The index and the shards may be of different checkpoints.",
        )
    return entries[name]


def _step(path: Path, metadata: Iterable[Mapping[str, str]], trainer: Path) -> int | None:
    texts = {held[key] for held in metadata for key in _STEP if key in held}
    steps = {int(text) for text in texts if text.isascii() and text.isdigit() and len(text) < 19}
    if len(steps) > 1:
        raise EvidenceError(
            f"Shards of {path} name different steps: {sorted(steps)}.",
            "Give a folder whose files were all written at one step.",
        )
    if steps or not trainer.is_file():
        return next(iter(steps), None)
    try:
        state = read_json(trainer)
    except EvidenceError:  # the weights can be read without it
        return None
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if type(step) is int else None
