"""Kind → candidates: every plausible geometry with its source. Collected, not chosen.

Counts and widths come from the owner's attributes and from the owner's own config (or its
per-layer view), and every count is paired with every width: most attention modules keep no head
count. A composite model's text config is never used for a module that has a config of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from muonsplit.geometry.fused import fused
from muonsplit.geometry.leaf import Kind
from muonsplit.geometry.stated import Reader, Stated
from muonsplit.layout import Layout, Segment

_KEY = frozenset({"key", "k", "kv", "keys"})
_VALUE = frozenset({"value", "v", "kv", "values"})
_PARTIAL = frozenset({"nope", "rope", "mqa"})
_NOPE, _ROPE, _V = "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"


class HeadGeometry(NamedTuple):
    """A plausible cut of a weight, and who says so.

    Attributes:
        heads: Number of heads.
        width: Rows of one.
        source: Who states count and width.
        parts: What the weight holds, ``groups`` times, every part of a head apart.
        groups: How often.
        gated: Whether each head's rows are followed by those of its output gate.
    """

    heads: int
    width: int
    source: str
    parts: tuple[Segment, ...]
    groups: int = 1
    gated: bool = False

    @property
    def layout(self) -> Layout:
        """The finest cut."""
        return Layout(self.parts, self.groups)

    def __str__(self) -> str:
        return f"{self.heads} × {self.width} = {self.heads * self.width} ({self.source})"


class Pair(NamedTuple):
    """A head count, a head width, and who states them."""

    heads: int
    width: int
    source: str


class Readings:
    """What owners and configs state, each read once for all the weights of a model."""

    def __init__(self) -> None:
        self._read: dict[int, Reader] = {}

    def of(self, owner: Any, config: Any) -> list[Reader]:
        """The owner, and its config or the view its layer has of it."""
        with suppress(Exception):  # most have no per-layer view; reading one may raise anything
            config = config.per_layer_config[owner.layer_idx]
        return [self._reader("owner", owner), self._reader("config", config)]

    def key(self, owner: Any, config: Any) -> object | None:
        """The same for owners of which the same can be read; None where that is not known."""
        module, view = self.of(owner, config)
        return None if module.fingerprint is None else (module.fingerprint, id(view))

    def _reader(self, label: str, target: Any) -> Reader:
        # The reader holds its target, so that no other object takes its identity.
        found = self._read.get(id(target))
        if found is None:
            found = self._read[id(target)] = Reader(label, target)
        return found


def candidates(
    kind: Kind, owner: Any, config: Any, leaf: str = "", readings: Readings | None = None
) -> list[HeadGeometry]:
    """Every geometry that the owner and its config make plausible for a kind of weight.

    Args:
        kind: What the leaf claims to be; kinds without heads have no candidates.
        owner: The module that holds the leaf.
        config: The owner's own config, or the nearest one above it; may be None.
        leaf: Name of the leaf; of fused ones it tells those that hold no queries.
        readings: What was read of other weights.
    """
    sources = (readings or Readings()).of(owner, config)
    if kind == "fused_qkv":
        return list(_fused(owner, leaf, sources))
    if kind in ("query", "mla_query_up"):
        plain = _plain("q", _queries(sources))
        return [*plain, *_gated(sources)] if kind == "query" else plain
    if kind == "key":
        return _plain("k", _keys(sources, _KEY))
    if kind == "value":
        return _plain("v", _keys(sources, _VALUE))
    return list(_key_values(sources)) if kind == "mla_key_value_up" else []


def _plain(role: str, pairs: Iterable[Pair]) -> list[HeadGeometry]:
    return [HeadGeometry(*pair, (Segment(role, pair.heads, pair.width),)) for pair in pairs]


def _queries(sources: Sequence[Reader]) -> list[Pair]:
    counts = _query_counts(sources)
    widths = [*_sums(sources, (_NOPE, _ROPE)), *_widths(sources, _VALUE)]
    # A derived width belongs to its count: an encoder's heads say nothing of a decoder's.
    derived = [(c, w) for c in counts for w in _derived(c, sources)]
    return _distinct([*_crossed(counts, widths), *derived])


def _keys(sources: Sequence[Reader], words: frozenset[str]) -> list[Pair]:
    """Keys or values: their own counts, or one for each group of queries, or as many."""
    own = [c for reader in sources for c in reader.counts if c.words & words]
    queries = _query_counts(sources)
    groups = sources[0].get("num_key_value_groups")
    grouped = [
        Stated(c.value // groups, f"{c.name} / owner.num_key_value_groups", c.words)
        for c in queries
        if groups is not None and c.value % groups == 0
    ]
    counts = [*own, *grouped, *queries]
    # A width named for values is none of the keys', and the other way round.
    others = (_VALUE - words) if words is _KEY else ((_KEY | {"qk", "q"}) - words)
    derived = [(c, w) for q in queries for w in _derived(q, sources) for c in (*own, *grouped, q)]
    return _distinct([*_crossed(counts, _widths(sources, others)), *derived])


def _gated(sources: Sequence[Reader]) -> Iterator[HeadGeometry]:
    """Queries with their output gate in one projection, head by head: ``[q | gate]``."""
    widths = [(w.value, w.value, f"2·{w.name}") for w in _widths(sources, _VALUE)]
    for reader in sources:
        query, gate = reader.total((_NOPE, _ROPE)), reader.get(_V)
        if query is not None and gate is not None:
            widths.append((query, gate, _said(reader, (_NOPE, _ROPE, _V))))
    for count in _query_counts(sources):
        for query, gate, name in widths:
            parts = (Segment("q", 1, query), Segment("gate", 1, gate))
            source = f"{count.name} × {name}"
            yield HeadGeometry(count.value, query + gate, source, parts, count.value, gated=True)


def _key_values(sources: Sequence[Reader]) -> Iterator[HeadGeometry]:
    """MLA's up-projection: each head's key without its rotary part, and its value."""
    for reader in sources:
        key, value = reader.get(_NOPE), reader.get(_V)
        if key is None or value is None:
            continue
        for count in _query_counts(sources):
            parts = (Segment("k", 1, key), Segment("v", 1, value))
            source = f"{count.name} × {_said(reader, (_NOPE, _V))}"
            yield HeadGeometry(count.value, key + value, source, parts, count.value)


def _fused(owner: Any, leaf: str, sources: Sequence[Reader]) -> Iterator[HeadGeometry]:
    """Queries, keys and values in one weight; or keys and values; or one for both."""
    delta = list(_delta(sources))
    yield from delta
    # Its head counts are none of an attention's beside it.
    keys = [] if delta else _keys(sources, _KEY)
    for query in [] if delta else _queries(sources):
        for key in keys:
            if key.width == query.width:
                source = f"{query.source}, {key.source}"
                for parts, groups in fused(owner, leaf, query.heads, key.heads, query.width):
                    blocks = groups * sum(part.heads for part in parts)
                    yield HeadGeometry(blocks, query.width, source, parts, groups)


def _delta(sources: Sequence[Reader]) -> Iterator[HeadGeometry]:
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
    yield HeadGeometry(keys, 2 * (key + ratio * value), source, grouped, keys)
    if key == value:
        turned = (Segment("q", keys, key), Segment("k", keys, key), Segment("v", values, value))
        yield HeadGeometry(2 * keys + values, key, source, turned)


def _query_counts(sources: Sequence[Reader]) -> list[Stated]:
    return [c for reader in sources for c in reader.counts if not c.words & (_KEY | _VALUE)]


def _widths(sources: Sequence[Reader], without: frozenset[str]) -> list[Stated]:
    """The stated widths but those whose name says they are something else's, or a part."""
    return [w for reader in sources for w in reader.widths if not w.words & (without | _PARTIAL)]


