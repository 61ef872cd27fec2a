"""Fields of a rule or an arithmetic: what each may be, by its type."""

import math
from collections.abc import Callable
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from muonsplit.errors import UsageError

# Numbers that are neither negative nor infinite, and more than that.
_BELOW = {"beta": 1.0}
_POSITIVE = ("norm_factor", "extra_scale")
# As torch.optim.Muon does, so that a slip of a key is no endless iteration.
_MOST_STEPS = 99


@cache
def hints(kind: type) -> dict[str, Any]:
    """The fields of a dataclass and their types."""
    return get_type_hints(kind)


def choices(hint: Any) -> tuple[Any, ...]:
    """The values of a ``Literal``, or of a union with one; nothing for any other type."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    found = [(None,) if part is NoneType else choices(part) for part in get_args(hint)]
    return tuple(c for part in found for c in part) if all(found) else ()


def check(instance: Any) -> None:
    """Checks every field of a dataclass instance.

    Raises:
        UsageError: If a field cannot have its value.
    """
    for name, hint in hints(type(instance)).items():
        value = getattr(instance, name)
        if not _fits(name, value, hint):
            raise UsageError(f"{name} cannot be {value!r}.", f"Use {said(name, hint)}.")


def said(name: str, hint: Any) -> str:
    """What a field may be, in words."""
    if options := choices(hint):
        return " or ".join("none" if c is None else str(c) for c in options)
    bound = " below 1" if name in _BELOW else " above 0" if name in _POSITIVE else " from 0"
    return {
        bool: "true or false",
        int: f"a whole number from 0 to {_MOST_STEPS}",
        float: f"a finite number{bound}",
        str: "a name",
        tuple[int, ...]: "whole numbers from 0, written 1+3",
    }.get(hint, "a whole number from 1 to 99999, or none")


def _fits(name: str, value: Any, hint: Any) -> bool:
    if options := choices(hint):
        return any(type(value) is type(c) and value == c for c in options)
    tests: dict[Any, Callable[[], bool]] = {
        bool: lambda: isinstance(value, bool),
        int: lambda: _whole(value, 0) and value <= _MOST_STEPS,
        float: lambda: _number(name, value),
        str: lambda: isinstance(value, str),
        tuple[int, ...]: lambda: isinstance(value, tuple) and all(_whole(v, 0) for v in value),
    }
    return tests.get(hint, lambda: value is None or _whole(value, 1))()


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(name: str, value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return False
    return (value > 0 if name in _POSITIVE else value >= 0) and value < _BELOW.get(name, math.inf)
