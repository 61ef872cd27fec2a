"""Subjects that are wrong, or right, in ways that a first look misses."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import muonsplit
from muonsplit.faulty.base import Broken
from muonsplit.muon import Direction, orthogonalize

Layouts = Mapping[str, muonsplit.Layout | None]

told = muonsplit.subject(dialect="deepspeed-0.19.8", recognises=False)


def reference(model: nn.Module, layouts: Layouts, **settings: Any) -> muonsplit.PerHeadMuon:
    return muonsplit.PerHeadMuon(model.named_parameters(), layouts, **settings)


class Hidden:
    """Shows no param groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        self._optimizer.step()


@told
def whole_when_decaying(
    model: nn.Module, layouts: Layouts, hyper: muonsplit.Hyper
) -> muonsplit.PerHeadMuon:
    cut = layouts if hyper.weight_decay == 0 else dict.fromkeys(layouts)
    return reference(model, cut, lr=hyper.lr, weight_decay=hyper.weight_decay)


class DecayAfter(Broken):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = 0.0
        loss = super().step(closure)
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay
            for p in group["params"]:
                p.mul_(1 - group["lr"] * decay)
        return loss


@told
def decay_after_update(model: nn.Module, layouts: Layouts, hyper: muonsplit.Hyper) -> DecayAfter:
    return DecayAfter(
        model.named_parameters(), layouts, lr=hyper.lr, weight_decay=hyper.weight_decay
    )


class DecayOnce(Broken):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["weight_decay"] = 0.0
        return loss


@told
def decay_once(model: nn.Module, layouts: Layouts, hyper: muonsplit.Hyper) -> Hidden:
    return Hidden(
        DecayOnce(model.named_parameters(), layouts, lr=hyper.lr, weight_decay=hyper.weight_decay)
    )


@told
def pairs_share_a_norm(model: nn.Module, layouts: Layouts, hyper: muonsplit.Hyper) -> Broken:
    def how(update: Tensor, layout: Any, arithmetic: Any) -> Tensor:
        result = orthogonalize(update, layout, arithmetic)
        if layout is None or len(layout.blocks()) < 4:
            return result
        # All but the first block are damped a little by their neighbour's size.
        heads = update.unflatten(0, (len(layout.blocks()), -1))
        sizes = heads.flatten(1).norm(dim=1)
        damp = 1 + 1e-3 * sizes.roll(1) / (sizes + sizes.roll(1))
        damp[0] = 1
        return (result.unflatten(0, heads.shape[:2]) * damp.view(-1, 1, 1)).flatten(0, 1)

    return Broken(model.named_parameters(), layouts, lr=hyper.lr, broken=how)


class ValueByQuery(Broken):
    """Damps each value update by the size of the query update beside it."""

    def orthogonalized(
        self, names: Sequence[str], updates: Sequence[Tensor]
    ) -> Sequence[Direction]:
        results = list(super().orthogonalized(names, updates))
        sizes = {name: update.norm() for name, update in zip(names, updates, strict=True)}
        for i, name in enumerate(names):
            if "v_proj" in name:
                damped = results[i].scaled / (1 + sizes[name.replace("v_proj", "q_proj")])
                results[i] = Direction(damped, 1.0)
        return results


@told
def value_by_query(model: nn.Module, layouts: Layouts, hyper: muonsplit.Hyper) -> ValueByQuery:
    return ValueByQuery(model.named_parameters(), layouts, lr=hyper.lr)


@told
def five_percent_too_large(model: nn.Module, layouts: Layouts, hyper: muonsplit.Hyper) -> Broken:
    def how(update: Tensor, layout: Any, arithmetic: Any) -> Tensor:
        return orthogonalize(update, layout, arithmetic) * 1.05

    dialect = muonsplit.DIALECTS["moonlight"]
    return Broken(model.named_parameters(), layouts, dialect=dialect, lr=hyper.lr, broken=how)


@told
def hides_its_rate(model: nn.Module, layouts: Layouts) -> Hidden:
    return Hidden(reference(model, layouts, lr=0.03))


@told
def half_precision(model: nn.Module, layouts: Layouts, hyper: muonsplit.Hyper) -> Hidden:
    model.to(torch.bfloat16)
    return Hidden(reference(model, layouts, lr=hyper.lr))


@told
def decays_of_its_own(model: nn.Module, layouts: Layouts) -> muonsplit.PerHeadMuon:
    return reference(model, layouts, lr=0.02, weight_decay=0.1)


class Scheduled(Broken):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.9
        return loss


@told
def schedules_itself(model: nn.Module, layouts: Layouts) -> Scheduled:
    return Scheduled(model.named_parameters(), layouts, lr=0.02)


@told
def rate_in_a_tensor(model: nn.Module, layouts: Layouts) -> muonsplit.PerHeadMuon:
    return reference(model, layouts, lr=torch.tensor(0.02))


@muonsplit.subject(dialect="jordan", recognises=True)
def contradicts_itself(model: nn.Module, layouts: Layouts) -> muonsplit.PerHeadMuon:
    return reference(model, layouts)


@told
def one_head_turned_another_large(
    model: nn.Module, layouts: Layouts, hyper: muonsplit.Hyper
) -> Broken:
    def how(update: Tensor, layout: Any, arithmetic: Any) -> Tensor:
        result = orthogonalize(update, layout, arithmetic)
        if layout is not None:
            width = layout.segments[0].width
            result[:width] *= 4
            result[-width:] += 1e-3 * result[-width:].flip(1)
        return result

    return Broken(model.named_parameters(), layouts, lr=hyper.lr, broken=how)
