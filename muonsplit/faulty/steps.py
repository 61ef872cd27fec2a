"""Faults of the step: iteration, momentum, decay, and what couples weights."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from muonsplit.dialect import DEFAULT_DIALECT, Arithmetic, Dialect, dialect_named
from muonsplit.faulty.base import Broken, Layouts, broken
from muonsplit.faulty.registry import fault
from muonsplit.layout import Layout
from muonsplit.muon import Direction, orthogonalize
from muonsplit.newton_schulz import scale_factor
from muonsplit.subjects.protocol import Hyper

# Jordan's but for b, which is −4.7750.
_MISTYPED = (3.4445, -4.7770, 2.0315)


def _with(**changes: object) -> Dialect:
    sound = dialect_named(DEFAULT_DIALECT)
    return replace(sound, arithmetic=replace(sound.arithmetic, **changes))  # pyright: ignore[reportArgumentType]


@fault(check="arithmetic.direction", model="llama", kind="any Muon")
def one_step_short(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Four Newton–Schulz steps instead of five."""
    return broken(model, layouts, hyper, dialect=_with(steps=4))


@fault(
    check="arithmetic.bias",
    model="llama",
    dialect="deepspeed-0.19.8-standard",
    kind="any Muon",
)
def coefficient_mistyped(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """In bfloat16, b is −4.7770 for −4.7750; each update is 0.7 % off, where rounding makes 4 %."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        if layout is None:
            return _mistyped(update.view(-1, *update.shape[-2:]), arithmetic).view_as(update)
        result = torch.empty_like(update)
        layout.write([_mistyped(batch, arithmetic) for batch in layout.batches(update)], result)
        return result

    return broken(model, layouts, hyper, how, dialect_named("deepspeed-0.19.8-standard"))


@fault(check="state.momentum", model="llama", kind="any Muon")
def nesterov_missing(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The buffer itself is orthogonalised, without the Nesterov step; the first step hides it."""
    return broken(model, layouts, hyper, dialect=_with(nesterov=False))


class _Decaying(Broken):
    """Decays once more after each step."""

    @torch.no_grad()
    def step(self, closure: object = None) -> object:
        """Takes the reference's step, then decays."""
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
        return loss


@fault(check="state.decay", model="llama", kind="any Muon")
def decay_twice(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The engine decays the parameters, and so does the optimizer."""
    return broken(model, layouts, hyper, kind=_Decaying)


class _Clipped(Broken):
    """Clips the orthogonalised updates of all weights to a global norm of one."""

    def orthogonalized(
        self, names: Sequence[str], updates: Sequence[Tensor]
    ) -> Sequence[Direction]:
        """Clips what the reference makes."""
        results = [d.scaled for d in super().orthogonalized(names, updates)]
        total = torch.stack([r.norm() for r in results]).norm()
        return [Direction(r / total.clamp(min=1.0), 1.0) for r in results]


@fault(
    check="independence.weights",
    model="llama",
    kind="any Muon",
    origin="DeepSpeed #7776; its default clipping",
)
def update_clipped(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The update is clipped by its global norm as if it were a gradient."""
    return broken(model, layouts, hyper, kind=_Clipped)


@fault(
    check="subject.repeatable",
    model="llama",
    kind="any Muon",
    origin="HeavyBall: stochastic rounding",
)
def rounded_at_random(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Updates are rounded to bfloat16 up or down at random, so no two runs agree."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        noise = 1 + (torch.rand_like(update) - 0.5) * torch.finfo(torch.bfloat16).eps
        return orthogonalize(update * noise, layout, arithmetic)

    return broken(model, layouts, hyper, how)


@fault(
    check="subject.answers",
    model="llama",
    kind="any Muon",
    origin="dion 2971bba: zero divided by a zero norm",
)
def not_a_number(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A norm without ε divides zero by zero in the first row."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        result = orthogonalize(update, layout, arithmetic)
        result[0] *= torch.zeros(()) / torch.zeros(())
        return result

    return broken(model, layouts, hyper, how)


def _mistyped(batch: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Five steps in emulated bfloat16, as one writes them down."""
    factor = scale_factor(arithmetic, *batch.shape[1:])
    X = batch.mT if batch.shape[1] > batch.shape[2] else batch
    X = _bfloat16(_bfloat16(X) / _bfloat16(X.norm(dim=(1, 2), keepdim=True)))
    a, b, c = _MISTYPED
    for _ in range(5):
        A = _bfloat16(X @ X.mT)
        B = _bfloat16(_bfloat16(b * A) + _bfloat16(_bfloat16(c * A) @ A))
        X = _bfloat16(_bfloat16(a * X) + _bfloat16(B @ X))
    return (X.mT if batch.shape[1] > batch.shape[2] else X).contiguous() * factor


def _bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()
