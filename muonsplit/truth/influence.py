"""Which lines of each weight influence what enters one projection, by autograd.

Legend: N columns that are probed, T positions, L lines of a weight.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muonsplit.truth.graph import Graph
from muonsplit.truth.record import Entry, Record
from muonsplit.truth.support import Reach

# Columns whose backward passes share one batch; bounds the memory, not the answer.
_BATCH = 64


@dataclass(frozen=True, slots=True)
class Influence:
    """What feeds one projection, and how.

    Attributes:
        columns: How many columns enter it.
        held: As in :class:`Graph`.
        reaches: The weights that have a gradient path to it.
    """

    columns: int
    held: int
    reaches: dict[str, Reach]


@dataclass(slots=True)
class _Sizes:
    """Largest influences of the lines of one weight, gathered batch by batch.

    Attributes:
        probe: Where the gradient is taken: at the output that the weight makes, else at itself.
        axis: The axis the lines lie on.
        columns: Per batch, on each column that enters: ``[N, L]``.
        past: From each position: ``[T, L]``; T is one for a gradient at the weight itself.
    """

    probe: Tensor
    axis: int
    columns: list[Tensor]
    past: Tensor

    def add(self, jacobian: Tensor) -> None:
        """Takes in the gradients of some columns, ``[N, *probe.shape]``."""
        size = jacobian.abs().flatten(1, -2)
        if self.probe.is_leaf:
            size = size.amax(1, keepdim=True) if self.axis else size.amax(2).unsqueeze(1)
        self.columns.append(size.amax(1))
        self.past = torch.maximum(self.past, size.amax(0))

    def reach(self, floor: float) -> Reach:
        """What is above the floor, relative to the largest."""
        size = torch.cat(self.columns)
        if not size.max().isfinite():
            raise ArithmeticError("a gradient is not finite")
        digits = (size > floor * size.max()).mT.flip(1).to(torch.uint8) + ord("0")
        supports = tuple(int(bytes(line), 2) for line in digits.tolist())
        remembered = (self.past > floor * self.past.amax(0)).sum(0)
        return Reach(self.axis, supports, tuple((2 * remembered > remembered.max()).tolist()))


def influence(entry: Entry, record: Record, weights: Mapping[str, Tensor]) -> Influence:
    """Differentiates every column that enters a projection, at the last position.

    The last position sees all others in causal attention, and as much as any in the rest.

    Args:
        entry: What enters.
        record: Of the forward pass.
        weights: Matrices (or stacks of them) by name.

    Raises:
        RuntimeError: If autograd has no derivative for what was computed.
        ArithmeticError: If a gradient is not finite.
    """
    graph = Graph.behind([entry.value])
    columns = columns_of(entry)
    found = list(_probes(graph, record, weights))
    if not found or not entry.value.numel():
        return Influence(columns, graph.held, {})
    last = entry.value.movedim(entry.columns, tuple(range(-len(entry.columns), 0)))
    sizes = [each for _, each in found]
    for jacobians in _jacobians(last.reshape(-1, columns)[-1], [each.probe for each in sizes]):
        for each, jacobian in zip(sizes, jacobians, strict=True):
            each.add(jacobian)
    # First-order rounding: each operation adds at most n·ε of the largest influence, n the terms
    # of its sums, and none sums more terms than the entering tensor has elements.
    floor = torch.finfo(torch.float64).eps * len(graph.nodes) * entry.value.numel()
    reaches: dict[str, Reach] = {}
    for name in dict.fromkeys(name for name, _ in found):
        reaches[name] = _chosen([each.reach(floor) for other, each in found if other == name])
    return Influence(columns, graph.held, reaches)


def columns_of(entry: Entry) -> int:
    """How many columns enter a projection: as many backward passes ask for all of them."""
    return math.prod(entry.value.shape[dim] for dim in entry.columns)


def work(entry: Entry, record: Record, weights: Mapping[str, Tensor]) -> int:
    """About how many elements of gradients :func:`influence` makes: columns × nodes × elements.

    Only nodes from which a weight that is asked for can be reached are passed through.
    """
    graph = Graph.behind([entry.value])
    leaves = {id(weight) for weight in weights.values()}
    outputs = {p.output.grad_fn for name in weights for p in record.products.get(name, [])}
    users: dict[Any, list[Any]] = {}
    for node in graph.nodes:
        for other, _ in node.next_functions:
            users.setdefault(other, []).append(node)
    pending = [n for n in graph.nodes if n in outputs or id(getattr(n, "variable", None)) in leaves]
    passed = set(pending)
    while pending:
        found = set(users.get(pending.pop(), ())) - passed
        passed |= found
        pending.extend(found)
    return columns_of(entry) * entry.value.numel() * len(passed)


def _probes(
    graph: Graph, record: Record, weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, _Sizes]]:
    zero = torch.zeros((), dtype=torch.float64)
    for name, weight in weights.items():
        products = record.products.get(name, [])
        here = [p for p in products if p.output.grad_fn in graph.nodes]
        if here:
            yield from ((name, _Sizes(p.output, p.axis, [], zero)) for p in here)
        elif id(weight) in graph.leaves:
            for axis in (0, 1) if weight.ndim == 2 else (0,):
                yield name, _Sizes(weight, axis, [], zero)


def _chosen(reaches: Sequence[Reach]) -> Reach:
    """One for both axes of a weight, or for all places where it is used."""
    if len({reach.axis for reach in reaches}) > 1:
        # A weight's input lines reach all that its output lines reach together.
        return min(reaches, key=lambda reach: sum(s.bit_count() for s in reach.supports))
    return functools.reduce(Reach.union, reaches)


def _jacobians(present: Tensor, inputs: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """For some columns at a time, the gradient of each input: ``[N, *input.shape]``."""

    def backward(columns: Tensor, batched: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            present,
            inputs,
            columns,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
            is_grads_batched=batched,
        )

    for columns in torch.eye(len(present), dtype=present.dtype).split(_BATCH):
        try:
            found = backward(columns, True)
        except RuntimeError:  # not every backward pass can be batched
            each = [backward(column, False) for column in columns]
            found = tuple(torch.stack(pieces) for pieces in zip(*each, strict=True))
        yield found
