"""A subject on several ranks: a process each, in one group, driven as if they were one."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from muonsplit.errors import (
    LackingError,
    MuonsplitError,
    SubjectError,
    SubjectFaultError,
    UsageError,
)
from muonsplit.sharding.exchange import as_bytes
from muonsplit.sharding.ways import check_world
from muonsplit.subjects.distribute import MEETING
from muonsplit.subjects.drive import Outcome, Task
from muonsplit.subjects.process import InProcess, Worker

Answer = TypeVar("Answer")

# Seconds that ranks are given to answer once one has failed: those that wait for it never will.
_GRACE_S = 5.0
_ONLY_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
# A host's own name need not lead to it.
LOOPBACK = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}


class Launch(Protocol):
    """Where ranks are, and where they meet.

    Attributes:
        world: How many there are.
    """

    world: int

    def workers(self, spec: str, timeout: float, memory: float) -> list[Worker]:
        """A worker for each rank, not started yet."""
        ...

    def meet(self) -> list[dict[str, str]]:
        """What each rank finds in its environment to meet the others at a place not used before."""
        ...

    def close(self) -> None:
        """Nothing is asked any more."""
        ...


class Here:
    """All ranks on this machine.

    Args:
        world: How many there are.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._folder = tempfile.mkdtemp(prefix="muonsplit-")

    def workers(self, spec: str, timeout: float, memory: float) -> list[Worker]:
        """See :meth:`Launch.workers`."""
        return [Worker(spec, timeout, memory) for _ in range(self.world)]

    def meet(self) -> list[dict[str, str]]:
        """See :meth:`Launch.meet`."""
        place = os.path.join(self._folder, uuid.uuid4().hex)
        return [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world),
                "LOCAL_WORLD_SIZE": str(self.world),
                **LOOPBACK,
                MEETING: place,
            }
            for rank in range(self.world)
        ]

    def close(self) -> None:
        """See :meth:`Launch.close`."""
        shutil.rmtree(self._folder, ignore_errors=True)


class Ranks:
    """A subject in one process a rank, all of them started again after one dies.

    Args:
        spec: Connection string of the subject.
        world: Number of ranks, a power of two.
        timeout: Seconds that one run may take.
        memory: GiB that each process may take beyond what it starts with.
        launch: Where the ranks are; by default all of them on this machine.
    """

    isolated = True

    def __init__(
        self,
        spec: str,
        world: int,
        timeout: float = 60.0,
        memory: float = 8.0,
        launch: Launch | None = None,
    ) -> None:
        check_world(world)
        self.spec = spec
        self.world = world
        self._launch = launch or Here(world)
        self._alone = Worker(spec, timeout, memory, _ONLY_RANK)
        self._workers = self._launch.workers(spec, timeout, memory)
        self._threads = ThreadPoolExecutor(world)

    def __enter__(self) -> "Ranks":
        self._started()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alone(self) -> Worker:
        """The same subject in a single process, to compare with."""
        self._alone.spec = self.spec
        return self._alone

    def describe(self) -> dict[str, Any]:
        """See :meth:`Worker.describe`; every rank must say the same.

        Raises:
            SubjectError: If it cannot be connected to, or ranks find different subjects.
        """
        found = self._each(lambda worker: worker.describe())
        other = [rank for rank, said in enumerate(found) if said != found[0]]
        if other:
            raise SubjectError(
                f"Rank {other[0]} finds another subject {self.spec!r} than rank 0: "
                f"{_difference(found[0], found[other[0]])}.",
                "Install the same software and the same files for every rank.",
            )
        return found[0]

    def run(self, task: Task) -> Outcome:
        """See :meth:`Worker.run`; a fault names the ranks that it was seen on.

        The parameters are those of rank 0, with the ranks that hold other ones.
        """
        outcomes = self._each(lambda worker: worker.run(task))
        first, *others = outcomes
        disagreeing = [
            _disagreeing(after, [other.after[step] for other in others])
            for step, after in enumerate(first.after)
        ]
        return replace(first, disagreeing=disagreeing)

    def close(self) -> None:
        """Ends all processes."""
        for worker in (*self._workers, self._alone):
            worker.close()
        self._threads.shutdown()
        self._launch.close()

    def _started(self) -> None:
        """Starts every rank, unless all of them are there."""
        if all(worker.alive for worker in self._workers):
            return
        for worker, environment in zip(self._workers, self._launch.meet(), strict=True):
            worker.close()
            worker.environment = environment
            worker.__enter__()

    def _each(self, ask: Callable[[Worker], Answer]) -> list[Answer]:
        """Asks every rank at once, each from a thread of its own."""
        self._started()
        for worker in self._workers:
            worker.spec = self.spec
        asked = [self._threads.submit(ask, worker) for worker in self._workers]
        wait(asked, return_when=FIRST_EXCEPTION)
        failed = [rank for rank, answer in enumerate(asked) if _error(answer)]
        if not failed:
            return [answer.result() for answer in asked]
        _, waiting = wait(asked, _GRACE_S)
        # A process that ended is why others raise, and is noticed later than they do.
        ended = [rank for rank, answer in enumerate(asked) if _has_ended(_error(answer))]
        for worker, answer in zip(self._workers, asked, strict=True):
            if answer in waiting:
                worker.kill()
        wait(asked)
        errors = {rank: error for rank in range(self.world) if (error := _error(asked[rank]))}
        alike = len({(type(e), str(e)) for e in errors.values()}) == 1
        if not (alike and len(errors) == self.world):
            # A rank that went on may be inside a collective that the others have left.
            for worker in self._workers:
                worker.close()
        raise _said(errors, ended or failed, self.world, alike)


