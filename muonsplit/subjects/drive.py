"""Driving one subject: chosen parameters and gradients in, parameters after each step out.

Gradients come from a linear loss Σ⟨W, G⟩, so that an engine's own backward hooks, buckets and
partitions see exactly the chosen G.
"""

import copy
import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.errors import LackingError, RefusedError, SubjectError
from muonsplit.layout import Layout
from muonsplit.models.load import Config, build
from muonsplit.sharding import local_of
from muonsplit.sharding.ways import Sharding
from muonsplit.subjects import checkpoint
from muonsplit.subjects.connect import Connection
from muonsplit.subjects.distribute import distribute, enter_group, like, rank, state_of, whole
from muonsplit.subjects.protocol import Hyper

Tensors = Mapping[str, Tensor]
Layouts = Mapping[str, Layout | None]
Settings = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Saved:
    """A first part of a run, by another subject whose state is saved and then loaded.

    Attributes:
        steps: How many of the steps it takes.
        layouts: What it is told.
        options: What it is given beside the connection string's.
    """

    steps: int
    layouts: Layouts
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Folders of checkpoints that any number of ranks can read.

    Attributes:
        save: Where the state is written after the last step; empty for nowhere.
        load: Where it is read before the first; empty for a run from zero state.
    """

    save: str = ""
    load: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """One run of a subject from zero state.

    Attributes:
        config: Config of the model it trains.
        parameters: Initial value of every parameter; their dtype is the model's.
        gradients: For each step, the gradient of every parameter.
        layouts: How each Muon weight is to be cut, for a subject that is told.
        hyper: Hyperparameters, for a subject that takes them.
        options: Options beside those of the connection string.
        saved: Who takes the first steps, if it is another.
        turned: Whether matrices are stored column by column, and their gradients with them.
        state: Whether the optimizer's own tensors are wanted.
        sharding: How the model is divided among ranks; None on one process.
        micro_batches: Backward passes a step; the gradient is the mean of theirs.
        alike: Whether every rank and micro-batch is given the gradient itself, and not a part of
            its own.
        keep: What is saved and loaded besides.
    """

    config: Config
    parameters: Tensors
    gradients: Sequence[Tensors]
    layouts: Layouts
    hyper: Hyper
    options: Mapping[str, str] = field(default_factory=dict)
    saved: Saved | None = None
    turned: bool = False
    state: bool = False
    sharding: Sharding | None = None
    micro_batches: int = 1
    alike: bool = False
    keep: Checkpoint = Checkpoint()

    @property
    def parts(self) -> tuple[int, int]:
        """The first part of a step's gradients that this rank is given, and how many there are."""
        place, ranks = (0, 1) if self.sharding is None else self.sharding.data(rank())
        return place * self.micro_batches, ranks * self.micro_batches


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left behind.

    Attributes:
        after: Parameters after each step.
        settings: Before each step, for each parameter in a torch param group, the
            hyperparameters of its group.
        overwritten: For each step, the parameters whose gradient the step wrote into.
        state: After each step, tensors the optimizer keeps for a parameter, as ``name/key``.
        disagreeing: For each step, the parameters of which ranks hold other bits than rank 0, with
            those ranks.
    """

    after: list[dict[str, Tensor]]
    settings: list[Settings]
    overwritten: list[list[str]]
    state: list[dict[str, Tensor]]
    disagreeing: list[dict[str, list[int]]] = field(default_factory=list)


class Models:
    """Keeps the last model built, so that many runs of one cost one build."""

    def __init__(self) -> None:
        self._config: Config | None = None
        self._model: nn.Module | None = None

    def fresh(self, config: Config) -> nn.Module:
        """A new copy of the config's model, on the CPU in float32."""
        if self._model is None or config != self._config:
            self._model, self._config = build(config, "cpu"), dict(config)
        return copy.deepcopy(self._model)


def drive(connection: Connection, task: Task, models: Models) -> Outcome:
    """Builds the subject on a fresh model and takes the task's steps.

    Raises:
        RefusedError: If the subject says that it cannot be built so.
        LackingError: If its state is to be saved and cannot be.
        Exception: Whatever the subject raises.
    """
    outcome = Outcome([], [], [], [])
    parameters, state, left = task.parameters, None, task.gradients
    if task.saved is not None:
        saved = task.saved
        with _Run(connection, task, models, parameters, saved.layouts, saved.options) as run:
            run.take(left[: saved.steps], outcome)
            state = run.saved()
        parameters, left = outcome.after[-1], left[saved.steps :]
    with _Run(connection, task, models, parameters, task.layouts, task.options) as run:
        if state is not None:
            run.load(state)
        if task.keep.load:
            run.resume(task.keep.load)
        run.take(left, outcome)
        if task.keep.save:
            run.keep(task.keep.save)
    return outcome


