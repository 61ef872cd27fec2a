"""The parent's side of a subject: run it, bound it, and refuse answers that are none."""

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from safetensors import SafetensorError
from torch import Tensor

from muonsplit.errors import (
    LackingError,
    RefusedError,
    SubjectError,
    SubjectFaultError,
    UnobservableError,
)
from muonsplit.models.load import Config
from muonsplit.subjects import wire
from muonsplit.subjects.connect import Connection, connect
from muonsplit.subjects.drive import Layouts, Models, Outcome, Task, drive
from muonsplit.subjects.limits import MARK, MEMORY, ROOT, Tail, end_all
from muonsplit.subjects.worker import described

_TAIL_LINES = 12
_STARTING_S = 180.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# An answer holds the parameters after each step and what the optimizer keeps for them.
_MOST_BYTES = 1 << 24
_SLACK = 8


class Driver(Protocol):
    """Something that runs a subject: a :class:`Worker`, :class:`InProcess` or several of them.

    Attributes:
        spec: Connection string of the subject.
        isolated: Whether it runs in a process of its own.
        world: Ranks that it runs on.
    """

    spec: str
    isolated: bool
    world: int

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
        memory: GiB that the process may take beyond what it starts with.
        environment: Variables of its environment besides ours.
    """

    isolated = True
    world = 1
    # Made anew with each process.
    _tail: Tail
    _folder: str

    def __init__(
        self,
        spec: str,
        timeout: float = 60.0,
        memory: float = 8.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.spec = spec
        self.environment = dict(environment or {})
        self.timeout = timeout
        self.memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._prepared: Config | None = None
        self._ended: int | None = None
        self._mark = uuid.uuid4().hex

    def __enter__(self) -> "Worker":
        if not self.alive:
            self._start()  # it imports while we do
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self) -> dict[str, Any]:
        """What the subject declares, its version and the digest of its file.

        Raises:
            SubjectError: If it cannot be connected to.
        """
        if not self.alive:
            self._start()
        # The first answer waits for torch and whatever the subject imports.
        return self._ready({"do": "describe", "subject": self.spec})

    def run(self, task: Task) -> Outcome:
        """Drives the subject through a task.

        Raises:
            SubjectFaultError: If it raised, exited, took too long, or answered with tensors that
                are not the model's parameters.
            RefusedError: If it says that it cannot be built so.
            LackingError: If it has no state to save, where that is asked.
        """
        if not self.alive:
            self.describe()
        if task.config != self._prepared:
            # Building the model is our own work, and must not count against the subject.
            self._ready({"do": "prepare", "config": task.config})
            self._prepared = task.config
        tensors = wire.labelled(task.parameters, "p")
        for step, gradients in enumerate(task.gradients):
            tensors |= wire.labelled(gradients, str(step))
        header = {"do": "run", "subject": self.spec, **_described(task)}
        answer, found = self._ask(header, tensors, self.timeout)
        return checked(_outcome(answer, found, len(task.gradients)), task)

    def _ready(self, header: dict[str, Any]) -> dict[str, Any]:
        """Asks for something that comes before the subject's first step."""
        try:
            return self._ask(header, {}, _STARTING_S)[0]
        except SubjectFaultError as fault:
            said = f"The process of {self.spec!r} did not get as far as a step: {fault.message}"
            raise SubjectError(said, fault.tail) from None

    @property
    def alive(self) -> bool:
        """Whether there is a process that has not ended."""
        return self._process is not None

    def kill(self) -> None:
        """Kills the process from another thread than the one that waits for its answer."""
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the process and everything it started."""
        self._end()

    def _end(self) -> int | None:
        process, self._process, self._prepared = self._process, None, None
        if process is None:
            return None
        end_all(self._mark)
        with suppress(ProcessLookupError):  # what took the mark off itself
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        code = process.wait()
        if self._ended is not None:
            os.close(self._ended)
            self._ended = None
        shutil.rmtree(self._folder, ignore_errors=True)
        return code

    def _start(self) -> None:
        self._tail = Tail()
        self._folder = tempfile.mkdtemp(prefix="muonsplit-")
        bounds = {MARK: self._mark, ROOT: os.getcwd(), MEMORY: str(self.memory)}
        self._process = subprocess.Popen(
            # -P: nothing in the current folder may shadow a library.
            [sys.executable, "-P", "-m", "muonsplit.subjects.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._tail.writing,
            env={**os.environ, **_ONE_THREAD, **bounds, **_found_from_here(), **self.environment},
            cwd=self._folder,
            start_new_session=True,
        )
        self._tail.opened()
        if sys.platform == "linux":
            self._ended = os.pidfd_open(self._process.pid)

    def _ask(
        self, header: dict[str, Any], tensors: Mapping[str, Tensor], limit: float
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        answer, found = self.exchange(header, tensors, limit)
        _raise_error(answer)
        return answer, found

    def exchange(
        self, header: Mapping[str, Any], tensors: Mapping[str, Tensor], limit: float
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Sends one frame and waits for the answer, whatever it says.

        Raises:
            SubjectFaultError: If none comes; the process has then been ended.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        most = _MOST_BYTES + _SLACK * sum(t.nbytes for t in tensors.values())
        try:
            wire.write(process.stdin, header, tensors)  # pyright: ignore[reportArgumentType]
            answer, found = wire.read(process.stdout, limit, most, self._ended)  # pyright: ignore[reportArgumentType]
        except TimeoutError:
            self._end()
            message = f"The subject took longer than {limit:g} s for one run and was ended."
            raise SubjectFaultError(message, self._lines()) from None
        except (OSError, EOFError):
            with suppress(subprocess.TimeoutExpired):  # its own exit code, before ours by SIGKILL
                process.wait(timeout=5)
            message = f"The subject's process ended by itself with exit code {self._end()}."
            raise SubjectFaultError(message, self._lines()) from None
        except (ValueError, RecursionError, SafetensorError) as error:
            self._end()
            message = f"The subject's process answered with something else: {error}"
            raise SubjectFaultError(message, self._lines()) from None
        return answer, found

    def _lines(self) -> str:
        return self._tail.lines(_TAIL_LINES)


def _described(task: Task) -> dict[str, Any]:
    """A task as plain values, but for its tensors."""
    saved = task.saved
    return {
        "config": task.config,
        "layouts": _texts(task.layouts),
        "hyper": asdict(task.hyper),
        "options": dict(task.options),
        "saved": saved
        and {
            "steps": saved.steps,
            "layouts": _texts(saved.layouts),
            "options": dict(saved.options),
        },
        "turned": task.turned,
        "state": task.state,
        "sharding": task.sharding and asdict(task.sharding),
        "micro_batches": task.micro_batches,
        "alike": task.alike,
        "keep": asdict(task.keep),
        "steps": len(task.gradients),
    }


def _texts(layouts: Layouts) -> dict[str, str | None]:
    return {name: None if layout is None else str(layout) for name, layout in layouts.items()}


@dataclass(frozen=True, slots=True)
class _Answer:
    settings: list[dict[str, dict[str, float]]]
    overwritten: list[list[str]]


def _outcome(answer: Mapping[str, Any], found: Mapping[str, Tensor], steps: int) -> Outcome:
    try:
        told = msgspec.convert(answer, _Answer)
    except msgspec.ValidationError as error:
        message = f"The subject's process answered with something else: {error}"
        raise SubjectFaultError(message) from None
    after = [wire.part(found, f"p{step}") for step in range(steps)]
    state = [wire.part(found, f"s{step}") for step in range(steps)]
    return Outcome(after, told.settings, told.overwritten, state)


def _raise_error(answer: Mapping[str, Any]) -> None:
    """Raises what the worker says went wrong."""
    match answer.get("error"):
        case None:
            return
        case "subject":
            raise SubjectError(answer["message"], answer["hint"])
        case "refused":
            raise RefusedError(answer["message"], answer["hint"])
        case "lacking":
            raise LackingError(answer["message"])
        case "fault":
            raise SubjectFaultError(answer["message"], answer["tail"])
        case _:
            message = f"The subject raised {answer['message']}"
            raise SubjectFaultError(message, answer["tail"], raised=True)


def _found_from_here() -> dict[str, str]:
    """Where the worker finds what this process would, though it runs in another folder."""
    paths = os.environ.get("PYTHONPATH", "")
    return {
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, paths.split(os.pathsep))))
    }


class InProcess:
    """A subject in this process, for debugging; what it does to the process, it does to us.

    Args:
        spec: Connection string of the subject.
    """

    isolated = False
    world = 1

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._models = Models()
        self._connection: Connection | None = None

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *_: object) -> None: ...

    def describe(self) -> dict[str, Any]:
        """See :meth:`Worker.describe`."""
        self._connection = connect(self.spec, Path.cwd())
        return described(self._connection)

    def run(self, task: Task) -> Outcome:
        """See :meth:`Worker.run`."""
        connection = self._connection or connect(self.spec, Path.cwd())
        try:
            outcome = drive(connection, task, self._models)
        except (SubjectError, LackingError):
            raise
        except Exception as error:
            message = f"The subject raised {type(error).__name__}: {error}"
            raise SubjectFaultError(message, traceback.format_exc(), raised=True) from error
        return checked(outcome, task)


def checked(outcome: Outcome, task: Task) -> Outcome:
    """Refuses an answer that is not the model's parameters.

    Raises:
        SubjectFaultError: If a parameter is missing, has another shape, or is not finite.
        UnobservableError: If it has another dtype, or a stated learning rate moves nothing.
    """
    finite = all(bool(g.isfinite().all()) for step in task.gradients for g in step.values())
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
            if finite and not after.isfinite().all():
                raise SubjectFaultError(
                    f"After step {step} {name} holds NaN or infinity; every input was finite."
                )
    for settings in outcome.settings:
        for name, values in settings.items():
            if not 0 < values.get("lr", 1.0) < math.inf:
                raise UnobservableError(f"{name} has a learning rate of {values['lr']}")
    return outcome
