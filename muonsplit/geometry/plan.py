"""The plan: what the rules say about every weight of a model, and why."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from muonsplit.dialect import DEFAULT_DIALECT, Dialect, SplitRule, dialect_named
from muonsplit.errors import LayoutError, NothingRecognisedError
from muonsplit.geometry.candidates import HeadGeometry, candidates
from muonsplit.geometry.confirm import confirm
from muonsplit.geometry.leaf import SPLITTABLE, Kind, holder, kind_of, locate
from muonsplit.geometry.owner import Role, role_of
from muonsplit.layout import Layout

_MISSED = "declined:"
_HEAD_LEAVES = frozenset({"lm_head", "embed_out"})
_ROLES: dict[Kind, str] = {
    "query": "q",
    "key": "k",
    "value": "v",
    "mla_query_up": "q",
    "mla_key_value_up": "kv",
    "fused_qkv": "qkv",
}
_NEVER: dict[Kind, str] = {
    "output": "output projection: its heads are on the input axis, rows would divide by accident",
    "mla_down": "MLA down-projection: the latent has no heads",
    "gate": "gate: one channel a row, no head mixes",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """What the rules say about one parameter.

    Attributes:
        name: Parameter name.
        shape: Its logical shape.
        owner: Class of the module that holds the leaf.
        leaf: Name of the module that holds the weight.
        kind: What the leaf is.
        layout: How it is cut; None where it stays whole.
        heads: Confirmed head count, or None.
        width: Confirmed rows of one head, or None.
        source: Where the geometry comes from; empty where there is none.
        reason: Which candidate confirmed, or why the weight stays whole.
    """

    name: str
    shape: tuple[int, ...]
    owner: str
    leaf: str
    kind: Kind
    layout: Layout | None
    heads: int | None
    width: int | None
    source: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The decision as plain values; the layout as ``str`` writes it."""
        layout = None if self.layout is None else str(self.layout)
        values = {field: getattr(self, field) for field in self.__slots__}
        return values | {"shape": list(self.shape), "layout": layout}


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
    modules = dict(model.named_modules())
    settle = _Arbiter(arbiter)
    decided = [_decide(name, p, modules, chosen, settle) for name, p in model.named_parameters()]
    return Plan(
        chosen.name,
        tuple(d for d in decided if d.kind not in _NOT_MUON),
        tuple(d for d in decided if d.kind in _NOT_MUON),
    )


class _Arbiter:
    """Asks an arbiter when it is first needed."""

    def __init__(self, ask: Callable[[], Mapping[str, Layout | None]] | None) -> None:
        self._ask = ask
        self._answers: Mapping[str, Layout | None] | None = None

    def geometry(self, name: str, role: str) -> HeadGeometry | None:
        """Heads of one width, if the arbiter knows of such."""
        if self._ask is None:
            return None
        if self._answers is None:
            self._answers = self._ask()
        layout = self._answers.get(name)
        if layout is None:
            return None
        widths = {segment.width for segment in layout.segments}
        if len(widths) != 1:
            return None
        (width,) = widths
        heads = layout.rows // width
        return HeadGeometry(heads, width, "arbiter", Layout.heads(role, heads, width, layout.axis))


_NOT_MUON: frozenset[Kind] = frozenset({"embedding", "head", "vector", "convolution"})


