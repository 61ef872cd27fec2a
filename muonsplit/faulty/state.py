"""Faults of state: buffers, gradients, infinities, and what is saved."""

from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.dialect import Arithmetic, dialect_named
from muonsplit.faulty.base import Broken, Layouts, broken
from muonsplit.faulty.registry import fault
from muonsplit.layout import Layout
from muonsplit.muon import advance_momentum, orthogonalize
from muonsplit.subjects.protocol import Hyper

# In its noise a buffer of half precision cannot be seen from outside.
_BFLOAT16 = "deepspeed-0.19.8-standard"
# DeepSpeed itself writes into gradients, and its dialect says so.
_KEPT = "deepspeed-0.19.8:gradient=kept"
_DEBIASED = "deepspeed-0.19.8:momentum=ema_debiased"


class _Apart(Broken):
    """Keeps the true buffer where nobody saves it, and the update where the buffer should be."""

    def _advanced(self, p: Tensor, beta: float) -> Tensor:
        assert p.grad is not None
        kept: dict[Tensor, Tensor] = self.__dict__.setdefault("_kept", {})
        buffer = kept.setdefault(p, torch.zeros_like(p))
        update = advance_momentum(p.grad, buffer, self.arithmetic, beta, 1)
        self.state[p]["momentum_buffer"] = update.clone()
        return update


