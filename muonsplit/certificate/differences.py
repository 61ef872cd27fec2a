"""Where two JSON values differ, by JSON Pointer (RFC 6901)."""

import json
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple

_SHOWN = 80
_NOTHING = object()


class Difference(NamedTuple):
    """One place in which two values differ.

    Attributes:
        pointer: Where.
        one: The first value as JSON, shortened, or ``nothing``.
        other: The second.
    """

    pointer: str
    one: str
    other: str


def differences(one: Any, other: Any, pointer: str = "") -> Iterator[Difference]:
    """Every leaf in which two JSON values differ, and the first of lists of different lengths."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            inner = f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"
            yield from differences(one.get(key, _NOTHING), other.get(key, _NOTHING), inner)
    elif isinstance(one, list) and isinstance(other, list):
        pairs = zip_longest(one, other, fillvalue=_NOTHING)
        found = (differences(*pair, f"{pointer}/{i}") for i, pair in enumerate(pairs))
        every = chain.from_iterable(found)
        # After one item too many or too few, all that follow differ by their place only.
        yield from every if len(one) == len(other) else islice(every, 1)
    elif type(one) is not type(other) or one != other:
        yield Difference(pointer, _shown(one), _shown(other))


def _shown(value: Any) -> str:
    if value is _NOTHING:
        return "nothing"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