def _error(answer: Future[Any]) -> BaseException | None:
    return answer.exception() if answer.done() else None


def _has_ended(error: BaseException | None) -> bool:
    return isinstance(error, SubjectFaultError) and not error.raised


def _said(
    errors: Mapping[int, BaseException], first: Sequence[int], world: int, alike: bool
) -> BaseException:
    """The error of those that failed first, with their ranks."""
    error = errors[first[0]]
    ranks = list(errors) if alike else list(first)
    if not isinstance(error, MuonsplitError | LackingError) or (
        len(ranks) == world and not isinstance(error, SubjectFaultError)
    ):
        return error
    where = "Every rank" if len(ranks) == world else f"Rank {', '.join(map(str, ranks))}"
    if isinstance(error, SubjectFaultError):
        said = f"{where}: {error.message}"
        return SubjectFaultError(said, error.tail, raised=error.raised)
    return SubjectFaultError(f"{where}, and not the others: {error}", raised=True)


def _disagreeing(
    first: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]]
) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if not same_bits(value, other[name]):
                found.setdefault(name, []).append(rank)
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit by bit."""
    return torch.equal(as_bytes(one), as_bytes(other))


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    key = next(key for key in one if one[key] != other.get(key))
    return f"{key} is {one[key]!r} there, {other.get(key)!r} here"


def driver_for(
    spec: str,
    world: int = 1,
    *,
    timeout: float = 60.0,
    memory: float = 8.0,
    in_process: bool = False,
    launch: Launch | None = None,
) -> InProcess | Worker | Ranks:
    """What runs a subject on a number of ranks.

    Args:
        spec: Connection string of the subject.
        world: Number of ranks, a power of two.
        timeout: Seconds that one run may take.
        memory: GiB that each process may take beyond what it starts with.
        in_process: Whether it runs in this process, to be debugged.
        launch: Where the ranks are; by default all of them on this machine.

    Raises:
        UsageError: If there cannot be so many ranks.
    """
    check_world(world)
    if world > 1:
        if in_process:
            raise UsageError(
                f"{world} ranks do not run in one process.", "Leave out --in-process, or the ranks."
            )
        return Ranks(spec, world, timeout, memory, launch)
    return InProcess(spec) if in_process else Worker(spec, timeout, memory)