class _Run:
    """A subject built on a fresh model whose loss is Σ⟨W, G⟩."""

    def __init__(
        self,
        connection: Connection,
        task: Task,
        models: Models,
        parameters: Tensors,
        layouts: Layouts,
        options: Mapping[str, str],
    ) -> None:
        self._task = task
        self._model = model = models.fresh(task.config)
        self._gradients: Tensors = {}
        for name, p in model.named_parameters():
            value = parameters[name].clone()
            turned = task.turned and value.ndim == 2
            p.data = value.mT.contiguous().mT if turned else value

        def loss(*_args: object, **_kwargs: object) -> Tensor:
            given = self._gradients
            # Looked up anew: FSDP2 puts whole parameters in place of shards meanwhile.
            named = model.named_parameters()
            return torch.stack([(local_of(p) * like(given[n], p)).sum() for n, p in named]).sum()

        model.forward = loss
        self._called = model
        if task.sharding is not None:
            enter_group()
            self._called = distribute(model, task.sharding)
        self._named = dict(model.named_parameters())
        accepted = inspect.signature(connection.factory).parameters
        offered = {
            "layouts": dict(layouts),
            "hyper": task.hyper,
            "micro_batches": task.micro_batches,
            "way": "" if task.sharding is None else task.sharding.way,
        }
        given = {name: value for name, value in offered.items() if name in accepted}
        arguments = {**given, **connection.options, **options}
        try:
            self._stepper: Any = connection.factory(model, **arguments)
        except SubjectError as error:
            raise RefusedError(error.message, error.hint) from error

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, *_: object) -> None:
        getattr(self._stepper, "close", lambda: None)()

    def take(self, steps: Sequence[Tensors], outcome: Outcome) -> None:
        """Takes steps, and adds what they leave behind."""
        for gradients in steps:
            outcome.settings.append(_settings(self._stepper, self._named))
            outcome.overwritten.append(self._step(gradients))
            outcome.after.append(_parameters(self._model, self._stepper))
            outcome.state.append(_state(self._stepper, self._named) if self._task.state else {})

    def saved(self) -> bytes:
        """The optimizer's state as a file would hold it."""
        if not (hasattr(self._stepper, "state_dict") and hasattr(self._stepper, "load_state_dict")):
            raise LackingError("the subject has no state_dict and load_state_dict")
        file = io.BytesIO()
        torch.save(self._stepper.state_dict(), file)
        return file.getvalue()

    def load(self, state: bytes) -> None:
        """Puts back what :meth:`saved` gave; it comes from this very process."""
        self._stepper.load_state_dict(torch.load(io.BytesIO(state), weights_only=False))

    def keep(self, folder: str) -> None:
        """Writes a checkpoint."""
        checkpoint.save(folder, self._model, self._stepper)

    def resume(self, folder: str) -> None:
        """Reads one."""
        checkpoint.load(folder, self._model, self._stepper)

    def _step(self, gradients: Tensors) -> list[str]:
        """Takes one step; names the parameters whose gradient it wrote into."""
        first, parts = self._task.parts
        for number in range(first, first + self._task.micro_batches):
            # New tensors: a subject that writes into a gradient must not reach the next run's.
            self._gradients = {
                name: g.clone() if self._task.alike else part(g, number, parts)
                for name, g in gradients.items()
            }
            self._backward()
            if hasattr(self._stepper, "backward") and number < first + self._task.micro_batches - 1:
                self._stepper.step()
        held = {n: local_of(p.grad) for n, p in self._named.items() if p.grad is not None}
        given = {name: gradient.clone() for name, gradient in held.items()}
        self._stepper.step()
        written = [
            name
            for name, before in given.items()
            if (after := self._named[name].grad) is not None and not _same(before, local_of(after))
        ]
        self._model.zero_grad(set_to_none=True)
        return [] if hasattr(self._stepper, "backward") else written

    def _backward(self) -> None:
        forward: Callable[[], Tensor] = getattr(self._stepper, "forward", self._called)
        value = forward()
        backward = getattr(self._stepper, "backward", None)
        if backward is not None:
            backward(value)
        elif self._task.micro_batches == 1:
            value.backward()
        else:
            (value / self._task.micro_batches).backward()


def part(gradient: Tensor, number: int, parts: int) -> Tensor:
    """What one rank or micro-batch is given of a gradient, so that the mean of all is the gradient.

    Every element is given to one part only, times their number: for a power of two the mean is
    exact. Which part it is given to runs along diagonals, so that no row and no column is whole.

    Args:
        gradient: Any shape.
        number: Which part, from 0.
        parts: How many there are.
    """
    if parts == 1:
        return gradient.clone()
    shape = gradient.shape
    cols = shape[-1] if shape else 1
    whose = (torch.arange(gradient.numel() // max(cols, 1))[:, None] + torch.arange(cols)) % parts
    mine = whose.view(shape) == number
    return torch.where(mine, gradient * parts, gradient.new_zeros(()))


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers; NaN is the same as NaN."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _parameters(model: nn.Module, stepper: Any) -> dict[str, Tensor]:
    gather = getattr(stepper, "parameters", None)
    found = dict(model.named_parameters()) if gather is None else gather()
    return {name: whole(p) for name, p in found.items()}


def _settings(stepper: Any, named: Mapping[str, nn.Parameter]) -> Settings:
    names = {id(p): name for name, p in named.items()}
    found: Settings = {}
    for group in getattr(stepper, "param_groups", []):
        numbers = {
            key: float(group[key])
            for key in ("lr", "momentum", "weight_decay")
            if _is_number(group.get(key))
        }
        found.update({names[id(p)]: numbers for p in group["params"] if id(p) in names})
    return found


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float)


def _state(stepper: Any, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Tensors as large as their parameter in the state of a torch optimizer."""
    state: Mapping[Any, Any] = getattr(stepper, "state", {})
    kept = (
        (f"{name}/{key}", state_of(value, p))
        for name, p in named.items()
        for key, value in state.get(p, {}).items()
    )
    return {name: value for name, value in kept if value is not None}
