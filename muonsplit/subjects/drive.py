"""Driving one subject: chosen parameters and gradients in, parameters after each step out.

Gradients come from a linear loss Σ⟨W, G⟩, so that an engine's own backward hooks, buckets and
partitions see exactly the chosen G.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.layout import Layout
from muonsplit.models.load import Config, build
from muonsplit.subjects.connect import Connection
from muonsplit.subjects.protocol import Hyper

Tensors = Mapping[str, Tensor]
Settings = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Task:
    """One run of a subject from zero state.

    Attributes:
        config: Config of the model it trains.
        parameters: Initial value of every parameter.
        gradients: For each step, the gradient of every parameter.
        layouts: How each Muon weight is to be cut, for a subject that is told.
        hyper: Hyperparameters, for a subject that takes them.
    """

    config: Config
    parameters: Tensors
    gradients: Sequence[Tensors]
    layouts: Mapping[str, Layout | None]
    hyper: Hyper


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left behind.

    Attributes:
        after: Parameters after each step.
        settings: Before each step, for each parameter in a torch param group, the
            hyperparameters of its group.
    """

    after: list[dict[str, Tensor]]
    settings: list[Settings]


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
        Exception: Whatever the subject raises.
    """
    model = models.fresh(task.config)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(task.parameters[name])
    current: dict[str, Tensor] = {}

    def loss(*_args: object, **_kwargs: object) -> Tensor:
        return torch.stack([(p * current[name]).sum() for name, p in named.items()]).sum()

    model.forward = loss
    stepper = connection.factory(model, **_arguments(connection, task))
    after: list[dict[str, Tensor]] = []
    settings: list[Settings] = []
    try:
        for gradients in task.gradients:
            # Clones: a subject that writes into a gradient must not reach the next run's.
            current = {name: gradients[name].clone() for name in named}
            settings.append(_settings(stepper, named))
            _step(model, stepper)
            after.append(_parameters(model, stepper))
        return Outcome(after, settings)
    finally:
        getattr(stepper, "close", lambda: None)()


def _arguments(connection: Connection, task: Task) -> dict[str, Any]:
    accepted = inspect.signature(connection.factory).parameters
    offered = {"layouts": dict(task.layouts), "hyper": task.hyper}
    given = {name: value for name, value in offered.items() if name in accepted}
    return given | connection.options


def _step(model: nn.Module, stepper: Any) -> None:
    forward: Callable[[], Tensor] = getattr(stepper, "forward", model)
    value = forward()
    backward = getattr(stepper, "backward", None)
    if backward is None:
        value.backward()
    else:
        backward(value)
    stepper.step()
    model.zero_grad(set_to_none=True)


def _parameters(model: nn.Module, stepper: Any) -> dict[str, Tensor]:
    gather = getattr(stepper, "parameters", None)
    found = dict(model.named_parameters()) if gather is None else gather()
    return {name: p.detach().clone() for name, p in found.items()}


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
