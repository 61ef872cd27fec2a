"""The plan: what the rules say about every weight of a model, and why."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from muonsplit.dialect import DEFAULT_DIALECT, Dialect, dialect_named
from muonsplit.errors import NothingRecognisedError
from muonsplit.geometry.decide import NOT_MUON, Decider, Decision, logical_shape
from muonsplit.geometry.leaf import SPLITTABLE
from muonsplit.layout import Layout

__all__ = ["Decision", "Plan", "logical_shape", "plan"]

_MISSED = "declined:"


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions on a model's weights, in model order.

    Attributes:
        dialect: Name of the dialect that was asked.
        decisions: One for each weight that Muon trains.
        others: One for each parameter that it does not: embeddings, head, vectors.
    """

    dialect: str
    decisions: tuple[Decision, ...]
    others: tuple[Decision, ...]

    @property
    def split(self) -> tuple[Decision, ...]:
        """The weights that are cut."""
        return tuple(d for d in self.decisions if d.layout is not None)

    def layouts(self) -> dict[str, Layout | None]:
        """The layout of every Muon weight by name; None for whole."""
        return {d.name: d.layout for d in self.decisions}

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values, decisions in model order."""
        return {
            "dialect": self.dialect,
            "decisions": [d.to_json() for d in self.decisions],
            "others": [d.to_json() for d in self.others],
        }

    def table(self) -> list[tuple[Decision, int]]:
        """One decision for each set that differs only by layer, with how many there are."""
        groups: dict[tuple[object, ...], list[Decision]] = {}
        for d in self.decisions:
            key = (d.owner, d.leaf, d.shape, d.layout, d.reason)
            groups.setdefault(key, []).append(d)
        return [(found[0], len(found)) for found in groups.values()]

    def missed(self) -> list[str]:
        """A line a leaf for attention weights that no candidate fits; nothing if there are none."""
        return [
            f"{d.owner}.{d.leaf} {d.shape} ×{count}: {d.reason}"
            for d, count in self.table()
            if d.kind in SPLITTABLE and d.reason.startswith(_MISSED)
        ]

    def raise_if_nothing(self) -> None:
        """Raises if no weight is split although the dialect splits by heads.

        Raises:
            NothingRecognisedError: Listing each attention leaf and why it stays whole.
        """
        if self.split:
            return
        reasons = {
            f"  {d.leaf} {d.shape} ×{count}: {d.reason}"
            for d, count in self.table()
            if d.kind != "other"
        }
        listed = "\n".join(sorted(reasons)) or "  no leaf of the model is known to hold heads"
        raise NothingRecognisedError(
            f"No weight of {len(self.decisions)} is split under dialect {self.dialect}:\n{listed}",
            "Whether that is right depends on model and dialect: muonsplit list dialects.",
        )


def plan(
    model: nn.Module,
    dialect: Dialect | str = DEFAULT_DIALECT,
    arbiter: Callable[[], Mapping[str, Layout | None]] | None = None,
) -> Plan:
    """Decides for every parameter of a model how it is cut, if at all.

    Args:
        model: Any module; on ``meta`` it costs no memory. Tied weights are decided once.
        dialect: A dialect or its name; its split rule is applied.
        arbiter: Asked once, if the rules leave the heads of an attention projection open: gives
            the cut by heads of each weight, or None where it knows of none. Without it, or where
            it does not know, such a weight stays whole. `muonsplit.planned` asks the truth.

    Returns:
        The plan. It is not an error if nothing is split: see :meth:`Plan.raise_if_nothing`.
    """
    chosen = dialect_named(dialect) if isinstance(dialect, str) else dialect
    decider = Decider(dict(model.named_modules()), chosen.split, arbiter)
    decided = [decider.decide(name, p) for name, p in model.named_parameters()]
    return Plan(
        chosen.name,
        tuple(d for d in decided if d.kind not in NOT_MUON),
        tuple(d for d in decided if d.kind in NOT_MUON),
    )
