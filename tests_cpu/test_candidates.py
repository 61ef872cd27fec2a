"""Recognition on the awkward models: per-layer configs, towers, fused orders, wrappers.

Expected counts and widths of default configs were traced through the models' forward passes, with
transformers 5.24; the rows of each fused order are written out from the classes' own views.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from muonsplit.geometry import Decision, Plan, plan
from muonsplit.layout import Layout
from muonsplit.models.load import build

DEFAULT = "deepspeed-0.19.8"
HEADS, PROJECTIONS = (f"{DEFAULT}:fused_qkv={asked}" for asked in ("heads", "projections"))


@functools.cache
def built(model_type: str, **fields: Any) -> nn.Module:
    return build({"model_type": model_type, **fields})


def seen(decided: Plan, *owners: str) -> Counter[tuple[str, int, str]]:
    """(leaf, rows, layout) of every split weight of some owners, with how many there are."""
    return Counter((d.leaf, d.shape[0], str(d.layout)) for d in decided.split if d.owner in owners)


def only(decided: Plan, leaf: str, owner: str = "") -> Decision:
    alike = {
        (d.shape, d.layout, d.reason): d
        for d in decided.decisions
        if d.leaf == leaf and owner in ("", d.owner)
    }
    assert len(alike) == 1
    return next(iter(alike.values()))


# model type → fields, owner, {(leaf, rows, layout): weights}
TRACED: dict[str, tuple[dict[str, Any], str, dict[tuple[str, int, str], int]]] = {
    "gemma4_text": (
        {},
        "Gemma4TextAttention",
        {
            ("q_proj", 2048, "q 8×256"): 25,
            ("k_proj", 1024, "k 4×256"): 25,
            ("v_proj", 1024, "v 4×256"): 25,
            ("q_proj", 4096, "q 8×512"): 5,
            ("k_proj", 2048, "k 4×512"): 5,
            ("v_proj", 2048, "v 4×512"): 5,
        },
    ),
    "dots3_note_text": (
        {},
        "Dots3NoteTextAttention",
        {
            ("q_b_proj", 24576, "q 128×192"): 13,
            ("kv_b_proj", 32768, "kv 128×256"): 13,
            ("q_b_proj", 16384, "q 64×256"): 33,
            ("kv_b_proj", 20480, "kv 64×320"): 33,
        },
    ),
    "mimo_v2_flash": (
        {},
        "MiMoV2FlashAttention",
        {
            ("q_proj", 12288, "q 64×192"): 48,
            ("k_proj", 768, "k 4×192"): 9,
            ("v_proj", 512, "v 4×128"): 9,
            ("k_proj", 1536, "k 8×192"): 39,
            ("v_proj", 1024, "v 8×128"): 39,
        },
    ),
    "olmo_hybrid": (
        {},
        "OlmoHybridGatedDeltaNet",
        {
            ("q_proj", 2880, "q 30×96"): 24,
            ("k_proj", 2880, "k 30×96"): 24,
            ("v_proj", 5760, "v 30×192"): 24,
        },
    ),
    "zaya": (
        {},
        "ZayaCCAProjection",
        {("q_proj", 1024, "q 8×128"): 40, ("k_proj", 256, "k 2×128"): 40},
    ),
    "deepseek_v4": ({}, "DeepseekV4Attention", {("q_b_proj", 32768, "q 64×512"): 43}),
    "mistral3": (
        {},
        "PixtralAttention",
        {
            ("q_proj", 1024, "q 16×64"): 24,
            ("k_proj", 1024, "k 16×64"): 24,
            ("v_proj", 1024, "v 16×64"): 24,
        },
    ),
}


@pytest.mark.parametrize("model_type", TRACED)
def test_default_configs_are_split_as_they_were_traced(model_type: str) -> None:
    fields, owner, wanted = TRACED[model_type]
    assert seen(plan(built(model_type, **fields)), owner) == wanted


def test_a_wrapper_leaf_hands_the_question_to_its_parent() -> None:
    # The weight is `q_proj.linear.weight`.
    decided = plan(built("inkling2_text"))
    queries = [d for d in decided.split if d.name.endswith(".q_proj.linear.weight")]
    assert Counter((d.shape, str(d.layout)) for d in queries) == {((6144, 4608), "q 48×128"): 48}


# What has heads by its shape alone, and none by its role.
@pytest.mark.parametrize(
    ("model_type", "owner", "leaf", "shape", "said"),
    [
        ("deepseek_v4", "DeepseekV4Indexer", "q_b_proj", (8192, 1024), "role"),
        ("axk2", "AXK2Indexer", "wq_b", (2048, 384), "role"),
        ("aria", "AriaCrossAttention", "q_proj", (1152, 1152), "attention module of its own"),
        ("aria", "AriaCrossAttention", "k_proj", (1152, 1152), "attention module of its own"),
        ("aria", "AriaCrossAttention", "v_proj", (1152, 1152), "attention module of its own"),
        ("deepseek_v4", "DeepseekV4Attention", "kv_proj", (512, 4096), ""),
    ],
)
def test_declined(
    model_type: str, owner: str, leaf: str, shape: tuple[int, int], said: str
) -> None:
    for dialect in (DEFAULT, HEADS, PROJECTIONS):
        decision = only(plan(built(model_type), dialect), leaf, owner)
        assert decision.shape == shape
        assert decision.layout is None
        assert said in decision.reason


@pytest.mark.parametrize("name", ["TokenIndexer", "TokenScorer", "KVCompressor", "Attention"])
@pytest.mark.parametrize("leaf", ["q_proj", "k_proj", "v_proj", "q_b_proj"])
def test_a_role_is_refused_where_the_shape_confirms(name: str, leaf: str) -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.head_dim = 4, 8
            setattr(self, leaf, nn.Linear(8, 32, bias=False))

    owner = type(name, (Owner,), {})()
    decided = plan(nn.ModuleDict({"self_attn": owner}))
    assert [d.layout is not None for d in decided.decisions] == [name == "Attention"]


def test_experts_in_three_dimensions_stay_whole() -> None:
    decided = plan(built("qwen3_moe", num_hidden_layers=1), HEADS)
    experts = [d for d in decided.decisions if len(d.shape) == 3]
    assert len(experts) == 2
    assert all(d.layout is None for d in experts)


def encoder_decoder(encoder: int, decoder: int) -> nn.Module:
    config = BartConfig(
        d_model=1024,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=encoder,
        decoder_attention_heads=decoder,
        vocab_size=64,
    )
    with torch.device("meta"):
        return BartForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("encoder", "decoder"),
    [
        (16, 16),
        (4, 16),
        (16, 4),
        (8, 16),
        (16, 8),
    ],
)
def test_encoder_and_decoder_count_for_themselves(encoder: int, decoder: int) -> None:
    decided = plan(encoder_decoder(encoder, decoder)).split
    cut = Counter(("encoder." in d.name, d.leaf, str(d.layout)) for d in decided)
    wanted: dict[tuple[bool, str, str], int] = {}
    for leaf in ("q_proj", "k_proj", "v_proj"):
        wanted[True, leaf, f"{leaf[0]} {encoder}×{1024 // encoder}"] = 1
        # Attention to itself, and to the encoder.
        wanted[False, leaf, f"{leaf[0]} {decoder}×{1024 // decoder}"] = 2
    assert cut == wanted


def test_cross_attention_has_the_heads_of_its_owner() -> None:
    with torch.device("meta"):
        whisper = WhisperForConditionalGeneration(
            WhisperConfig(
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=4,
                decoder_attention_heads=6,
                d_model=384,
            )
        )
        t5 = T5ForConditionalGeneration(T5Config(num_layers=1, num_heads=6, d_kv=64, d_model=512))
    across = [d for d in plan(whisper).split if ".encoder_attn." in d.name]
    assert sorted(str(d.layout) for d in across) == ["k 6×64", "q 6×64", "v 6×64"]
    # T5's 6 × 64 rows are not its d_model of 512.
    across = [d for d in plan(t5).split if ".EncDecAttention." in d.name]
    assert sorted(str(d.layout) for d in across) == ["k 6×64", "q 6×64", "v 6×64"]


def test_widths_and_counts_come_from_different_places() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head_dim, self.num_key_value_groups = 24, 4
            for leaf, rows in (("q_proj", 192), ("k_proj", 48), ("v_proj", 48)):
                setattr(self, leaf, nn.Linear(8, rows, bias=False))

    model = nn.ModuleDict({"self_attn": Attention()})
    model.config = SimpleNamespace(num_attention_heads=8, hidden_size=64)
    assert [str(d.layout) for d in plan(model).split] == ["q 8×24", "k 2×24", "v 2×24"]


# Role → rows of one head, and the first row of each.
Rows = Mapping[str, tuple[int, list[int]]]


def interleaved(heads: int, d: int) -> Rows:
    return {r: (d, [h * 3 * d + i * d for h in range(heads)]) for i, r in enumerate("qkv")}


def concatenated(heads: int, kv: int, d: int) -> Rows:
    return {
        "q": (d, [h * d for h in range(heads)]),
        "k": (d, [heads * d + g * d for g in range(kv)]),
        "v": (d, [(heads + kv) * d + g * d for g in range(kv)]),
    }


def grouped(groups: int, r: int, d: int) -> Rows:
    return {
        "q": (d, [g * (r + 2) * d + j * d for g in range(groups) for j in range(r)]),
        "k": (d, [g * (r + 2) * d + r * d for g in range(groups)]),
        "v": (d, [g * (r + 2) * d + (r + 1) * d for g in range(groups)]),
    }


def slabs(heads: int, d: int) -> Rows:
    quarter, each = heads * d // 4, range(heads // 4)
    return {
        role: (d, [m * 3 * quarter + i * quarter + j * d for m in range(4) for j in each])
        for i, role in enumerate("qvk")
    }


def keys_values(kv: int, d: int) -> Rows:
    return {"k": (d, [g * d for g in range(kv)]), "v": (d, [kv * d + g * d for g in range(kv)])}


def delta_qkv(keys: int, values: int, dk: int, dv: int) -> Rows:
    return {
        "q": (dk, [i * dk for i in range(keys)]),
        "k": (dk, [keys * dk + i * dk for i in range(keys)]),
        "v": (dv, [2 * keys * dk + j * dv for j in range(values)]),
    }


def delta_qkvz(keys: int, r: int, dk: int, dv: int) -> Rows:
    bases = [g * (2 * dk + 2 * r * dv) for g in range(keys)]
    return {
        "q": (dk, bases),
        "k": (dk, [base + dk for base in bases]),
        "v": (dv, [base + 2 * dk + j * dv for base in bases for j in range(r)]),
        "z": (dv, [base + 2 * dk + r * dv + j * dv for base in bases for j in range(r)]),
    }


def parts(heads: int, **widths: int) -> Rows:
    """Every head is its parts, one after the other."""
    (first, a), (second, b) = widths.items()
    starts = [h * (a + b) for h in range(heads)]
    return {first: (a, starts), second: (b, [start + a for start in starts])}


FALCON_40B = {
    "new_decoder_architecture": True,
    "hidden_size": 8192,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "num_hidden_layers": 1,
}
FALCON_RW = {"new_decoder_architecture": False, "multi_query": False, "num_hidden_layers": 1}
# id → model type, fields, leaf, owner, axis, rows
FUSED: dict[str, tuple[str, dict[str, Any], str, str, int, Rows]] = {
    "neox": ("gpt_neox", {}, "query_key_value", "", 0, interleaved(64, 96)),
    "bloom": ("bloom", {}, "query_key_value", "", 0, interleaved(8, 8)),
    "persimmon": ("persimmon", {}, "query_key_value", "", 0, interleaved(64, 64)),
    "minimax": ("minimax", {}, "qkv_proj", "", 0, interleaved(32, 128)),
    "bigcode": ("gpt_bigcode", {"multi_query": False}, "c_attn", "", 0, interleaved(12, 64)),
    "falcon-rw": ("falcon", FALCON_RW, "query_key_value", "", 0, interleaved(71, 64)),
    "phi3": ("phi3", {}, "qkv_proj", "", 0, concatenated(32, 32, 96)),
    "phi3 of 8": ("phi3", {"num_key_value_heads": 8}, "qkv_proj", "", 0, concatenated(32, 8, 96)),
    "phi3 of 16": (
        *("phi3", {"num_key_value_heads": 16}, "qkv_proj", "", 0),
        concatenated(32, 16, 96),
    ),
    "mpt": ("mpt", {}, "Wqkv", "", 0, concatenated(16, 16, 128)),
    "torch": ("aria", {}, "in_proj_weight", "", 0, concatenated(16, 16, 72)),
    "falcon-7b": ("falcon", {}, "query_key_value", "", 0, concatenated(71, 1, 64)),
    "bigcode of 1": ("gpt_bigcode", {}, "c_attn", "", 0, concatenated(12, 1, 64)),
    "falcon-40b": ("falcon", FALCON_40B, "query_key_value", "", 0, grouped(8, 16, 64)),
    "codegen": ("codegen", {}, "qkv_proj", "", 0, slabs(16, 256)),
    "gpt2": ("gpt2", {}, "c_attn", "", 1, concatenated(12, 12, 64)),
    "jetmoe": ("jetmoe", {}, "kv_proj", "", 0, keys_values(16, 128)),
    "qwen3.5": ("qwen3_5_text", {}, "in_proj_qkv", "", 0, delta_qkv(16, 32, 128, 128)),
    "qwen3-next": ("qwen3_next", {}, "in_proj_qkvz", "", 0, delta_qkvz(16, 2, 128, 128)),
}


def cut(layout: Layout | None) -> set[tuple[str, tuple[tuple[int, int], ...]]]:
    assert layout is not None
    return {(block.role, block.spans) for block in layout.blocks()}


def each(rows: Rows) -> set[tuple[str, tuple[tuple[int, int], ...]]]:
    return {(role, ((s, s + d),)) for role, (d, starts) in rows.items() for s in starts}


@functools.cache
def fused(case: str, dialect: str) -> Decision:
    model_type, fields, leaf, owner, _, _ = FUSED[case]
    return only(plan(built(model_type, **fields), dialect), leaf, owner)


@pytest.mark.parametrize("case", FUSED)
def test_fused_weights_stay_whole_unless_asked_for(case: str) -> None:
    decision = fused(case, DEFAULT)
    assert decision.layout is None
    assert "the dialect keeps it whole" in decision.reason


@pytest.mark.parametrize("case", FUSED)
def test_fused_weights_by_heads(case: str) -> None:
    layout = fused(case, HEADS).layout
    assert layout is not None
    assert layout.axis == FUSED[case][4]
    assert cut(layout) == each(FUSED[case][5])


@pytest.mark.parametrize("case", FUSED)
def test_fused_weights_by_projections(case: str) -> None:
    layout = fused(case, PROJECTIONS).layout
    assert layout is not None
    assert layout.axis == FUSED[case][4]
    blocks = {b.role: {r for a, z in b.spans for r in range(a, z)} for b in layout.blocks()}
    assert len(blocks) == len(layout.blocks())
    assert blocks == {
        role: {r for s in starts for r in range(s, s + d)}
        for role, (d, starts) in FUSED[case][5].items()
    }


def test_an_unknown_order_has_heads_but_no_projections() -> None:
    # Its owner is called `Attention`, and is not the only one.
    by_heads = only(plan(built("openai-gpt"), HEADS), "c_attn")
    assert str(by_heads.layout) == "qkv 36×64, axis 1"
    by_projections = only(plan(built("openai-gpt"), PROJECTIONS), "c_attn")
    assert by_projections.layout is None
    assert "which rows are Q, K and V is not known" in by_projections.reason


@pytest.mark.parametrize(
    ("model_type", "leaf", "option", "joint", "rows"),
    [
        ("qwen3_next", "q_proj", "gated_query", "q 16×512", parts(16, q=256, gate=256)),
        ("qwen3_5_text", "q_proj", "gated_query", "q 16×512", parts(16, q=256, gate=256)),
        ("axk2", "q_gate_proj", "gated_query", "q 32×160", parts(32, q=96, gate=64)),
        ("axk2", "kv_b_proj", "mla_key_value", "kv 32×128", parts(32, k=64, v=64)),
        ("deepseek_v3", "kv_b_proj", "mla_key_value", "kv 128×256", parts(128, k=128, v=128)),
    ],
)
def test_parts_of_a_head_joint_and_apart(
    model_type: str, leaf: str, option: str, joint: str, rows: Rows
) -> None:
    model = built(model_type)
    assert str(only(plan(model, f"{DEFAULT}:{option}=joint"), leaf).layout) == joint
    assert str(only(plan(model, DEFAULT), leaf).layout) == joint
    assert cut(only(plan(model, f"{DEFAULT}:{option}=apart"), leaf).layout) == each(rows)


def test_what_has_no_gate_is_not_cut_apart() -> None:
    apart = plan(built("llama", num_hidden_layers=1), f"{DEFAULT}:gated_query=apart")
    assert str(only(apart, "q_proj").layout) == "q 32×128"


def small(layers: int = 2) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=40,
    )
    return LlamaForCausalLM(config)


def said(model: nn.Module, dialect: str = DEFAULT) -> list[tuple[object, ...]]:
    return [
        (d.leaf, d.kind, d.shape, d.layout, d.heads, d.width, d.reason)
        for d in plan(model, dialect).decisions
    ]


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    if not distributed.is_available() or distributed.is_initialized():
        pytest.skip("needs torch.distributed, and nobody else's process group")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Same(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 1.0


def each_attention(change: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    model = small()
    for layer in model.model.layers:
        changed = change(layer.self_attn)
        layer.self_attn = layer.self_attn if changed is None else changed
    return model


def each_layer(change: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    model = small()
    for i, layer in enumerate(model.model.layers):
        changed = change(layer)
        model.model.layers[i] = layer if changed is None else changed
    return model


def each_linear(change: Callable[[nn.Module], object]) -> nn.Module:
    model = small()
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            change(module)
    return model


def sharded() -> nn.Module:
    model = each_layer(lambda layer: fully_shard(layer))
    fully_shard(model)
    return model


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "DDP": lambda: DistributedDataParallel(small()),
    "DDP of compiled": lambda: DistributedDataParallel(torch.compile(small())),
    "compiled": lambda: torch.compile(small()),
    "layers compiled": lambda: each_layer(torch.compile),
    "FSDP2": sharded,
    "FSDP2 of attention": lambda: each_attention(lambda a: fully_shard(a)),
    "layers checkpointed": lambda: each_layer(checkpoint_wrapper),
    "attention checkpointed": lambda: each_attention(checkpoint_wrapper),
    "parametrised": lambda: each_linear(
        lambda m: parametrize.register_parametrization(m, "weight", Same())
    ),
    "weight norm": lambda: each_linear(parametrizations.weight_norm),
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapping", WRAPPED)
def test_a_wrapped_model_is_decided_as_the_bare_one(wrapping: str) -> None:
    wrapped = WRAPPED[wrapping]()
    bare = said(small())
    assert len([row for row in bare if row[3] is not None]) == 6
    assert said(wrapped) == bare


def concatenated_model() -> nn.Module:
    config = Phi3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=40,
        pad_token_id=0,
    )
    return Phi3ForCausalLM(config)


@pytest.mark.usefixtures("process_group")
def test_a_sharded_owner_keeps_its_order() -> None:
    model = concatenated_model()
    bare = said(model, PROJECTIONS)
    fully_shard(model.model.layers[0].self_attn)
    assert said(model, PROJECTIONS) == bare


def test_a_parametrised_conv1d_keeps_its_axis() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=40))
    bare = [row for row in said(model, HEADS) if row[3] is not None]
    assert [str(row[3]) for row in bare] == ["q 4×8 | k 4×8 | v 4×8, axis 1"]
    attention = model.transformer.h[0].attn
    parametrize.register_parametrization(attention.c_attn, "weight", Same())
    assert [row for row in said(model, HEADS) if row[3] is not None] == bare


class LoraLinear(nn.Module):
    """As peft builds it: the layer below, and a dictionary of adapters by name."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.lora_embedding_A = nn.ParameterDict({})


@pytest.mark.parametrize("adapter", ["default", "q_proj", "query"])
def test_an_adapter_is_read_through_and_its_own_matrices_declined(adapter: str) -> None:
    def adapted(attention: nn.Module) -> None:
        for leaf in ("q_proj", "k_proj", "v_proj"):
            lora = LoraLinear(getattr(attention, leaf))
            for part in (lora.lora_A, lora.lora_B):
                part[adapter] = part.pop("default")
            setattr(attention, leaf, lora)

    decided = plan(each_attention(adapted))
    own = [d for d in decided.decisions if ".lora_" in d.name]
    assert len(own) == 2 * 3 * 2
    for d in own:
        assert d.layout is None
        assert d.reason
    rest = Counter(str(d.layout) for d in decided.decisions if ".lora_" not in d.name)
    assert rest == Counter(str(row[3]) for row in said(small()))


def test_tied_attention_weights_are_decided_once() -> None:
    model = small()
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight = first.q_proj.weight
    second.v_proj = second.k_proj
    decided = plan(model)
    names = [d.name for d in (*decided.decisions, *decided.others)]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert Counter(d.leaf for d in decided.split) == {"q_proj": 1, "k_proj": 2, "v_proj": 1}
