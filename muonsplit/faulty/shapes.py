"""Faults of shapes, storage and dtypes that most models do not have."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from muonsplit.dialect import Arithmetic, dialect_named
from muonsplit.faulty.base import Broken, Layouts, broken, by_block
from muonsplit.faulty.registry import fault
from muonsplit.layout import Layout
from muonsplit.muon import Direction, orthogonalize
from muonsplit.newton_schulz import newton_schulz, scale_factor
from muonsplit.subjects.protocol import Hyper

# Every tall weight of Pythia has a whole ratio of rows to columns.
_HEADS = "deepspeed-0.19.8:fused_qkv=heads"
_NO_NESTEROV = "deepspeed-0.19.8:nesterov=false"
_ALIGNED = 8


@fault(
    check="inputs.shapes",
    model="pythia-1b",
    dialect=_HEADS,
    kind="any Muon",
    origin="DeepSpeed _aspect_ratio_scale under Inductor",
)
def whole_ratio_of_a_second_shape(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Compiled again for a second shape, the scale takes the ratio of the sides as an integer."""

    def whole(batch: Tensor, arithmetic: Arithmetic) -> Tensor:
        rows, cols = batch.shape[1:]
        return newton_schulz(batch, arithmetic) * max(1, rows // cols) ** 0.5

    return broken(model, layouts, hyper, by_block(whole))


class _FirstScale(Broken):
    """Keeps the scale of the first weight with a number of columns."""

    def orthogonalized(
        self, names: Sequence[str], updates: Sequence[Tensor]
    ) -> Sequence[Direction]:
        """The reference's directions at the scale of another weight."""
        kept: dict[int, float] = {}
        found: list[Direction] = []
        for name, update in zip(names, updates, strict=True):
            rows = _block_rows(update, self.layouts[name])
            factor = scale_factor(self.arithmetic, rows, update.shape[-1])
            first = kept.setdefault(update.shape[-1], factor)
            result = orthogonalize(update, self.layouts[name], self.arithmetic)
            found.append(Direction(result * (first / factor), 1.0))
        return found


def _block_rows(update: Tensor, layout: Layout | None) -> int:
    return update.shape[-2] if layout is None else layout.blocks()[0].rows


@fault(
    check="arithmetic.scale",
    model="llama",
    kind="any Muon",
    origin="harness study: two shapes in a row under compile",
)
def scale_of_the_first_shape(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The scale is computed for the first weight of a width and kept for all others."""
    return broken(model, layouts, hyper, kind=_FirstScale)


@fault(
    check="inputs.shapes",
    model="llama",
    kind="any Muon",
    origin="Emerging-Optimizers #245: columns of 16 bytes",
)
def last_columns_left_out(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A kernel handles columns by eight, and what is left over gets no update."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        left = update.shape[-1] % _ALIGNED
        result = orthogonalize(update, layout, arithmetic)
        if left and layout is None and update.shape[-1] > _ALIGNED:
            result[..., -left:] = 0
        return result

    return broken(model, layouts, hyper, how)


@fault(
    check="inputs.shapes",
    model="llama",
    kind="any Muon",
    origin="speculators #821; Emerging-Optimizers #245",
)
def few_rows_refused(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A matrix of fewer rows than a tile raises in the kernel."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        if update.shape[-2] < _ALIGNED:
            raise RuntimeError(f"a tile has {_ALIGNED} rows, got {tuple(update.shape)}")
        return orthogonalize(update, layout, arithmetic)

    return broken(model, layouts, hyper, how)


class _Raw(Broken):
    """Reads gradients as they lie in memory."""

    def _advanced(self, p: Tensor, beta: float) -> Tensor:
        assert p.grad is not None
        given = p.grad
        if not given.is_contiguous():
            p.grad = given.mT.reshape(given.shape) if given.ndim == 2 else given.contiguous()
        update = super()._advanced(p, beta)
        p.grad = given
        return update


@fault(
    check="inputs.shapes",
    model="llama",
    kind="any Muon",
    origin="harness study: non-contiguous input",
)
def transposed_gradient_read_raw(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A gradient stored column by column is read as if it were stored row by row."""
    return broken(model, layouts, hyper, kind=_Raw)


@fault(
    check="inputs.storage",
    model="llama",
    origin="DeepSpeed #8580; GPT-NeoX stores q, k and v of a head together",
)
def groups_put_back_as_sections(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Heads stored in groups of q, k and v are put back with all q first, then all k, all v."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        result = orthogonalize(update, layout, arithmetic)
        if layout is None or layout.groups == 1 or layout.axis:
            return result
        roles = dict.fromkeys(segment.role for segment in layout.segments)
        spans = [s for role in roles for b in layout.blocks() if b.role == role for s in b.spans]
        return torch.cat([result[start:stop] for start, stop in spans])

    return broken(model, layouts, hyper, how)


@fault(check="inputs.storage", model="llama", origin="DeepSpeed #8580, review")
def fused_scale_on_heads(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Heads of several roles in one weight are scaled by the shape of the weight."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        result = orthogonalize(update, layout, arithmetic)
        if layout is None or len({segment.role for segment in layout.segments}) == 1:
            return result
        sides = update.mT.shape if layout.axis else update.shape
        own = scale_factor(arithmetic, layout.blocks()[0].rows, sides[1])
        return result * (scale_factor(arithmetic, *sides) / own)

    return broken(model, layouts, hyper, how)


class _Master(Broken):
    """Steps a copy of half-precision parameters that carries no tags."""

    def orthogonalized(
        self, names: Sequence[str], updates: Sequence[Tensor]
    ) -> Sequence[Direction]:
        """Whole matrices for parameters that have such a copy."""
        halves = [update.dtype is torch.bfloat16 for update in updates]
        layouts = [None if h else self.layouts[n] for n, h in zip(names, halves, strict=True)]
        pairs = zip(updates, layouts, strict=True)
        return [Direction(orthogonalize(u, x, self.arithmetic), 1.0) for u, x in pairs]


@fault(
    check="inputs.dtype",
    model="llama",
    origin="Megatron-LM #4728; Primus propagate_specs",
)
def tag_lost_on_the_master_copy(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Parameters in half precision have a float32 copy, and the cut is not copied with them."""
    return broken(model, layouts, hyper, kind=_Master)


@fault(
    check="inputs.dtype",
    model="llama",
    dialect=_NO_NESTEROV,
    kind="any Muon",
    origin="torch.optim.Muon 2.13: nesterov=False in bfloat16",
)
def buffer_normalised_in_place(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Without Nesterov the update is the buffer, and in bfloat16 no cast copies it."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        result = orthogonalize(update, layout, arithmetic)
        if update.dtype is torch.bfloat16:
            update.div_(update.norm().clamp(min=arithmetic.epsilon))
        return result

    return broken(model, layouts, hyper, how, dialect_named(_NO_NESTEROV))
