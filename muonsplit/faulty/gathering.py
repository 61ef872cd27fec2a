"""Sound optimizers for several ranks, with hooks to break; they divide otherwise than PerHeadMuon.

Every rank gathers whole weights and gradients, steps all of them as a single process would, and
keeps its own part of the result. An engine is given whole weights, and reduces gradients itself.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.dialect import DEFAULT_DIALECT
from muonsplit.faulty.base import Broken, Layouts, Named
from muonsplit.layout import Layout
from muonsplit.muon import orthogonalize
from muonsplit.sharding import local_of
from muonsplit.subjects.distribute import like, whole
from muonsplit.subjects.protocol import Hyper

# The default dialect, except that heads which a shard cuts are put together.
GATHER = f"{DEFAULT_DIALECT}:cut_heads=gather"
# Likewise, except that they are refused.
RAISE = f"{DEFAULT_DIALECT}:cut_heads=raise"


def _settings(hyper: Hyper) -> dict[str, Any]:
    return {"lr": hyper.lr, "momentum": hyper.momentum, "weight_decay": hyper.weight_decay}


class _Inner(Named):
    """The Muon of pieces."""

    outer: "Gathering"

    def direction(self, name: str, update: Tensor) -> Tensor:
        """See :meth:`Gathering.direction`."""
        return self.outer.direction(name, update)


class Gathering:
    """Steps pieces of weights by a Muon that knows of no ranks; by default each piece is all of it.

    Args:
        model: The model to train, its parameters plain or DTensors.
        layouts: As for :class:`~muonsplit.muon.PerHeadMuon`.
        hyper: Hyperparameters.

    Attributes:
        named: The model's parameters by name.
        layouts: How whole weights are cut.
        pieces: What is stepped in place of each parameter; plain tensors.
        inner: The Muon of the pieces.
    """

    def __init__(self, model: nn.Module, layouts: Layouts, hyper: Hyper) -> None:
        self.named = dict(model.named_parameters())
        self.layouts = layouts
        self.pieces = {n: nn.Parameter(self.piece(n, p.detach())) for n, p in self.named.items()}
        self.inner = _Inner(
            self.pieces.items(), {n: self.layout(n) for n in layouts}, **_settings(hyper)
        )
        self.inner.outer = self

    def piece(self, name: str, x: Tensor) -> Tensor:
        """What is stepped of a parameter, or of its gradient.

        Args:
            name: The parameter.
            x: It, or its gradient.

        Returns:
            A plain tensor that shares no memory with it.
        """
        return whole(x)

    def layout(self, name: str) -> Layout | None:
        """How the piece of a Muon weight is cut."""
        return self.layouts[name]

    def direction(self, name: str, update: Tensor) -> Tensor:
        """What is subtracted from a piece, in units of the learning rate.

        Args:
            name: The weight.
            update: What momentum made of its gradient.
        """
        return orthogonalize(update, self.layout(name), self.inner.arithmetic)

    def kept(self, name: str, piece: Tensor) -> Tensor:
        """What this rank holds of a piece that was stepped."""
        return like(piece, self.named[name])

    @torch.no_grad()
    def step(self) -> None:
        """Gathers gradients, steps the pieces, and writes back what this rank holds of them."""
        for name, p in self.named.items():
            self.pieces[name].grad = None if p.grad is None else self.piece(name, p.grad)
        self.inner.step()
        for name, p in self.named.items():
            local_of(p).copy_(self.kept(name, self.pieces[name].detach()))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Copies of the Muon's param groups, with the model's own parameters."""
        return [{**g, "params": list(self.named.values())} for g in self.inner.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """What the Muon keeps for each of the model's parameters."""
        return {
            p: self.inner.state[self.pieces[name]]
            for name, p in self.named.items()
            if self.pieces[name] in self.inner.state
        }

    def state_dict(self) -> dict[str, Any]:
        """The Muon's state."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts it back."""
        self.inner.load_state_dict(state)


class LocalShards(Gathering):
    """Takes what the rank holds of some weights for matrices, and gathers the others."""

    def taken(self, name: str) -> bool:
        """Whether a parameter is one of them; a parameter that Muon does not train is none."""
        raise NotImplementedError

    def piece(self, name: str, x: Tensor) -> Tensor:
        """See :meth:`Gathering.piece`."""
        if not self.taken(name):
            return super().piece(name, x)
        return local_of(x).detach().clone(memory_format=torch.contiguous_format)

    def layout(self, name: str) -> Layout | None:
        """Whole, for a weight of which the shard is taken."""
        return None if self.taken(name) else super().layout(name)

    def kept(self, name: str, piece: Tensor) -> Tensor:
        """See :meth:`Gathering.kept`."""
        return piece if self.taken(name) else super().kept(name, piece)


class Engine:
    """Sums gradients of micro-batches, then over ranks, and steps whole weights on every rank.

    Args:
        model: The model to train, whole on every rank.
        layouts: As for :class:`~muonsplit.muon.PerHeadMuon`.
        hyper: Hyperparameters.
        micro_batches: Backward passes a step.

    Attributes:
        named: The model's parameters by name.
        inner: The Muon.
    """

    def __init__(
        self, model: nn.Module, layouts: Layouts, hyper: Hyper, micro_batches: int
    ) -> None:
        self._model = model
        self.named = dict(model.named_parameters())
        self.inner = Broken(self.named.items(), layouts, **_settings(hyper))
        self.micro_batches = micro_batches
        self.seen = 0
        self.optimizers = [self.inner]

    def forward(self) -> Tensor:
        """The loss of a micro-batch."""
        return self._model()

    def backward(self, loss: Tensor) -> None:
        """Adds a micro-batch to the gradients."""
        (loss / self.micro_batches).backward()
        self.seen += 1

    def step(self) -> None:
        """Called after each micro-batch; the last one of a step is followed by an update."""
        if self.seen % self.micro_batches == 0:
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Steps with the mean gradient."""
        for name, p in self.named.items():
            if p.grad is not None:
                p.grad = self.reduced(name, p.grad)
        self.inner.step()

    def reduced(self, name: str, gradient: Tensor) -> Tensor:
        """The mean over ranks of a parameter's gradient, or what is taken for it."""
        return mean_over_ranks(gradient)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The Muon's."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        """The Muon's."""
        return self.inner.state

    def state_dict(self) -> dict[str, Any]:
        """The Muon's."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts it back."""
        self.inner.load_state_dict(state)


def mean_over_ranks(x: Tensor) -> Tensor:
    """The mean of a tensor over all ranks; a new tensor."""
    if ranks() == 1:
        return x.clone()
    distributed: Any = import_module("torch.distributed")
    total = x.detach().clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total)
    return total / ranks()


def ranks() -> int:
    """How many ranks there are: 1 without a group."""
    distributed: Any = import_module("torch.distributed")
    return distributed.get_world_size() if distributed.is_initialized() else 1


def rank() -> int:
    """Which rank this is: 0 without a group."""
    distributed: Any = import_module("torch.distributed")
    return distributed.get_rank() if distributed.is_initialized() else 0
