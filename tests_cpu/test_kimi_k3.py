"""The Kimi K3 stand-in has the released shapes, runs, and keeps its heads apart."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muonsplit.errors import ConfigError
from muonsplit.models.kimi_k3 import KimiK3Config, KimiK3ForCausalLM, mix_sources
from muonsplit.models.kimi_k3_layers import (
    KimiDeltaAttention,
    KimiMLAAttention,
    KimiMoEGate,
    gated_delta_rule,
)

MODELS = Path(__file__).parents[1] / "golden" / "models"

# (owner class, leaf) -> (shape, count), written down from the released checkpoint's listing.
FULL_SIZE = {
    ("KimiDeltaAttention", "q_proj"): ((12288, 7168), 69),
    ("KimiDeltaAttention", "k_proj"): ((12288, 7168), 69),
    ("KimiDeltaAttention", "v_proj"): ((12288, 7168), 69),
    ("KimiDeltaAttention", "q_conv1d"): ((12288, 1, 4), 69),
    ("KimiDeltaAttention", "k_conv1d"): ((12288, 1, 4), 69),
    ("KimiDeltaAttention", "v_conv1d"): ((12288, 1, 4), 69),
    ("KimiDeltaAttention", "f_a_proj"): ((128, 7168), 69),
    ("KimiDeltaAttention", "f_b_proj"): ((12288, 128), 69),
    ("KimiDeltaAttention", "b_proj"): ((96, 7168), 69),
    ("KimiDeltaAttention", "g_proj"): ((12288, 7168), 69),
    ("KimiDeltaAttention", "o_norm"): ((128,), 69),
    ("KimiDeltaAttention", "o_proj"): ((7168, 12288), 69),
    ("KimiMLAAttention", "q_a_proj"): ((1536, 7168), 24),
    ("KimiMLAAttention", "q_a_layernorm"): ((1536,), 24),
    ("KimiMLAAttention", "q_b_proj"): ((18432, 1536), 24),
    ("KimiMLAAttention", "kv_a_proj_with_mqa"): ((576, 7168), 24),
    ("KimiMLAAttention", "kv_a_layernorm"): ((512,), 24),
    ("KimiMLAAttention", "kv_b_proj"): ((24576, 512), 24),
    ("KimiMLAAttention", "g_proj"): ((12288, 7168), 24),
    ("KimiMLAAttention", "o_proj"): ((7168, 12288), 24),
    ("KimiDecoderLayer", "input_layernorm"): ((7168,), 93),
    ("KimiDecoderLayer", "post_attention_layernorm"): ((7168,), 93),
    ("KimiDecoderLayer", "self_attention_res_norm"): ((7168,), 93),
    ("KimiDecoderLayer", "self_attention_res_proj"): ((1, 7168), 93),
    ("KimiDecoderLayer", "mlp_res_norm"): ((7168,), 93),
    ("KimiDecoderLayer", "mlp_res_proj"): ((1, 7168), 93),
    ("KimiSparseMoeBlock", "gate"): ((896, 7168), 92),
    ("KimiSparseMoeBlock", "routed_expert_down_proj"): ((3584, 7168), 92),
    ("KimiSparseMoeBlock", "routed_expert_norm"): ((3584,), 92),
    ("KimiSparseMoeBlock", "routed_expert_up_proj"): ((7168, 3584), 92),
    ("KimiK3TextModel", "embed_tokens"): ((163840, 7168), 1),
    ("KimiK3TextModel", "output_attn_res_norm"): ((7168,), 1),
    ("KimiK3TextModel", "output_attn_res_proj"): ((1, 7168), 1),
    ("KimiK3TextModel", "norm"): ((7168,), 1),
    ("KimiK3ForCausalLM", "lm_head"): ((163840, 7168), 1),
}
SMALL_SIZE = {
    ("KimiDeltaAttention", "q_proj"): ((256, 1024), 6),
    ("KimiDeltaAttention", "k_proj"): ((256, 1024), 6),
    ("KimiDeltaAttention", "v_proj"): ((256, 1024), 6),
    ("KimiDeltaAttention", "q_conv1d"): ((256, 1, 4), 6),
    ("KimiDeltaAttention", "k_conv1d"): ((256, 1, 4), 6),
    ("KimiDeltaAttention", "v_conv1d"): ((256, 1, 4), 6),
    ("KimiDeltaAttention", "f_a_proj"): ((32, 1024), 6),
    ("KimiDeltaAttention", "f_b_proj"): ((256, 32), 6),
    ("KimiDeltaAttention", "b_proj"): ((8, 1024), 6),
    ("KimiDeltaAttention", "g_proj"): ((256, 1024), 6),
    ("KimiDeltaAttention", "o_proj"): ((1024, 256), 6),
    ("KimiMLAAttention", "q_a_proj"): ((256, 1024), 2),
    ("KimiMLAAttention", "q_b_proj"): ((768, 256), 2),
    ("KimiMLAAttention", "kv_a_proj_with_mqa"): ((160, 1024), 2),
    ("KimiMLAAttention", "kv_b_proj"): ((1024, 128), 2),
    ("KimiMLAAttention", "g_proj"): ((512, 1024), 2),
    ("KimiMLAAttention", "o_proj"): ((1024, 512), 2),
}

TINY = {
    "hidden_size": 20,
    "intermediate_size": 18,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 9,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_experts": 4,
    "moe_intermediate_size": 7,
    "routed_expert_hidden_size": 12,
    "attn_res_block_size": 2,
    "vocab_size": 31,
}


def published(name: str) -> dict[str, Any]:
    return json.loads((MODELS / name / "config.json").read_text())


def tiny_config(**linear: Any) -> KimiK3Config:
    """Four layers, the fourth with MLA, and widths that few weights share."""
    fields = published("kimi-k3-0.40b")
    fields |= TINY
    fields["linear_attn_config"] |= {"num_heads": 3, "head_dim": 5, **linear}
    return KimiK3Config.from_dict(fields)


def build(config: KimiK3Config, seed: int = 0) -> KimiK3ForCausalLM:
    torch.manual_seed(seed)
    return KimiK3ForCausalLM(config).double()


def build_on_meta(name: str) -> KimiK3ForCausalLM:
    with torch.device("meta"):
        return KimiK3ForCausalLM(KimiK3Config.from_dict(published(name)))


def tokens(config: KimiK3Config, length: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (2, length), generator=generator)


def weights_by_owner(model: nn.Module) -> Counter[tuple[tuple[str, str], tuple[int, ...]]]:
    found: Counter[tuple[tuple[str, str], tuple[int, ...]]] = Counter()
    for name, parameter in model.named_parameters():
        path = name.removesuffix(".weight").split(".")
        owner = type(model.get_submodule(".".join(path[:-1]))).__name__
        found[(owner, path[-1]), tuple(parameter.shape)] += 1
    return found


@pytest.mark.parametrize(
    ("name", "expected"), [("kimi-k3", FULL_SIZE), ("kimi-k3-0.40b", SMALL_SIZE)]
)
def test_every_listed_weight_has_the_published_shape_and_count(
    name: str, expected: dict[tuple[str, str], tuple[tuple[int, ...], int]]
) -> None:
    listed = {
        key: count
        for key, count in weights_by_owner(build_on_meta(name)).items()
        if key[0] in expected
    }
    assert listed == {(key, shape): count for key, (shape, count) in expected.items()}


def test_full_size_has_the_published_names_and_parameter_count() -> None:
    model = build_on_meta("kimi-k3")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (12288, 7168)
    assert shapes["model.layers.3.self_attn.kv_b_proj.weight"] == (24576, 512)
    assert shapes["model.layers.92.self_attn.q_b_proj.weight"] == (18432, 1536)
    assert shapes["model.layers.0.self_attn.A_log"] == (96,)
    assert shapes["model.layers.0.self_attn.dt_bias"] == (12288,)
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (33792, 7168)
    moe = "model.layers.1.block_sparse_moe"
    assert shapes[f"{moe}.experts.gate_up_proj"] == (896, 6144, 3584)
    assert shapes[f"{moe}.experts.down_proj"] == (896, 3584, 3072)
    assert shapes[f"{moe}.shared_experts.down_proj.weight"] == (7168, 6144)
    assert not any(name.startswith("model.layers.1.mlp.") for name in shapes)
    # Published as 2.78 trillion.
    assert math.isclose(sum(p.numel() for p in model.parameters()), 2.78e12, rel_tol=1e-3)


def test_attention_modules_carry_the_attributes_that_name_their_heads() -> None:
    layers = build_on_meta("kimi-k3").model.layers
    kda, mla = layers[0].self_attn, layers[3].self_attn
    assert isinstance(kda, KimiDeltaAttention)
    assert (kda.num_heads, kda.head_dim, kda.num_k_heads, kda.head_k_dim) == (96, 128, 96, 128)
    assert isinstance(mla, KimiMLAAttention)
    assert (mla.num_heads, mla.q_head_dim, mla.v_head_dim) == (96, 192, 128)
    assert (mla.qk_nope_head_dim, mla.qk_rope_head_dim) == (128, 64)
    assert (kda.layer_idx, mla.layer_idx) == (0, 3)
    assert kda.config.num_attention_heads == mla.config.num_attention_heads == 96


def test_full_size_runs_forward_on_meta() -> None:
    model = build_on_meta("kimi-k3")
    assert model(torch.zeros(2, 5, dtype=torch.long, device="meta")).shape == (2, 5, 163840)


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(),
        tiny_config(gate_lower_bound=-5.0),
        tiny_config(use_full_rank_gate=False),
        dataclasses.replace(tiny_config(), q_lora_rank=None),
        dataclasses.replace(tiny_config(), routed_expert_hidden_size=None),
        dataclasses.replace(tiny_config(), mla_use_output_gate=False, num_experts_per_token=1),
    ],
    ids=["plain", "bounded", "low-rank-gate", "plain-query", "no-latent", "no-mla-gate"],
)
def test_logits_are_finite_and_gradients_reach_every_parameter(config: KimiK3Config) -> None:
    model = build(config)
    logits = model(tokens(config))
    assert logits.shape == (2, 7, 31)
    assert logits.isfinite().all()
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens(config).flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # With the embedding as its only source, the first residual has nothing to weigh.
        if not name.startswith("model.layers.0.self_attention_res"):
            assert parameter.grad.count_nonzero() > 0, name


def test_variants_differ_in_the_weights_they_have() -> None:
    def names(config: KimiK3Config) -> set[str]:
        return {name for name, _ in build(config).named_parameters()}

    plain = names(tiny_config())
    low_rank = names(tiny_config(use_full_rank_gate=False))
    assert "model.layers.0.self_attn.g_proj.weight" in plain - low_rank
    assert "model.layers.0.self_attn.g_b_proj.weight" in low_rank - plain
    one_query = names(dataclasses.replace(tiny_config(), q_lora_rank=None))
    assert "model.layers.3.self_attn.q_b_proj.weight" in plain - one_query
    assert "model.layers.3.self_attn.q_proj.weight" in one_query - plain


def test_the_published_small_model_runs_in_float32() -> None:
    config = dataclasses.replace(KimiK3Config.from_dict(published("kimi-k3-0.40b")), vocab_size=50)
    logits = KimiK3ForCausalLM(config)(tokens(config, length=3))
    assert logits.shape == (2, 3, 50)
    assert logits.isfinite().all()


def test_later_tokens_do_not_change_earlier_logits() -> None:
    config = tiny_config()
    model, before = build(config), tokens(config)
    after = before.clone()
    after[:, 4] = (after[:, 4] + 1) % config.vocab_size
    change = (model(before) - model(after)).abs().amax(dim=(0, 2))
    assert change[:4].max() < 1e-12
    assert change[4:].min() > 1e-6


@pytest.mark.parametrize("leaf", ["q_proj", "k_proj", "v_proj", "f_b_proj", "b_proj", "q_conv1d"])
def test_delta_attention_heads_are_independent(leaf: str) -> None:
    attention = build(tiny_config()).model.layers[0].self_attn
    assert isinstance(attention, KimiDeltaAttention)
    reach = head_reach(attention, attention.get_submodule(leaf).weight, attention.head_dim)
    assert torch.equal(reach, torch.eye(3, dtype=torch.bool))


@pytest.mark.parametrize("leaf", ["q_b_proj", "kv_b_proj"])
def test_mla_heads_are_independent(leaf: str) -> None:
    attention = build(tiny_config()).model.layers[3].self_attn
    assert isinstance(attention, KimiMLAAttention)
    reach = head_reach(attention, attention.get_submodule(leaf).weight, attention.v_head_dim)
    assert torch.equal(reach, torch.eye(3, dtype=torch.bool))


def head_reach(attention: nn.Module, weight: Any, width: int) -> Tensor:
    """Which of three equal row blocks (second index) reach which head of o_proj's input."""
    merged: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        merged.append(inputs[0])

    attention.get_submodule("o_proj").register_forward_pre_hook(keep)
    generator = torch.Generator().manual_seed(2)
    attention(torch.randn(2, 6, 20, dtype=torch.double, generator=generator))
    # A random weighting: the plain sum of a normalised head could hide a dependency.
    mixed = merged[0] * torch.randn(merged[0].shape, dtype=torch.double, generator=generator)
    rows: list[Tensor] = []
    for head in mixed.split(width, dim=-1):
        (gradient,) = torch.autograd.grad(head.sum(), weight, retain_graph=True)
        rows.append(gradient.flatten(1).unflatten(0, (3, -1)).abs().amax(dim=(1, 2)) > 0)
    return torch.stack(rows)


