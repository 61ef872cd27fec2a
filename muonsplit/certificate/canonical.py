"""The canonical form: equal values give equal text, and so equal digests."""

import hashlib
import json
import math
from typing import Any


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces; equal values give equal text."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest(value: Any) -> str:
    """SHA-256 of the canonical form."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def sayable(value: Any) -> Any:
    """A value as JSON can hold it.

    JSON has no infinity, and an update that does not move is infinitely far off: such numbers
    become words. A subject may say what is no text: that becomes question marks.
    """
    if isinstance(value, dict):
        return {sayable(key): sayable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [sayable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return value


def printable(text: str) -> str:
    """Text on one line in which nothing steers a terminal, for messages about a stranger's file."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
