"""What a meta tensor cannot do, done with shapes alone: it has no values to decide by."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def stand_in(name: str, args: tuple[Any, ...], error: Exception) -> Any:
    """A value of the same kind as an operation on meta tensors that failed would have given.

    Args:
        name: The operation, as torch names it.
        args: Its arguments.
        error: What it raised.

    Raises:
        Exception: The error, if the operation is none that needs values.
    """
    found = _STAND_INS.get(name)
    if found is None:
        raise error
    return found(*args)


def _grouped(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    """Every token through one of the experts ``b`` [experts, in, out]."""
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def _indices(condition: Tensor, *rest: Any) -> Tensor:
    """One index: enough to go on with, whatever it is."""
    return torch.zeros(1, condition.ndim, dtype=torch.long, device="meta")


def _where(condition: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _indices(condition).unbind(1)


def _listed(tensor: Tensor) -> Any:
    size, *inner = tensor.shape or (1,)
    value = _listed(tensor[0]) if inner else 0
    return [value] * size if tensor.ndim else 0


def _flat(tensor: Tensor, *rest: Any) -> Tensor:
    return tensor.flatten()


def _bins(tensor: Tensor, bins: int = 1, *rest: Any) -> Tensor:
    return torch.zeros(bins, dtype=torch.long, device="meta")


def _no(*args: Any) -> bool:
    return False


def _nought(tensor: Tensor) -> int:
    return 0


def _nil(tensor: Tensor) -> float:
    return 0.0


_STAND_INS: dict[str, Callable[..., Any]] = {
    "__bool__": _no,
    "__contains__": _no,
    "equal": _no,
    "allclose": _no,
    "item": _nought,
    "__int__": _nought,
    "__index__": _nought,
    "__float__": _nil,
    "tolist": _listed,
    "_grouped_mm": _grouped,
    "grouped_mm": _grouped,
    "nonzero": _indices,
    "argwhere": _indices,
    "where": _where,
    "unique_consecutive": _flat,
    "unique": _flat,
    "masked_select": _flat,
    "bincount": _bins,
    "histc": _bins,
}