def test_delta_rule_recalls_what_orthogonal_keys_wrote() -> None:
    keys = torch.eye(4, dtype=torch.double)[None, :, None, :]
    values = torch.arange(16, dtype=torch.double).view(1, 4, 1, 4)
    queries = keys[:, [0, 0, 1, 2]]
    ones = torch.ones(1, 4, 1, dtype=torch.double)
    read = gated_delta_rule(queries, keys, values, torch.zeros_like(keys), ones)
    assert torch.equal(read, values[:, [0, 0, 1, 2]])


def test_delta_rule_overwrites_and_decays() -> None:
    keys = torch.tensor([1.0, 0.0]).double().expand(1, 3, 1, 2)
    values = torch.tensor([8.0, 2.0, 0.0]).double().view(1, 3, 1, 1).expand(1, 3, 1, 2)
    beta = torch.tensor([1.0, 0.5, 0.0]).double().view(1, 3, 1)
    halve = torch.full_like(keys, math.log(0.5))
    read = gated_delta_rule(keys, keys, values, halve, beta)[0, :, 0, 0]
    # 8 is written; halved to 4 and moved half-way to 2; then only halved.
    assert read.tolist() == pytest.approx([8.0, 3.0, 1.5])


@pytest.mark.parametrize("bound", [None, -5.0])
def test_decay_parameters_start_finite_and_the_bound_holds(bound: float | None) -> None:
    attention = KimiDeltaAttention(tiny_config(gate_lower_bound=bound), 0)
    again = KimiDeltaAttention(tiny_config(gate_lower_bound=bound), 0)
    for name in ("A_log", "dt_bias"):
        assert attention.get_parameter(name).isfinite().all()
        assert torch.equal(attention.get_parameter(name), again.get_parameter(name))
    hidden = 1e3 * torch.randn(2, 6, 20, generator=torch.Generator().manual_seed(3))
    decay = attention._log_decay(hidden)  # pyright: ignore[reportPrivateUsage]
    assert decay.max().item() <= 0.0
    assert (decay.min().item() >= -5.0) is (bound is not None)


