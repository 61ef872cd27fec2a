"""Faults that an ordinary gradient hides: tiny, huge, zero and singular ones, and copies."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from muonsplit.dialect import Arithmetic, dialect_named
from muonsplit.faulty.base import Break, Broken, Layouts, broken, by_block, of_norm, sound
from muonsplit.faulty.registry import fault
from muonsplit.layout import Layout
from muonsplit.muon import orthogonalize
from muonsplit.subjects.protocol import Hyper

# Number of a block, count of blocks → factor.
Factor = Callable[[int, int], float]

_BFLOAT16 = "deepspeed-0.19.8-standard"
_FLOAT16 = "deepspeed-0.19.8:cpu_dtype=float16"
# Hidden by bfloat16 at ordinary sizes.
_LARGE_EPSILON = 1e-5
# A block whose smallest singular value is a smaller part of the largest is singular.
_SINGULAR = 1e-5


def _of_norms(batch: Tensor, squared: Callable[[Tensor], Tensor], arithmetic: Arithmetic) -> Tensor:
    """Blocks orthogonalised as if each had the squared norm that is made of it."""
    return torch.cat([of_norm(squared(x), x[None], arithmetic) for x in batch])


@fault(
    check="inputs.scale",
    model="llama",
    dialect=_BFLOAT16,
    kind="any Muon",
    origin="Emerging-Optimizers #229",
)
def epsilon_too_large(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """ε is 1e-5 where the dialect has 1e-7; blocks with a small gradient hardly move."""

    def squared(block: Tensor) -> Tensor:
        return (block.square().sum().sqrt() + _LARGE_EPSILON).square()

    def how(batch: Tensor, arithmetic: Arithmetic) -> Tensor:
        return _of_norms(batch, squared, arithmetic)

    return broken(model, layouts, hyper, by_block(how), dialect_named(_BFLOAT16))


@fault(
    check="inputs.scale",
    model="llama",
    dialect=_BFLOAT16,
    kind="any Muon",
    origin="harness study: ε on the squared norm",
)
def epsilon_under_the_root(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """ε is added to the squared norm, where it weighs as its root does outside."""

    def how(batch: Tensor, arithmetic: Arithmetic) -> Tensor:
        return _of_norms(batch, lambda x: x.square().sum() + arithmetic.epsilon, arithmetic)

    return broken(model, layouts, hyper, by_block(how), dialect_named(_BFLOAT16))


@fault(
    check="inputs.scale",
    model="llama",
    dialect=_FLOAT16,
    kind="any Muon",
    origin="DeepSpeed #8533",
)
def cast_before_the_norm(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The update is cast to float16 before it is normalised; beyond 65504 it comes out zero."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        held = update.half().float()
        result = orthogonalize(held.nan_to_num(posinf=0.0, neginf=0.0), layout, arithmetic)
        return result if held.isfinite().all() else torch.zeros_like(result)

    return broken(model, layouts, hyper, how, dialect_named(_FLOAT16))


@fault(
    check="inputs.scale",
    model="llama",
    kind="any Muon",
    origin="harness study: the squared norm overflows",
)
def norm_from_fourth_powers(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The norm is the fourth root of squared squares, infinite long before the norm is."""

    def how(batch: Tensor, arithmetic: Arithmetic) -> Tensor:
        totals = batch.square().sum((1, 2), keepdim=True)
        return sound(batch / totals.square().sqrt().sqrt().clamp(min=1e-7), arithmetic)

    return broken(model, layouts, hyper, by_block(how))


@fault(
    check="inputs.zero",
    model="llama",
    origin="dion 2971bba; Emerging-Optimizers normalize_in_double",
)
def zero_over_zero(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The norm has no ε, and a head without a gradient becomes NaN."""

    def how(batch: Tensor, arithmetic: Arithmetic) -> Tensor:
        # Where the norm is sound so is the rest: ε is all that is missing.
        return sound(batch + 0 * batch / batch.norm(dim=(1, 2), keepdim=True), arithmetic)

    return broken(model, layouts, hyper, by_block(how))


@fault(check="inputs.zero", model="llama", origin="harness study: one zero head")
def noise_against_zero(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A little is put into a block that is zero, and a head without a gradient moves."""

    def how(batch: Tensor, arithmetic: Arithmetic) -> Tensor:
        empty = ~batch.flatten(1).any(1).view(-1, 1, 1)
        return sound(batch + 1e-12 * empty, arithmetic)

    return broken(model, layouts, hyper, by_block(how))


@fault(check="inputs.zero", model="llama", origin="harness study: one zero head")
def others_make_up_for_zero(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Where a head has no gradient, the others take a larger step in its place."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        result = orthogonalize(update, layout, arithmetic)
        if layout is None:
            return result
        moving = torch.cat([batch.flatten(1).any(1) for batch in layout.batches(update)])
        return result * (len(moving) / moving.sum().clamp(min=1))

    return broken(model, layouts, hyper, how)


def _singular(batch: Tensor) -> Tensor:
    """Which blocks are, shape ``[B, 1, 1]``."""
    values = torch.linalg.svdvals(batch)
    return (values[:, -1] < _SINGULAR * values[:, 0]).view(-1, 1, 1)


@fault(check="inputs.rank", model="llama", kind="any Muon", origin="harness study: low rank")
def singular_blocks_raw(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A block that is singular is only normalised, as if there were nothing to orthogonalise."""

    def how(batch: Tensor, arithmetic: Arithmetic) -> Tensor:
        norms = batch.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
        return torch.where(_singular(batch), batch / norms, sound(batch, arithmetic))

    return broken(model, layouts, hyper, by_block(how))


@fault(check="inputs.rank", model="llama", kind="any Muon", origin="harness study: low rank")
def ridge_on_singular_blocks(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A block that is singular gets a ridge on its diagonal before it is iterated."""

    def how(batch: Tensor, arithmetic: Arithmetic) -> Tensor:
        ridge = 0.05 * batch.norm(dim=(1, 2), keepdim=True) * torch.eye(*batch.shape[1:])
        return sound(torch.where(_singular(batch), batch + ridge, batch), arithmetic)

    return broken(model, layouts, hyper, by_block(how))


def _by_number(factor: Factor) -> Break:
    """Multiplies each block by a factor of its number and the count."""

    def hook(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        result = orthogonalize(update, layout, arithmetic)
        if layout is None:
            return result
        rows = result.mT if layout.axis else result
        blocks = layout.blocks()
        for number, block in enumerate(blocks):
            for start, stop in block.spans:
                rows[start:stop] *= factor(number, len(blocks))
        return result

    return hook


@fault(check="independence.copies", model="llama", origin="harness study: copies of one head")
def later_heads_smaller(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A factor is applied once more for each head that came before."""
    return broken(model, layouts, hyper, _by_number(lambda number, count: 0.99**number))


@fault(check="independence.copies", model="llama", origin="harness study: copies of one head")
def last_head_twice(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The loop over heads adds the last one twice."""
    return broken(
        model,
        layouts,
        hyper,
        _by_number(lambda number, count: 2.0 if number == count - 1 else 1.0),
    )