@fault(
    check="state.buffer", model="llama", kind="any Muon", origin="harness study: buffer aliasing"
)
def buffer_holds_the_update(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """What is kept as the momentum buffer is the update; the true one is kept out of sight."""
    return broken(model, layouts, hyper, kind=_Apart)


class _Half(Broken):
    """Rounds the buffer to bfloat16."""

    def _advanced(self, p: Tensor, beta: float) -> Tensor:
        update = super()._advanced(p, beta)
        buffer = self.state[p]["momentum_buffer"]
        buffer.copy_(buffer.bfloat16())
        return update


@fault(
    check="state.buffer",
    model="llama",
    dialect=_BFLOAT16,
    kind="any Muon",
    origin="harness study: bf16 momentum",
)
def buffer_in_half_precision(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Momentum of float32 parameters is kept in bfloat16."""
    return broken(model, layouts, hyper, dialect=dialect_named(_BFLOAT16), kind=_Half)


class _Mixed(Broken):
    """Lets the parameter leak into the buffer."""

    def _advanced(self, p: Tensor, beta: float) -> Tensor:
        update = super()._advanced(p, beta)
        self.state[p]["momentum_buffer"].add_(p, alpha=1e-3)
        return update


@fault(
    check="state.decay",
    model="llama",
    dialect=_BFLOAT16,
    kind="any Muon",
    origin="Emerging-Optimizers #66: coupled decay",
)
def decay_in_the_buffer(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A thousandth of the parameter is mixed into the buffer in each step, as decay would be."""
    return broken(model, layouts, hyper, dialect=dialect_named(_BFLOAT16), kind=_Mixed)


class _IntoGradient(Broken):
    """Takes the Nesterov step in the gradient's own memory."""

    def _advanced(self, p: Tensor, beta: float) -> Tensor:
        update = super()._advanced(p, beta)
        assert p.grad is not None
        p.grad.copy_(update)
        return update


@fault(
    check="state.gradient",
    model="llama",
    dialect=_KEPT,
    kind="any Muon",
    origin="DeepSpeed #8432",
)
def nesterov_in_the_gradient(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The Nesterov step is written into the gradient, which an accumulation then goes on with."""
    return broken(model, layouts, hyper, kind=_IntoGradient)


class _Zeroing(Broken):
    """Clears gradients itself."""

    @torch.no_grad()
    def step(self, closure: object = None) -> object:
        """Takes the reference's step and zeroes what it used."""
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.zero_()
        return loss


@fault(check="state.gradient", model="llama", dialect=_KEPT, kind="any Muon")
def gradients_cleared(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The step zeroes the gradients, which whoever logs or clips them afterwards finds."""
    return broken(model, layouts, hyper, kind=_Zeroing)


@fault(check="state.nonfinite", model="llama", kind="any Muon", origin="DeepSpeed #8432, #8435")
def momentum_poisoned(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """An infinite gradient enters momentum, and its weight gets zero for ever after."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        if update.isfinite().all():
            return orthogonalize(update, layout, arithmetic)
        return torch.zeros_like(update)

    return broken(model, layouts, hyper, how)


class _AllOfThem(Broken):
    """Poisons every weight with one."""

    def _muon(self, named: list[tuple[str, Tensor]], group: dict[str, Any]) -> None:
        super()._muon(named, group)
        if not all(p.grad is None or bool(p.grad.isfinite().all()) for _, p in named):
            for _, p in named:
                p.fill_(float("nan"))


@fault(check="state.nonfinite", model="llama", kind="any Muon", origin="DeepSpeed #8432")
def one_infinity_poisons_all(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A common factor of all gradients carries one infinity into every weight."""
    return broken(model, layouts, hyper, kind=_AllOfThem)


@fault(
    check="state.nonfinite",
    model="llama",
    origin="DeepSpeed 0.19.8: the per-head branch returns before the guard",
)
def infinity_applied_as_a_number(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Infinities are clamped to large numbers, and a finite, plausible update is applied."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        if not update.isfinite().all():
            update = update.nan_to_num().clamp(-1e3, 1e3)
        return orthogonalize(update, layout, arithmetic)

    return broken(model, layouts, hyper, how)


class _Unsaved(Broken):
    """Saves param groups only."""

    def state_dict(self) -> dict[str, Any]:
        """No buffers."""
        return {**super().state_dict(), "state": {}}


@fault(
    check="state.resume", model="llama", kind="any Muon", origin="harness study: state lost on load"
)
def state_not_saved(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Momentum is not in the state that is saved."""
    return broken(model, layouts, hyper, kind=_Unsaved)


class _Zeroed(Broken):
    """Allocates its buffers anew when a state is loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads, then zeroes momentum."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if "momentum_buffer" in state:
                state["momentum_buffer"].zero_()


@fault(
    check="state.resume", model="llama", kind="any Muon", origin="harness study: state lost on load"
)
def momentum_lost_on_load(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Momentum is saved, and zeroed behind the load."""
    return broken(model, layouts, hyper, kind=_Zeroed)


class _Reordered(Broken):
    """Hands buffers of one shape out in reverse."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads, then exchanges the buffers of weights of one shape."""
        super().load_state_dict(state_dict)
        shapes: dict[torch.Size, list[dict[str, Any]]] = {}
        for p, state in self.state.items():
            if "momentum_buffer" in state:
                shapes.setdefault(p.shape, []).append(state)
        for states in shapes.values():
            buffers = [state["momentum_buffer"] for state in states]
            for state, buffer in zip(states, reversed(buffers), strict=True):
                state["momentum_buffer"] = buffer


@fault(check="state.resume", model="llama", kind="any Muon", origin="harness study: order of state")
def buffers_in_another_order(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Buffers are matched to weights by order and shape, and the order is another after a load."""
    return broken(model, layouts, hyper, kind=_Reordered)


class _Uncounted(Broken):
    """Counts steps from the load."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads, then begins counting anew."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = 0


@fault(
    check="state.resume",
    model="llama",
    dialect=_DEBIASED,
    kind="any Muon",
    origin="harness study: state lost on load",
)
def steps_counted_anew(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The count of steps, by which momentum is corrected, begins anew after a load."""
    return broken(model, layouts, hyper, dialect=dialect_named(_DEBIASED), kind=_Uncounted)


class _CutSaved(Broken):
    """Keeps the cut in its param groups."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        cut = {name: None if x is None else str(x) for name, x in self.layouts.items()}
        self.param_groups[0]["cut"] = cut

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads, and cuts as the saved run did."""
        super().load_state_dict(state_dict)
        cut = self.param_groups[0]["cut"].items()
        self.layouts = {name: None if x is None else Layout.parse(x) for name, x in cut}


@fault(check="state.split", model="llama", origin="VeOmni load_state_dict")
def cut_restored_from_the_state(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The cut is an option of the param groups, so an old state turns the split off again."""
    return broken(model, layouts, hyper, kind=_CutSaved)