def test_router_gives_the_chosen_experts_weights_that_sum_to_one() -> None:
    gate = KimiMoEGate(tiny_config())
    gate.e_score_correction_bias.copy_(torch.tensor([0.0, 9.0, 0.0, 9.0]))
    weights = gate(torch.randn(5, 20, generator=torch.Generator().manual_seed(4)))
    assert torch.equal(weights > 0, torch.tensor([False, True, False, True]).expand(5, 4))
    assert torch.allclose(weights.sum(dim=-1), torch.ones(5))


def test_attention_residual_averages_sources_and_passes_one_through() -> None:
    norm, proj = nn.RMSNorm(4), nn.Linear(4, 1, bias=False)
    first, second = torch.randn(2, 1, 3, 4, generator=torch.Generator().manual_seed(5))
    assert torch.equal(mix_sources([first], norm, proj), first)
    nn.init.zeros_(proj.weight)
    assert torch.allclose(mix_sources([first, second], norm, proj), (first + second) / 2)


def drop(field: str) -> Callable[[dict[str, Any]], object]:
    return lambda fields: fields.pop(field)


def set_top(field: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda fields: fields.__setitem__(field, value)


def set_linear(field: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda fields: fields["linear_attn_config"].__setitem__(field, value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (drop("kv_lora_rank"), ["'kv_lora_rank'", "missing"]),
        (drop("q_lora_rank"), ["'q_lora_rank'", "missing"]),
        (drop("linear_attn_config"), ["'linear_attn_config'", "missing"]),
        (set_top("linear_attn_config", {}), ["linear_attn_config.num_heads", "missing"]),
        (set_top("num_attention_heads", 0), ["'num_attention_heads'", "integer from 1", "not 0"]),
        (set_top("num_attention_heads", True), ["'num_attention_heads'", "not True"]),
        (set_top("hidden_size", 2**40), ["'hidden_size'", str(2**40)]),
        (set_top("hidden_size", "1024"), ["'hidden_size'", "not '1024'"]),
        (set_top("q_lora_rank", -1), ["'q_lora_rank'", "not -1"]),
        (set_top("first_k_dense_replace", -1), ["'first_k_dense_replace'", "from 0", "not -1"]),
        (set_top("num_experts_per_token", 9), ["'num_experts_per_token'", "at most", "not 9"]),
        (set_top("mla_use_output_gate", 1), ["'mla_use_output_gate'", "true or false", "not 1"]),
        (set_top("mla_use_nope", False), ["'mla_use_nope'", "rotary", "not False"]),
        (set_top("model_type", "llama"), ["'model_type'", "'kimi_k3_text'", "not 'llama'"]),
        (set_top("rms_norm_eps", 0.0), ["'rms_norm_eps'", "positive", "not 0.0"]),
        (set_top("linear_attn_config", 3), ["'linear_attn_config'", "mapping", "not 3"]),
        (set_linear("num_heads", True), ["linear_attn_config.num_heads", "not True"]),
        (set_linear("num_heads", 0), ["linear_attn_config.num_heads", "not 0"]),
        (set_linear("gate_lower_bound", 5.0), ["gate_lower_bound", "negative", "not 5.0"]),
        (set_linear("gate_lower_bound", -math.inf), ["gate_lower_bound", "finite", "not -inf"]),
        (set_linear("use_full_rank_gate", "no"), ["use_full_rank_gate", "not 'no'"]),
        (set_linear("kda_layers", "123"), ["kda_layers", "list", "not '123'"]),
        (set_linear("kda_layers", [1, 2.0]), ["kda_layers", "not 2.0"]),
        (set_linear("kda_layers", [1, 2, 3, 5, 6]), ["kda_layers", "layer 7", "in neither"]),
        (set_linear("full_attn_layers", [4, 5, 8]), ["kda_layers", "layer 5", "in both"]),
    ],
)
def test_a_bad_config_is_refused_by_name(
    damage: Callable[[dict[str, Any]], object], words: list[str]
) -> None:
    fields = published("kimi-k3-0.40b")
    damage(fields)
    with pytest.raises(ConfigError) as caught:
        KimiK3Config.from_dict(fields)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_config_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a mapping"):
        KimiK3Config.from_dict([1, 2])  # pyright: ignore[reportArgumentType]


def test_config_keeps_every_field_and_its_own_copy() -> None:
    fields = published("kimi-k3")
    config = KimiK3Config.from_dict(fields)
    assert all(getattr(config, name) == value for name, value in fields.items())
    assert isinstance(config.linear_attn_config, dict)
    fields["linear_attn_config"]["kda_layers"].clear()
    assert [config.is_kda_layer(index) for index in (0, 3, 90, 92)] == [True, False, True, False]


def test_fields_that_decide_no_structure_are_passed_over() -> None:
    fields = published("kimi-k3-0.40b")
    set_top("rope_theta", 10000.0)(fields)
    set_linear("activation", "silu")(fields)
    assert KimiK3Config.from_dict(fields).num_attention_heads == 8
