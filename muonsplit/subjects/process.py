"""The parent's side of a subject: run it, bound it, and refuse answers that are none."""

import math
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Protocol

from safetensors import SafetensorError
from torch import Tensor

from muonsplit.errors import MuonsplitError, SubjectError, SubjectFaultError, UnobservableError
from muonsplit.models.load import Config
from muonsplit.subjects import wire
from muonsplit.subjects.connect import Connection, connect
from muonsplit.subjects.drive import Models, Outcome, Task, drive
from muonsplit.subjects.worker import described

_TAIL_LINES = 12
_STARTING_S = 180.0


class Driver(Protocol):
    """Something that runs a subject: a :class:`Worker` or :class:`InProcess`."""

    spec: str

    def describe(self) -> dict[str, Any]:
        """What the subject declares, its version and the digest of its file."""
        ...

    def run(self, task: Task) -> Outcome:
        """Drives the subject through a task from zero state."""
        ...


class Worker:
    """A subject in a process of its own, started again after it dies.

    Args:
        spec: Connection string of the subject.
        timeout: Seconds that one run may take; starting up is bounded apart.
    """

    def __init__(self, spec: str, timeout: float = 60.0) -> None:
        self.spec = spec
        self.timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._prepared: Config | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self) -> dict[str, Any]:
        """What the subject declares, its version and the digest of its file.

        Raises:
            SubjectError: If it cannot be connected to.
        """
        if self._process is None:
            self._start()
        # The first answer waits for torch and whatever the subject imports.
        return self._ready({"do": "describe", "subject": self.spec})

    def run(self, task: Task) -> Outcome:
        """Drives the subject through a task.

        Raises:
            SubjectFaultError: If it raised, exited, took too long, or answered with tensors that
                are not the model's parameters.
        """
        if self._process is None:
            self.describe()
        if task.config != self._prepared:
            # Building the model is our own work, and must not count against the subject.
            self._ready({"do": "prepare", "config": task.config})
            self._prepared = task.config
        header = {
            "do": "run",
            "subject": self.spec,
            "config": task.config,
            "layouts": {n: None if x is None else str(x) for n, x in task.layouts.items()},
            "hyper": asdict(task.hyper),
            "steps": len(task.gradients),
        }
        tensors = wire.labelled(task.parameters, "p")
        for step, gradients in enumerate(task.gradients):
            tensors |= wire.labelled(gradients, str(step))
        answer, found = self._ask(header, tensors, self.timeout)
        after = [wire.part(found, str(step)) for step in range(len(task.gradients))]
        return checked(Outcome(after, answer["settings"]), task)

    def _ready(self, header: dict[str, Any]) -> dict[str, Any]:
        """Asks for something that comes before the subject's first step."""
        try:
            return self._ask(header, {}, _STARTING_S)[0]
        except SubjectFaultError as fault:
            said = f"The process of {self.spec!r} did not get as far as a step: {fault.message}"
            raise SubjectError(said, fault.tail) from None

    def close(self) -> None:
        """Ends the process and everything it started."""
        self._end()
        self._log.close()

    def _end(self) -> int | None:
        process, self._process, self._prepared = self._process, None, None
        if process is None:
            return None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        return process.wait()

    def _start(self) -> None:
        self._log.seek(0)
        self._log.truncate()
        self._process = subprocess.Popen(
            # -P: nothing in the current folder may shadow a library.
            [sys.executable, "-P", "-m", "muonsplit.subjects.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def _ask(
        self, header: dict[str, Any], tensors: Mapping[str, Tensor], limit: float
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            wire.write(process.stdin, header, tensors)  # pyright: ignore[reportArgumentType]
            answer, found = wire.read(process.stdout, limit)  # pyright: ignore[reportArgumentType]
        except TimeoutError:
            self._end()
            message = f"The subject took longer than {limit:g} s for one run and was ended."
            raise SubjectFaultError(message, self._tail()) from None
        except (OSError, EOFError, ValueError, SafetensorError):
            with suppress(subprocess.TimeoutExpired):  # its own exit code, before ours by SIGKILL
                process.wait(timeout=5)
            message = f"The subject's process ended by itself with exit code {self._end()}."
            raise SubjectFaultError(message, self._tail()) from None
        if answer.get("error") == "subject":
            raise SubjectError(answer["message"], answer["hint"])
        if "error" in answer:
            raise SubjectFaultError(f"The subject raised {answer['message']}", answer["tail"])
        return answer, found

    def _tail(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 8192))
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


class InProcess:
    """A subject in this process, for debugging; what it does to the process, it does to us.

    Args:
        spec: Connection string of the subject.
    """

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._models = Models()
        self._connection: Connection | None = None

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *_: object) -> None: ...

    def describe(self) -> dict[str, Any]:
        """See :meth:`Worker.describe`."""
        self._connection = connect(self.spec)
        return described(self._connection)

    def run(self, task: Task) -> Outcome:
        """See :meth:`Worker.run`."""
        connection = self._connection or connect(self.spec)
        try:
            outcome = drive(connection, task, self._models)
        except MuonsplitError:
            raise
        except Exception as error:
            message = f"The subject raised {type(error).__name__}: {error}"
            raise SubjectFaultError(message, traceback.format_exc()) from error
        return checked(outcome, task)


def checked(outcome: Outcome, task: Task) -> Outcome:
    """Refuses an answer that is not the model's parameters.

    Raises:
        SubjectFaultError: If a parameter is missing, has another shape, or is not finite.
        UnobservableError: If it has another dtype, or a stated learning rate moves nothing.
    """
    for step, found in enumerate(outcome.after, 1):
        for name, before in task.parameters.items():
            after = found.get(name)
            if after is None:
                raise SubjectFaultError(f"After step {step} the model has no parameter {name}.")
            if after.shape != before.shape:
                raise SubjectFaultError(
                    f"After step {step} {name} is {tuple(after.shape)}; it was "
                    f"{tuple(before.shape)}."
                )
            if after.dtype != before.dtype:
                raise UnobservableError(
                    f"after step {step} {name} is {after.dtype}, it was given as {before.dtype}; "
                    "models of other dtypes are not observed yet"
                )
            if not after.isfinite().all():
                raise SubjectFaultError(
                    f"After step {step} {name} holds NaN or infinity; every input was finite."
                )
    for settings in outcome.settings:
        for name, values in settings.items():
            if not 0 < values.get("lr", 1.0) < math.inf:
                raise UnobservableError(f"{name} has a learning rate of {values['lr']}")
    return outcome
