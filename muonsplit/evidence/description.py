"""The files of a capture: a JSON description a rank, and safetensors written as a stream.

A rank of two writes ``rank-00000-of-00002.json`` last, and before it the parts it holds something
of, as ``rank-00000-of-00002.before.safetensors``. Which files there are follows from the rank, so
a description names none. Writing takes torch alone.
"""

import ctypes
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonsplit.errors import EvidenceError
from muonsplit.sharding.held import Region, length

FORMAT = 1
PARTS = ("before", "gradients", "momentum_before", "after", "momentum")
# A description that is not written yet has the name that write_whole gives it.
_NAME = re.compile(r"(\.)?rank-(\d{5,9})-of-(\d{5,9})\.(?:([a-z_]+)\.safetensors|json(?(1)\..+))")
_LARGEST_DESCRIPTION = 512 << 20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
CODES = {dtype: code for code, dtype in _DTYPES.items()}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}


@dataclass(frozen=True, slots=True)
class Piece:
    """What a file holds of one tensor.

    Attributes:
        shape: Shape of the whole tensor.
        dtype: Dtype it is stored in, as torch calls it.
        spans: For each axis of the whole tensor, the intervals that are held, in the order they
            are stored; for the one axis of its elements, if it is flat.
        flat: Whether a slice of the flattened tensor is held.
    """

    shape: tuple[int, ...]
    dtype: str
    spans: tuple[tuple[tuple[int, int], ...], ...]
    flat: bool

    @property
    def local(self) -> tuple[int, ...]:
        """Shape of what is held."""
        return tuple(map(length, self.spans))


@dataclass(frozen=True, slots=True)
class File:
    """One safetensors file: its size in bytes, digest, and what it holds by weight."""

    size: int
    sha256: str
    pieces: dict[str, Piece]


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter as a rank's optimizer has it: shape of the whole, dtype, hyperparameters."""

    shape: tuple[int, ...]
    dtype: str
    settings: dict[str, float]


@dataclass(frozen=True, slots=True)
class Description:
    """What one rank wrote.

    Attributes:
        format: Version of this description.
        world: Number of ranks.
        rank: Which one.
        torch: Version of torch.
        muonsplit: Version of muonsplit.
        optimizer: Class of the optimizer.
        steps: Steps that were taken; None where they cannot be counted.
        weights: Every parameter of two axes or more that the rank's optimizer steps.
        momentum: Which key of the optimizer's state was taken as momentum, by weight.
        left_out: Why something could not be recorded, by part and weight.
        files: What was written, by part.
    """

    format: int
    world: int
    rank: int
    torch: str
    muonsplit: str
    optimizer: str
    steps: int | None
    weights: dict[str, Weight]
    momentum: dict[str, str]
    left_out: dict[str, dict[str, str]]
    files: dict[str, File]


class Named(NamedTuple):
    """What the name of a file says; the part is None for a description."""

    rank: int
    world: int
    part: str | None
    unfinished: bool = False


def file_of(rank: int, world: int, part: str | None = None) -> str:
    """The name of a rank's file of one part, or of its description."""
    end = "json" if part is None else f"{part}.safetensors"
    return f"rank-{rank:05d}-of-{world:05d}.{end}"


def said_by(name: str) -> Named | None:
    """What the name of a file says, if it is one of a capture's."""
    found = _NAME.fullmatch(name)
    return Named(int(found[2]), int(found[3]), found[4], bool(found[1])) if found else None


def encoded(description: Description) -> bytes:
    """The description as JSON."""
    return json.dumps(asdict(description), allow_nan=False).encode()


def decoded(path: Path) -> Description:
    """Reads a description; its types are right, its content is not judged.

    Raises:
        EvidenceError: If it cannot be read or is none of this version.
    """
    msgspec = import_module("msgspec")
    try:
        if path.stat().st_size > _LARGEST_DESCRIPTION:
            raise EvidenceError(f"{path} is larger than {_LARGEST_DESCRIPTION} bytes.")
        content = path.read_bytes()
        version = msgspec.json.decode(content, type=dict[str, msgspec.Raw]).get("format")
        if version is not None and bytes(version) != str(FORMAT).encode():
            raise EvidenceError(
                f"{path} is of format {bytes(version)[:20]!r}; this version reads {FORMAT}."
            )
        return msgspec.json.decode(content, type=Description)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        if isinstance(error, EvidenceError):
            raise
        reason = ascii(str(error))[1:-1].rstrip(".")
        raise EvidenceError(f"{path} is no description of a capture: {reason}.") from None
    except OSError as error:
        raise EvidenceError(f"{path} cannot be read: {error.strerror}.") from None


class Held(NamedTuple):
    """What this process is to write of one tensor.

    Attributes:
        shape: Shape of the whole tensor.
        region: What of it is held; of its elements, if it is flat.
        flat: Whether it is a slice of the flattened tensor.
        dtype: Its dtype.
        fetch: Gives the local tensor, on whatever device it is.
        key: The key of the optimizer's state it stands under, for momentum.
    """

    shape: tuple[int, ...]
    region: Region
    flat: bool
    dtype: torch.dtype
    fetch: Callable[[], Tensor]
    key: str = ""


def stream(path: Path, tensors: Mapping[str, Held]) -> tuple[int, str]:
    """Writes a new safetensors file that never holds more than one tensor in memory.

    Args:
        path: It must not exist.
        tensors: By name.

    Returns:
        Its size in bytes and its SHA-256, in hexadecimal.

    Raises:
        EvidenceError: If a tensor is not what was said of it.
        OSError: If the file cannot be written.
    """
    # Wide dtypes first, so that each tensor begins where its dtype may.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {}
    end = 0
    for name, held in ordered:
        shape = list(map(length, held.region))
        start, end = end, end + torch.Size(shape).numel() * held.dtype.itemsize
        code = CODES[held.dtype]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = sha256()
    with path.open("xb") as file:
        for chunk in (len(text).to_bytes(8, "little"), text):
            file.write(chunk)
            digest.update(chunk)
        for name, held in ordered:
            local = held.fetch().detach().to("cpu").contiguous()
            size = local.numel() * local.element_size()
            begin, stop = header[name]["data_offsets"]
            if local.dtype != held.dtype or size != stop - begin:
                raise EvidenceError(
                    f"{name} was {held.dtype} of {stop - begin} bytes when its description was "
                    f"written, and is {local.dtype} of {size}."
                )
            # torch gives bytes without a copy only through numpy, which need not be there.
            raw = memoryview((ctypes.c_ubyte * size).from_address(local.data_ptr()))
            file.write(raw)
            digest.update(raw)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()
