"""Faults of a state that one number of ranks saves and another loads."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.faulty.base import Layouts
from muonsplit.faulty.gathering import GATHER
from muonsplit.faulty.registry import fault
from muonsplit.muon import PerHeadMuon
from muonsplit.sharding import local_of, on_mesh
from muonsplit.subjects.distribute import like
from muonsplit.subjects.protocol import Hyper


class _Saved(PerHeadMuon):
    """The reference, except that its state dict holds plain tensors in place of DTensors."""

    def saved(self, value: Tensor) -> Tensor:
        """What is saved of a DTensor."""
        raise NotImplementedError

    def loaded(self, value: Tensor, p: Tensor) -> Tensor:
        """What this rank takes of what was saved for a parameter."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        state = {
            i: {k: self.saved(x) if _placed(x) else x for k, x in kept.items()}
            for i, kept in found["state"].items()
        }
        return {**found, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        tensor: Any = import_module("torch.distributed.tensor")
        # By number, and by name as torch.distributed.checkpoint gives them.
        parameters: dict[Any, Any] = {
            **dict(enumerate(p for _, p in self._named())),
            **dict(self._named()),
        }

        def put(value: Any, p: Any) -> Any:
            if not (isinstance(value, Tensor) and value.ndim and on_mesh(p)):
                return value
            local = self.loaded(value, p)
            return tensor.DTensor.from_local(
                local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
            )

        state = {
            i: {key: put(value, parameters[i]) for key, value in kept.items()}
            for i, kept in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": state})


def _placed(value: Any) -> bool:
    return isinstance(value, Tensor) and on_mesh(value)


class _Local(_Saved):
    def saved(self, value: Tensor) -> Tensor:
        return local_of(value)

    def loaded(self, value: Tensor, p: Tensor) -> Tensor:
        return value


@fault(check="sharding.resume", model="llama", dialect=GATHER, kind="any Muon", world=2, way="fsdp")
def momentum_saved_as_a_shard(model: nn.Module, layouts: Layouts, hyper: Hyper) -> PerHeadMuon:
    """What a rank holds of the momentum is saved as if it were all of it."""
    return _built(_Local, model, layouts, hyper)


class _OwnRows(_Saved):
    def saved(self, value: Tensor) -> Tensor:
        found = torch.zeros(value.shape, dtype=value.dtype)
        places = like(torch.arange(value.numel()).view(value.shape), value).flatten()
        found.view(-1)[places] = local_of(value).flatten()
        return found

    def loaded(self, value: Tensor, p: Tensor) -> Tensor:
        return like(value, p)


@fault(check="sharding.resume", model="llama", dialect=GATHER, kind="any Muon", world=2, way="tp")
def momentum_of_the_first_rank(model: nn.Module, layouts: Layouts, hyper: Hyper) -> PerHeadMuon:
    """Each rank saves its own rows and zeros for the others'; the first rank's is what is read."""
    return _built(_OwnRows, model, layouts, hyper)


class _OthersOwnRows(_OwnRows):
    def state_dict(self) -> dict[str, Any]:
        right, found = PerHeadMuon.state_dict(self), super().state_dict()
        state = {
            i: right["state"][i] if "momentum_buffer" in kept else kept
            for i, kept in found["state"].items()
        }
        return {**found, "state": state}

    def loaded(self, value: Tensor, p: Tensor) -> Tensor:
        return local_of(value) if on_mesh(value) else super().loaded(value, p)


@fault(check="sharding.resume", model="llama", dialect=GATHER, kind="any Muon", world=2, way="fsdp")
def averages_of_the_first_rank(model: nn.Module, layouts: Layouts, hyper: Hyper) -> PerHeadMuon:
    """Momentum is saved, but of what AdamW keeps for the other parameters only the first rows."""
    return _built(_OthersOwnRows, model, layouts, hyper)


def _built(
    kind: type[PerHeadMuon], model: nn.Module, layouts: Layouts, hyper: Hyper
) -> PerHeadMuon:
    return kind(
        model.named_parameters(),
        layouts,
        lr=hyper.lr,
        momentum=hyper.momentum,
        weight_decay=hyper.weight_decay,
    )
