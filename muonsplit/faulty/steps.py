"""Faults of the step: iteration, momentum, decay, and what couples weights."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from muonsplit.dialect import Arithmetic, dialect_named
from muonsplit.faulty.base import Broken, Layouts, broken, by_block, choosing
from muonsplit.faulty.registry import fault
from muonsplit.layout import Layout
from muonsplit.muon import Direction, orthogonalize
from muonsplit.newton_schulz import Coefficients, Rounding, scale_factor
from muonsplit.subjects.protocol import Hyper

JORDAN: Coefficients = (3.4445, -4.7750, 2.0315)
_MISTYPED: Coefficients = (3.4445, -4.7770, 2.0315)


@fault(check="arithmetic.direction", model="llama", kind="any Muon")
def one_step_short(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Four Newton–Schulz steps instead of five."""
    return broken(model, layouts, hyper, dialect=choosing(steps=4))


@fault(
    check="arithmetic.bias",
    model="llama",
    dialect="deepspeed-0.19.8-standard",
    kind="any Muon",
)
def coefficient_mistyped(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """In bfloat16, b is −4.7770 for −4.7750; each update is 0.7 % off, where rounding makes 4 %."""
    how = by_block(lambda batch, arithmetic: quintic(batch, arithmetic, _MISTYPED))
    return broken(model, layouts, hyper, how, dialect_named("deepspeed-0.19.8-standard"))


@fault(check="state.momentum", model="llama", kind="any Muon")
def nesterov_missing(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The buffer itself is orthogonalised, without the Nesterov step; the first step hides it."""
    return broken(model, layouts, hyper, dialect=choosing(nesterov=False))


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


def quintic(batch: Tensor, arithmetic: Arithmetic, coefficients: Coefficients) -> Tensor:
    """Five steps as one writes them down, in float32 or in emulated bfloat16, and the scale.

    Args:
        batch: Blocks, shape ``[B, rows, cols]``.
        arithmetic: Its dtype on a CPU, its ε and its scale.
        coefficients: Those of every step.
    """
    q = _bfloat16 if arithmetic.cpu_dtype == "bfloat16" else _unrounded
    tall = batch.shape[1] > batch.shape[2]
    X = q(batch.mT if tall else batch)
    X = q(X / q(X.norm(dim=(1, 2), keepdim=True) + arithmetic.epsilon))
    X = five_steps(X, coefficients, q)
    return (X.mT if tall else X).contiguous() * scale_factor(arithmetic, *batch.shape[1:])


def _bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _unrounded(x: Tensor) -> Tensor:
    return x


def five_steps(X: Tensor, coefficients: Coefficients, q: Rounding = _unrounded) -> Tensor:
    """Five steps from the left, without normalisation.

    Args:
        X: Matrices, shape ``[..., rows, cols]``.
        coefficients: Those of every step.
        q: Rounds each result.
    """
    a, b, c = coefficients
    for _ in range(5):
        A = q(X @ X.mT)
        B = q(q(b * A) + q(q(c * A) @ A))
        X = q(q(a * X) + q(B @ X))
    return X
