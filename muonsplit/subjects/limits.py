"""What keeps a worker in bounds: its memory, its folder, and everything it starts.

A process of the same user is no sandbox. What is bounded here is what goes wrong by accident, and
what a careless subject leaves behind.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

# In the environment of a worker and of all it starts, so that they are found when it ends.
MARK = "MUONSPLIT_WORKER"
# The folder that files and modules are looked for in; the worker itself runs in an empty one.
ROOT = "MUONSPLIT_ROOT"
MEMORY = "MUONSPLIT_MEMORY"
_PR_SET_PDEATHSIG = 1
_KEPT = 8192
_GIB = 1 << 30
_ENDING_S = 5.0
_EMPTY_ROUNDS = 2


def enter() -> None:
    """Bounds the worker, from inside: it ends with its parent, and memory is limited."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    most = _used() + int(float(os.environ[MEMORY]) * _GIB)
    # Private writable memory: address space alone is reserved by the hundred GiB for a GPU.
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _used() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))


def end_all(mark: str) -> None:
    """Ends every process that carries a mark, whatever session or parent it has by now.

    Returns when they are gone, or after a few seconds where the system does not let one go.
    """
    if sys.platform != "linux":
        return
    until = time.monotonic() + _ENDING_S
    empty = 0
    # What forks while it is looked for is found in the next round; and what is just being
    # replaced by another program has no environment for a moment: one empty round proves little.
    while empty < _EMPTY_ROUNDS and time.monotonic() < until:
        found = _marked(f"{MARK}={mark}".encode())
        empty = 0 if found else empty + 1
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        _wait(found, until)


def _wait(processes: list[int], until: float) -> None:
    """Waits for processes to end: a signal is sent at once, but a process takes time to die."""
    for process in processes:
        with suppress(ProcessLookupError):
            gone = os.pidfd_open(process)
            try:
                select.select([gone], [], [], max(0.0, until - time.monotonic()))
            finally:
                os.close(gone)


def _marked(wanted: bytes) -> list[int]:
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # gone, or somebody else's
                # One that has ended, but is not waited for yet, has no environment any more.
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


class Tail:
    """The last that is written to a pipe; the rest is read and forgotten, however much it is."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        self._kept = b""
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        with suppress(OSError), os.fdopen(self._reading, "rb", buffering=0) as stream:
            while chunk := stream.read(1 << 16):
                self._kept = (self._kept + chunk)[-_KEPT:]

    def opened(self) -> None:
        """Called when the writer has its end; ours would keep the pipe open."""
        os.close(self.writing)

    def lines(self, count: int) -> str:
        """The last lines, once the writer has ended or a moment later."""
        self._thread.join(timeout=1.0)
        return "\n".join(self._kept.decode(errors="replace").splitlines()[-count:])
