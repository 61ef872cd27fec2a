"""Faults of storage: fused projections, and weights stored with their heads on the other axis."""

from torch import Tensor, nn

from muonsplit.dialect import Arithmetic, dialect_named
from muonsplit.faulty.base import Broken, Layouts, broken, each_block, heads_of, recut
from muonsplit.faulty.registry import fault
from muonsplit.layout import Layout, Segment
from muonsplit.muon import orthogonalize
from muonsplit.newton_schulz import newton_schulz, scale_factor
from muonsplit.subjects.protocol import Hyper

_HEADS = "deepspeed-0.19.8:fused_qkv=heads"
_PROJECTIONS = "deepspeed-0.19.8:fused_qkv=projections"


@fault(
    check="cut.rows",
    model="pythia-1b",
    dialect=_PROJECTIONS,
    origin="DeepSpeed #8580: sectioned or interleaved by group",
)
def interleaved_cut_as_sections(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Q, K and V interleaved by head are cut as if all Q came first, then all K, then all V."""
    heads = heads_of(model)

    def cut(p: Tensor) -> Layout | None:
        width = p.shape[0] // 3 // heads
        return Layout(tuple(Segment(r, heads, width) for r in "qkv"), joined=True)

    return broken(model, recut(model, layouts, ("query_key_value",), cut), hyper)


@fault(
    check="recognition.split",
    model="pythia-1b",
    dialect=_PROJECTIONS,
    origin="xtuner #2030; modded-nanogpt #47; Megatron-LM #1428",
)
def fused_kept_whole(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Q, K and V are orthogonalised as the one matrix they are stored as."""
    return broken(model, dict.fromkeys(layouts), hyper)


@fault(
    check="arithmetic.scale",
    model="transformers:phi3",
    dialect=_PROJECTIONS,
    origin="DeepSpeed #8580, review; dion #90",
)
def scale_of_the_fused_weight(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Q, K and V are orthogonalised apart and scaled by the shape of the three together."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        if layout is None:
            return orthogonalize(update, layout, arithmetic)
        factor = scale_factor(arithmetic, *update.shape)
        return each_block(update, layout, lambda batch: newton_schulz(batch, arithmetic) * factor)

    return broken(model, layouts, hyper, how, dialect_named(_PROJECTIONS))


@fault(
    check="recognition.split",
    model="transformers:gpt2",
    dialect=_HEADS,
    origin="Paddle's layout; optax and maxtext #2546",
)
def rows_of_a_transposed_weight(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A weight stored inputs first has its heads on columns, and is cut on rows."""
    heads = heads_of(model, "n_head")

    def cut(p: Tensor) -> Layout | None:
        return Layout.heads("q", heads, p.shape[0] // heads)

    return broken(model, recut(model, layouts, ("c_attn",), cut), hyper)


@fault(
    check="arithmetic.scale",
    model="transformers:gpt2",
    dialect=_HEADS,
    origin="optax #1249",
)
def scale_of_a_transposed_weight(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The scale of a weight stored inputs first takes its rows for outputs."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        if layout is None:
            return orthogonalize(update, layout, arithmetic)

        def transposed(batch: Tensor) -> Tensor:
            factor = scale_factor(arithmetic, batch.shape[2], batch.shape[1])
            return newton_schulz(batch, arithmetic) * factor

        return each_block(update, layout, transposed)

    return broken(model, layouts, hyper, how)
