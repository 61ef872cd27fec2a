"""Options of a dialect on a command line: ``field=value``, with commas between."""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from muonsplit.dialect.arithmetic import Arithmetic
from muonsplit.dialect.coefficients import COEFFICIENTS
from muonsplit.dialect.rules import SplitRule
from muonsplit.errors import UsageError

_NUMBER = re.compile(r"\d+(\.\d*)?(e[+-]?\d{1,3})?")


def _whole(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text):
        raise ValueError
    return int(text)


def _heads(text: str) -> int:
    if (heads := _whole(text)) < 1:
        raise ValueError
    return heads


def _number(text: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise ValueError
    return float(text)


def _steps(text: str) -> tuple[int, ...]:
    return tuple(_whole(part) for part in text.split("+")) if text else ()


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        return choices[choices.index(text)]

    return read


class _Field:
    """How a field is read, and how that is said."""

    def __init__(self, read: Callable[[str], Any], said: str) -> None:
        self.read, self.said = read, said


def _field(name: str, hint: Any) -> _Field:
    by_type = {
        bool: _Field(lambda text: {"true": True, "false": False}[text], "true|false"),
        float: _Field(_number, "NUMBER"),
        int: _Field(_whole, "N"),
    }
    special = {
        "heads_per_block": _Field(_heads, "N"),
        "restarts": _Field(_steps, "STEP+STEP"),
        "coefficients": _Field(_one_of(tuple(COEFFICIENTS)), "|".join(COEFFICIENTS)),
    }
    if name in special:
        return special[name]
    if hint in by_type:
        return by_type[hint]
    choices = tuple(
        choice
        for part in ([hint] if get_origin(hint) is Literal else get_args(hint))
        for choice in (get_args(part) or ("none",))
    )
    read = _one_of(choices)
    return _Field(
        lambda text: None if read(text) == "none" and name == "pre_cast" else text,
        "|".join(choices),
    )


_FIELDS: Mapping[str, _Field] = {
    f.name: _field(f.name, get_type_hints(kind)[f.name])
    for kind in (SplitRule, Arithmetic)
    for f in fields(kind)
}


def parse(text: str) -> dict[str, Any]:
    """The fields that an option text sets.

    Raises:
        UsageError: If there is no such field, it cannot have such a value, or it is given twice.
    """
    items = [_item(item) for item in text.split(",")]
    asked = dict(items)
    if len(asked) < len(items):
        raise UsageError(f"{text!r} gives one option twice.", "Give each once.")
    return asked


def _item(item: str) -> tuple[str, Any]:
    name, _, value = item.partition("=")
    if name not in _FIELDS:
        raise UsageError(f"{item!r} is no option of a dialect.", f"Known: {', '.join(_FIELDS)}.")
    try:
        return name, _FIELDS[name].read(value)
    except (ValueError, KeyError):
        raise UsageError(
            f"{item!r} is no option of a dialect: {name} cannot be {value!r}.",
            f"Use {name}={_FIELDS[name].said}.",
        ) from None
