"""Frames between parent and worker: never pickle, so that an answer can only be data.

A frame is two little-endian 8-byte lengths, a JSON header and a safetensors body.
"""

import json
import os
import select
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from safetensors.torch import load, save
from torch import Tensor

Header = Mapping[str, Any]
Tensors = Mapping[str, Tensor]

_LENGTHS = struct.Struct("<QQ")


def write(stream: BinaryIO, header: Header, tensors: Tensors) -> None:
    """Writes one frame and flushes it."""
    stream.write(packed(header, tensors))
    stream.flush()


def packed(header: Header, tensors: Tensors) -> bytes:
    """One frame."""
    text = json.dumps(header).encode()
    body = save({name: t.contiguous() for name, t in tensors.items()})
    return _LENGTHS.pack(len(text), len(body)) + text + body


def unpacked(frame: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What one frame holds.

    Raises:
        ValueError: If it is none.
    """
    if len(frame) < _LENGTHS.size:
        raise ValueError(f"a frame of {len(frame)} bytes")
    text, body = _LENGTHS.unpack(frame[: _LENGTHS.size])
    if len(frame) != _LENGTHS.size + text + body:
        raise ValueError(f"a frame of {len(frame)} bytes that says it has {text + body} more")
    start = _LENGTHS.size + text
    return json.loads(frame[_LENGTHS.size : start]), load(frame[start:])


def read(
    stream: BinaryIO,
    limit: float | None = None,
    most: int | None = None,
    ended: int | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads one frame.

    Args:
        stream: An unbuffered pipe.
        limit: Seconds it may take, or None to wait for ever.
        most: Bytes it may have, or None for any number.
        ended: A descriptor that can be read once the writer has ended; what it started may hold
            the pipe open.

    Raises:
        TimeoutError: If it takes longer.
        EOFError: If the pipe closes or the writer ends first.
        ValueError: If it is longer, or no frame.
    """
    deadline = None if limit is None else time.monotonic() + limit
    watched = [stream] if ended is None else [stream, ended]
    text, body = _LENGTHS.unpack(_exactly(watched, _LENGTHS.size, deadline))
    if most is not None and text + body > most:
        raise ValueError(f"a frame of {text + body} bytes; at most {most} are expected")
    header = json.loads(_exactly(watched, text, deadline))
    return header, load(_exactly(watched, body, deadline))


def part(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    """The tensors whose name starts with ``prefix/``, without it."""
    start = f"{prefix}/"
    return {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}


def labelled(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    """The same tensors, each name after ``prefix/``."""
    return {f"{prefix}/{name}": t for name, t in tensors.items()}


def _exactly(watched: Sequence[Any], count: int, deadline: float | None) -> bytes:
    stream, chunks = watched[0], bytearray()
    while len(chunks) < count:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = select.select(watched, [], [], left)[0]
        if not ready:
            raise TimeoutError
        if stream not in ready:
            raise EOFError
        chunk = os.read(stream.fileno(), min(count - len(chunks), 1 << 20))
        if not chunk:
            raise EOFError
        chunks += chunk
    return bytes(chunks)
