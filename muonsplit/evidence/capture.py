"""Recording one step of a real run: every rank writes what it holds, and gathers nothing."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.errors import EvidenceError
from muonsplit.evidence.description import (
    CODES,
    FORMAT,
    Description,
    File,
    Held,
    Piece,
    Weight,
    encoded,
    file_of,
    said_by,
    stream,
)
from muonsplit.evidence.placed import (
    Found,
    Partitioned,
    Placed,
    Plain,
    clean,
    group_of_ranks,
)
from muonsplit.files import write_whole
from muonsplit.sharding.held import Shard

Named = Iterable[tuple[str, Tensor]]


@contextmanager
def capture(
    optimizer: Any,
    directory: Path | str,
    model: nn.Module | None = None,
    names: Named | None = None,
    placements: Mapping[str, Shard] | None = None,
) -> Generator[Path]:
    """Records one optimizer step: parameters before and after, gradients and momentum.

    Every rank enters it, takes exactly one step inside, and writes files of its own; nothing is
    gathered, and one weight at a time leaves its device. Recorded are parameters of two axes or
    more. A directory is complete only once every rank has left; an exception, or a process that is
    killed, leaves nothing that :func:`~muonsplit.evidence.captured.open_capture` accepts. Give each
    capture a directory of its own.

    ``torch.optim`` optimizers are recorded as their ``step`` begins and ends, so that clipping
    may be inside; but for gradients that a closure computes, which are left out. Others are
    recorded as the block begins and ends: call ``engine.backward`` before it. For a DeepSpeed
    engine the float32 master is recorded, and what its step would gather to tell is left out, with
    the reason in the description.

    Args:
        optimizer: Has ``param_groups``, as those of ``torch.optim`` have, or is a DeepSpeed engine.
        directory: Absent, empty, or with files that other ranks write now.
        model: Names the parameters; an engine has its own, and an optimizer that was given
            ``model.named_parameters()`` needs none.
        names: Pairs of name and parameter, instead of a model.
        placements: What this rank holds of plain tensors that are shards, by name, as a
            tensor-parallel framework without DTensors knows it. Other plain tensors are whole, and
            rank 0 writes them.

    Yields:
        The directory.

    Raises:
        EvidenceError: If the directory holds something else, parameters have no names or a place
            that is not told, a file cannot be written, or not exactly one step was taken.
    """
    engine = hasattr(optimizer, "module") and hasattr(optimizer, "optimizer")
    source, stepped = _source(optimizer, engine, model, names, placements or {})
    record = _Record(source, Path(directory), type(stepped).__name__)
    with record:
        with _watched(record, optimizer, stepped):
            yield record.folder
        record.finish()


@contextmanager
def _watched(record: "_Record", optimizer: Any, stepped: Any) -> Generator[None]:
    """Records before and after the step: by torch's hooks, or where the block begins and ends."""
    if isinstance(stepped, torch.optim.Optimizer) and hasattr(stepped, "_optimizer_step_pre_hooks"):
        handles = (
            stepped.register_step_pre_hook(record.hook_before),
            stepped.register_step_post_hook(record.hook_after),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        return
    counts = _counter(optimizer) if record.of_engine else None
    begun = counts() if counts else 0
    record.before()
    yield
    record.steps = counts() - begun if counts else None
    record.after()


def _source(
    optimizer: Any,
    engine: bool,
    model: nn.Module | None,
    names: Named | None,
    placements: Mapping[str, Shard],
) -> tuple[Placed, Any]:
    """The matrices, and the optimizer whose step is the one that is recorded."""
    if engine and model is None:
        model = optimizer.module
    named = names if names is not None else model and model.named_parameters()
    by_id = None if named is None else {id(p): name for name, p in named}
    stepped, groups = optimizer, getattr(optimizer, "param_groups", None)
    if engine:
        stepped = optimizer.optimizer
        if any(hasattr(stepped, key) for key in ("bit16_groups", "bf16_groups", "grad_position")):
            return Partitioned(optimizer, by_id or {}), stepped
        halves = (getattr(stepped, "fp16_groups", ()), getattr(stepped, "fp32_groups", ()))
        masters = [
            pair for low, high in zip(*halves, strict=True) for pair in zip(low, high, strict=True)
        ]
        by_id = (by_id or {}) | {id(high): (by_id or {}).get(id(low), "") for low, high in masters}
        stepped = stepped.optimizer if masters else stepped
        groups = stepped.param_groups
    if groups is None:
        raise EvidenceError(
            f"{type(optimizer).__name__} has no param_groups, and is no DeepSpeed engine."
        )
    found = _matrices(groups, by_id)
    if not found:
        raise EvidenceError(
            f"{type(optimizer).__name__} steps no parameter of two axes or more.",
            "Of a DeepSpeed run give the engine, not its optimizer.",
        )
    return Plain(getattr(stepped, "state", {}), found, placements), stepped


def _matrices(
    groups: Iterable[Mapping[str, Any]], names: Mapping[int, str] | None
) -> dict[str, tuple[Tensor, Mapping[str, Any]]]:
    """The parameters of two axes or more, with their groups, by name.

    Args:
        groups: Param groups; with names of their own, where none are given.
        names: Names by the identity of the parameter.

    Raises:
        EvidenceError: If a parameter has no name, two have one, or one is a piece that does not
            tell its place.
    """
    listed = [(p, name, group) for group in groups for p, name in _named(group, names)]
    common = all(name.startswith("module.") for _, name, _ in listed if name is not None)
    found: dict[str, tuple[Tensor, Mapping[str, Any]]] = {}
    for p, given, group in listed:
        if getattr(p, "_fsdp_flattened", False) or getattr(p, "_is_flat_param", False):
            raise EvidenceError(
                "A parameter is a piece of a flat FSDP parameter, which does not tell its place.",
                "Divide the model by fully_shard (FSDP2).",
            )
        if p.dim() < 2:
            continue
        if given is None:
            raise EvidenceError(
                f"A parameter of shape {tuple(p.shape)} has no name.",
                "Give the model, or the optimizer model.named_parameters().",
            )
        name = clean(given.removeprefix("module.") if common else given)
        if name in found and found[name][0] is not p:
            raise EvidenceError(f"Two parameters of the optimizer are called {name!r}.")
        found[name] = (p, group)
    return found


def _named(
    group: Mapping[str, Any], names: Mapping[int, str] | None
) -> Iterator[tuple[Tensor, str | None]]:
    params = list(group["params"])
    if names is not None:
        yield from ((p, names.get(id(p))) for p in params)
        return
    yield from zip(params, group.get("param_names") or [None] * len(params), strict=True)


def _counter(engine: Any) -> Callable[[], int]:
    """Steps that an engine has really taken: a step that overflows is skipped."""
    return lambda: engine.global_steps - engine.skipped_steps


class _Record:
    """What one rank writes of one step; removed again if the block it stands for fails."""

    def __init__(self, source: Placed, folder: Path, optimizer: str) -> None:
        self.folder = folder
        self.of_engine = isinstance(source, Partitioned)
        self.steps: int | None = 0
        self._source, self._optimizer = source, optimizer
        self._rank, self._world = group_of_ranks()
        self._files: dict[str, File] = {}
        self._weights: dict[str, Weight] = {}
        self._momentum: dict[str, str] = {}
        self._left_out: dict[str, dict[str, str]] = {}
        self._failed = ""
        self._begun = 0
        self._wrote: list[Path] = []

    def __enter__(self) -> None:
        self._made = not self.folder.exists()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            found = sorted(path.name for path in self.folder.iterdir())
        except OSError as error:
            raise EvidenceError(f"{self.folder} cannot be written: {error.strerror}.") from None
        for name in found:
            said = said_by(name)
            if said is None or said.world != self._world or said.rank == self._rank:
                raise EvidenceError(
                    f"{self.folder} holds {name!r} already.",
                    "Give each capture a new directory.",
                )

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            return
        # The description first: what is left without it is no capture.
        for path in reversed(self._wrote):
            path.unlink(missing_ok=True)
        if self._made:
            # Another rank may have written there.
            with suppress(OSError):
                self.folder.rmdir()

    def hook_before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begun += 1
        if self._begun == 1:
            # torch passes the optimizer itself along.
            self.before(closure=any(x is not None for x in (*args[1:], kwargs.get("closure"))))

    def hook_after(self, *_: Any) -> None:
        self.steps = (self.steps or 0) + 1
        if self.steps == self._begun == 1:
            self.after()

    def before(self, closure: bool = False) -> None:
        for name in self._source.names:
            shape, dtype = self._source.weight(name)
            self._weights[name] = Weight(shape, _spelt(dtype), self._source.settings(name))
        self._write("before", self._source.value)
        late = "a closure computes it inside the step"
        self._write("gradients", (lambda _: late) if closure else self._source.gradient)
        self._write("momentum_before", self._source.momentum)

    def after(self) -> None:
        self._write("after", self._source.value)
        self._write("momentum", self._source.momentum)

    def _write(self, part: str, find: Callable[[str], Found]) -> None:
        found = {name: find(name) for name in self._weights}
        held = {name: x for name, x in found.items() if isinstance(x, Held)}
        self._left_out[part] = {name: x for name, x in found.items() if isinstance(x, str)}
        for name, x in held.items():
            if x.dtype not in CODES:
                raise self._fault(f"{name} is {x.dtype}, which safetensors does not hold")
            if x.key:
                self._momentum[name] = x.key
        if not held:
            return
        path = self.folder / file_of(self._rank, self._world, part)
        self._wrote.append(path)
        try:
            size, digest = stream(path, held)
        except OSError as error:
            raise self._fault(f"{path} cannot be written: {error.strerror}") from error
        except EvidenceError as error:
            raise self._fault(error.message.rstrip(".")) from None
        pieces = {n: Piece(x.shape, _spelt(x.dtype), x.region, x.flat) for n, x in held.items()}
        self._files[part] = File(size, digest, pieces)

    def _fault(self, message: str) -> EvidenceError:
        # It may be raised inside the optimizer's step, where a loop may go on after errors.
        self._failed = f"{message}."
        return EvidenceError(self._failed)

    def finish(self) -> None:
        """Judges the step, and writes the description that makes the files a capture."""
        if self._failed:
            raise EvidenceError(self._failed)
        steps, before, after = self.steps, self._files.get("before"), self._files.get("after")
        if steps is None and before and after and before.sha256 == after.sha256:
            steps = 0
        if steps not in (None, 1) or (self._begun and self._begun != steps):
            raise EvidenceError(
                f"{steps or 'No'} steps of {self._optimizer} were taken; a capture is of one.",
                "A step that overflows or a scaler skips is none: capture another.",
            )
        said = Description(
            FORMAT,
            self._world,
            self._rank,
            str(torch.__version__),
            _version(),
            self._optimizer,
            steps,
            self._weights,
            self._momentum,
            self._left_out,
            self._files,
        )
        path = self.folder / file_of(self._rank, self._world)
        self._wrote.append(path)
        try:
            write_whole(path, encoded(said))
        except OSError as error:
            raise EvidenceError(f"{path} cannot be written: {error.strerror}.") from error


def _spelt(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _version() -> str:
    try:
        return metadata.version("muonsplit")
    except metadata.PackageNotFoundError:
        return ""
