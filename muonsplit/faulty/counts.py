"""Faults of counts and widths: the right weights, cut into the wrong heads."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from muonsplit.dialect import Arithmetic
from muonsplit.faulty.base import Broken, Layouts, broken, heads_of, recut
from muonsplit.faulty.registry import fault
from muonsplit.layout import Layout
from muonsplit.muon import orthogonalize
from muonsplit.subjects.protocol import Hyper


def _of_width(width: int, role: str = "q") -> Callable[[Tensor], Layout]:
    """Cuts rows by division through a width."""
    return lambda p: Layout.heads(role, p.shape[0] // width, width)


def _width(model: nn.Module) -> int:
    return heads_of(model, "head_dim")


@fault(check="cut.rows", model="deepseek-v2-lite", origin="VeOmni #980")
def rows_over_head_dim(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Heads are rows // head_dim, but MLA's head_dim is its rope part only."""
    width = heads_of(model, "qk_rope_head_dim")
    return broken(model, recut(model, layouts, ("q_proj", "kv_b_proj"), _of_width(width)), hyper)


@fault(check="cut.rows", model="kimi-k3-0.40b", origin="DeepSpeed #8436")
def equal_product_of_the_config(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The config's heads × width give the same rows as the module's own, which are other heads."""

    def cut(p: Tensor) -> Layout | None:
        return Layout.heads("q", 2 * heads_of(model), p.shape[0] // (2 * heads_of(model)))

    return broken(model, recut(model, layouts, ("q_proj", "k_proj", "v_proj"), cut), hyper)


@fault(check="cut.rows", model="llama", origin="DeepSpeed #8384, candidates that disagree")
def ambiguity_guessed(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Two counts and widths give the rows; the first that was tried is taken."""
    heads, width = heads_of(model), _width(model)
    cut = Layout.heads("q", heads // 2, 2 * width)
    return broken(model, recut(model, layouts, ("q_proj",), lambda p: cut), hyper)


@fault(check="cut.rows", model="deepseek-v2-lite", origin="DeepSpeed #8384, review by delock")
def order_of_branches(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """`kv_b_proj` begins with `k`, and the branch for keys comes before the one for MLA."""
    width = heads_of(model, "qk_nope_head_dim")
    return broken(model, recut(model, layouts, ("kv_b_proj",), _of_width(width, "k")), hyper)


@fault(
    check="cut.rows",
    model="transformers:gemma4_text",
    origin="PaddleFleet #1482; Megatron-LM #6326",
)
def one_width_for_every_layer(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The width is read from the model's config, but full attention has wider heads than local."""
    first = next(layout for layout in layouts.values() if layout is not None)
    cut = _of_width(first.blocks()[0].rows)
    return broken(model, recut(model, layouts, ("q_proj", "k_proj", "v_proj"), cut), hyper)


@fault(check="cut.rows", model="llama", origin="modded-nanogpt #253")
def head_pairs(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Two heads are orthogonalised together."""
    return broken(model, recut(model, layouts, ("q_proj",), _of_width(2 * _width(model))), hyper)


@fault(
    check="cut.rows",
    model="llama",
    dialect="deepspeed-0.19.8:heads_per_block=2",
    origin="prime-rl #4119",
)
def heads_per_block_ignored(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Asked for two heads a block, it takes one."""
    return broken(model, recut(model, layouts, ("q_proj",), _of_width(_width(model))), hyper)


@fault(check="cut.rows", model="deepseek-v2-lite", origin="xtuner #2001; torchtitan #4692")
def rope_rows_apart(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A query head's rope rows are a block of their own; the dialect keeps a head together."""
    heads, nope = heads_of(model), heads_of(model, "qk_nope_head_dim")
    rope = heads_of(model, "qk_rope_head_dim")
    cut = Layout.parse(f"{heads} × (nope {nope} | rope {rope})")
    return broken(model, recut(model, layouts, ("q_proj",), lambda p: cut), hyper)


@fault(
    check="cut.rows",
    model="deepseek-v2-lite",
    dialect="deepspeed-0.19.8:mla_key_value=apart",
    origin="Primus split_kv",
)
def key_and_value_together(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """K and V of an MLA head stay one block although they were to be two."""
    heads = heads_of(model)

    def cut(p: Tensor) -> Layout | None:
        return Layout.heads("kv", heads, p.shape[0] // heads)

    return broken(model, recut(model, layouts, ("kv_b_proj",), cut), hyper)


@fault(check="cut.rows", model="transformers:qwen3_next", origin="Megatron-LM #4731")
def gates_counted_as_heads(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The rows of an output gate beside each query head are cut off as heads of their own."""
    cut = _of_width(_width(model))
    return broken(model, recut(model, layouts, ("q_proj",), cut), hyper)


@fault(check="cut.rows", model="llama", origin="xtuner _muonsplit: trailing rows")
def trailing_rows_frozen(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The list of sizes is one row short, and rows that nothing covers get no update."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        result = orthogonalize(update, layout, arithmetic)
        if layout is None:
            return result
        width = layout.blocks()[-1].rows
        last = orthogonalize(update[-width:-1], None, arithmetic)
        return torch.cat([result[:-width], last, torch.zeros_like(update[-1:])])

    return broken(model, layouts, hyper, how)


@fault(
    check="cut.rows",
    model="transformers:qwen3_next",
    dialect="deepspeed-0.19.8:fused_qkv=heads",
    origin="DeepSpeed #8580, review by alanhuangyoo",
)
def fused_input_by_the_config(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The fused input of linear attention is cut into the config's heads, of softmax attention."""
    cut = _of_width(_width(model))
    return broken(model, recut(model, layouts, ("in_proj_qkvz",), cut), hyper)
