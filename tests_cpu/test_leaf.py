"""Names are read through wrappers, and a near miss is a miss."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from transformers import LlamaConfig, LlamaForCausalLM

from muonsplit.geometry import plan
from muonsplit.geometry.leaf import SPLITTABLE, kind_of, locate
from muonsplit.geometry.owner import role_of

OWNER = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("name", "owner", "leaf"),
    [
        (f"{OWNER}.q_proj.weight", OWNER, "q_proj"),
        (f"module.{OWNER}.q_proj.weight", f"module.{OWNER}", "q_proj"),
        (f"_orig_mod.{OWNER}.q_proj.weight", f"_orig_mod.{OWNER}", "q_proj"),
        (f"{OWNER}.q_proj.module.weight", OWNER, "q_proj"),
        (f"{OWNER}.q_proj._orig_mod.weight", OWNER, "q_proj"),
        (f"{OWNER}.q_proj._fsdp_wrapped_module.weight", OWNER, "q_proj"),
        (f"{OWNER}.q_proj._checkpoint_wrapped_module.weight", OWNER, "q_proj"),
        (
            f"{OWNER}._fsdp_wrapped_module._checkpoint_wrapped_module.q_proj.weight",
            f"{OWNER}._fsdp_wrapped_module._checkpoint_wrapped_module",
            "q_proj",
        ),
        (f"{OWNER}.q_proj.linear.weight", OWNER, "q_proj"),
        (f"{OWNER}.q_proj.base_layer.weight", OWNER, "q_proj"),
        (f"{OWNER}.q_proj.parametrizations.weight.original", OWNER, "q_proj"),
        (f"{OWNER}.q_proj.parametrizations.weight.original1", OWNER, "q_proj"),
        (f"{OWNER}.q_proj.base_layer.parametrizations.weight.original", OWNER, "q_proj"),
        (f"{OWNER}.q_proj._orig_mod.base_layer.weight", OWNER, "q_proj"),
        (f"{OWNER}.in_proj_weight", OWNER, "in_proj_weight"),
        ("model.layers.3.mlp.experts.gate_up_proj", "model.layers.3.mlp.experts", "gate_up_proj"),
        (f"{OWNER}.q_proj.bias", f"{OWNER}.q_proj", "bias"),
        ("q_proj.weight", "", "q_proj"),
        ("module.q_proj.weight", "module", "q_proj"),
    ],
)
def test_locate(name: str, owner: str, leaf: str) -> None:
    assert locate(name) == (owner, leaf)


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        ("q_proj", "query"),
        ("query", "query"),
        ("Wq", "query"),
        ("k_proj", "key"),
        ("project_k", "key"),
        ("q", "query"),
        ("query_key", "query"),
        ("q_gate_proj", "query"),
        ("k_lin", "key"),
        ("to_v", "value"),
        ("v_proj", "value"),
        ("q_b_proj", "mla_query_up"),
        ("wq_b", "mla_query_up"),
        ("linear_q_up_proj", "mla_query_up"),
        ("kv_b_proj", "mla_key_value_up"),
        ("wkv_b", "mla_key_value_up"),
        ("query_key_value", "fused_qkv"),
        ("qkv_proj", "fused_qkv"),
        ("c_attn", "fused_qkv"),
        ("in_proj_weight", "fused_qkv"),
        ("in_proj_qkvz", "fused_qkv"),
        ("kv_proj", "fused_qkv"),
        ("q_a_proj", "mla_down"),
        ("kv_a_proj_with_mqa", "mla_down"),
        ("o_proj", "output"),
        ("dense", "output"),
        ("out_proj", "output"),
        ("g_proj", "gate"),
        ("f_b_proj", "gate"),
    ],
)
def test_kind(leaf: str, kind: str) -> None:
    assert kind_of(leaf) == kind


@pytest.mark.parametrize(
    "leaf",
    [
        "wq_bb",
        "dense_h_to_4h",
        "q_proj_extra",
        "xq_proj",
        "Q_PROJ",
        "q_proj ",
        "wq_",
        "kv_b",
        "qq",
        "Q",
        "",
        "gate_up_proj",
        "b_proj",
        "weights_proj",
        "q_norm",
    ],
)
def test_near_misses_are_other(leaf: str) -> None:
    assert kind_of(leaf) == "other"


def test_what_is_never_split_is_not_splittable() -> None:
    assert not SPLITTABLE & {"mla_down", "output", "gate", "other"}


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("LlamaAttention", OWNER),
        ("Qwen3MoeAttention", OWNER),
        ("MoeAttention", OWNER),
        ("GPTNeoXAttention", "gpt_neox.layers.0.attention"),
        ("LongcatFlashMLA", OWNER),
        ("MLA", "attn"),
        ("KimiMLAAttention", OWNER),
        ("KimiDeltaAttention", OWNER),
        ("BertSelfAttention", "bert.encoder.layer.0.attention.self"),
        ("T5Attention", OWNER),
        ("MultiheadAttention", ""),
        ("LlamaFlashAttention2", OWNER),
    ],
)
def test_attention_is_asked(name: str, path: str) -> None:
    role = role_of(name, path)
    assert role.attention
    assert name in role.reason


@pytest.mark.parametrize(
    ("name", "path", "word"),
    [
        ("GlmMoeDsaIndexer", f"{OWNER}.indexer", "indexer"),
        ("DeepseekV4Indexer", OWNER, "indexer"),
        ("TokenScorer", OWNER, "scorer"),
        ("AttentionScorer", OWNER, "scorer"),
        ("KVCompressorAttention", OWNER, "compressor"),
        ("LlamaAttention", f"{OWNER}.indexer.attn", "indexer"),
        ("LlamaAttention", f"{OWNER}.compressor.inner", "compressor"),
        ("LlamaAttention", "scorer.self_attn", "scorer"),
        ("LlamaAttention", f"{OWNER}.Indexer", "indexer"),
    ],
)
def test_a_role_that_is_not_attention_is_refused(name: str, path: str, word: str) -> None:
    role = role_of(name, path)
    assert not role.attention
    assert word in role.reason
    assert "role" in role.reason


@pytest.mark.parametrize(
    "name", ["LlamaMLP", "Projector", "Attentive", "Mlattn", "Linear", "", "PatchMerger"]
)
def test_an_unknown_owner_is_declined(name: str) -> None:
    role = role_of(name, OWNER)
    assert not role.attention
    assert "not known" in role.reason


# 4 query heads and 2 key-value heads of 8 rows.
WANTED = {"q_proj": "q 4×8", "k_proj": "k 2×8", "v_proj": "v 2×8"}


def small() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=40,
        )
    )


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2.0


class DistributedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class CheckpointWrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = module


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)


def parametrised() -> nn.Module:
    model = small()
    for layer in model.model.layers:
        for leaf in WANTED:
            linear = getattr(layer.self_attn, leaf)
            parametrize.register_parametrization(linear, "weight", Twice())
    return model


def weight_normed() -> nn.Module:
    model = small()
    for layer in model.model.layers:
        for leaf in WANTED:
            parametrizations.weight_norm(getattr(layer.self_attn, leaf))
    return model


def with_adapters() -> nn.Module:
    model = small()
    for layer in model.model.layers:
        for leaf in WANTED:
            setattr(layer.self_attn, leaf, LoraLinear(getattr(layer.self_attn, leaf)))
    return model


def checkpointed() -> nn.Module:
    model = small()
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = CheckpointWrapper(layer)
    return model


def compiled_part() -> nn.Module:
    model = small()
    for layer in model.model.layers:
        layer.self_attn = torch.compile(layer.self_attn)
    return model


WRAPPED = {
    "bare": small,
    "compiled": lambda: torch.compile(small()),
    "attention compiled": compiled_part,
    "module": lambda: DistributedDataParallel(small()),
    "module and compiled": lambda: torch.compile(DistributedDataParallel(small())),
    "checkpointed": checkpointed,
    "parametrised": parametrised,
    "weight_norm": weight_normed,
    "adapters": with_adapters,
}


@pytest.mark.parametrize("wrapping", WRAPPED)
def test_wrapped_models_have_the_same_layouts(wrapping: str) -> None:
    decisions = plan(WRAPPED[wrapping]()).split
    seen = sorted((d.leaf, str(d.layout), d.owner) for d in decisions)
    assert seen == sorted((*item, "LlamaAttention") for item in WANTED.items() for _ in range(2))
