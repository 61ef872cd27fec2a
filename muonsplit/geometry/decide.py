"""One weight: leaf, owner and shape to a decision, with its reason."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from muonsplit.dialect import SplitRule
from muonsplit.geometry.arbiter import Arbiter
from muonsplit.geometry.candidates import HeadGeometry, Readings, candidates
from muonsplit.geometry.confirm import Answer, confirm
from muonsplit.geometry.cut import ROLES, cut
from muonsplit.geometry.leaf import SPLITTABLE, Kind, Place, holder, kind_of, locate
from muonsplit.geometry.owner import Role, class_name, role_of
from muonsplit.layout import Layout

NOT_MUON: frozenset[Kind] = frozenset({"embedding", "head", "vector", "convolution"})

_HEAD_LEAVES = frozenset({"lm_head", "embed_out"})
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


class _Owner(NamedTuple):
    """What is known of a module that holds weights.

    Attributes:
        module: The module itself.
        name: Its class.
        role: Whether it may be asked for heads.
        config: Its own config, or that of the nearest module above it.
        stated: Equal for owners that state the same; None where that is not known.
        feeds_attention: Whether it holds an attention module of torch's own.
    """

    module: Any
    name: str
    role: Role
    config: Any
    stated: object | None
    feeds_attention: bool


class Decider:
    """Decides weights one after the other, and each question once.

    Args:
        modules: Every module of the model by path.
        split: What one block is.
        ask: The arbiter, if there is one.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        split: SplitRule,
        ask: Callable[[], Mapping[str, Layout | None]] | None,
    ) -> None:
        self._modules = modules
        self._split = split
        self._arbiter = Arbiter(ask)
        self._readings = Readings()
        self._owners: dict[str, _Owner] = {}
        self._answers: dict[object, Answer] = {}
        self._cuts: dict[object, tuple[Layout | None, str]] = {}

    def decide(self, name: str, parameter: Any) -> Decision:
        """The decision on one parameter."""
        place, shape = locate(name), logical_shape(parameter)
        owner = self._owners.get(place.owner) or self._known(place.owner)
        kind, reason, layout, found = self._decided(name, place, shape, owner)
        heads, width, source = found[:3] if found is not None else (None, None, "")
        return Decision(
            name, shape, owner.name, place.leaf, kind, layout, heads, width, source, reason
        )

    def _known(self, path: str) -> _Owner:
        module = self._modules.get(path)
        name = "" if module is None else class_name(module)
        config, role = self._config_of(path, module), role_of(name, path)
        owner = _Owner(module, name, role, config, None, False)
        if module is not None and role.attention:
            inner = any(isinstance(part, nn.MultiheadAttention) for part in module.children())
            stated = self._readings.key(module, config)
            owner = owner._replace(stated=stated, feeds_attention=inner)
        self._owners[path] = owner
        return owner

    def _config_of(self, path: str, module: Any) -> Any:
        """The config of the owner, or of the nearest module above it that has one."""
        with suppress(Exception):  # a property may raise anything
            config = getattr(module, "config", None)
            if config is not None:
                return config
        if not path:
            return None
        above = path.rpartition(".")[0]
        return (self._owners.get(above) or self._known(above)).config

    def _decided(
        self, name: str, place: Place, shape: tuple[int, ...], owner: _Owner
    ) -> tuple[Kind, str, Layout | None, HeadGeometry | None]:
        module = self._modules.get(holder(name))
        if unmuon := _not_muon(module, place.leaf, shape):
            return *unmuon, None, None
        kind, why = _asked(name, place.leaf, shape, owner)
        if why:
            return kind, why, None, None
        axis = heads_axis(module)
        answer = self._answer(kind, place.leaf, shape[axis], owner)
        geometry, reason = answer.geometry, answer.reason
        if answer.open and (settled := self._arbiter.geometry(name, ROLES[kind])) is not None:
            geometry, reason = settled, f"arbiter: {settled.heads} × {settled.width}; {reason}"
        if geometry is None:
            return kind, reason, None, None
        layout, kept = self._cut(kind, geometry, axis, answer.one_order)
        return kind, kept or reason, layout, geometry

    def _answer(self, kind: Kind, leaf: str, rows: int, owner: _Owner) -> Answer:
        question = (owner.stated, kind, leaf, rows)
        answer = self._answers.get(question) if owner.stated is not None else None
        if answer is None:
            found = candidates(kind, owner.module, owner.config, leaf, self._readings)
            answer = confirm(rows, found)
            self._answers[question] = answer
        return answer

    def _cut(
        self, kind: Kind, geometry: HeadGeometry, axis: int, one_order: bool
    ) -> tuple[Layout | None, str]:
        question = (kind, geometry, axis, one_order)
        found = self._cuts.get(question)
        if found is None:
            found = self._cuts[question] = cut(kind, geometry, self._split, axis, one_order)
        return found


def logical_shape(parameter: Any) -> tuple[int, ...]:
    """The shape of the whole weight: ``ds_shape`` under zero.Init, else ``shape``."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def heads_axis(module: Any) -> int:
    """The axis of a weight's outputs: transformers' Conv1D stores ``[in, out]``."""
    return 1 if any(cls.__name__ == "Conv1D" for cls in type(module).__mro__) else 0


def _asked(name: str, leaf: str, shape: tuple[int, ...], owner: _Owner) -> tuple[Kind, str]:
    """The kind of a weight, and why it is not asked for heads; empty if it is."""
    kind, role = kind_of(leaf), owner.role
    if ".lora_" in name:
        return "other", "an adapter's own matrix: its rank has no heads"
    if kind == "other" or (kind in _NEVER and not role.attention):
        unknown = "not a leaf known to hold heads" if role.attention else "not attention"
        return "other", f"{unknown}: {owner.name}.{leaf}"
    if kind in _NEVER:
        return kind, _NEVER[kind]
    assert kind in SPLITTABLE
    if not role.attention:
        return "indexer" if role.refused else kind, f"declined by role: {role.reason}"
    if len(shape) != 2:
        return kind, f"declined: {len(shape)}-D, heads are rows of a matrix"
    if owner.feeds_attention:
        return kind, "declined: it feeds an attention module of its own, which has the heads"
    return kind, ""


def _not_muon(module: Any, leaf: str, shape: tuple[int, ...]) -> tuple[Kind, str] | None:
    if isinstance(module, nn.Embedding):
        return "embedding", "embedding: trained by AdamW"
    if leaf in _HEAD_LEAVES:
        return "head", "output head: trained by AdamW"
    if len(shape) < 2 or 1 in shape[-2:]:
        return "vector", "vector, or rows of one: nothing to orthogonalise, trained by AdamW"
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return "convolution", "convolution: trained by AdamW"
    return None
