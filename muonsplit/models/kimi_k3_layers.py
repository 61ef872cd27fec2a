"""Attention and feed-forward layers of the Kimi K3 stand-in.

Everything is computed in the dtype of the parameters, so that a float64 model is exact enough to
tell an absent dependency from a small one. No shape depends on data, so that the layers run on
the ``meta`` device too.

Legend: B batch, T tokens, C hidden size, H heads, D width of a delta-attention head, K kernel of
the short convolutions, Q and Z widths of the query and key-value latents, N and R widths of the
two parts of an MLA query or key (the second named after the rotary embedding it does not have
here), V width of an MLA value, E experts, I their inner width, L the latent width they work in.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

if TYPE_CHECKING:
    from muonsplit.models.kimi_k3 import KimiK3Config

_EXPERT_INIT_STD = 0.02


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time, then SiLU; weight (channels, 1, K)."""

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, channels) to the same shape."""
        channels, _, kernel_size = self.weight.shape
        # Padded on the left only: a step sees itself and the K - 1 steps before it.
        padded = F.pad(x.transpose(1, 2), (kernel_size - 1, 0))
        return F.silu(F.conv1d(padded, self.weight, groups=channels)).transpose(1, 2)


def l2_normalise(x: Tensor) -> Tensor:
    """Scales the last dimension to length one."""
    # Added under the root, not clamped outside: the gradient stays finite at zero.
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Delta rule with one decay per channel of the key, one time step after the other.

    With the state S (key by value) of a head, a step is S <- diag(exp(log_decay)) S, then
    S <- S + beta k (v - S^T k)^T; its output is S^T q. Source: Kimi team, "Kimi Linear: An
    Expressive, Efficient Attention Architecture", arXiv 2510.26692.

    Args:
        q: (B, T, H, D), of unit length up to a scale.
        k: (B, T, H, D), of unit length.
        v: (B, T, H, D).
        log_decay: (B, T, H, D), at most 0.
        beta: (B, T, H), the writing strength, from 0 to 1.

    Returns:
        (B, T, H, D).
    """
    state = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1])
    outputs: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * log_decay[:, t].exp().unsqueeze(-1)
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        write = beta[:, t].unsqueeze(-1) * error
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], write)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1)


