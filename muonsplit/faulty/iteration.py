"""Faults of the iteration itself: coefficients, steps, normalisation, scale, batches."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from muonsplit.dialect import Arithmetic
from muonsplit.faulty.base import Broken, Layouts, broken, by_block, choosing, each_block, of_norm
from muonsplit.faulty.registry import fault
from muonsplit.faulty.steps import JORDAN, five_steps
from muonsplit.layout import Layout
from muonsplit.muon import Direction, orthogonalize
from muonsplit.newton_schulz import newton_schulz, scale_factor
from muonsplit.subjects.protocol import Hyper

_POLAR = "deepspeed-0.19.8:coefficients=polar-express-5-safe"
_LONGER = (
    "deepspeed-0.19.8:coefficients=deepseek-v4,steps=11,past_end=repeat_last,iteration=standard"
)


@fault(check="arithmetic.direction", model="llama", kind="any Muon")
def one_step_more(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Six Newton–Schulz steps instead of five."""
    return broken(model, layouts, hyper, dialect=choosing(steps=6, restarts=(2, 4)))


@fault(
    check="arithmetic.direction",
    model="llama",
    dialect=_POLAR,
    kind="any Muon",
    origin="gram-newton-schulz 7721134; dion #33",
)
def safety_factor_elsewhere(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The safety factor is left out of the last step, as another list of Polar Express has it."""
    return broken(model, layouts, hyper, dialect=choosing(_POLAR, coefficients="polar-express-5"))


@fault(
    check="arithmetic.direction",
    model="llama",
    dialect=_LONGER,
    kind="any Muon",
    origin="Emerging-Optimizers #74",
)
def schedule_begins_anew(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """An eleventh step of a set of ten takes the first coefficients again, not the last."""
    return broken(model, layouts, hyper, dialect=choosing(_LONGER, past_end="cycle"))


@fault(
    check="arithmetic.direction",
    model="llama",
    kind="any Muon",
    origin="harness study: exact polar factor",
)
def polar_factor(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The exact polar factor in place of five steps towards it."""

    def polar(batch: Tensor, arithmetic: Arithmetic) -> Tensor:
        U, _, Vh = torch.linalg.svd(batch, full_matrices=False)
        return U @ Vh * scale_factor(arithmetic, *batch.shape[1:])

    return broken(model, layouts, hyper, by_block(polar))


@fault(
    check="subject.answers",
    model="llama",
    kind="any Muon",
    origin="HeavyBall 5961ea66",
)
def multiplied_by_its_norm(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Blocks are multiplied by their norm instead of divided, and the quintic runs away."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        return five_steps(update * update.norm().square(), JORDAN)

    return broken(model, layouts, hyper, how)


@fault(
    check="arithmetic.direction",
    model="llama",
    kind="any Muon",
    origin="dion d3c7a006: a faster path by default",
)
def half_precision_inside(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The iteration runs in bfloat16 where its dialect takes float32."""
    return broken(
        model, layouts, hyper, dialect=choosing(cpu_dtype="bfloat16", iteration="standard")
    )


@fault(check="arithmetic.direction", model="llama", kind="any Muon")
def spectral_norm(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Blocks are divided by their largest singular value, not by their Frobenius norm."""

    def of_spectrum(batch: Tensor, arithmetic: Arithmetic) -> Tensor:
        X = five_steps(batch / torch.linalg.matrix_norm(batch, 2, keepdim=True), JORDAN)
        return X * scale_factor(arithmetic, *batch.shape[1:])

    return broken(model, layouts, hyper, by_block(of_spectrum))


@fault(check="subject.answers", model="llama", origin="DeepSpeed #7939, review; EO #262")
def matrices_only(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A product that takes matrices only is given a batch of heads, and raises."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        def gram(batch: Tensor) -> Tensor:
            return torch.addmm(batch, batch, batch.mT)

        return (
            orthogonalize(update, None, arithmetic)
            if layout is None
            else each_block(update, layout, gram)
        )

    return broken(model, layouts, hyper, how)


class _OneNorm(Broken):
    """Divides all blocks of one shape by one norm."""

    def orthogonalized(
        self, names: Sequence[str], updates: Sequence[Tensor]
    ) -> Sequence[Direction]:
        """The reference's, but for the norm of a batch."""
        totals: dict[torch.Size, Tensor] = {}
        for update in updates:
            totals[update.shape] = totals.get(update.shape, 0) + update.square().sum()
        return [
            Direction(self._in_batch(update, self.layouts[name], totals[update.shape]), 1.0)
            for name, update in zip(names, updates, strict=True)
        ]

    def _in_batch(self, update: Tensor, layout: Layout | None, total: Tensor) -> Tensor:
        if layout is None:
            return orthogonalize(update, layout, self.arithmetic)
        return each_block(update, layout, lambda batch: of_norm(total, batch, self.arithmetic))


@fault(
    check="independence.weights",
    model="llama",
    kind="any Muon",
    origin="Emerging-Optimizers #262 and #270, reviews",
)
def batch_shares_a_norm(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Weights of one shape are iterated as a batch, and the norm is taken over all of it."""
    return broken(model, layouts, hyper, kind=_OneNorm)


@fault(
    check="subject.answers",
    model="transformers:qwen3_next",
    dialect="deepspeed-0.19.8:fused_qkv=heads",
    origin="Megatron-LM #4731",
)
def sizes_without_the_gate(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A fused weight is split into the sizes of q, k and v; the gate's rows are too many."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        if layout is None or len(layout.segments) < 4:
            return orthogonalize(update, layout, arithmetic)
        sizes = [layout.groups * segment.rows for segment in layout.segments[:3]]
        return torch.cat([orthogonalize(x, None, arithmetic) for x in update.split(sizes)])

    return broken(model, layouts, hyper, how)


@fault(
    check="subject.answers",
    model="llama",
    origin="DeepSpeed #8384, 5d16495",
)
def placeholder_read_as_a_matrix(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Under zero.Init a weight has one dimension, and asking for its columns raises."""
    placeholders = {name: p.detach().flatten()[:0] for name, p in model.named_parameters()}
    columns = {name: placeholders[name].shape[1] for name in layouts}
    return broken(model, {n: x for n, x in layouts.items() if columns[n]}, hyper)


@fault(
    check="arithmetic.scale",
    model="llama",
    kind="any Muon",
    origin="Emerging-Optimizers get_muon_scale_factor: three modes",
)
def scale_of_another_mode(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Updates are scaled by the root of the larger side, as another mode of one function does."""
    return broken(model, layouts, hyper, dialect=choosing(scale="spectral"))


@fault(
    check="arithmetic.scale",
    model="llama",
    kind="any Muon",
    origin="Emerging-Optimizers #186; HeavyBall 341c849",
)
def scale_upside_down(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The scale takes columns over rows."""

    def turned(batch: Tensor, arithmetic: Arithmetic) -> Tensor:
        return newton_schulz(batch, arithmetic) * scale_factor(arithmetic, *batch.mT.shape[1:])

    return broken(model, layouts, hyper, by_block(turned))
