"""Faults of routing: Muon is not run where it should be, or is run where it should not."""

import torch
from torch import Tensor, nn

from muonsplit.faulty.base import Broken, Layouts, Named, broken, leaf_of
from muonsplit.faulty.registry import fault
from muonsplit.layout import Layout
from muonsplit.muon import orthogonalize
from muonsplit.newton_schulz import newton_schulz
from muonsplit.subjects.protocol import Hyper


@fault(check="routing.muon", model="llama", kind="any Muon", origin="DeepSpeed #8441")
def update_left_out(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Without ZeRO nothing orthogonalises: what is called Muon is SGD with momentum."""
    return broken(model, layouts, hyper, lambda update, layout, arithmetic: update.clone())


@fault(check="routing.muon", model="llama", kind="any Muon", origin="LLaMA-Factory #8041")
def adamw_by_another_name(
    model: nn.Module, layouts: Layouts, hyper: Hyper
) -> torch.optim.Optimizer:
    """The option that asks for Muon is not passed on, and everything is trained by AdamW."""
    decay = hyper.weight_decay
    return torch.optim.AdamW(model.parameters(), lr=hyper.lr, weight_decay=decay)


@fault(check="routing.muon", model="llama", kind="any Muon", origin="torchtitan #4812")
def pattern_misses_a_leaf(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The pattern of Muon's weights does not match a fused or renamed one, which gets AdamW."""
    missed = ("gate_proj", "up_proj")
    kept = {name: layout for name, layout in layouts.items() if leaf_of(name) not in missed}
    return broken(model, kept, hyper)


class _Dead(Named):
    """Leaves experts where they are."""

    def direction(self, name: str, update: Tensor) -> Tensor:
        """Nothing, for a stack of experts."""
        return torch.zeros_like(update) if update.ndim == 3 else super().direction(name, update)


@fault(
    check="routing.muon",
    model="deepseek-v2-lite",
    kind="any Muon",
    origin="KellerJordan/Muon #65",
)
def experts_never_move(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A kernel without a backward pass leaves the experts at their first values."""
    return broken(model, layouts, hyper, kind=_Dead)


class _Signs(Named):
    """Cuts a projection with a row for each head into these rows."""

    def direction(self, name: str, update: Tensor) -> Tensor:
        """Each row alone: divided by its norm, and nothing more."""
        if leaf_of(name) != "b_proj":
            return super().direction(name, update)
        return newton_schulz(update.unsqueeze(1), self.arithmetic).squeeze(1)


@fault(
    check="routing.muon",
    model="kimi-k3-0.40b",
    origin="Primus MIN_BLOCK_ROWS; torchtitan #4596",
)
def blocks_of_one_row(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A projection with one row a head is cut into rows, and a row has nothing to orthogonalise."""
    return broken(model, layouts, hyper, kind=_Signs)


@fault(
    check="routing.others",
    model="llama",
    kind="any Muon",
    origin="DeepSpeed #7641; KellerJordan/Muon #13; Megatron-LM #3024",
)
def head_in_muon(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The embedding is left out by its name, the output head is not."""
    heads: dict[str, Layout | None] = {
        name: None for name, _ in model.named_parameters() if leaf_of(name) == "lm_head"
    }
    return broken(model, {**layouts, **heads}, hyper)


class _FirstOnly(Named):
    """Splits in the first layer, and leaves the middle block of every later weight raw."""

    def direction(self, name: str, update: Tensor) -> Tensor:
        """The update with one block that is momentum only."""
        layout = self.layouts[name]
        result = orthogonalize(update, layout, self.arithmetic)
        if layout is not None and ".0." not in name:
            width = layout.blocks()[0].rows
            result[width : 2 * width] = update[width : 2 * width]
        return result


@fault(check="routing.muon", model="llama", origin="harness study: one head raw")
def one_head_raw_in_later_layers(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The second head of each weight is added raw, but in the first layer all is well."""
    return broken(model, layouts, hyper, kind=_FirstOnly)
