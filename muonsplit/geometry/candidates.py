"""Kind → candidates: every plausible geometry with its source. Collected, not chosen.

Counts and widths come from the owner's attributes and from the owner's own config (or its
per-layer view), and every count is paired with every width: most attention modules keep no head
count. A composite model's text config is never used for a module that has a config of its own.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from muonsplit.geometry.fused import fused
from muonsplit.geometry.leaf import Kind
from muonsplit.geometry.stated import Reader, Stated
from muonsplit.layout import Layout, Segment

_KEY = frozenset({"key", "k", "kv", "keys"})
_VALUE = frozenset({"value", "v", "kv", "values"})
_NOPE, _ROPE = "qk_nope_head_dim", "qk_rope_head_dim"


class HeadGeometry(NamedTuple):
    """A plausible cut of a weight, and who says so.

    Attributes:
        heads: Number of heads.
        width: Rows of one.
        source: Who states count and width.
        layout: The finest cut: every part of every head apart.
    """

    heads: int
    width: int
    source: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.heads} × {self.width} = {self.heads * self.width} ({self.source})"


class Pair(NamedTuple):
    """A head count, a head width, and who states them."""

    heads: int
    width: int
    source: str


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
        return list(_fused(owner, sources))
    if kind == "query":
        return [*_plain("q", _queries(sources)), *_gated(sources)]
    if kind == "key":
        return _plain("k", _keys(sources, _KEY))
    if kind == "value":
        return _plain("v", _keys(sources, _VALUE))
    if kind == "mla_query_up":
        return _plain("q", _queries(sources))
    return list(_key_values(sources)) if kind == "mla_key_value_up" else []


def _plain(role: str, pairs: list[Pair]) -> list[HeadGeometry]:
    return [HeadGeometry(*pair, Layout.heads(role, pair.heads, pair.width)) for pair in pairs]


def _queries(sources: list[Reader]) -> list[Pair]:
    counts = _query_counts(sources)
    roped = list(_sums(sources, (_NOPE, _ROPE)))
    return [*_crossed(counts, [*roped, *_widths(sources, _VALUE)]), *_derived(counts, sources)]


def _keys(sources: list[Reader], words: frozenset[str]) -> list[Pair]:
    """Keys or values: their own counts, or one for each group of queries, or as many."""
    own = [c for c in _counts(sources) if c.words & words]
    queries = _query_counts(sources)
    groups = sources[0].get("num_key_value_groups")
    grouped = [
        Stated(c.value // groups, f"{c.name} / owner.num_key_value_groups", c.words)
        for c in queries
        if groups is not None and c.value % groups == 0
    ]
    counts = [*own, *grouped, *queries]
    # A width named for values is none of the keys', and the other way round.
    widths = _widths(sources, (_KEY | _VALUE | {"qk", "q"}) - words - ({"qk"} & _qk(words)))
    return [*_crossed(counts, widths), *_derived(counts, sources)]


def _qk(words: frozenset[str]) -> frozenset[str]:
    return frozenset({"qk"}) if words is _KEY else frozenset()


def _gated(sources: list[Reader]) -> Iterator[HeadGeometry]:
    """Queries with their output gate in one projection, head by head: ``[q | gate]``."""
    counts = _query_counts(sources)
    plain = [(w.value, w.value, f"2·{w.name}") for w in _widths(sources, _VALUE)]
    for reader in sources:
        query, value = reader.total((_NOPE, _ROPE)), reader.get("v_head_dim")
        if query is not None and value is not None:
            names = (_NOPE, _ROPE, "v_head_dim")
            plain.append((query, value, _said(reader, names)))
    for count in counts:
        for query, gate, name in plain:
            layout = Layout((Segment("q", 1, query), Segment("gate", 1, gate)), count.value)
            source = f"{count.name} × {name}"
            yield HeadGeometry(count.value, query + gate, source, layout)


def _key_values(sources: list[Reader]) -> Iterator[HeadGeometry]:
    """MLA's up-projection: each head's key without its rotary part, and its value."""
    for reader in sources:
        key, value = reader.get(_NOPE), reader.get("v_head_dim")
        if key is None or value is None:
            continue
        for count in _query_counts(sources):
            layout = Layout((Segment("k", 1, key), Segment("v", 1, value)), count.value)
            source = f"{count.name} × {_said(reader, (_NOPE, 'v_head_dim'))}"
            yield HeadGeometry(count.value, key + value, source, layout)


def _fused(owner: Any, sources: list[Reader]) -> Iterator[HeadGeometry]:
    """Queries, keys and values in one weight; or keys and values."""
    delta = list(_delta(sources))
    yield from delta
    # Its head counts are none of an attention's beside it.
    for query in [] if delta else _queries(sources):
        for key in _keys(sources, _KEY):
            if key.width == query.width:
                source = f"{query.source}, {key.source}"
                for layout in fused(owner, query.heads, key.heads, query.width):
                    blocks = layout.rows // query.width
                    yield HeadGeometry(blocks, query.width, source, layout)


def _delta(sources: list[Reader]) -> Iterator[HeadGeometry]:
    """GatedDeltaNet: grouped ``[q | k | v | z]`` per key head, or ``[q | k | v]`` in turn."""
    owner = sources[0]
    keys, values = owner.get("num_k_heads"), owner.get("num_v_heads")
    key, value = owner.get("head_k_dim"), owner.get("head_v_dim")
    if keys is None or values is None or key is None or value is None or values % keys:
        return
    source = "owner.num_k_heads × owner.head_k_dim, owner.num_v_heads × owner.head_v_dim"
    ratio = values // keys
    parts = (Segment("q", 1, key), Segment("k", 1, key))
    grouped = (*parts, Segment("v", ratio, value), Segment("z", ratio, value))
    yield HeadGeometry(keys, 2 * (key + ratio * value), source, Layout(grouped, keys))
    turned = Layout((Segment("q", keys, key), Segment("k", keys, key), Segment("v", values, value)))
    if key == value:
        yield HeadGeometry(turned.rows // key, key, source, turned)


def _counts(sources: list[Reader]) -> list[Stated]:
    return [count for reader in sources for count in reader.counts()]


def _query_counts(sources: list[Reader]) -> list[Stated]:
    return [c for c in _counts(sources) if not c.words & (_KEY | _VALUE)]


def _widths(sources: list[Reader], without: frozenset[str]) -> list[Stated]:
    """The stated widths but those whose name says they are something else's."""
    parts = frozenset({"nope", "rope", "mqa"})
    return [
        width
        for reader in sources
        for width in reader.widths()
        if not width.words & (without | parts)
    ]


def _sums(sources: list[Reader], names: tuple[str, ...]) -> Iterator[Stated]:
    for reader in sources:
        total = reader.total(names)
        if total is not None:
            yield Stated(total, _said(reader, names), frozenset())


def _said(reader: Reader, names: tuple[str, ...]) -> str:
    return "(" + " + ".join(f"{reader.label}.{name}" for name in names) + ")"


def _crossed(counts: list[Stated], widths: list[Stated]) -> list[Pair]:
    return [Pair(c.value, w.value, f"{c.name} × {w.name}") for c in counts for w in widths]


def _derived(counts: list[Stated], sources: list[Reader]) -> list[Pair]:
    """The hidden size over the heads, where no head width is stated and the division is exact.

    It belongs to the count it was derived from: an encoder's count says nothing of a decoder.
    """
    if any(
        width.words == frozenset({"head", "dim"}) for reader in sources for width in reader.widths()
    ):
        return []
    return [
        Pair(
            count.value, hidden.value // count.value, f"{count.name} × {hidden.name} / {count.name}"
        )
        for reader in sources
        for hidden in reader.hidden()
        for count in counts
        if hidden.value % count.value == 0
    ]