class KimiDeltaAttention(nn.Module):
    """Kimi delta attention (KDA): linear attention with a per-channel forget gate.

    ``q_proj``, ``k_proj``, ``v_proj``, ``g_proj`` have weights (H*D, C), each of the three
    convolutions (H*D, 1, K), ``f_a_proj`` (D, C), ``f_b_proj`` (H*D, D), ``b_proj`` (H, C),
    ``o_proj`` (C, H*D). Without ``use_full_rank_gate`` the output gate is ``g_a_proj`` (D, C) and
    ``g_b_proj`` (H*D, D) instead of ``g_proj``. ``A_log`` has H entries; the checkpoint pads it.
    """

    def __init__(self, config: KimiK3Config, layer_idx: int) -> None:
        super().__init__()
        linear = config.linear_attn_config
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads: int = linear["num_heads"]
        self.head_dim: int = linear["head_dim"]
        self.num_k_heads = self.num_heads
        self.head_k_dim = self.head_dim
        self.gate_lower_bound: float | None = linear.get("gate_lower_bound")
        self.use_full_rank_gate: bool = linear.get("use_full_rank_gate", False)

        hidden, inner = config.hidden_size, self.num_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, inner, bias=False)
        self.k_proj = nn.Linear(hidden, inner, bias=False)
        self.v_proj = nn.Linear(hidden, inner, bias=False)
        self.q_conv1d = ShortConvolution(inner, linear["short_conv_kernel_size"])
        self.k_conv1d = ShortConvolution(inner, linear["short_conv_kernel_size"])
        self.v_conv1d = ShortConvolution(inner, linear["short_conv_kernel_size"])
        self.f_a_proj = nn.Linear(hidden, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, inner, bias=False)
        self.b_proj = nn.Linear(hidden, self.num_heads, bias=False)
        if self.use_full_rank_gate:
            self.g_proj = nn.Linear(hidden, inner, bias=False)
        else:
            self.g_a_proj = nn.Linear(hidden, self.head_dim, bias=False)
            self.g_b_proj = nn.Linear(self.head_dim, inner, bias=False)
        self.A_log = nn.Parameter(self._initial_log_rates())
        self.dt_bias = nn.Parameter(self._initial_time_steps())
        self.o_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(inner, hidden, bias=False)

    def _initial_log_rates(self) -> Tensor:
        # Under a bound the rate multiplies inside the sigmoid: a large one would saturate it.
        if self.gate_lower_bound is not None:
            return torch.zeros(self.num_heads)
        return torch.linspace(1.0, 16.0, self.num_heads).log()

    def _initial_time_steps(self) -> Tensor:
        # Mamba's range of time steps, spread evenly instead of drawn, through inverse softplus.
        channels = self.num_heads * self.head_dim
        steps = torch.linspace(math.log(1e-3), math.log(1e-1), channels).exp()
        return steps + torch.log(-torch.expm1(-steps))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, self.head_dim)

    def _log_decay(self, hidden_states: Tensor) -> Tensor:
        raw = self._split_heads(self.f_b_proj(self.f_a_proj(hidden_states)) + self.dt_bias)
        rate = self.A_log.exp().unsqueeze(-1)
        if self.gate_lower_bound is None:
            return -rate * F.softplus(raw)
        return self.gate_lower_bound * torch.sigmoid(rate * raw)

    def _output_gate(self, hidden_states: Tensor) -> Tensor:
        if self.use_full_rank_gate:
            return torch.sigmoid(self.g_proj(hidden_states))
        return torch.sigmoid(self.g_b_proj(self.g_a_proj(hidden_states)))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps (B, T, C) to the same shape, causally."""
        q = self._split_heads(self.q_conv1d(self.q_proj(hidden_states)))
        k = self._split_heads(self.k_conv1d(self.k_proj(hidden_states)))
        v = self._split_heads(self.v_conv1d(self.v_proj(hidden_states)))
        attended = gated_delta_rule(
            l2_normalise(q) * self.head_dim**-0.5,
            l2_normalise(k),
            v,
            self._log_decay(hidden_states),
            torch.sigmoid(self.b_proj(hidden_states)),
        )
        normed = self.o_norm(attended).flatten(-2)
        return self.o_proj(normed * self._output_gate(hidden_states))


class KimiMLAAttention(nn.Module):
    """Multi-head latent attention without a position embedding, with an optional output gate.

    ``q_a_proj`` has weight (Q, C), ``q_b_proj`` (H*(N+R), Q), ``kv_a_proj_with_mqa`` (Z+R, C),
    ``kv_b_proj`` (H*(N+V), Z), ``g_proj`` (H*V, C), ``o_proj`` (C, H*V). Without ``q_lora_rank``
    the queries come from one ``q_proj`` (H*(N+R), C). The R part of the key is one for all heads.
    """

    def __init__(self, config: KimiK3Config, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.q_lora_rank = config.q_lora_rank
        self.kv_lora_rank = config.kv_lora_rank
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_rope_head_dim = config.qk_rope_head_dim
        self.v_head_dim = config.v_head_dim
        self.q_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        self.use_output_gate = config.mla_use_output_gate

        hidden, eps = config.hidden_size, config.rms_norm_eps
        query_rows = self.num_heads * self.q_head_dim
        if self.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, query_rows, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, self.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(self.q_lora_rank, eps)
            self.q_b_proj = nn.Linear(self.q_lora_rank, query_rows, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            hidden, self.kv_lora_rank + self.qk_rope_head_dim, bias=False
        )
        self.kv_a_layernorm = nn.RMSNorm(self.kv_lora_rank, eps)
        self.kv_b_proj = nn.Linear(
            self.kv_lora_rank,
            self.num_heads * (self.qk_nope_head_dim + self.v_head_dim),
            bias=False,
        )
        if self.use_output_gate:
            self.g_proj = nn.Linear(hidden, self.num_heads * self.v_head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, hidden, bias=False)

    def _queries(self, hidden_states: Tensor) -> Tensor:
        if self.q_lora_rank is None:
            rows = self.q_proj(hidden_states)
        else:
            rows = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        return rows.unflatten(-1, (self.num_heads, self.q_head_dim)).transpose(1, 2)

    def _keys_and_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        latent, shared_key = self.kv_a_proj_with_mqa(hidden_states).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        widths = [self.qk_nope_head_dim, self.v_head_dim]
        rows = self.kv_b_proj(self.kv_a_layernorm(latent))
        per_head = rows.unflatten(-1, (self.num_heads, sum(widths))).transpose(1, 2)
        key, value = per_head.split(widths, dim=-1)
        shared_key = shared_key.unsqueeze(1).expand(-1, self.num_heads, -1, -1)
        return torch.cat([key, shared_key], dim=-1), value

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps (B, T, C) to the same shape, causally."""
        key, value = self._keys_and_values(hidden_states)
        attended = F.scaled_dot_product_attention(
            self._queries(hidden_states), key, value, is_causal=True
        )
        merged = attended.transpose(1, 2).flatten(-2)
        if self.use_output_gate:
            merged = merged * torch.sigmoid(self.g_proj(hidden_states))
        return self.o_proj(merged)


