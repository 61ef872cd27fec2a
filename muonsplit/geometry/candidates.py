"""Kind → candidates: every (heads, width, source) that is plausible. Collected, not chosen.

Counts and widths come from the owner's attributes and from the owner's own config (or its
per-layer view), and every count is paired with every width: most attention modules keep no head
count. A composite model's text config is never used for a module that has a config of its own.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from muonsplit.geometry.leaf import Kind

# Beyond this a count or width is nonsense, whatever the rows are.
_LARGEST = 1 << 20

_QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_q_heads")
_KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
_COUNTS: dict[Kind, tuple[str, ...]] = {
    "query": _QUERY_COUNTS,
    "key": ("num_k_heads", *_KV_COUNTS),
    "value": ("num_v_heads", *_KV_COUNTS),
    "mla_query_up": _QUERY_COUNTS,
    "mla_key_value_up": _QUERY_COUNTS,
}
_ROPED = ("qk_nope_head_dim", "qk_rope_head_dim")
_HEAD_DIM = (("head_dim",), ("head_size",))
# A width is one field or the sum of several.
_WIDTHS: dict[Kind, tuple[tuple[str, ...], ...]] = {
    "query": (_ROPED, ("qk_head_dim",), ("q_head_dim",), ("head_k_dim",), *_HEAD_DIM),
    "key": (("head_k_dim",), *_HEAD_DIM),
    "value": (("head_v_dim",), ("v_head_dim",), *_HEAD_DIM),
    "mla_query_up": (_ROPED, ("qk_head_dim",), ("q_head_dim",), *_HEAD_DIM),
    "mla_key_value_up": (("qk_nope_head_dim", "v_head_dim"),),
}


class HeadGeometry(NamedTuple):
    """A plausible cut of a weight: ``heads`` blocks of ``width`` rows, and who says so."""

    heads: int
    width: int
    source: str

    def __str__(self) -> str:
        return f"{self.heads} × {self.width} = {self.heads * self.width} ({self.source})"


class Reader(NamedTuple):
    """Reads positive integers off a module or config that may hold, or raise, anything."""

    label: str
    target: Any

    def get(self, name: str) -> int | None:
        """The attribute, if it is an int from 1 to 2²⁰ and no bool."""
        # transformers' per-layer configs raise RuntimeError for a field that differs by layer.
        try:
            value = getattr(self.target, name, None)
        except Exception:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST:
            return value
        return None

    def total(self, names: tuple[str, ...]) -> int | None:
        """The sum of several fields, if all can be read."""
        values = [self.get(name) for name in names]
        return None if None in values else sum(v for v in values if v is not None)

    def say(self, names: tuple[str, ...]) -> str:
        """How a sum of fields is written."""
        joined = " + ".join(f"{self.label}.{name}" for name in names)
        return f"({joined})" if len(names) > 1 else joined


def readers(owner: Any, config: Any) -> list[Reader]:
    """The owner, and its config or the view its layer has of it."""
    with suppress(Exception):  # most configs have no per-layer view; reading one may raise anything
        config = config.per_layer_config[owner.layer_idx]
    return [Reader("owner", owner), Reader("config", config)]


def candidates(kind: Kind, owner: Any, config: Any) -> list[HeadGeometry]:
    """Every geometry that the owner and its config make plausible for a kind of weight.

    Args:
        kind: What the leaf claims to be; kinds without heads have no candidates.
        owner: The module that holds the leaf.
        config: The owner's own config, or the nearest one above it; may be None.
    """
    sources = readers(owner, config)
    if kind == "fused_qkv":
        return list(_fused(sources))
    counts = list(_counts(kind, sources))
    return [
        HeadGeometry(heads, width, f"{count_name} × {width_name}")
        for heads, count_name in counts
        for width, width_name in _widths(kind, sources)
    ]


def _counts(kind: Kind, sources: list[Reader]) -> Iterator[tuple[int, str]]:
    named = [
        (value, f"{reader.label}.{name}")
        for reader in sources
        for name in _COUNTS.get(kind, ())
        if (value := reader.get(name)) is not None
    ]
    if named or kind not in ("key", "value"):
        yield from named
        return
    queries = list(_counts("query", sources))
    groups = sources[0].get("num_key_value_groups")
    for heads, name in queries:
        if groups is None:
            yield heads, name
        elif heads % groups == 0:
            yield heads // groups, f"{name} / owner.num_key_value_groups"


def _widths(kind: Kind, sources: list[Reader]) -> Iterator[tuple[int, str]]:
    for reader in sources:
        for names in _WIDTHS.get(kind, ()):
            if (width := reader.total(names)) is not None:
                yield width, reader.say(names)
    stated = any(s.total(names) is not None for s in sources for names in _HEAD_DIM)
    if kind in ("query", "key", "value") and not stated:
        yield from _derived_width(sources)


def _derived_width(sources: list[Reader]) -> Iterator[tuple[int, str]]:
    """The hidden size over the heads, where no head width is stated and the division is exact."""
    for reader in sources:
        hidden = reader.get("hidden_size")
        for heads, name in _counts("query", [reader]):
            if hidden is not None and hidden % heads == 0:
                yield hidden // heads, f"{reader.label}.hidden_size / {name}"


def _fused(sources: list[Reader]) -> Iterator[HeadGeometry]:
    """Query, key and value heads of one width: whatever their order, each is ``width`` rows."""
    for queries, name in _counts("query", sources):
        for kv, kv_name in _counts("key", sources):
            for width, width_name in _widths("query", sources):
                source = f"({name} + 2·{kv_name}) × {width_name}"
                yield HeadGeometry(queries + 2 * kv, width, source)
