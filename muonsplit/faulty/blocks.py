"""Faults on blocks: the right weights, but not what is done to each head."""

import torch
from torch import Tensor, nn

from muonsplit.dialect import Arithmetic
from muonsplit.faulty.base import Broken, Layouts, broken, each_block, of_norm
from muonsplit.faulty.registry import fault
from muonsplit.layout import Layout, Segment
from muonsplit.muon import orthogonalize
from muonsplit.newton_schulz import scale_factor
from muonsplit.subjects.protocol import Hyper


@fault(check="arithmetic.scale", model="deepseek-v2-lite", origin="dion before #90; VeOmni; Primus")
def whole_matrix_scale(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Each head is scaled by the shape of the whole weight: √H too large where it is tall."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        result = orthogonalize(update, layout, arithmetic)
        if layout is None:
            return result
        rows, cols = update.shape
        width = rows // len(layout.blocks())
        wrong, right = (scale_factor(arithmetic, r, cols) for r in (rows, width))
        return result * (wrong / right)

    return broken(model, layouts, hyper, how)


@fault(check="independence.heads", model="llama", origin="harness study: norm shared across heads")
def shared_norm(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """All heads are divided by the Frobenius norm of the whole weight before they are iterated."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        if layout is None:
            return orthogonalize(update, layout, arithmetic)
        total = update.square().sum()
        return each_block(update, layout, lambda batch: of_norm(total, batch, arithmetic))

    return broken(model, layouts, hyper, how)


@fault(check="cut.rows", model="llama", origin="harness study: row boundary off by one")
def boundary_off_by_one(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The first head takes one row of the second."""

    def shifted(layout: Layout) -> Layout:
        (role, heads, width), *_ = layout.segments
        parts = [Segment(role, 1, width + 1), Segment(role, 1, width - 1)]
        rest = [Segment(role, heads - 2, width)] if heads > 2 else []
        return Layout((*parts, *rest))

    return broken(model, {n: x and shifted(x) for n, x in layouts.items()}, hyper)


@fault(
    check="cut.placement",
    model="llama",
    origin="gram-newton-schulz split utils: unchecked recombine",
)
def heads_permuted(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The blocks are put together in another order than they were taken apart."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        result = orthogonalize(update, layout, arithmetic)
        if layout is None:
            return result
        return result.unflatten(0, (len(layout.blocks()), -1)).flip(0).flatten(0, 1)

    return broken(model, layouts, hyper, how)


@fault(check="routing.muon", model="llama", origin="harness study: last head raw")
def last_head_raw(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The loop over heads ends one early; the last head's momentum is added as it is."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        result = orthogonalize(update, layout, arithmetic)
        if layout is not None:
            last = layout.blocks()[-1].rows
            result[-last:] = update[-last:]
        return result

    return broken(model, layouts, hyper, how)


@fault(check="cut.columns", model="llama", kind="any Muon")
def columns_cut(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Each block is cut once more, in the middle of its input axis."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        halves = update.chunk(2, dim=-1)
        return torch.cat([orthogonalize(half, layout, arithmetic) for half in halves], dim=-1)

    return broken(model, layouts, hyper, how)