class KimiMLP(nn.Module):
    """SwiGLU layer; weights ``gate_proj`` and ``up_proj`` (inner, C), ``down_proj`` (C, inner).

    Args:
        hidden_size: C.
        intermediate_size: Inner width.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., C) to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class KimiMoEGate(nn.Module):
    """Sigmoid router; weight (E, C). The correction bias steers the choice, not the weights."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_token
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Buffer(torch.zeros(config.num_experts))
        nn.init.normal_(self.weight, std=_EXPERT_INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., C) to routing weights (..., E), zero for the experts not chosen."""
        scores = torch.sigmoid(F.linear(x, self.weight))
        chosen = (scores + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.top_k > 1:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return torch.zeros_like(scores).scatter(-1, chosen, weights)


class KimiExperts(nn.Module):
    """All routed experts, stacked; ``gate_up_proj`` (E, 2I, L), ``down_proj`` (E, L, I).

    The checkpoint stores them one by one as ``w1`` (gate), ``w3`` (up) and ``w2`` (down).
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_experts, 2 * intermediate_size, hidden_size)
        )
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        nn.init.normal_(self.gate_up_proj, std=_EXPERT_INIT_STD)
        nn.init.normal_(self.down_proj, std=_EXPERT_INIT_STD)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Maps (..., L) and routing weights (..., E) to (..., L)."""
        # Every expert sees every token: gathering tokens needs shapes that `meta` cannot know.
        gate, up = torch.einsum("...l,eil->...ei", x, self.gate_up_proj).chunk(2, dim=-1)
        inner = weights.unsqueeze(-1) * F.silu(gate) * up
        return torch.einsum("...ei,eli->...l", inner, self.down_proj)


class KimiSparseMoeBlock(nn.Module):
    """Mixture of experts: routed experts, in a latent width if one is configured, plus shared ones.

    ``routed_expert_down_proj`` has weight (L, C), ``routed_expert_up_proj`` (C, L);
    ``shared_experts`` is one dense MLP of inner width I times the number of shared experts.
    """

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        inner = config.moe_intermediate_size
        self.has_latent = latent is not None
        self.gate = KimiMoEGate(config)
        self.experts = KimiExperts(config.num_experts, latent or hidden, inner)
        self.shared_experts = KimiMLP(hidden, inner * config.num_shared_experts)
        if latent is not None:
            self.routed_expert_down_proj = nn.Linear(hidden, latent, bias=False)
            self.routed_expert_norm = nn.RMSNorm(latent, config.rms_norm_eps)
            self.routed_expert_up_proj = nn.Linear(latent, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, C) to the same shape."""
        weights = self.gate(x)
        if self.has_latent:
            routed = self.experts(self.routed_expert_down_proj(x), weights)
            routed = self.routed_expert_up_proj(self.routed_expert_norm(routed))
        else:
            routed = self.experts(x, weights)
        return routed + self.shared_experts(x)
