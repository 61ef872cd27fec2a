"""Faults of what is carried from step to step: momentum and weight decay."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from muonsplit.faulty.base import Broken, Layouts, broken, choosing
from muonsplit.faulty.registry import fault
from muonsplit.muon import Direction, PerHeadMuon
from muonsplit.subjects.protocol import Hyper


class _Twice(Broken):
    """Advances momentum for each of two micro-batches."""

    def _advanced(self, p: Tensor, beta: float) -> Tensor:
        super()._advanced(p, beta)
        return super()._advanced(p, beta)


@fault(check="state.momentum", model="llama", kind="any Muon", origin="DeepSpeed #8443 and #8600")
def momentum_for_each_micro_batch(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The hook that advances momentum runs once a micro-batch, so twice a step."""
    return broken(model, layouts, hyper, kind=_Twice)


class _FirstGradient(Broken):
    """Starts the buffer as torch's SGD does."""

    def _advanced(self, p: Tensor, beta: float) -> Tensor:
        assert p.grad is not None
        first = not self.state[p]
        update = super()._advanced(p, beta)
        if first:
            self.state[p]["momentum_buffer"].copy_(p.grad)
        return update


@fault(check="state.momentum", model="llama", kind="any Muon")
def buffer_starts_at_the_gradient(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The first gradient enters the buffer in full, not with 1 − β."""
    return broken(model, layouts, hyper, kind=_FirstGradient)


class _Before(Broken):
    """Looks ahead from the old buffer."""

    def _advanced(self, p: Tensor, beta: float) -> Tensor:
        assert p.grad is not None
        held = self.state[p].get("momentum_buffer", torch.zeros_like(p)).clone()
        super()._advanced(p, beta)
        return p.grad.lerp(held, beta)


@fault(
    check="state.momentum", model="llama", kind="any Muon", origin="harness study: Nesterov order"
)
def nesterov_from_the_old_buffer(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The Nesterov step uses the buffer as it was before this gradient."""
    return broken(model, layouts, hyper, kind=_Before)


class _Forgetful(Broken):
    """Begins each step from zero state."""

    @torch.no_grad()
    def step(self, closure: object = None) -> object:
        """Forgets, then takes the reference's step."""
        self.state.clear()
        return super().step(closure)


@fault(check="state.momentum", model="llama", kind="any Muon")
def momentum_not_kept(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The buffer is made anew in each step."""
    return broken(model, layouts, hyper, kind=_Forgetful)


@fault(
    check="state.momentum", model="llama", kind="any Muon", origin="harness study: momentum form"
)
def average_and_gradient(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The running average is added to the gradient in full, where β and 1 − β weigh them."""
    return broken(model, layouts, hyper, dialect=choosing(momentum="ema_plus_g"))


class _Coupled(Broken):
    """Decays through the gradient."""

    @torch.no_grad()
    def step(self, closure: object = None) -> object:
        """Adds the decay to each gradient, then takes a step without."""
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad.add(p, alpha=group["weight_decay"])
            group["weight_decay"] = 0.0
        loss = super().step(closure)
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        return loss


@fault(check="state.decay", model="llama", kind="any Muon", origin="Emerging-Optimizers #66")
def decay_in_the_gradient(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Weight decay is added to the gradient, where orthogonalisation forgets its size."""
    return broken(model, layouts, hyper, kind=_Coupled)


@fault(
    check="state.decay",
    model="llama",
    kind="any Muon",
    origin="Emerging-Optimizers #66: decay and rate coupled",
)
def decay_at_the_adjusted_rate(model: nn.Module, layouts: Layouts, hyper: Hyper) -> PerHeadMuon:
    """The rate that the scale adjusts decays the parameter too."""
    return PerHeadMuon(
        model.named_parameters(),
        layouts,
        dialect=choosing(scale_on="rate", decay_rate="adjusted"),
        lr=hyper.lr,
        momentum=hyper.momentum,
        weight_decay=hyper.weight_decay,
    )


class _After(Broken):
    """Decays the parameter behind the update."""

    def orthogonalized(
        self, names: Sequence[str], updates: Sequence[Tensor]
    ) -> Sequence[Direction]:
        """The update less what decay takes of it when it comes after."""
        kept = next(1 - g["lr"] * g["weight_decay"] for g in self.param_groups)
        made = super().orthogonalized(names, updates)
        return [Direction(d.scaled * kept, 1.0) for d in made]


@fault(check="state.decay", model="llama", kind="any Muon", origin="harness study: decay after")
def decay_after_the_update(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The parameter decays after its update, so a part of the update decays as well."""
    return broken(model, layouts, hyper, kind=_After)


class _Partly(Broken):
    """Forgets the decay of weights that are cut."""

    @torch.no_grad()
    def step(self, closure: object = None) -> object:
        """Puts back what decay takes of them."""
        for group in self.param_groups:
            kept = 1 - group["lr"] * group["weight_decay"]
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if self.layouts.get(name) is not None:
                    p.div_(kept)
        return super().step(closure)


@fault(check="state.decay", model="llama")
def heads_do_not_decay(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The path that splits returns before the decay."""
    return broken(model, layouts, hyper, kind=_Partly)
