"""The subject's own process. It is given inputs only; what is expected stays with the parent."""

import ctypes
import inspect
import os
import signal
import sys
import traceback
from importlib import metadata
from typing import Any, BinaryIO

import torch
from torch import Tensor

from muonsplit.errors import SubjectError
from muonsplit.layout import Layout
from muonsplit.subjects.connect import Connection, connect
from muonsplit.subjects.drive import Models, Task, drive
from muonsplit.subjects.protocol import Hyper
from muonsplit.subjects.wire import Header, Tensors, labelled, part, read, write

_FRAMES = 3
_PR_SET_PDEATHSIG = 1


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
            self._connections[spec] = connect(spec)
        return self._connections[spec]


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answers requests until the pipe closes."""
    held = _Held()
    while True:
        try:
            header, tensors = read(source, None)
        except EOFError:
            return
        write(sink, *_guarded(header, tensors, held))


def _guarded(
    header: Header, tensors: Tensors, held: _Held
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        return _answer(header, tensors, held)
    except SubjectError as error:
        return {"error": "subject", "message": error.message, "hint": error.hint}, {}
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
    layouts = {n: None if x is None else Layout.parse(x) for n, x in header["layouts"].items()}
    gradients = [part(tensors, str(step)) for step in range(header["steps"])]
    hyper = Hyper(**header["hyper"])
    task = Task(header["config"], part(tensors, "p"), gradients, layouts, hyper)
    outcome = drive(connection, task, held.models)
    found: dict[str, Tensor] = {}
    for step, after in enumerate(outcome.after):
        found |= labelled(after, str(step))
    return {"settings": outcome.settings}, found


def _end_with_parent() -> None:
    """Asks Linux to end this process when its parent dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Runs the worker: frames on the standard streams, the subject's own output to stderr."""
    _end_with_parent()
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    serve(sys.stdin.buffer, sink)
    os._exit(0)  # nothing the subject registered to run at exit gets to run


if __name__ == "__main__":
    main()