def logical_shape(parameter: Any) -> tuple[int, ...]:
    """The shape of the whole weight: ``ds_shape`` under zero.Init, else ``shape``."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _decide(
    name: str,
    parameter: Any,
    modules: Mapping[str, nn.Module],
    chosen: Dialect,
    arbiter: _Arbiter,
) -> Decision:
    place, shape = locate(name), logical_shape(parameter)
    owner = modules.get(place.owner)
    owner_class = type(owner).__name__ if owner is not None else ""

    def decision(
        kind: Kind, reason: str, layout: Layout | None = None, found: HeadGeometry | None = None
    ) -> Decision:
        heads, width, source = found[:3] if found is not None else (None, None, "")
        return Decision(
            name, shape, owner_class, place.leaf, kind, layout, heads, width, source, reason
        )

    if unmuon := _not_muon(name, place.leaf, shape, modules):
        return decision(*unmuon)
    role = role_of(owner_class, place.owner)
    kind = kind_of(place.leaf)
    if kind == "other" or (kind in _NEVER and not role.attention):
        unknown = "not a leaf known to hold heads" if role.attention else "not attention"
        return decision("other", f"{unknown}: {owner_class}.{place.leaf}")
    if kind in _NEVER:
        return decision(kind, _NEVER[kind])
    assert kind in SPLITTABLE
    if role.refused:
        return decision("indexer", f"declined by role: {role.reason}")
    if declined := _refused(name, shape, role, owner):
        return decision(kind, declined)
    axis = heads_axis(modules.get(holder(name)))
    answer = confirm(shape[axis], candidates(kind, owner, _config_of(place.owner, modules)))
    geometry, reason = answer.geometry, answer.reason
    if answer.open and (settled := arbiter.geometry(name, _ROLES[kind])) is not None:
        geometry, reason = settled, f"arbiter: {settled.heads} × {settled.width}; {reason}"
    if geometry is None:
        return decision(kind, reason)
    layout, kept = _layout(kind, geometry, chosen.split, axis, answer.one_order)
    return decision(kind, kept or reason, layout, geometry)


def _refused(name: str, shape: tuple[int, ...], role: Role, owner: Any) -> str:
    """Why a weight whose leaf claims heads is not asked for them; empty if it is."""
    if not role.attention:
        return f"declined by role: {role.reason}"
    if ".lora_" in name:
        return "declined: an adapter's own matrix; its rank has no heads"
    if len(shape) != 2:
        return f"declined: {len(shape)}-D, heads are rows of a matrix"
    if any(isinstance(part, nn.MultiheadAttention) for part in owner.children()):
        return "declined: it feeds an attention module of its own, which has the heads"
    return ""


def heads_axis(module: Any) -> int:
    """The axis of a weight's outputs: transformers' Conv1D stores ``[in, out]``."""
    return 1 if type(module).__name__ == "Conv1D" and not isinstance(module, nn.Conv1d) else 0


def _not_muon(
    name: str, leaf: str, shape: tuple[int, ...], modules: Mapping[str, nn.Module]
) -> tuple[Kind, str] | None:
    module = modules.get(holder(name))
    if isinstance(module, nn.Embedding):
        return "embedding", "embedding: trained by AdamW"
    if leaf in _HEAD_LEAVES:
        return "head", "output head: trained by AdamW"
    if len(shape) < 2 or 1 in shape[-2:]:
        return "vector", "vector, or rows of one: nothing to orthogonalise, trained by AdamW"
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return "convolution", "convolution: trained by AdamW"
    return None


def _config_of(path: str, modules: Mapping[str, nn.Module]) -> Any:
    """The config of the owner, or of the nearest module above it that has one."""
    for parent in _upwards(path):
        with suppress(Exception):  # a property may raise anything
            config = getattr(modules.get(parent), "config", None)
            if config is not None:
                return config
    return None


def _upwards(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _layout(
    kind: Kind, geometry: HeadGeometry, split: SplitRule, axis: int, one_order: bool
) -> tuple[Layout | None, str]:
    """The layout the split rule makes of a geometry, and a reason where it makes none."""
    heads, width, _, finest = geometry
    if split.heads_per_block is None:
        return None, "the dialect keeps every weight whole"
    layout = Layout.heads(_ROLES[kind], heads, width)
    if kind == "fused_qkv":
        said = f"fused QKV of {heads} heads of {width} rows"
        if split.fused_qkv == "whole":
            return None, f"{said}: the dialect keeps it whole"
        if split.fused_qkv == "projections":
            if not one_order or len({segment.role for segment in finest.segments}) < 2:
                return None, f"{said}: which rows are Q, K and V is not known of this owner"
            return replace(finest, joined=True, axis=axis), ""
        layout = finest
    if kind == "mla_key_value_up" and split.mla_key_value == "apart":
        if len(finest.segments) < 2:
            return None, "declined: kv is to be cut into K and V, but their widths are not stated"
        layout = finest
    if kind == "query" and split.gated_query == "apart":
        layout = finest
    try:
        return replace(layout.per_block(split.heads_per_block), axis=axis), ""
    except LayoutError as error:
        return None, f"declined: {error}"
