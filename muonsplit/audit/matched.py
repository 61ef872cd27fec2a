"""Bringing checkpoints and a model's plan together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from muonsplit.dialect import Dialect
from muonsplit.errors import EvidenceError, UsageError
from muonsplit.evidence.opened import prefix_of, under
from muonsplit.evidence.saved import Saved
from muonsplit.geometry import Decision, plan
from muonsplit.layout import Layout

# What other frameworks make of the same heads.
_RULES: tuple[Mapping[str, Any], ...] = (
    {"mla_key_value": "joint"},
    {"mla_key_value": "apart"},
    {"fused_qkv": "projections"},
    {"fused_qkv": "heads"},
    {"gated_query": "joint"},
    {"gated_query": "apart"},
)
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Matched:
    """Two checkpoints and what the rules say of the model.

    Attributes:
        model: Name of the model.
        config: SHA-256 of its config.
        decisions: One for each Muon weight.
        legal: What other split rules make of a weight.
        heads: Head counts that occur in the model.
        before: The earlier checkpoint, by the model's names.
        after: The later one.
        unknown: Tensors that are no parameters of the model.
        missing: Muon weights that a checkpoint lacks.
        dtype: The coarsest dtype that Muon weights are stored in.
        asked: Pattern of the weights that are asked about.
        muon: Muon weights of the model, asked about or not.
    """

    model: str
    config: str
    decisions: tuple[Decision, ...]
    legal: Mapping[str, tuple[Layout | None, ...]]
    heads: tuple[int, ...]
    before: Saved
    after: Saved
    unknown: int
    missing: tuple[str, ...]
    dtype: str
    asked: str
    muon: int

    @property
    def both(self) -> tuple[Saved, Saved]:
        """The earlier checkpoint and the later one."""
        return self.before, self.after


def match(
    name: str,
    config: str,
    model: nn.Module,
    dialect: Dialect,
    before: Saved,
    after: Saved,
    only: str = "*",
) -> Matched:
    """Finds a model's Muon weights in two checkpoints.

    Args:
        name: What the model is called.
        config: SHA-256 of its config.
        model: On ``meta``.
        dialect: Its split rule makes the plan.
        before: The earlier checkpoint.
        after: The later one.
        only: Pattern of the weights that are asked about, as of a shell.

    Raises:
        UsageError: If no Muon weight is named so.
        EvidenceError: If they are not of this model, not of one run, or in the wrong order.
    """
    every = plan(model, dialect).decisions
    decisions = tuple(d for d in every if fnmatchcase(d.name, only))
    if not decisions:
        raise UsageError(
            f"None of the {len(every)} Muon weights of {name} is named like {only!r}.",
            f"They are named like {every[0].name!r}." if every else "",
        )
    parameters = {name for name, _ in model.named_parameters()}
    before, after = (under(s, prefix_of(s.entries, parameters)) for s in (before, after))
    _in_order(before, after)
    there = [d for d in decisions if d.name in before.entries and d.name in after.entries]
    fewest = min((before, after), key=lambda saved: sum(d.name in saved.entries for d in decisions))
    _of_this_model(name, decisions, there, before, fewest)
    _of_one_run(there, before, after)
    others = [_plan_of(model, dialect, rule) for rule in _RULES]
    legal = {d.name: tuple({o[d.name]: None for o in others}) for d in decisions}
    found = {d.name for d in there}
    dtypes = {before.entries[d.name].dtype for d in there} | {
        after.entries[d.name].dtype for d in there
    }
    coarsest = max(dtypes, key=lambda dtype: (-dtype.itemsize, str(dtype)))
    return Matched(
        name,
        config,
        decisions,
        legal,
        tuple(dict.fromkeys(d.heads for d in decisions if d.heads)),
        before,
        after,
        len(set(before.entries) - parameters),
        tuple(d.name for d in decisions if d.name not in found),
        str(coarsest).removeprefix("torch."),
        only,
        len(every),
    )


def _plan_of(
    model: nn.Module, dialect: Dialect, rule: Mapping[str, Any]
) -> dict[str, Layout | None]:
    split = replace(dialect.split, **{"heads_per_block": 1, **rule})
    return plan(model, replace(dialect, split=split)).layouts()


def _in_order(before: Saved, after: Saved) -> None:
    if before.step is None or after.step is None:
        return
    if before.step > after.step:
        raise EvidenceError(
            f"{before.path} is of step {before.step} and {after.path} of step {after.step}: they "
            "are in the wrong order.",
            "Give the earlier one first.",
        )
    if before.step == after.step:
        raise EvidenceError(
            f"{before.path} and {after.path} are both of step {before.step}.",
            "Give checkpoints of consecutive steps.",
        )


def _of_this_model(
    name: str, all: Sequence[Decision], there: Sequence[Decision], saved: Saved, fewest: Saved
) -> None:
    wrong = [d for d in there if saved.entries[d.name].shape != d.shape]
    if wrong:
        listed = _listed(
            f"{d.name} is {saved.entries[d.name].shape}, the config says {d.shape}" for d in wrong
        )
        raise EvidenceError(
            f"{saved.path} is not of {name}: {listed}.", "Give the config that was trained."
        )
    if 2 * len(there) < len(all):
        missing = _listed(d.name for d in all if d not in there)
        raise EvidenceError(
            f"{fewest.path} has {len(there)} of the {len(all)} Muon weights of {name}; it lacks "
            f"{missing}.",
            "Give the config that was trained, or name those that are there: --weights PATTERN.",
        )


def _of_one_run(there: Sequence[Decision], before: Saved, after: Saved) -> None:
    differing = [d for d in there if before.entries[d.name].shape != after.entries[d.name].shape]
    if differing:
        listed = _listed(
            f"{d.name} is {before.entries[d.name].shape}, then {after.entries[d.name].shape}"
            for d in differing
        )
        raise EvidenceError(f"{before.path} and {after.path} are of different models: {listed}.")


def _listed(some: Iterable[str]) -> str:
    found = list(some)
    more = len(found) - _MOST_NAMED
    return ", ".join(found[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
