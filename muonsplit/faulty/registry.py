"""Faults: subjects that must fail, each with its origin and the check that must catch it first."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from muonsplit.dialect import DEFAULT_DIALECT
from muonsplit.subjects.protocol import subject

Factory = Callable[..., Any]
Kind = Literal["per-head Muon", "any Muon"]

_MADE = "made for its check"


@dataclass(frozen=True, slots=True)
class Fault:
    """A planted fault.

    Attributes:
        name: Name on the command line, as ``faulty:NAME``.
        check: Id of the check that must be the first to fail.
        model: Golden model on which the fault shows.
        dialect: Dialect it claims to speak.
        kind: Whether only a per-head split can have it, or any Muon.
        origin: Where it was seen in public, or that it was made for its check.
        summary: What is wrong, in one line.
        recognises: Whether it finds the heads itself.
        world: Ranks that it needs.
        way: The way of sharding it is planted under; empty on one process.
    """

    name: str
    check: str
    model: str
    dialect: str
    kind: Kind
    origin: str
    summary: str
    recognises: bool = False
    world: int = 1
    way: str = ""

    @property
    def place(self) -> str:
        """The model, and how it is divided among ranks if it is."""
        return f"{self.model}, {self.way} on {self.world}" if self.way else self.model


FAULTS: dict[str, Fault] = {}


def fault(
    *,
    check: str,
    model: str,
    dialect: str = DEFAULT_DIALECT,
    kind: Kind = "per-head Muon",
    origin: str = _MADE,
    recognises: bool = False,
    off: Mapping[str, str] | None = None,
    options: Mapping[str, tuple[str, str]] | None = None,
    world: int = 1,
    way: str = "",
) -> Callable[[Factory], Factory]:
    """Registers a factory as a fault; its docstring says what is wrong.

    Args:
        check: Id of the check that must be the first to fail.
        model: Golden model on which the fault shows.
        dialect: Dialect it claims to speak.
        kind: Whether only a per-head split can have it, or any Muon.
        origin: Where it was seen in public.
        recognises: Whether it finds the heads itself, and is given the model only.
        off: As for :func:`~muonsplit.subjects.protocol.subject`.
        options: Likewise.
        world: Ranks that it needs.
        way: The way of sharding it is planted under, if it needs more than one.
    """
    ways = (way,) if way else ("ddp",)

    def register(factory: Factory) -> Factory:
        name = factory.__name__.replace("_", "-")
        summary = summary_of(factory)
        assert name not in FAULTS, name
        FAULTS[name] = Fault(
            name, check, model, dialect, kind, origin, summary, recognises, world, way
        )
        return subject(
            dialect=dialect,
            recognises=recognises,
            models=(model,),
            off=off,
            options=options,
            ways=ways,
        )(factory)

    return register


def summary_of(factory: Factory) -> str:
    """The first line of a factory's docstring."""
    return (factory.__doc__ or "").strip().splitlines()[0]
