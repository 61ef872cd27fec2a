"""What every tensor of a forward pass carries, and one operation as its handlers see it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from muonsplit.truth.mixing import Mixings
from muonsplit.truth.rows import Rows, rows_of_weight

_ROWS = "_muonsplit_rows"


class LostError(Exception):
    """An operation that moves rows in a way that cannot be followed."""


class Call(NamedTuple):
    """One operation that has run.

    Attributes:
        func: What torch calls it by.
        args: Its arguments.
        kwargs: Its keyword arguments.
        out: What it gave.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    def given(self, position: int, name: str, default: Any = None) -> Any:
        """An argument, however it was passed."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments."""
        return tensors_in((self.args, self.kwargs))


class Tape:
    """The rows that tensors carry.

    Args:
        weights: The parameters to follow, two dimensions or more.
        mixings: Where what is seen is written down.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], mixings: Mixings) -> None:
        self._names = {id(weight): name for name, weight in weights.items()}
        self._weights: dict[int, Rows] = {}
        self.mixings = mixings

    def rows(self, tensor: Any) -> Rows:
        """The rows a tensor carries and that still have something to tell."""
        if not isinstance(tensor, Tensor):
            return {}
        found: Rows | None = getattr(tensor, _ROWS, None)
        if found is None and id(tensor) in self._names:
            found = self._weights.get(id(tensor))
            if found is None:
                found = rows_of_weight(self._names[id(tensor)], tensor)
                self._weights[id(tensor)] = found
        return {o: maps for o, maps in (found or {}).items() if not self.mixings.settled(o)}

    def carry(self, tensor: Any, rows: Rows) -> None:
        """Makes a tensor carry rows; a weight carries its own."""
        if isinstance(tensor, Tensor) and id(tensor) not in self._names:
            setattr(tensor, _ROWS, rows)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []
