"""Frames between parent and worker: never pickle, so that an answer can only be data.

A frame is two little-endian 8-byte lengths, a JSON header and a safetensors body.
"""

import json
import os
import select
import struct
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

from safetensors.torch import load, save
from torch import Tensor

Header = Mapping[str, Any]
Tensors = Mapping[str, Tensor]

_LENGTHS = struct.Struct("<QQ")


def write(stream: BinaryIO, header: Header, tensors: Tensors) -> None:
    """Writes one frame and flushes it."""
    text = json.dumps(header).encode()
    body = save({name: t.contiguous() for name, t in tensors.items()})
    stream.write(_LENGTHS.pack(len(text), len(body)) + text + body)
    stream.flush()


def read(stream: BinaryIO, limit: float | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads one frame.

    Args:
        stream: An unbuffered pipe.
        limit: Seconds it may take, or None to wait for ever.

    Raises:
        TimeoutError: If it takes longer.
        EOFError: If the pipe closes first.
    """
    deadline = None if limit is None else time.monotonic() + limit
    text, body = _LENGTHS.unpack(_exactly(stream, _LENGTHS.size, deadline))
    header = json.loads(_exactly(stream, text, deadline))
    return header, load(_exactly(stream, body, deadline))


def part(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    """The tensors whose name starts with ``prefix/``, without it."""
    start = f"{prefix}/"
    return {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}


def labelled(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    """The same tensors, each name after ``prefix/``."""
    return {f"{prefix}/{name}": t for name, t in tensors.items()}


def _exactly(stream: BinaryIO, count: int, deadline: float | None) -> bytes:
    chunks = bytearray()
    while len(chunks) < count:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                raise TimeoutError
        chunk = os.read(stream.fileno(), min(count - len(chunks), 1 << 20))
        if not chunk:
            raise EOFError
        chunks += chunk
    return bytes(chunks)