def _sums(sources: Sequence[Reader], names: tuple[str, ...]) -> Iterator[Stated]:
    for reader in sources:
        total = reader.total(names)
        if total is not None:
            yield Stated(total, _said(reader, names), frozenset())


def _said(reader: Reader, names: tuple[str, ...]) -> str:
    return "(" + " + ".join(f"{reader.label}.{name}" for name in names) + ")"


def _crossed(counts: Iterable[Stated], widths: Sequence[Stated]) -> Iterator[tuple[Stated, Stated]]:
    return ((count, width) for count in counts for width in widths)


def _derived(queries: Stated, sources: Sequence[Reader]) -> Iterator[Stated]:
    """The hidden size over the query heads, where no head width is stated and it divides."""
    if any(w.words == frozenset({"head", "dim"}) for reader in sources for w in reader.widths):
        return
    for reader in sources:
        for hidden in reader.hidden:
            if hidden.value % queries.value == 0:
                name = f"{hidden.name} / {queries.name}"
                yield Stated(hidden.value // queries.value, name, frozenset())


def _distinct(found: Iterable[tuple[Stated, Stated]]) -> list[Pair]:
    """A pair for each count and width, by the plainest way to it."""
    ways: dict[tuple[int, int], str] = {}
    for count, width in found:
        source = f"{count.name} × {width.name}"
        old = ways.get((count.value, width.value))
        if old is None or plainness(source) < plainness(old):
            ways[count.value, width.value] = source
    return [Pair(heads, width, source) for (heads, width), source in ways.items()]


def plainness(source: str) -> tuple[int, int, str]:
    """Orders sources: what is derived comes after what is stated, the config after the owner."""
    return source.count(" / "), source.count("config."), source
