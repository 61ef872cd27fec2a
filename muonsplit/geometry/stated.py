"""What an owner and its config state: every head count and head width, by what its name says.

Attributes are read by the words of their names, so that `swa_num_key_value_heads` and
`decoder_attention_heads` are found where a list of names would miss them. A plausible number that
is none of this weight's does no harm: the shape has to confirm it.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, NamedTuple

# Beyond these a width or a count is nonsense, whatever the rows are.
_LARGEST = 1 << 20
_MOST_HEADS = 1 << 14
# No config states as many head counts; one that does is not worth the pairs it would make.
_MOST_STATED = 32
_LONGEST_NAME = 64
_HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "all_head_size")
# Asked for by name too: a property or a class attribute stands in no instance's dictionary.
_USUAL = (
    *("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads"),
    *("num_kv_heads", "n_kv_heads", "encoder_attention_heads", "decoder_attention_heads"),
    *("head_dim", "head_size", "attention_head_size", "v_head_dim", "qk_head_dim", "d_kv"),
)
_WIDTHS = frozenset({"d_kv", "d_head", "dim_head", "dim_per_head", "kv_channels"})
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


class Reader:
    """Reads positive integers off a module or config that may hold, or raise, anything.

    Args:
        label: What to call it: ``owner`` or ``config``.
        target: The module or config.
    """

    def __init__(self, label: str, target: Any) -> None:
        self.label = label
        self.target = target

    def get(self, name: str) -> int | None:
        """The attribute, if it is an int from 1 to 2²⁰; no bool, no subclass."""
        # transformers' per-layer configs raise RuntimeError for a field that differs by layer.
        try:
            value = getattr(self.target, name, None)
        except Exception:
            return None
        return value if type(value) is int and 0 < value <= _LARGEST else None

    def total(self, names: Iterable[str]) -> int | None:
        """The sum of several fields, if all can be read."""
        values = [self.get(name) for name in names]
        return None if None in values else sum(v for v in values if v is not None)

    @cached_property
    def counts(self) -> tuple[Stated, ...]:
        """Every head count."""
        found = (s for s in self._stated(_is_count) if s.value <= _MOST_HEADS)
        return tuple(islice(found, _MOST_STATED))

    @cached_property
    def widths(self) -> tuple[Stated, ...]:
        """Every head width."""
        return tuple(islice(self._stated(_is_width), _MOST_STATED))

    @cached_property
    def fingerprint(self) -> object | None:
        """Equal for two modules of which the same would be read; None where that is not known."""
        try:
            own = self.target.__dict__
            shared = [(name, getattr(self.target, name)) for name in _of_class(type(self.target))]
        except Exception:
            return None
        plain = [item for item in own.items() if type(item[1]) in (int, bool)]
        kept = [item for item in (*plain, *shared) if _matters(item[0])]
        if not all(type(value) in (int, bool, type(None)) for _, value in kept):
            return None
        return type(self.target), tuple(kept)

    @cached_property
    def hidden(self) -> tuple[Stated, ...]:
        """The width of the stream, under whichever name."""
        found = ((name, self.get(name)) for name in _HIDDEN)
        return tuple(
            Stated(value, f"{self.label}.{name}", frozenset())
            for name, value in found
            if value is not None
        )

    def _stated(self, wanted: Any) -> Iterator[Stated]:
        for name, words in self._words.items():
            if wanted(name, words) and (value := self.get(name)) is not None:
                yield Stated(value, f"{self.label}.{name}", words)

    @cached_property
    def _words(self) -> dict[str, frozenset[str]]:
        names: dict[Any, None] = dict.fromkeys(_USUAL)
        for attribute in ("__dict__", "attribute_map", "__slots__"):
            with suppress(Exception):  # a config may raise anything, or be none
                names |= dict.fromkeys(list(getattr(self.target, attribute)))
        return {
            name: frozenset(name.split("_"))
            for name in names
            if isinstance(name, str) and not name.startswith("_") and len(name) <= _LONGEST_NAME
        }


def _is_count(name: str, words: frozenset[str]) -> bool:
    """`num_attention_heads`, `n_head`, `n_head_kv`, `heads`; not `head_dim`."""
    if words & _BESIDE or words & {"dim", "size", "width"}:
        return False
    return bool(words & {"heads", "nheads", "nhead"}) or {"n", "head"} <= words


def _is_width(name: str, words: frozenset[str]) -> bool:
    """`head_dim`, `attention_head_size`, `d_kv`; not `num_heads`."""
    if words & _BESIDE or words & {"heads", "num", "n", "all"}:
        return False
    return name in _WIDTHS or ("head" in words and bool(words & {"dim", "size", "width"}))


@lru_cache(maxsize=1024)
def _matters(name: str) -> bool:
    """Whether a number by this name might be read; a layer's number is not."""
    return not name.startswith("layer_")


@lru_cache(maxsize=1024)
def _of_class(cls: type) -> tuple[str, ...]:
    """The usual names that a class has itself, as properties or attributes."""
    return tuple(name for name in (*_USUAL, *_HIDDEN) if hasattr(cls, name))
