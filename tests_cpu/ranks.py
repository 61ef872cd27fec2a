"""Runs a function on several ranks, each a process of its own, in one gloo group."""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed

# What ranks use and take long to import, once for all of them.
_PRELOADED = [
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "muonsplit.muon",
    "pytest",
]
# Seconds that a rank waits for the others, and that all of them may take.
PATIENCE, LIMIT = 30, 90


def run(world: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Any]:
    """What a function returns on each rank.

    Args:
        world: Number of ranks.
        function: Of a module that can be imported; it finds its rank in torch.distributed.
        *args: What it is given, the same on every rank.
        limit: Seconds after which all ranks are ended.

    Raises:
        AssertionError: If a rank raises, with the traceback of each that does, or is not done.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        started = [context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            context.Process(
                target=_rank,
                args=(rank, world, folder, end, function, args),
                daemon=True,
            )
            for rank, (_, end) in enumerate(started)
        ]
        try:
            for process, (_, end) in zip(ranks, started, strict=True):
                process.start()
                # Only the rank itself holds this end, so that its death is seen.
                end.close()
            return _results([end for end, _ in started], limit)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _results(ends: list[Connection], limit: float) -> list[Any]:
    found: dict[int, tuple[bool, Any]] = {}
    until = time.monotonic() + limit
    while len(found) < len(ends) and (left := until - time.monotonic()) > 0:
        ready = wait([end for rank, end in enumerate(ends) if rank not in found], left)
        for rank, end in enumerate(ends):
            if end in ready:
                try:
                    found[rank] = end.recv()
                except EOFError:
                    found[rank] = (False, "ended without a word")
        # The others may wait for one that has failed until their patience ends.
        if any(not done for done, _ in found.values()):
            until = min(until, time.monotonic() + 2)
    for rank in range(len(ends)):
        found.setdefault(rank, (False, f"not done after {limit:g} seconds, or after another's end"))
    failed = [f"rank {rank}: {said}" for rank, (done, said) in sorted(found.items()) if not done]
    assert not failed, "\n".join(failed)
    return [found[rank][1] for rank in range(len(ends))]


def _rank(
    rank: int,
    world: int,
    folder: str,
    end: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        distributed: Any = torch.distributed
        store = distributed.FileStore(str(Path(folder) / "store"), world)
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE)
        )
        result = function(*args)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        end.send((True, result))
    except BaseException:
        end.send((False, traceback.format_exc()))
