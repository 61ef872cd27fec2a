"""What a subject is: an optimizer under test, made by a factory and driven one step at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

Factory = TypeVar("Factory", bound=Callable[..., Any])

ATTRIBUTE = "__muonsplit_subject__"

# Ways of sharding in which parameters are DTensors, besides the plain one of data parallelism.
DTENSOR_WAYS = ("ddp", "tp", "fsdp", "hsdp", "tp-fsdp")
# A grouped-query and an MLA model: what every recogniser has to know.
DEFAULT_MODELS = ("llama", "deepseek-v2-lite")


@dataclass(frozen=True, slots=True)
class Hyper:
    """Hyperparameters of one run.

    Attributes:
        lr: Learning rate of the Muon weights.
        momentum: Momentum coefficient in [0, 1).
        weight_decay: Decoupled weight decay coefficient.
    """

    lr: float = 0.02
    momentum: float = 0.95
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True)
class SubjectInfo:
    """What a factory declares about its subject.

    Attributes:
        dialect: Name of the dialect it claims to speak.
        recognises: Whether it finds the heads itself; else it is told the layouts.
        models: Models it is certified on when none is named.
        off: Options that turn the split off; one that is told the layouts needs none.
        options: Options that must change something, each with two values to compare.
        ways: Ways of sharding it claims to work under, as :data:`muonsplit.sharding.ways.WAYS`
            names them.
    """

    dialect: str
    recognises: bool
    models: tuple[str, ...] = DEFAULT_MODELS
    off: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    ways: tuple[str, ...] = ("ddp",)


class Stepper(Protocol):
    """An optimizer that can be stepped; every ``torch.optim.Optimizer`` is one.

    An engine may also have ``forward() -> loss`` and ``backward(loss)``; they replace calling
    the model and ``loss.backward()``, and it is stepped after each micro-batch. One that shards its
    weights has ``parameters()``, a mapping from name to the full weight, and one that holds
    resources has ``close()``.
    """

    def step(self) -> object:
        """Updates the parameters of the model it was built for."""
        ...


def subject(
    *,
    dialect: str,
    recognises: bool,
    models: tuple[str, ...] = DEFAULT_MODELS,
    off: Mapping[str, str] | None = None,
    options: Mapping[str, tuple[str, str]] | None = None,
    ways: tuple[str, ...] = ("ddp",),
) -> Callable[[Factory], Factory]:
    """Declares a factory as a subject.

    The factory is called with the model and, if it has parameters of these names, ``layouts``
    (a mapping from parameter name to :class:`~muonsplit.layout.Layout`), ``hyper`` (a
    :class:`Hyper`), ``micro_batches`` (backward passes a step, for an engine that counts them
    itself) and ``way`` (how the model is divided among ranks; empty on one process). It returns a
    :class:`Stepper`.

    Args:
        dialect: Name of the dialect the subject claims to speak.
        recognises: Whether it finds the heads itself.
        models: Models it is certified on when none is named.
        off: Options that turn the split off, for a subject that finds the heads itself.
        options: Options that must change something, each with two values to compare.
        ways: Ways of sharding it claims to work under: ``ddp``, ``tp``, ``fsdp``, ``hsdp``,
            ``tp-fsdp``, or ``engine`` for one that divides the model itself.
    """
    info = SubjectInfo(dialect, recognises, models, off or {}, options or {}, ways)

    def mark(factory: Factory) -> Factory:
        setattr(factory, ATTRIBUTE, info)
        return factory

    return mark


def info_of(factory: Callable[..., Any]) -> SubjectInfo | None:
    """Returns what the factory declares, or None if it declares nothing."""
    return getattr(factory, ATTRIBUTE, None)
