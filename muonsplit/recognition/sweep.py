"""The sweep: plan against truth on every architecture that transformers can build.

Each architecture runs in a process of its own, two at a time; what it says is a file, so that a
sweep that was stopped goes on where it stopped and a crash costs its own row only.
"""

import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from muonsplit.files import write_whole
from muonsplit.recognition.rows import no_witnesses

# The slowest architecture takes about a tenth of it on an idle core.
_SECONDS = 180.0
_POLL = 0.02

Row = dict[str, Any]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, order=True)
class Architecture:
    """One entry of one of transformers' mappings.

    Attributes:
        task: ``causal``, ``image-text`` or ``seq2seq``.
        model_type: Its type; the config is the type's default.
    """

    task: str
    model_type: str

    @property
    def file(self) -> str:
        """Name of its row's file."""
        return f"{self.task}.{self.model_type}.json"


def architectures(types: Sequence[str] = ()) -> list[Architecture]:
    """What there is to sweep, in order.

    Args:
        types: Model types; all by default.
    """
    from muonsplit.models.load import mappings

    found = [Architecture(task, kind) for task, kinds in mappings().items() for kind in kinds]
    return sorted(a for a in found if not types or a.model_type in types)


def sweep(
    wanted: Sequence[Architecture],
    folder: Path,
    processes: int = 2,
    fresh: bool = False,
    progress: Progress = lambda done, of, name: None,
) -> list[Row]:
    """Compares plan with truth on each architecture.

    Args:
        wanted: Which.
        folder: Where each row is written; rows that are there and of the same versions stand.
        processes: How many run at once.
        fresh: Whether rows that stand are made anew.
        progress: Told how many rows are done, of how many, and the last one.

    Returns:
        A row an architecture, in order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = {} if fresh else {a: row for a in wanted if (row := _standing(folder / a.file))}
    waiting = [a for a in wanted if a not in rows]
    running: dict[Architecture, tuple[BaseProcess, float]] = {}
    context = multiprocessing.get_context("fork")
    _preload()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                next_ = waiting.pop(0)
                process = context.Process(target=_run, args=(next_, folder / next_.file))
                process.start()
                running[next_] = (process, time.monotonic())
            for done in _ended(running):
                process, _ = running.pop(done)
                rows[done] = _result(done, folder / done.file, process)
                progress(len(rows), len(wanted), done.model_type)
            time.sleep(_POLL)
    finally:
        for process, _ in running.values():
            process.kill()
    return [rows[a] for a in wanted]


def _preload() -> None:
    """Imports once what every process needs: they are forked from this one.

    Much is imported when a first model is built and run. Nothing is differentiated here: autograd
    starts threads, and those do not survive a fork.
    """
    import torch

    from muonsplit.models.load import build
    from muonsplit.recognition.rows import weight_rows

    torch.set_num_threads(1)
    weight_rows(build({"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 64}))


def _ended(running: Mapping[Architecture, tuple[BaseProcess, float]]) -> Iterator[Architecture]:
    for architecture, (process, started) in list(running.items()):
        if process.is_alive() and time.monotonic() - started > _SECONDS:
            process.kill()
            process.join()
        if not process.is_alive():
            process.join()
            yield architecture


def _result(architecture: Architecture, path: Path, process: BaseProcess) -> Row:
    row = _standing(path)
    if row is not None and process.exitcode == 0:
        return row
    code = process.exitcode or 0
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    row = _empty(architecture) | {"error": f"its process {how}"}
    write_whole(path, _text(row))
    return row


def _standing(path: Path) -> Row | None:
    """A row that is there, whole, and made by these versions."""
    try:
        row = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) and row.get("versions") == versions() else None


def versions() -> dict[str, str]:
    """What a row depends on."""
    import torch
    import transformers

    import muonsplit

    return {
        "muonsplit": muonsplit.__version__,
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
    }


def _empty(architecture: Architecture) -> Row:
    return {
        "versions": versions(),
        "task": architecture.task,
        "model_type": architecture.model_type,
        "class": None,
        "error": None,
        "weights": [],
        "witnesses": no_witnesses("not built"),
    }


def _text(row: Row) -> bytes:
    return (json.dumps(row, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()


def _run(architecture: Architecture, path: Path) -> None:
    import torch

    torch.set_num_threads(1)
    write_whole(path, _text(examined(architecture)))


def examined(architecture: Architecture) -> Row:
    """The row of one architecture, made in this process."""
    from muonsplit.errors import MuonsplitError
    from muonsplit.models.load import build
    from muonsplit.recognition.rows import weight_rows, witness_row

    row = _empty(architecture)
    try:
        model = build({"model_type": architecture.model_type}, task=architecture.task)
        weights = weight_rows(model)
    except MuonsplitError as error:
        return row | {"error": error.message}
    except Exception as error:  # a model may raise anything, and costs its own row only
        return row | {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    names = {weight["weight"] for weight in weights}
    seen = witness_row({"model_type": architecture.model_type}, architecture.task, names)
    return row | {"class": type(model).__name__, "weights": weights, "witnesses": seen}
