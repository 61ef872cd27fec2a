"""A structural, runnable stand-in for the text model of Moonshot's Kimi K3.

transformers has no class for it. Module names, owner classes and weight shapes follow the released
checkpoint (its ``language_model.`` prefix dropped), so that whatever reads names and shapes meets
what it would meet in the real model; the forward pass has the same data flow, so that whatever
traces heads finds the same heads. It is not the released model: there is no cache, no vision
tower, no mixed precision, and the feed-forward layers use SwiGLU where the release uses a
bounded variant of it.

Legend: B batch, T tokens, C hidden size, S residual sources, W vocabulary.
"""

import copy
import dataclasses
import math
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from muonsplit.errors import ConfigError
from muonsplit.models.kimi_k3_layers import (
    KimiDeltaAttention,
    KimiMLAAttention,
    KimiMLP,
    KimiSparseMoeBlock,
)

_MODEL_TYPE = "kimi_k3_text"
# No weight has more than three of these sizes as factors, so its bytes still fit in 63 bits.
_LARGEST_SIZE = 2**19

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_intermediate_size",
    "attn_res_block_size",
    "vocab_size",
)
_NULLABLE_SIZES = ("q_lora_rank", "routed_expert_hidden_size")
_LINEAR_SIZES = ("num_heads", "head_dim", "short_conv_kernel_size")
_LAYER_LISTS = ("kda_layers", "full_attn_layers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiK3Config:
    """The fields of a Kimi K3 text config that decide its structure, under their published names.

    Every way of making one checks it, ``dataclasses.replace`` included.

    Attributes:
        head_dim: Stated by the published configs, used by no layer; the heads' widths are
            ``qk_*_head_dim`` and ``v_head_dim`` (MLA) and ``linear_attn_config["head_dim"]`` (KDA).
        q_lora_rank: Width of the query latent, or None for one plain ``q_proj``.
        first_k_dense_replace: How many of the first layers have a dense MLP instead of experts.
        routed_expert_hidden_size: Latent width the routed experts work in, or None for none.
        attn_res_block_size: Layers per block of the attention residuals.
        linear_attn_config: ``num_heads``, ``head_dim``, ``short_conv_kernel_size``,
            ``kda_layers``, ``full_attn_layers`` (both 1-based), and optionally
            ``use_full_rank_gate`` (default False) and ``gate_lower_bound`` (default None).
        rms_norm_eps: Not in every published excerpt; the default is the released value.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_output_gate: bool
    mla_use_nope: bool
    first_k_dense_replace: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    attn_res_block_size: int
    vocab_size: int
    linear_attn_config: dict[str, Any]
    routed_expert_hidden_size: int | None = None
    rms_norm_eps: float = 1e-5

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "KimiK3Config":
        """Builds a config from the parsed JSON of a published one.

        Args:
            fields: Field names and values; a published file has more than decide the structure,
                and the others are passed over.

        Raises:
            ConfigError: A field is missing, or has a value no model can be built from.
        """
        if not isinstance(cast(object, fields), Mapping):
            raise ConfigError(f"A Kimi K3 config must be a mapping, not {reprlib.repr(fields)}.")
        known = {field.name: field for field in dataclasses.fields(cls)}
        required = [n for n, f in known.items() if f.default is dataclasses.MISSING]
        _check_present(fields, required, prefix="")
        return cls(**copy.deepcopy({n: value for n, value in fields.items() if n in known}))

    def __post_init__(self) -> None:
        if self.model_type != _MODEL_TYPE:
            _refuse("model_type", repr(_MODEL_TYPE), self.model_type)
        for name in _SIZES:
            _check_size(name, getattr(self, name))
        for name in _NULLABLE_SIZES:
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name))
        _check_size("first_k_dense_replace", self.first_k_dense_replace, smallest=0)
        _check_flag("mla_use_output_gate", self.mla_use_output_gate)
        if cast(object, self.mla_use_nope) is not True:
            _refuse("mla_use_nope", "true (rotary MLA is not implemented)", self.mla_use_nope)
        if self.num_experts_per_token > self.num_experts:
            _refuse(
                "num_experts_per_token",
                f"at most num_experts ({self.num_experts})",
                self.num_experts_per_token,
            )
        _check_number("rms_norm_eps", self.rms_norm_eps, positive=True)
        _check_linear_attention(self.linear_attn_config, self.num_hidden_layers)

    def is_kda_layer(self, layer_idx: int) -> bool:
        """Whether the layer at this 0-based index has delta attention; otherwise it has MLA."""
        return layer_idx + 1 in self.linear_attn_config["kda_layers"]


def _refuse(field: str, expected: str, value: object) -> NoReturn:
    # reprlib keeps a hostile value from filling the terminal.
    message = f"Kimi K3 config field {field!r} must be {expected}, not {reprlib.repr(value)}."
    raise ConfigError(message, "Compare it with the published config.json.")


def _check_present(fields: Mapping[str, Any], required: list[str], prefix: str) -> None:
    for name in required:
        if name not in fields:
            _refuse(prefix + name, "present", "missing")


def _check_size(field: str, value: object, smallest: int = 1) -> None:
    # bool is an int in Python: without the exact type, a count of true would build one head.
    if type(value) is not int or not smallest <= value <= _LARGEST_SIZE:
        _refuse(field, f"an integer from {smallest} to {_LARGEST_SIZE}", value)


def _check_flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(field, "true or false", value)


def _check_number(field: str, value: object, *, positive: bool) -> None:
    expected = f"a finite {'positive' if positive else 'negative'} number"
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(field, expected, value)
    if not 0 < (value if positive else -value) < math.inf:
        _refuse(field, expected, value)


def _check_linear_attention(linear: dict[str, Any], num_hidden_layers: int) -> None:
    prefix = "linear_attn_config."
    if not isinstance(cast(object, linear), dict):
        _refuse("linear_attn_config", "a mapping from field names to values", linear)
    _check_present(linear, [*_LINEAR_SIZES, *_LAYER_LISTS], prefix)
    for name in _LINEAR_SIZES:
        _check_size(prefix + name, linear[name])
    _check_flag(prefix + "use_full_rank_gate", linear.get("use_full_rank_gate", False))
    if linear.get("gate_lower_bound") is not None:
        _check_number(prefix + "gate_lower_bound", linear["gate_lower_bound"], positive=False)
    for name in _LAYER_LISTS:
        _check_layer_list(prefix + name, linear[name])
    kda, full = set(linear["kda_layers"]), set(linear["full_attn_layers"])
    for layer in range(1, num_hidden_layers + 1):
        if (layer in kda) is (layer in full):
            found = "in both" if layer in kda else "in neither"
            expected = f"such that layer {layer} is in it or else in full_attn_layers"
            _refuse(prefix + "kda_layers", expected, found)


def _check_layer_list(field: str, value: object) -> None:
    if not isinstance(value, list):
        _refuse(field, "a list of 1-based layer numbers", value)
    for layer in cast(list[object], value):
        _check_size(field, layer)


def mix_sources(sources: list[Tensor], norm: nn.RMSNorm, proj: nn.Linear) -> Tensor:
    """Attention residual: each token's softmax-weighted mean of earlier states of the stream.

    The row of ``proj`` is a learned query, shared by all tokens; the keys are the normalised
    sources and the values the sources themselves. One source passes through unchanged.
    Source: Kimi team, "Attention Residuals" (block form).

    Args:
        sources: S tensors (B, T, C): the finished blocks, then the running sum of this one.
        norm: Over C.
        proj: Weight (1, C).

    Returns:
        (B, T, C).
    """
    values = torch.stack(sources)
    weights = proj(norm(values)).softmax(dim=0)
    return (weights * values).sum(dim=0)


class KimiDecoderLayer(nn.Module):
    """One decoder layer: attention, then a feed-forward layer, each fed by an attention residual.

    ``self_attn`` is delta attention or MLA; the feed-forward layer is ``mlp`` in the first
    ``first_k_dense_replace`` layers and ``block_sparse_moe`` in the others, as in the checkpoint.
    """

    def __init__(self, config: KimiK3Config, layer_idx: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        attention = KimiDeltaAttention if config.is_kda_layer(layer_idx) else KimiMLAAttention
        self.starts_block = layer_idx % config.attn_res_block_size == 0
        self.is_dense = layer_idx < config.first_k_dense_replace
        self.self_attn = attention(config, layer_idx)
        if self.is_dense:
            self.mlp = KimiMLP(hidden, config.intermediate_size)
        else:
            self.block_sparse_moe = KimiSparseMoeBlock(config)
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attention_res_norm = nn.RMSNorm(hidden, eps)
        self.self_attention_res_proj = nn.Linear(hidden, 1, bias=False)
        self.mlp_res_norm = nn.RMSNorm(hidden, eps)
        self.mlp_res_proj = nn.Linear(hidden, 1, bias=False)

    def forward(self, partial: Tensor, blocks: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Adds this layer's two outputs to the running sum of its block.

        Args:
            partial: (B, T, C), the sum of the outputs of the current block so far.
            blocks: Finished blocks, each (B, T, C); the first is the embedding.

        Returns:
            The new ``partial`` and the new ``blocks``.
        """
        hidden = mix_sources(
            [*blocks, partial], self.self_attention_res_norm, self.self_attention_res_proj
        )
        attended = self.self_attn(self.input_layernorm(hidden))
        if self.starts_block:
            blocks, partial = [*blocks, partial], attended
        else:
            partial = partial + attended
        hidden = mix_sources([*blocks, partial], self.mlp_res_norm, self.mlp_res_proj)
        feed_forward = self.mlp if self.is_dense else self.block_sparse_moe
        return partial + feed_forward(self.post_attention_layernorm(hidden)), blocks


class KimiK3TextModel(nn.Module):
    """Embedding, decoder layers, the last attention residual and the final norm."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.layers = nn.ModuleList(
            KimiDecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.output_attn_res_norm = nn.RMSNorm(hidden, eps)
        self.output_attn_res_proj = nn.Linear(hidden, 1, bias=False)
        self.norm = nn.RMSNorm(hidden, eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Maps token ids (B, T) to final hidden states (B, T, C)."""
        partial: Tensor = self.embed_tokens(input_ids)
        blocks: list[Tensor] = []
        for layer in self.layers:
            partial, blocks = layer(partial, blocks)
        sources = [*blocks, partial]
        return self.norm(mix_sources(sources, self.output_attn_res_norm, self.output_attn_res_proj))


class KimiK3ForCausalLM(nn.Module):
    """Kimi K3's text model with its language-model head.

    The checkpoint stores the routed experts one by one; here they are stacked into 3-D
    parameters as transformers 5 does, so that the full size (93 layers of 896 experts) builds
    on the ``meta`` device in seconds.

    Args:
        config: A :class:`KimiK3Config`.
    """

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        self.config = config
        self.model = KimiK3TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Maps token ids (B, T) to logits (B, T, W)."""
        return self.lm_head(self.model(input_ids))
