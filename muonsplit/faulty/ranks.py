"""Faults of several ranks that hold whole weights: what is reduced, when, and by whom."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.faulty.base import Broken, Layouts, broken
from muonsplit.faulty.gathering import Engine, mean_over_ranks, rank, ranks
from muonsplit.faulty.registry import fault
from muonsplit.subjects.protocol import Hyper


def _own_slice(x: Tensor) -> Tensor:
    """Which elements of a flat partition are this rank's, in the shape of what is divided."""
    each = -(-x.numel() // ranks())
    return (torch.arange(x.numel()) // each == rank()).view(x.shape)


class _ReducedSlice(Engine):
    def reduced(self, name: str, gradient: Tensor) -> Tensor:
        mean = super().reduced(name, gradient)
        return torch.where(_own_slice(mean), mean, gradient)


@fault(
    check="sharding.agreement",
    model="llama",
    kind="any Muon",
    origin="DeepSpeed #7807, mended by #8090 and #8141",
    world=2,
    way="engine",
)
def slice_reduced(
    model: nn.Module, layouts: Layouts, hyper: Hyper, micro_batches: int
) -> _ReducedSlice:
    """Each rank orthogonalises a gradient of which only its own slice is reduced."""
    return _ReducedSlice(model, layouts, hyper, micro_batches)


class _GatheredSlices(_ReducedSlice):
    @torch.no_grad()
    def update(self) -> None:
        super().update()
        for p in self.named.values():
            own = torch.where(_own_slice(p), p, p.new_zeros(()))
            p.copy_(mean_over_ranks(own) * ranks())


@fault(
    check="sharding.mean",
    model="llama",
    kind="any Muon",
    origin="DeepSpeed #7807: a flat partition, gathered after the step",
    world=2,
    way="engine",
)
def slice_reduced_and_gathered(
    model: nn.Module, layouts: Layouts, hyper: Hyper, micro_batches: int
) -> _GatheredSlices:
    """Likewise, but ranks gather each other's slices of the result, and agree on what is wrong."""
    return _GatheredSlices(model, layouts, hyper, micro_batches)


class _ReducedWeights(Engine):
    def reduced(self, name: str, gradient: Tensor) -> Tensor:
        return super().reduced(name, gradient) if name in self.inner.layouts else gradient


@fault(check="sharding.agreement", model="llama", kind="any Muon", world=2, way="engine")
def norms_not_reduced(
    model: nn.Module, layouts: Layouts, hyper: Hyper, micro_batches: int
) -> _ReducedWeights:
    """Parameters that Muon does not train are stepped by each rank's own gradient."""
    return _ReducedWeights(model, layouts, hyper, micro_batches)


class _MeanOfUpdates(Engine):
    def reduced(self, name: str, gradient: Tensor) -> Tensor:
        return gradient

    @torch.no_grad()
    def update(self) -> None:
        super().update()
        for p in self.named.values():
            p.copy_(mean_over_ranks(p))


@fault(check="sharding.mean", model="llama", kind="any Muon", world=2, way="engine")
def updates_averaged(
    model: nn.Module, layouts: Layouts, hyper: Hyper, micro_batches: int
) -> _MeanOfUpdates:
    """Each rank orthogonalises its own gradient, and the results are averaged."""
    return _MeanOfUpdates(model, layouts, hyper, micro_batches)


class _Hooked(Engine):
    def step(self) -> None:
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] /= self.micro_batches
        self.update()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        for p in self.named.values():
            p.grad = None


@fault(
    check="sharding.accumulation",
    model="llama",
    kind="any Muon",
    origin="DeepSpeed #8443, #8600",
    world=2,
    way="engine",
)
def iterated_in_each_micro_batch(
    model: nn.Module, layouts: Layouts, hyper: Hyper, micro_batches: int
) -> _Hooked:
    """Newton–Schulz in the reduce hook: momentum advances, and is iterated, in each micro-batch."""
    return _Hooked(model, layouts, hyper, micro_batches)


class _LastOnly(Engine):
    def backward(self, loss: Tensor) -> None:
        for p in self.named.values():
            p.grad = None
        super().backward(loss)


@fault(check="sharding.accumulation", model="llama", kind="any Muon", world=2, way="engine")
def last_micro_batch_only(
    model: nn.Module, layouts: Layouts, hyper: Hyper, micro_batches: int
) -> _LastOnly:
    """Each micro-batch puts its gradient in place of the one before."""
    return _LastOnly(model, layouts, hyper, micro_batches)


@fault(check="sharding.agreement", model="llama", kind="any Muon", world=2, way="ddp")
def other_rate_on_a_rank(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Ranks step by different learning rates, as after a schedule that one has stepped twice."""
    made = broken(model, layouts, hyper)
    for group in made.param_groups:
        group["lr"] /= 1 + rank()
    return made


class _Owned(Broken):
    """Each Muon weight is stepped by one rank, which sends it to the others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        distributed: Any = import_module("torch.distributed")
        named = dict(self._named())
        owners = {name: i % ranks() for i, name in enumerate(self.layouts)}
        for name, owner in owners.items():
            named[name].grad = named[name].grad if owner == rank() else None
        loss = super().step(closure)
        for name, owner in list(owners.items())[:-1]:
            if ranks() > 1:
                distributed.broadcast(named[name], owner)
        return loss


@fault(check="sharding.agreement", model="llama", kind="any Muon", world=2, way="ddp")
def weight_not_sent(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Ranks step weights for each other, and the last of them is never sent."""
    return broken(model, layouts, hyper, kind=_Owned)
