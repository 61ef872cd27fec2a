"""Faults of recognition: the wrong weights, the wrong axis, the wrong number of heads."""

from torch import nn

from muonsplit.faulty.base import Broken, Layouts, broken, equal_blocks, heads_of
from muonsplit.faulty.registry import fault
from muonsplit.layout import Layout
from muonsplit.subjects.protocol import Hyper


@fault(check="recognition.split", model="llama", origin="DeepSpeed #8612")
def tag_dropped_on_one_path(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Weights that share a shape with an earlier one are bucketed, and the bucket forgets the cut.

    Which call site runs depends on an unrelated option; three of six dropped the tag.
    """
    seen: set[tuple[int, ...]] = set()
    kept: dict[str, Layout | None] = {}
    for name, p in model.named_parameters():
        if name in layouts:
            kept[name] = None if (*p.shape, name.split(".")[-2]) in seen else layouts[name]
            seen.add((*p.shape, name.split(".")[-2]))  # pyright: ignore[reportArgumentType]
    return broken(model, kept, hyper)


@fault(check="cut.rows", model="llama", origin="DeepSpeed #8384, tensor parallelism")
def stale_head_count_on_shard(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The head count of the model before it was sharded in two still divides the rows left."""
    stale = {
        name: layout
        and Layout.heads("q", 2 * len(layout.blocks()), layout.rows // 2 // len(layout.blocks()))
        for name, layout in layouts.items()
    }
    return broken(model, stale, hyper)


@fault(check="routing.muon", model="llama", origin="DeepSpeed #8438, zero.Init under ZeRO-3")
def zero_init_shapes(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Placeholders of partitioned parameters have one dimension, so nothing counts as a matrix."""
    placeholders = {name: p.detach().flatten()[:0] for name, p in model.named_parameters()}
    matrices = {name: layout for name, layout in layouts.items() if placeholders[name].ndim >= 2}
    return broken(model, matrices, hyper)


@fault(check="recognition.whole", model="llama", origin="DeepSpeed #8384, first version")
def o_proj_on_rows(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The output projection is cut on its rows; its heads are columns, and the rows divide too."""
    cut = dict(layouts)
    for name, p in model.named_parameters():
        if name.endswith("o_proj.weight"):
            cut[name] = equal_blocks(p, heads_of(model))
    return broken(model, cut, hyper)


@fault(check="recognition.whole", model="pythia-1b", origin="DeepSpeed #8384, first version")
def dense_by_substring(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """`dense` anywhere in a name is taken for attention: dense_h_to_4h and dense_4h_to_h match."""
    cut = dict(layouts)
    for name, p in model.named_parameters():
        if name in layouts and "dense_" in name:
            cut[name] = equal_blocks(p, heads_of(model))
    return broken(model, cut, hyper)


@fault(check="recognition.whole", model="glm-5.2", origin="deepspeed 0.19.8 on GLM-5's config")
def indexer_split(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The indexer's wq_b begins with `wq`, and num_attention_heads × head_dim gives its rows."""
    heads, width = heads_of(model), heads_of(model, "head_dim")
    cut = dict(layouts)
    for name, p in model.named_parameters():
        if name.split(".")[-2].startswith("wq") and p.shape[0] == heads * width:
            cut[name] = Layout.heads("q", heads, width)
    return broken(model, cut, hyper)


@fault(check="cut.rows", model="llama", origin="DeepSpeed #8384; dion's README example")
def query_count_for_key_value(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """One count for the layer: K and V of a grouped-query model are cut into quarter heads."""
    cut = dict(layouts)
    for name, p in model.named_parameters():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            cut[name] = equal_blocks(p, heads_of(model))
    return broken(model, cut, hyper)


@fault(check="routing.others", model="llama", kind="any Muon")
def embedding_in_muon(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Every matrix is trained by Muon, the embedding and the output head among them."""
    matrices = {name: None for name, p in model.named_parameters() if p.ndim >= 2}
    return broken(model, {**matrices, **layouts}, hyper)
