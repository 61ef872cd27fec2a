"""Faults of names: leaves that a recogniser does not know, or knows by mistake."""

from collections.abc import Sequence

from torch import Tensor, nn

from muonsplit.faulty.base import Broken, Layouts, broken, equal_blocks, heads_of, leaf_of, recut
from muonsplit.faulty.registry import fault
from muonsplit.layout import Layout
from muonsplit.subjects.protocol import Hyper

_HEADS = "deepspeed-0.19.8:fused_qkv=heads"


def _by_head_dim(model: nn.Module, layouts: Layouts, leaves: Sequence[str]) -> Layouts:
    """Leaves keep their cut only if the config's own heads × head_dim give their rows."""
    rows = heads_of(model) * heads_of(model, "head_dim")
    chosen = {name: p.shape[0] for name, p in model.named_parameters() if name in layouts}
    lost = [n for n, found in chosen.items() if leaf_of(n) in leaves and found != rows]
    return {**layouts, **dict.fromkeys(lost)}


@fault(check="recognition.split", model="glm-5.2", origin="DeepSpeed #8384, review by pengdurice")
def latent_up_projections_missed(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """MLA's q_b and kv_b have other widths than head_dim, so neither is confirmed and cut."""
    return broken(model, _by_head_dim(model, layouts, ("q_b_proj", "kv_b_proj")), hyper)


@fault(check="recognition.split", model="deepseek-v2-lite", origin="DeepSpeed #8384, c6a7793")
def latent_query_without_lora_missed(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A plain q_proj of MLA is judged by head_dim, which transformers fills with the rope width."""
    return broken(model, _by_head_dim(model, layouts, ("q_proj",)), hyper)


@fault(check="recognition.split", model="kimi-k3-0.40b", origin="DeepSpeed #8420")
def linear_attention_missed(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Linear attention is judged by the top level of the config, which describes full attention."""
    return broken(model, _by_head_dim(model, layouts, ("q_proj", "k_proj", "v_proj")), hyper)


@fault(check="recognition.split", model="deepseek-v2-lite", origin="PaddleFleet #1679")
def leaf_renamed(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A projection was renamed, and the registry of splits knows its old name only."""
    return broken(model, recut(model, layouts, ("kv_b_proj",), lambda p: None), hyper)


@fault(check="recognition.split", model="kimi-k3-0.40b", origin="Megatron-LM #5015; Primus")
def one_name_only(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Only `linear_qkv` is looked for, and this model has no weight of that name."""
    kept = {name: layout for name, layout in layouts.items() if leaf_of(name) == "linear_qkv"}
    return broken(model, {**dict.fromkeys(layouts), **kept}, hyper)


@fault(
    check="recognition.split",
    model="kimi-k3-0.40b",
    origin="Megatron-LM #5015, review by gaojingwei",
)
def condition_inverted(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The test for MLA is the wrong way round: its weights are passed over."""
    return broken(model, recut(model, layouts, ("q_b_proj", "kv_b_proj"), lambda p: None), hyper)


@fault(
    check="recognition.split",
    model="transformers:qwen3_next",
    dialect=_HEADS,
    origin="miles #3096; xtuner #2030",
)
def fused_input_missed(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The fused input of linear attention goes by another name than `qkv_proj` and stays whole."""
    return broken(model, recut(model, layouts, ("in_proj_qkvz",), lambda p: None), hyper)


@fault(
    check="recognition.split",
    model="transformers:phi3",
    dialect=_HEADS,
    origin="lm-engine #408, review",
)
def split_on_the_wrong_projection(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The split is attached to the output projection, not to the fused input."""
    without = recut(model, layouts, ("qkv_proj",), lambda p: None)
    return broken(
        model,
        recut(model, without, ("o_proj",), lambda p: equal_blocks(p, heads_of(model))),
        hyper,
    )


@fault(check="recognition.whole", model="glm-5.2", origin="VeOmni #1108; PaddleFormers #4532")
def indexer_by_its_own_heads(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A bare leaf name matches the indexer too, whose own heads and width give its rows."""
    heads, width = heads_of(model, "index_n_heads"), heads_of(model, "index_head_dim")
    layout = Layout.heads("q", heads, width)
    return broken(model, recut(model, layouts, ("wq_b",), lambda p: layout), hyper)


@fault(check="recognition.whole", model="llama", origin="DeepSpeed #8384, first version")
def divisibility_as_proof(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Without a head_dim, rows that the head count divides are taken for heads."""

    def cut(p: Tensor) -> Layout | None:
        return equal_blocks(p, heads_of(model))

    return broken(model, recut(model, layouts, ("gate_proj", "up_proj"), cut), hyper)


@fault(
    check="recognition.whole",
    model="transformers:phi3",
    origin="torchtitan #4531; Megatron-LM #7077",
)
def gate_and_up_interleaved(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A fused gate and up is cut into every second row, as another storage has it."""

    def cut(p: Tensor) -> Layout | None:
        return Layout.parse(f"{p.shape[0] // 2} × (gate 1 | up 1), joined")

    return broken(model, recut(model, layouts, ("gate_up_proj",), cut), hyper)


@fault(
    check="recognition.whole",
    model="kimi-k3-0.40b",
    origin="Megatron-LM #7085: gate rows; dion's README example",
)
def gate_taken_for_heads(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The rows of an output gate, which has the shape of a query, are cut as heads."""

    def cut(p: Tensor) -> Layout | None:
        return equal_blocks(p, heads_of(model))

    return broken(model, recut(model, layouts, ("g_proj",), cut), hyper)
