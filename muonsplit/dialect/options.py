"""Options of a dialect on a command line: ``field=value``, with commas between."""

import re
from collections.abc import Mapping
from typing import Any

from muonsplit.dialect import fields
from muonsplit.dialect.arithmetic import Arithmetic
from muonsplit.dialect.coefficients import COEFFICIENTS
from muonsplit.dialect.rules import SplitRule
from muonsplit.errors import UsageError

_NUMBER = re.compile(r"[0-9]{1,30}(\.[0-9]{0,30})?(e[+-]?[0-9]{1,3})?")
_WHOLE = re.compile(r"[0-9]{1,5}")

_HINTS: Mapping[str, Any] = {**fields.hints(SplitRule), **fields.hints(Arithmetic)}


def parse(text: str) -> dict[str, Any]:
    """The fields that an option text sets; whether they may be so is theirs to say.

    Raises:
        UsageError: If there is no such field, the value cannot be read, or it is given twice.
    """
    items = [_item(item) for item in text.split(",")]
    asked = dict(items)
    if len(asked) < len(items):
        raise UsageError(f"{text!r} gives one option twice.", "Give each once.")
    return asked


def _item(item: str) -> tuple[str, Any]:
    name, equals, value = item.partition("=")
    if name not in _HINTS or not equals:
        raise UsageError(f"{item!r} is no option of a dialect.", f"Known: {', '.join(_HINTS)}.")
    try:
        return name, _read(name, _HINTS[name], value)
    except (ValueError, KeyError):
        said = fields.said(name, _HINTS[name])
        if name == "coefficients":
            said = " or ".join(COEFFICIENTS)
        shown = f"{item[:60]!r} is no option of a dialect: {name} cannot be {value[:40]!r}."
        raise UsageError(shown, f"Use {said}.") from None


def _read(name: str, hint: Any, text: str) -> Any:
    """A value as its type is written.

    Raises:
        ValueError: If it is written otherwise.
        KeyError: Likewise.
    """
    if name == "coefficients":
        return {c: c for c in COEFFICIENTS}[text]
    if options := fields.choices(hint):
        return {"none" if c is None else c: c for c in options}[text]
    if hint is bool:
        return {"true": True, "false": False}[text]
    if hint is float:
        return float(_matched(_NUMBER, text))
    if hint is int:
        return int(_matched(_WHOLE, text))
    if hint == tuple[int, ...]:
        return tuple(int(_matched(_WHOLE, part)) for part in text.split("+")) if text else ()
    return None if text == "none" else int(_matched(_WHOLE, text))


def _matched(pattern: re.Pattern[str], text: str) -> str:
    if not pattern.fullmatch(text):
        raise ValueError
    return text
