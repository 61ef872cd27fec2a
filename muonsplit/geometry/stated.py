"""What an owner and its config state: every head count and head width, by what its name says.

Attributes are read by the words of their names, so that `swa_num_key_value_heads` and
`decoder_attention_heads` are found where a list of names would miss them. A plausible number that
is none of this weight's does no harm: the shape has to confirm it.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

# Beyond these a width or a count is nonsense, whatever the rows are.
_LARGEST = 1 << 20
_MOST_HEADS = 1 << 14
_HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "all_head_size")
_COUNT = re.compile(r"(.*_)?(n|num|heads?|nheads?)(_.*)?_?heads?|heads?|n_heads?|nheads?")
_WIDTH = re.compile(
    r"(.*_)?(head_?(dim|size|width)|dim_head|dim_per_head|d_kv|d_head|kv_channels)s?"
)
# Parts that stand beside attention and count otherwise.
_BESIDE = frozenset({"index", "indexer", "mamba", "expert", "experts", "hash", "ngram", "lm"})


class Stated(NamedTuple):
    """A positive number that an owner or a config states.

    Attributes:
        value: The number.
        name: Where it stands, as ``owner.num_heads`` or ``config.head_dim``.
        words: The words of its name.
    """

    value: int
    name: str
    words: frozenset[str]


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

    def total(self, names: Iterable[str]) -> int | None:
        """The sum of several fields, if all can be read."""
        values = [self.get(name) for name in names]
        return None if None in values else sum(v for v in values if v is not None)

    def counts(self) -> list[Stated]:
        """Every head count."""
        return [count for count in self._matching(_COUNT) if count.value <= _MOST_HEADS]

    def widths(self) -> list[Stated]:
        """Every head width."""
        return list(self._matching(_WIDTH))

    def hidden(self) -> list[Stated]:
        """The width of the stream, under whichever name."""
        return [
            Stated(value, f"{self.label}.{name}", frozenset())
            for name in _HIDDEN
            if (value := self.get(name)) is not None
        ]

    def _matching(self, pattern: re.Pattern[str]) -> Iterator[Stated]:
        for name in self._names():
            words = frozenset(name.split("_"))
            if pattern.fullmatch(name) and not words & _BESIDE:
                value = self.get(name)
                if value is not None:
                    yield Stated(value, f"{self.label}.{name}", words)

    def _names(self) -> list[str]:
        names: dict[str, None] = {}
        for attribute in ("__dict__", "attribute_map"):
            with suppress(Exception):  # a config may raise anything, or be none
                for name in getattr(self.target, attribute):
                    if isinstance(name, str) and not name.startswith("_"):
                        names[name] = None
        return list(names)
