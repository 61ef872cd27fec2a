"""Ranks that a launcher such as torchrun has started, on one machine or several.

Rank 0 asks, and reports. Every other rank keeps a worker of its own and passes on what rank 0 asks
of it, through the launcher's store: a subject runs isolated on each machine.
"""

import os
import platform
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from importlib import import_module, metadata
from typing import Any

from torch import Tensor

from muonsplit.errors import MuonsplitError, SubjectFaultError, UsageError
from muonsplit.sharding.ways import check_world
from muonsplit.subjects import wire
from muonsplit.subjects.distribute import MEETING
from muonsplit.subjects.distribute import rank as rank_here
from muonsplit.subjects.process import Worker
from muonsplit.subjects.ranks import LOOPBACK

_WANTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_JOINING = timedelta(minutes=5)
_FOREVER = timedelta(days=1)
_POLL_S = 0.1
# An answer may take as long as the run, and as its process takes to be ended.
_SLACK_S = 30.0


def is_launched() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return all(name in os.environ for name in _WANTED) and os.environ["WORLD_SIZE"] != "1"


def launched_world() -> int:
    """How many ranks the launcher started."""
    return int(os.environ["WORLD_SIZE"])


def leads() -> bool:
    """Whether this is the rank that asks and reports."""
    return rank_here() == 0


