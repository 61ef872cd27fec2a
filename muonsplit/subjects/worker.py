"""The subject's own process. It is given inputs only; what is expected stays with the parent."""

import inspect
import os
import sys
import traceback
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from muonsplit.errors import LackingError, RefusedError, SubjectError
from muonsplit.layout import Layout
from muonsplit.models.load import ready
from muonsplit.sharding.ways import Sharding
from muonsplit.subjects import limits
from muonsplit.subjects.connect import Connection, connect
from muonsplit.subjects.drive import Checkpoint, Models, Saved, Task, drive
from muonsplit.subjects.protocol import Hyper
from muonsplit.subjects.wire import Header, Tensors, labelled, part, read, write

_FRAMES = 3


def described(connection: Connection) -> dict[str, Any]:
    """What a connection declares, as plain values."""
    info = connection.info
    try:
        version = metadata.version(connection.distribution) if connection.distribution else ""
    except metadata.PackageNotFoundError:
        version = ""
    return {
        "dialect": info.dialect,
        "recognises": info.recognises,
        "models": list(info.models),
        "given": dict(connection.options),
        "off": dict(info.off),
        "options": {name: list(values) for name, values in info.options.items()},
        "ways": list(info.ways),
        "takes": sorted(inspect.signature(connection.factory).parameters),
        "distribution": connection.distribution,
        "version": version,
        "digest": connection.digest,
    }


class _Held:
    """What is kept between requests: the last model, and each subject as it was first found."""

    def __init__(self) -> None:
        self.models = Models()
        self._connections: dict[str, Connection] = {}

    def connection(self, spec: str) -> Connection:
        if spec not in self._connections:
            self._connections[spec] = connect(spec, Path(os.environ[limits.ROOT]))
        return self._connections[spec]


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answers requests until the pipe closes."""
    held = _Held()
    while True:
        try:
            header, tensors = read(source)
        except EOFError:
            return
        write(sink, *_guarded(header, tensors, held))


def _guarded(
    header: Header, tensors: Tensors, held: _Held
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        return _answer(header, tensors, held)
    except SubjectError as error:
        kind = "refused" if isinstance(error, RefusedError) else "subject"
        return {"error": kind, "message": error.message, "hint": error.hint}, {}
    except LackingError as error:
        return {"error": "lacking", "message": error.message}, {}
    except Exception as error:
        tail = "".join(traceback.format_exception(error)[-_FRAMES:])
        said = f"{type(error).__name__}: {error}"
        return {"error": "raised", "message": said, "tail": tail}, {}


def _answer(
    header: Header, tensors: Tensors, held: _Held
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if header["do"] == "prepare":
        held.models.fresh(header["config"])
        return {}, {}
    connection = held.connection(header["subject"])
    if header["do"] == "describe":
        return described(connection), {}
    gradients = [part(tensors, str(step)) for step in range(header["steps"])]
    saved = header["saved"]
    task = Task(
        header["config"],
        part(tensors, "p"),
        gradients,
        _layouts(header["layouts"]),
        Hyper(**header["hyper"]),
        header["options"],
        saved and Saved(saved["steps"], _layouts(saved["layouts"]), saved["options"]),
        header["turned"],
        header["state"],
        header["sharding"] and Sharding(**header["sharding"]),
        header["micro_batches"],
        header["alike"],
        Checkpoint(**header["keep"]),
    )
    outcome = drive(connection, task, held.models)
    found: dict[str, Tensor] = {}
    for step, (after, state) in enumerate(zip(outcome.after, outcome.state, strict=True)):
        found |= labelled(after, f"p{step}") | labelled(state, f"s{step}")
    return {"settings": outcome.settings, "overwritten": outcome.overwritten}, found


def _layouts(texts: Mapping[str, str | None]) -> dict[str, Layout | None]:
    return {name: None if text is None else Layout.parse(text) for name, text in texts.items()}


def main() -> None:
    """Runs the worker: frames on the standard streams, the subject's own output to stderr."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    limits.enter()
    ready()
    serve(sys.stdin.buffer, sink)
    os._exit(0)  # nothing the subject registered to run at exit gets to run


if __name__ == "__main__":
    main()
