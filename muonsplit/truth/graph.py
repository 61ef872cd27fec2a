"""The autograd graph behind a tensor, and the statistics of norms as constants in it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

_NORMS = {F.layer_norm, F.rms_norm, F.group_norm, F.normalize, torch.layer_norm, torch.rms_norm}
_STATISTICS: set[Callable[..., Any]] = {
    *(Tensor.mean, Tensor.var, Tensor.std, Tensor.norm),
    *(torch.mean, torch.var, torch.std, torch.norm),
    *(torch.var_mean, torch.std_mean, torch.linalg.vector_norm, torch.linalg.norm),
}


class Held(torch.autograd.Function):
    """A constant: the value passes, the gradient does not.

    Statistics over all heads couple every head to every other without saying where one ends.
    The node stays in the graph, so that an answer can say that it was so.
    """

    @staticmethod
    def forward(ctx: Any, statistic: Tensor, width: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Passes the value; ``width`` is how many channels it was taken over."""
        ctx.width = width
        return statistic.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[None, None]:
        """Stops the gradient."""
        return None, None

    @staticmethod
    def is_node(node: Any) -> bool:
        """Whether an autograd node is one of these."""
        return type(node).__name__ == "HeldBackward"


def hold(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a norm, or what a norm is written with, its statistics held constant.

    Args:
        func: A torch function.
        args: Its arguments.
        kwargs: The same, by name.

    Returns:
        What the function returns; None if it is neither.
    """
    x: Any = args[0] if args else kwargs.get("input")
    if func in _NORMS:
        # With constant statistics a norm is a factor a channel. Which channel reaches which is
        # all that is asked, so the factor may as well be one.
        return Held.apply(func(*args, **kwargs), x.shape[-1]) + (x - x.detach())
    if func in _STATISTICS and _broadcasts_back(func, x.ndim, args, kwargs):
        found = func(*args, **kwargs)
        if isinstance(found, tuple):
            return tuple(Held.apply(statistic, x.shape[-1]) for statistic in found)
        return Held.apply(found, x.shape[-1])
    return None


def _broadcasts_back(func: Any, ndim: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a reduction keeps its dimension, the last: it will scale what it was taken from.

    One that drops the dimension, or reduces over time, is content.
    """
    # A norm takes its order before the dimension.
    dim = kwargs.get("dim", args[1] if len(args) > 1 and "norm" not in func.__name__ else None)
    dims = tuple(dim) if isinstance(dim, list | tuple) else (dim,)
    keeps = kwargs.get("keepdim", bool(args) and args[-1] is True)
    return keeps and dims in ((-1,), (ndim - 1,))


@dataclass(frozen=True, slots=True)
class Graph:
    """What tensors were computed from, back to the projections before them.

    Attributes:
        nodes: Autograd nodes; those behind a held statistic are left out.
        leaves: Ids of the parameters at the ends.
        held: The most channels that a held statistic was taken over, or 0.
    """

    nodes: set[Any]
    leaves: set[int]
    held: int

    @classmethod
    def behind(cls, tensors: Iterable[Tensor]) -> "Graph":
        """Walks back from some tensors."""
        pending: list[Any] = [t.grad_fn for t in tensors if t.grad_fn is not None]
        nodes, leaves, held = set(pending), set[int](), 0
        while pending:
            node = pending.pop()
            if Held.is_node(node):
                held = max(held, node.width)
                continue
            if hasattr(node, "variable"):
                leaves.add(id(node.variable))
            found = {n for n, _ in node.next_functions if n is not None} - nodes
            nodes |= found
            pending.extend(found)
        return cls(nodes, leaves, held)
