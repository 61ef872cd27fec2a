"""A peer's Muon on the weights that are named, and torch's AdamW beside it on all others."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from muonsplit.layout import Layout
from muonsplit.subjects.protocol import Hyper


class Weight(NamedTuple):
    """A tensor that a Muon is to train, and how it is to be cut; None for whole."""

    parameter: nn.Parameter
    layout: Layout | None


Make = Callable[[list[Weight]], torch.optim.Optimizer]
# What a Muon is given in place of a tensor: views of it, or None for the tensor itself.
Parts = Callable[[Tensor], Sequence[Tensor] | None]


def by_expert(weight: Tensor) -> Sequence[Tensor] | None:
    """A stack of experts matrix by matrix, for a Muon that takes matrices only."""
    return weight.unbind() if weight.ndim == 3 else None


def by_layout(weights: Iterable[Weight]) -> Iterator[tuple[Layout | None, list[nn.Parameter]]]:
    """The weights of each layout together, for a Muon that is told by param group."""
    groups: dict[Layout | None, list[nn.Parameter]] = {}
    for weight in weights:
        groups.setdefault(weight.layout, []).append(weight.parameter)
    yield from groups.items()


class MuonAndAdamW:
    """Both, stepped and saved as one.

    Args:
        model: The model to train.
        layouts: How each weight that Muon trains is to be cut; None for whole.
        hyper: Learning rate and weight decay of both.
        make: Builds the peer's Muon for the weights.
        parts: What the Muon is given in place of a weight; by default the weight itself.
        told: The keys of its param groups that say how to cut.

    Attributes:
        optimizers: The peer's, and AdamW if there is anything for it.

    Raises:
        LayoutError: If a layout does not cover its weight.
    """

    def __init__(
        self,
        model: nn.Module,
        layouts: Mapping[str, Layout | None],
        hyper: Hyper,
        make: Make,
        parts: Parts = lambda weight: None,
        told: Sequence[str] = (),
    ) -> None:
        named = dict(model.named_parameters())
        others = [p for name, p in named.items() if name not in layouts]
        self._parts, self._told = parts, told
        self._stood_in: dict[nn.Parameter, list[nn.Parameter]] = {}
        weights: list[Weight] = []
        for name, layout in layouts.items():
            weights += [Weight(held, layout) for held in self._held(named[name])]
            if layout is not None:
                # Refuses a weight that it does not cover; by its whole shape, if it is sharded.
                layout.batches(torch.empty(named[name].shape, device="meta"))
        self._numbers = {p: i for i, p in enumerate([*(w.parameter for w in weights), *others])}
        self.optimizers = [make(weights)]
        if others:
            decay = hyper.weight_decay
            self.optimizers.append(torch.optim.AdamW(others, hyper.lr, weight_decay=decay))

    def _held(self, weight: nn.Parameter) -> list[nn.Parameter]:
        parts = self._parts(weight.detach())
        if parts is None:
            return [weight]
        self._stood_in[weight] = [nn.Parameter(part) for part in parts]
        return self._stood_in[weight]

    def step(self) -> None:
        """Steps both."""
        for weight, held in self._stood_in.items():
            # Row by row, as an engine's are: a collective would take the numbers as they lie.
            gradient = None if weight.grad is None else self._parts(weight.grad.contiguous())
            for part, piece in zip(held, gradient or (None,) * len(held), strict=True):
                part.grad = piece
        for optimizer in self.optimizers:
            optimizer.step()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Copies of the param groups of both, with the model's own parameters."""
        owners = {part: weight for weight, held in self._stood_in.items() for part in held}
        return [
            {**group, "params": list(dict.fromkeys(owners.get(p, p) for p in group["params"]))}
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """What both keep for each of the model's parameters, parts put together again."""
        found = {p: kept for one in self.optimizers for p, kept in one.state.items()}
        for weight, held in self._stood_in.items():
            if all(part in found for part in held):
                states = [found.pop(part) for part in held]
                found[weight] = {
                    key: _joined([state[key] for state in states], weight) for key in states[0]
                }
        return found

    def state_dict(self) -> dict[str, Any]:
        """The state of both, by the order in which the weights are named."""
        return {"optimizers": [self._saved(optimizer) for optimizer in self.optimizers]}

    def _saved(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        saved, order = optimizer.state_dict(), self._order(optimizer)
        return {**saved, "state": {order[i]: kept for i, kept in saved["state"].items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what :meth:`state_dict` gave, but for how weights are to be cut.

        A param group would bring its own cut along, and undo what this run was told.

        Args:
            state: What it gave, of the same model.
        """
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            kept, order = saved["state"], self._order(optimizer)
            groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
            loaded = {
                **saved,
                "state": {i: kept[number] for i, number in enumerate(order) if number in kept},
                "param_groups": [{**saved["param_groups"][0], **self._own(g)} for g in groups],
            }
            optimizer.load_state_dict(loaded)

    def _order(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """The number of each of its parameters, group after group."""
        return [self._numbers[p] for group in optimizer.param_groups for p in group["params"]]

    def _own(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"params": group["params"], **{key: group.get(key) for key in self._told}}


def _joined(values: list[Any], weight: Tensor) -> Any:
    """What parts keep, in the shape of their weight; the first part's, if it has no such shape."""
    local = [getattr(value, "to_local", lambda value=value: value)() for value in values]
    if all(isinstance(value, Tensor) for value in local):
        stacked = torch.stack(local)
        if stacked.numel() == weight.numel():
            return stacked.view(weight.shape)
    return local[0]