class _Channel:
    """Frames from one rank to another through the store, each read once."""

    def __init__(self, sender: int, receiver: int) -> None:
        distributed: Any = import_module("torch.distributed")
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A client of its own: one that waits holds up all who share it.
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        serves = not served and sender == rank_here() == 0 and receiver == 1
        client = distributed.TCPStore(
            host, port, is_master=serves, timeout=_JOINING, wait_for_workers=False
        )
        prefix = f"muonsplit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = distributed.PrefixStore(f"{prefix}/{sender}-{receiver}", client)
        self._count = 0

    def send(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._store.set(str(self._count), wire.packed(header, tensors))
        self._count += 1

    def receive(self, limit: timedelta = _FOREVER) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Waits for the next frame.

        Raises:
            TimeoutError: If it takes longer, or the store is gone.
        """
        key = str(self._count)
        try:
            self._store.wait([key], limit)
            frame = self._store.get(key)
            self._store.delete_key(key)
        except RuntimeError as error:
            raise TimeoutError(str(error)) from error
        self._count += 1
        return wire.unpacked(frame)

    def let_read(self) -> None:
        """Waits until the last frame was read: the store may end with this process."""
        until = time.monotonic() + _SLACK_S
        while self._count and time.monotonic() < until:
            if not self._store.check([str(self._count - 1)]):
                return
            time.sleep(_POLL_S)

    @property
    def waiting(self) -> bool:
        """Whether there is a frame."""
        return self._store.check([str(self._count)])


class Launched:
    """The ranks of a launcher, seen from rank 0.

    Args:
        arguments: What this rank was asked for; every rank must have been asked for the same.

    Attributes:
        world: How many ranks there are.

    Raises:
        UsageError: If a rank is of other software, or was asked for something else.
    """

    def __init__(self, arguments: list[str]) -> None:
        self.world = launched_world()
        check_world(self.world)
        others = range(1, self.world)
        self._to = {rank: _Channel(0, rank) for rank in others}
        self._from = {rank: _Channel(rank, 0) for rank in others}
        mine = _introduced(arguments)
        heard = {rank: self._heard(rank) for rank in others}
        apart = [
            f"{fact} is {said[fact]!r} on rank {rank} and {mine[fact]!r} on rank 0"
            for rank, said in heard.items()
            for fact in mine
            if said.get(fact) != mine[fact]
        ]
        told = {"do": "refuse" if apart else "go", "why": "; ".join(apart)}
        for rank in others:
            self._to[rank].send(told, {})
        if apart:
            self._let_read()
            raise _apart(told["why"])

    def _heard(self, rank: int) -> dict[str, Any]:
        try:
            return self._from[rank].receive(_JOINING)[0]
        except TimeoutError:
            raise UsageError(
                f"Rank {rank} of {self.world} has not said a word for "
                f"{_JOINING.total_seconds():g} s.",
                "Start the same command on every rank.",
            ) from None

    def workers(self, spec: str, timeout: float, memory: float) -> list[Worker]:
        """See :meth:`muonsplit.subjects.ranks.Launch.workers`."""
        remote = [
            _Remote(spec, timeout, memory, self._to[rank], self._from[rank])
            for rank in range(1, self.world)
        ]
        return [Worker(spec, timeout, memory), *remote]

    def meet(self) -> list[dict[str, str]]:
        """See :meth:`muonsplit.subjects.ranks.Launch.meet`."""
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        loopback = LOOPBACK if host in _LOOPBACK else {}
        place = {MEETING: f"{host}:{port}/muonsplit/{uuid.uuid4().hex}", **loopback}
        return [place] * self.world

    def close(self) -> None:
        """See :meth:`muonsplit.subjects.ranks.Launch.close`."""
        for channel in self._to.values():
            channel.send({"do": "leave"}, {})
        self._let_read()

    def _let_read(self) -> None:
        for channel in self._to.values():
            channel.let_read()


class _Remote(Worker):
    """The worker that another rank keeps."""

    def __init__(
        self, spec: str, timeout: float, memory: float, to: _Channel, back: _Channel
    ) -> None:
        super().__init__(spec, timeout, memory)
        self._to, self._back = to, back
        self._there = False

    @property
    def alive(self) -> bool:
        """See :attr:`Worker.alive`."""
        return self._there

    def kill(self) -> None:
        """See :meth:`Worker.kill`."""
        self._to.send({"do": "kill"}, {})

    def exchange(
        self, header: Mapping[str, Any], tensors: Mapping[str, Tensor], limit: float
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See :meth:`Worker.exchange`."""
        self._to.send({"do": "ask", "limit": limit, "header": header}, tensors)
        try:
            answer, found = self._back.receive(timedelta(seconds=limit + _SLACK_S))
        except TimeoutError:
            self._there = False
            raise SubjectFaultError("The rank does not answer any more.") from None
        self._there = self._there and answer.get("error") != "fault"
        return answer, found

    def _start(self) -> None:
        start = {"spec": self.spec, "timeout": self.timeout, "memory": self.memory}
        self._to.send({"do": "start", "environment": self.environment, **start}, {})
        self._there = True

    def _end(self) -> int | None:
        if self._there:
            self._to.send({"do": "end"}, {})
        self._there, self._prepared = False, None
        return None


def serve(arguments: list[str]) -> None:
    """Does what rank 0 asks, until it says that it is done.

    Args:
        arguments: What this rank was asked for.

    Raises:
        UsageError: If rank 0 is of other software, was asked for something else, or is gone.
    """
    check_world(launched_world())
    to, back = _Channel(rank_here(), 0), _Channel(0, rank_here())
    to.send(_introduced(arguments), {})
    try:
        told, _ = back.receive(_JOINING)
        if told["do"] != "refuse":
            _serve(to, back)
            return
    except TimeoutError as error:
        raise UsageError(f"Rank 0 does not ask any more: {error}", "See what it says.") from None
    raise _apart(told["why"])


def _serve(to: _Channel, back: _Channel) -> None:
    worker: Worker | None = None
    with ThreadPoolExecutor(1) as thread:
        while True:
            asked, tensors = back.receive()
            match asked["do"]:
                case "start":
                    worker = Worker(
                        asked["spec"], asked["timeout"], asked["memory"], asked["environment"]
                    )
                    worker.__enter__()
                case "ask" if worker is not None:
                    answer = thread.submit(_answered, worker, asked, tensors)
                    while not wait([answer], _POLL_S).done:
                        if back.waiting:  # nothing but an order to kill comes meanwhile
                            back.receive()
                            worker.kill()
                    to.send(*answer.result())
                case "end" | "leave" if worker is not None:
                    worker.close()
                case _:
                    pass
            if asked["do"] == "leave":
                return


def _answered(
    worker: Worker, asked: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        return worker.exchange(asked["header"], tensors, asked["limit"])
    except SubjectFaultError as fault:
        return {"error": "fault", "message": fault.message, "tail": fault.tail}, {}


def _introduced(arguments: list[str]) -> dict[str, Any]:
    """What all ranks must have in common."""
    return {
        "the world size": launched_world(),
        "the command": arguments,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("muonsplit", "torch")},
    }


def _apart(why: str) -> MuonsplitError:
    return UsageError(
        f"The ranks are not alike: {why}.", "Start the same command of the same software on each."
    )
