"""Autograd finds the heads of real models, and of wrong ones what is wrong.

Expected runs are written out from each model's layout: which rows serve which heads. They are
built with ``head``, from widths and head numbers alone.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from muonsplit.errors import InputError
from muonsplit.layout import Layout
from muonsplit.models.load import build, resolve
from muonsplit.models.miniature import miniature
from muonsplit.truth.answer import Run, Truth
from muonsplit.truth.gradients import gradients
from muonsplit.truth.support import Reach, column_classes, judge

transformers.logging.set_verbosity_error()

IDS = torch.tensor([[3, 14, 15, 9, 2, 6, 5, 35]])
H = 4
ALL = range(H)

Piece = tuple[int, Sequence[int]]


def head(width: int, *heads: int) -> Piece:
    return width, heads


def runs(*pieces: Piece) -> tuple[Run, ...]:
    found: list[Run] = []
    for width, heads in pieces:
        start = found[-1].stop if found else 0
        found.append(Run(start, start + width, frozenset(heads)))
    return tuple(found)


def each(width: int, heads: Sequence[int] = ALL) -> list[Piece]:
    return [head(width, h) for h in heads]


def model(model_type: str, **fields: Any) -> nn.Module:
    torch.manual_seed(0)
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = transformers.AutoConfig.for_model(
        model_type, **{"vocab_size": 40, **special, **fields}
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def truths(built: nn.Module) -> dict[str, Truth]:
    return gradients(built, lambda m: m(input_ids=IDS, use_cache=False))


DENSE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": H,
}
MLA = {
    **DENSE,
    "num_key_value_heads": H,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
FALCON = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": H}

PAIRS = (head(6, 0, 1), head(6, 2, 3))  # of two key-value heads, each serves two
# Model → what its attention weights' rows serve; all other weights must have no heads.
LAYOUTS: dict[str, tuple[Callable[[], nn.Module], dict[str, list[Piece]]]] = {
    "llama": (
        lambda: model("llama", **DENSE, num_key_value_heads=2, head_dim=6),
        {"q_proj": each(6), "k_proj": [*PAIRS], "v_proj": [*PAIRS]},
    ),
    "gpt_neox": (
        lambda: model("gpt_neox", **DENSE),
        {"query_key_value": [head(8, h) for h in ALL for _ in "qkv"]},
    ),
    "falcon-7b": (
        lambda: model("falcon", **FALCON, multi_query=True, new_decoder_architecture=False),
        {"query_key_value": [*each(8), head(8, *ALL), head(8, *ALL)]},
    ),
    "falcon-40b": (
        lambda: model("falcon", **FALCON, num_kv_heads=2, new_decoder_architecture=True),
        {
            "query_key_value": [
                piece
                for a, b in ((0, 1), (2, 3))
                for piece in (head(8, a), head(8, b), head(8, a, b), head(8, a, b))
            ]
        },
    ),
    "phi3": (
        lambda: model("phi3", **DENSE, num_key_value_heads=2),
        {"qkv_proj": [*each(8), *2 * [head(8, 0, 1), head(8, 2, 3)]]},
    ),
    "mpt": (
        lambda: model("mpt", d_model=32, n_heads=H, n_layers=1, max_seq_len=16),
        {"Wqkv": 3 * each(8)},
    ),
    "gpt2": (
        lambda: model("gpt2", n_embd=32, n_head=H, n_layer=1, n_positions=16),
        {"c_attn": 3 * each(8)},
    ),
    "codegen": (  # four slabs of [q | v | k], here of two heads each
        lambda: model("codegen", n_embd=64, n_head=8, n_layer=1, rotary_dim=4, n_positions=16),
        {"qkv_proj": [head(8, 2 * m + j) for m in range(4) for _ in "qvk" for j in range(2)]},
    ),
    "deepseek_v2": (
        lambda: model("deepseek_v2", **MLA, q_lora_rank=None, first_k_dense_replace=1),
        {"q_proj": each(10), "kv_b_proj": [p for h in ALL for p in (head(6, h), head(8, h))]},
    ),
    "kimi_linear": (
        lambda: model(
            "kimi_linear",
            **{**MLA, "num_hidden_layers": 2},
            q_lora_rank=12,
            layer_types=["linear_attention", "full_attention"],
            mlp_layer_types=["dense", "dense"],
            linear_num_heads=H,
            linear_head_dim=6,
        ),
        {
            "0.self_attn.q_proj": each(6),
            "0.self_attn.k_proj": each(6),
            "0.self_attn.v_proj": each(6),
            "0.self_attn.conv1d": 3 * each(6),
            "A_log": each(1),
            "f_b_proj": each(6),
            "b_proj": each(1),
            "g_b_proj": each(6),
            "q_b_proj": each(10),
            "kv_b_proj": [p for h in ALL for p in (head(6, h), head(8, h))],
        },
    ),
    "qwen3_next": (
        lambda: model(
            "qwen3_next",
            **{**DENSE, "num_hidden_layers": 2},
            num_key_value_heads=2,
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=H,
            linear_key_head_dim=6,
            linear_value_head_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=12,
        ),
        {
            # A key head serves two value heads: [q | k | v v | z z], [b b | a a].
            "in_proj_qkvz": [
                piece
                for a, b in ((0, 1), (2, 3))
                for piece in (*2 * [head(6, a, b)], *2 * [head(4, a), head(4, b)])
            ],
            "in_proj_ba": [
                piece for a, b in ((0, 1), (2, 3)) for piece in 2 * [head(1, a), head(1, b)]
            ],
            "conv1d": [*2 * PAIRS, *each(4)],
            "q_proj": [head(8, h) for h in ALL for _ in ("query", "gate")],
            "k_proj": [head(8, 0, 1), head(8, 2, 3)],
            "v_proj": [head(8, 0, 1), head(8, 2, 3)],
        },
    ),
    "mamba2": (
        lambda: model(
            "mamba2",
            hidden_size=16,
            num_hidden_layers=1,
            num_heads=H,
            head_dim=8,
            expand=2,
            state_size=6,
            n_groups=2,
            chunk_size=4,
        ),
        {  # [z | x | B | C | dt]
            "in_proj": [*each(8), *each(8), *2 * PAIRS, *each(1)],
            "conv1d": [*each(8), *2 * PAIRS],
        },
    ),
    "minimax": (
        lambda: model(
            "minimax",
            **{**DENSE, "num_hidden_layers": 2},
            num_key_value_heads=2,
            layer_types=["linear_attention", "full_attention"],
            num_local_experts=2,
            block_size=8,
        ),
        {
            "0.self_attn.qkv_proj": [head(8, h) for h in ALL for _ in "qkv"],
            "0.self_attn.output_gate": each(8),
            "1.self_attn.q_proj": each(8),
            "1.self_attn.k_proj": [head(8, 0, 1), head(8, 2, 3)],
            "1.self_attn.v_proj": [head(8, 0, 1), head(8, 2, 3)],
        },
    ),
    "olmo2": (
        lambda: model("olmo2", **DENSE, num_key_value_heads=H),
        {"q_proj": each(8), "k_proj": each(8), "v_proj": each(8)},
    ),
    # Differential attention subtracts head h + 2 from head h and normalises the pair: what
    # enters the output projection has two heads, and each has two blocks in every weight.
    "diffllama": (
        lambda: model("diffllama", **DENSE, num_key_value_heads=H),
        {leaf: 2 * each(8, (0, 1)) for leaf in ("q_proj", "k_proj", "v_proj")},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_heads_are_where_the_model_computes_them(name: str) -> None:
    make, expected = LAYOUTS[name]
    answers = truths(make())
    seen = {
        leaf: answer
        for weight, answer in answers.items()
        for leaf in expected
        if f".{leaf}." in f".{weight}." and "norm" not in weight
    }
    assert {leaf: answer.runs for leaf, answer in seen.items()} == {
        leaf: runs(*pieces) for leaf, pieces in expected.items()
    }
    assert {answer.state for answer in seen.values()} == {"heads"}
    assert {answer.axis for answer in seen.values()} == {1 if name == "gpt2" else 0}
    rest = [answer for answer in answers.values() if answer not in seen.values()]
    assert {answer.state for answer in rest} == {"none"}
    assert len(seen) + len(rest) == len(answers)


def test_kimi_k3_keeps_gates_per_channel_and_decays_per_head() -> None:
    stand_in = build(miniature(resolve("kimi-k3-0.40b").config), "cpu")
    answers = gradients(stand_in, lambda m: m(IDS))
    delta = {w: answers[f"model.layers.0.self_attn.{w}.weight"] for w in ("q_proj", "k_proj")}
    delta |= {w: answers[f"model.layers.0.self_attn.{w}.weight"] for w in ("v_proj", "f_b_proj")}
    assert {answer.runs for answer in delta.values()} == {runs(*each(8))}
    gate = answers["model.layers.0.self_attn.g_proj.weight"]
    assert gate.runs == runs(*each(8))
    assert "one column a row" in gate.evidence
    assert "one column a row" not in delta["f_b_proj"].evidence
    full = "model.layers.3.self_attn"
    assert answers[f"{full}.q_b_proj.weight"].runs == runs(*each(24))
    assert answers[f"{full}.kv_b_proj.weight"].runs == runs(
        *(head(16, h) for h in ALL for _ in "kv")
    )
    assert answers[f"{full}.g_proj.weight"].runs == runs(*each(16))
    for down in ("layers.0.self_attn.f_a_proj", "layers.3.self_attn.kv_a_proj_with_mqa"):
        assert answers[f"model.{down}.weight"].state == "none"


def test_an_indexer_has_no_gradient_path() -> None:
    answers = truths(
        model(
            "glm_moe_dsa",
            **MLA,
            q_lora_rank=12,
            index_n_heads=2,
            index_head_dim=8,
            index_topk=4,
            mlp_layer_types=["dense"],
            indexer_types=["full"],
        )
    )
    indexer = {name: answer for name, answer in answers.items() if "indexer" in name}
    assert {name.split(".")[-2] for name in indexer} == {"wq_b", "wk", "weights_proj"}
    assert {answer.state for answer in indexer.values()} == {"unknown"}
    assert all("no gradient path" in answer.evidence for answer in indexer.values())
    assert answers["model.layers.0.self_attn.q_b_proj.weight"].runs == runs(*each(10))


@pytest.mark.parametrize("name", ["olmo2", "minimax"])
def test_evidence_names_the_norm_that_was_held_constant(name: str) -> None:
    answers = truths(LAYOUTS[name][0]())
    held = [a for w, a in answers.items() if "layers.0.self_attn" in w and a.state == "heads"]
    assert held
    assert all("norm over 32 channels held constant" in answer.evidence for answer in held)
    llama = truths(LAYOUTS["llama"][0]())
    assert not any("held constant" in answer.evidence for answer in llama.values())


def test_grouped_mamba_states_serve_all_heads_of_one_group() -> None:
    fields = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": H, "head_dim": 8}
    answers = truths(model("mamba2", **fields, expand=2, state_size=6, n_groups=1, chunk_size=4))
    in_proj = answers["backbone.layers.0.mixer.in_proj.weight"]
    shared = [head(6, *ALL), head(6, *ALL)]
    assert in_proj.runs == runs(*each(8), *each(8), *shared, *each(1))


# A toy attention: every name is its caller's, and what it multiplies by can be broken.

PLAIN = ("query", "key", "value", "output")


class Toy(nn.Module):
    """Self-attention (B, T, 16), causal; ``names`` are those of its four projections."""

    def __init__(self, heads: int = H, names: Sequence[str] = PLAIN) -> None:
        super().__init__()
        self.heads, self.names = heads, names
        for name in names:
            setattr(self, name, nn.Linear(16, 16, bias=False))

    def projected(self, name: str, x: Tensor) -> Tensor:
        return getattr(self, name)(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def attended(self, x: Tensor) -> Tensor:
        q, k, v = (self.projected(name, x) for name in self.names[:3])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.names[3])(self.attended(x))


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def ask(toy: nn.Module, seed: int = 0) -> dict[str, Truth]:
    return gradients(toy, lambda m: m(noise(1, 6, 16)), seed)


def test_names_do_not_matter() -> None:
    misleading = ("down_proj", "indexer", "o_proj", "q_proj")
    assert list(ask(Toy(names=misleading)).values()) == list(ask(Toy()).values())
    assert [truth.state for truth in ask(Toy()).values()] == ["heads", "heads", "heads", "none"]


def test_a_wrong_view_is_a_different_truth() -> None:
    right, wrong = ask(Toy())["query.weight"], ask(Toy(heads=2))["query.weight"]
    assert right.runs == runs(*each(4))
    assert wrong.runs == runs(*each(8, (0, 1)))
    assert not right.objection(Layout.heads("q", 4, 4))
    assert wrong.objection(Layout.heads("q", 4, 4))
    assert right.objection(Layout.heads("q", 2, 8))


def test_heads_do_not_depend_on_the_draw() -> None:
    assert ask(Toy(), seed=1) == ask(Toy(), seed=2)


def test_torch_multihead_attention_is_one_parameter() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, H, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    answers = ask(Block())
    assert answers["attention.in_proj_weight"].runs == runs(*3 * each(4))
    assert answers["attention.out_proj.weight"].state == "none"
    assert "input axis" in answers["attention.out_proj.weight"].evidence


class Scaled(Toy):
    """Its branch starts at zero: by a parameter, which is drawn anew, or by a constant."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = scale

    def attended(self, x: Tensor) -> Tensor:
        return super().attended(x) * self.scale


def test_a_parameter_at_zero_is_drawn_anew() -> None:
    toy = Scaled(nn.Parameter(torch.zeros(16)))
    nn.init.zeros_(toy.get_parameter("query.weight"))
    assert ask(toy)["query.weight"].runs == ask(toy)["key.weight"].runs == runs(*each(4))


def test_a_branch_that_stays_zero_is_inconclusive() -> None:
    answers = ask(Scaled(nn.Buffer(torch.zeros(16))))
    for name in PLAIN[:3]:
        assert answers[f"{name}.weight"].state == "unknown"
        assert "zero-initialised" in answers[f"{name}.weight"].evidence


class Measured(Toy):
    """One weight acts only through a statistic, of the kind that is held constant."""

    def __init__(self) -> None:
        super().__init__()
        self.measure = nn.Linear(16, 16, bias=False)

    def attended(self, x: Tensor) -> Tensor:
        return super().attended(x) * self.measure(x).mean(-1, keepdim=True)


def test_a_path_through_a_statistic_alone_is_no_path() -> None:
    measure = ask(Measured())["measure.weight"]
    assert (measure.state, measure.runs) == ("unknown", ())
    assert "no gradient path" in measure.evidence


class Rounded(Toy):
    """Adds to every head the rounding error of a sum over all of them."""

    def attended(self, x: Tensor) -> Tensor:
        out = super().attended(x)
        total = out.sum(-1, keepdim=True)
        return out + (total * (1 / 49) * 49 - total)


def test_rounding_is_no_influence() -> None:
    assert 49 * (1 / 49) - 1 != 0  # the couplings are there, of one part in 1e16
    assert ask(Rounded())["query.weight"].runs == runs(*each(4))


class Coupled(Toy):
    """Adds to every head a real share of every other, and no more than one part in 1e6."""

    def attended(self, x: Tensor) -> Tensor:
        out = super().attended(x)
        return out + 1e-6 * out.sum(-1, keepdim=True)


def test_a_small_influence_is_one() -> None:
    assert {truth.state for truth in ask(Coupled()).values()} == {"none"}


class Turned(Toy):
    """Queries pass through one matrix that every head shares, values through one a head."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4, bias=False)
        self.own = nn.Parameter(torch.zeros(H, 4, 4))

    def projected(self, name: str, x: Tensor) -> Tensor:
        out = super().projected(name, x)
        return self.shared(out) if name == "query" else out @ self.own if name == "value" else out


def test_products_within_heads_are_no_end() -> None:
    answers = ask(Turned())
    for name in PLAIN[:3]:
        assert answers[f"{name}.weight"].runs == runs(*each(4))
    assert answers["shared.weight"].state == "none"


class Masked(Toy):
    """Its query weight is masked and transposed on the way, and its input is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))
        self.mask = nn.Buffer(torch.ones(16, 16))

    def projected(self, name: str, x: Tensor) -> Tensor:
        if name != "query":
            return super().projected(name, x)
        weight = self.get_parameter("query.weight") * self.get_buffer("mask")
        rows = (x * self.gain) @ weight.T
        return rows.unflatten(-1, (H, -1)).transpose(1, 2)


def test_what_is_made_of_weights_is_a_weight() -> None:
    query = ask(Masked())["query.weight"]
    assert (query.runs, query.axis) == (runs(*each(4)), 0)


class Narrow(Toy):
    """Computes in float32 inside, as many softmaxes do, and adds what cancels there to 1e-7."""

    def attended(self, x: Tensor) -> Tensor:
        out = super().attended(x).float() @ torch.eye(16)
        total = out.sum(-1, keepdim=True, dtype=torch.float32)
        return (out + (total * (1 / 41) * 41 - total)).to(torch.float64)


class Forgetful(Toy):
    """Every head forgets by a decay that would underflow as it was initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(1, 40, H))

    def attended(self, x: Tensor) -> Tensor:
        kept = torch.exp(-torch.exp(self.decay) * F.softplus(self.projected("query", x).sum(-1).mT))
        value = self.projected("value", x).transpose(1, 2)
        return (value * (1 + kept.unsqueeze(-1))).flatten(-2)


def test_a_decay_is_drawn_where_it_forgets_little() -> None:
    assert torch.exp(-torch.exp(torch.tensor(40.0, dtype=torch.float64))) == 0
    assert ask(Forgetful())["query.weight"].runs == runs(*each(4))


class Deep(nn.Module):
    """Attentions on one residual stream, as many as asked."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Toy() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_the_layers_of_a_deep_model_are_asked_as_those_of_a_shallow_one() -> None:
    answers = ask(Deep(9))
    assert len(answers) == 9 * 4
    for name, answer in answers.items():
        if ".output." in name:
            assert answer.state == "none"
        else:
            assert answer.runs == runs(*each(4))


def test_what_the_budget_does_not_reach_is_unknown() -> None:
    whole = ask(Deep(3))
    partly = gradients(Deep(3), lambda m: m(noise(1, 6, 16)), budget=60_000)
    spoken = {name for name, answer in partly.items() if answer.state == "heads"}
    assert spoken == {n for n, a in whole.items() if n.startswith("layers.0.") and a.runs}
    assert all(partly[name].runs == whole[name].runs for name in spoken)
    silent = partly["layers.2.query.weight"]
    assert silent.state == "unknown"
    assert "too large" in silent.evidence


def test_more_columns_than_can_be_asked_are_unknown() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 1025), nn.Linear(1025, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.silu(self.up(x)))

    answers = gradients(Wide(), lambda m: m(noise(1, 3, 4)))
    assert answers["up.weight"].state == "unknown"
    assert "1025 columns" in answers["up.weight"].evidence


def test_narrow_dtypes_are_widened() -> None:
    assert torch.tensor(41.0) * torch.tensor(1 / 41) - 1 != 0
    assert ask(Narrow())["query.weight"].runs == runs(*each(4))


class Normed(Toy):
    """Queries are normalised over all heads at once."""

    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = norm

    def projected(self, name: str, x: Tensor) -> Tensor:
        if name != "query":
            return super().projected(name, x)
        return self.norm(self.get_submodule("query")(x)).unflatten(-1, (H, -1)).transpose(1, 2)


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def written_out(x: Tensor) -> Tensor:
    return (x - x.mean(dim=-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6)


def by_length(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("norm", [nn.RMSNorm(16), nn.LayerNorm(16), unit, written_out, by_length])
def test_statistics_of_a_norm_over_all_heads_are_held_constant(
    norm: Callable[[Tensor], Tensor],
) -> None:
    query = ask(Normed(norm))["query.weight"]
    assert query.runs == runs(*each(4))
    assert "norm over 16 channels held constant" in query.evidence


class Hostile(torch.autograd.Function):
    """A backward pass that cannot be batched, and one that is not there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, broken: bool) -> Tensor:
        ctx.broken = broken
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.broken:
            raise NotImplementedError("no derivative")
        return grads[0] * math.copysign(1.0, grads[0].sum().item()) ** 2, None


class Opaque(Toy):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken

    def attended(self, x: Tensor) -> Tensor:
        return Hostile.apply(super().attended(x), self.broken)


def test_a_backward_pass_that_cannot_be_batched_is_taken_column_by_column() -> None:
    assert ask(Opaque(broken=False)) == ask(Toy())


def test_a_missing_derivative_is_unknown_and_says_why() -> None:
    answers = ask(Opaque(broken=True))
    assert answers["query.weight"].state == "unknown"
    assert "no derivative" in answers["query.weight"].evidence


def test_a_weight_that_is_not_called_is_unknown() -> None:
    toy = Toy()
    toy.tower = nn.Linear(16, 16)
    assert ask(toy)["tower.weight"].state == "unknown"
    assert "not used" in ask(toy)["tower.weight"].evidence


def test_nothing_is_left_behind() -> None:
    toy = Toy().train()
    before = {name: value.clone() for name, value in toy.state_dict().items()}
    state = torch.get_rng_state()
    assert ask(toy) == ask(toy)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    assert toy.training
    assert all(p.grad is None and p.dtype == torch.float32 for p in toy.parameters())
    assert all(torch.equal(value, before[name]) for name, value in toy.state_dict().items())


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(InputError, match="on meta"):
        ask(Toy().to("meta"))
    with pytest.raises(InputError, match="ZeroDivisionError"):
        gradients(Toy(), lambda _: 1 // 0)


# The sets alone: bit c is column c.


def reach(*supports: int) -> Reach:
    return Reach(0, supports, (True,) * len(supports))


def test_values_of_grouped_queries_do_not_cut_heads() -> None:
    queries = reach(0b0011, 0b0011, 0b1100, 0b1100)
    values = reach(0b0101, 0b1010)  # one column in each of two heads
    assert column_classes([queries, values], 4) == [0b0011, 0b1100]


def test_one_row_a_head_makes_heads_if_something_has_more_rows() -> None:
    decay, values = reach(0b0011, 0b1100), reach(0b0001, 0b0010, 0b0100, 0b1000)
    assert column_classes([decay, values], 4) == [0b0011, 0b1100]
    assert column_classes([decay], 4) == []


def test_channels_that_are_read_twice_are_no_heads() -> None:
    merged = reach(0b000100010001, 0b001000100010, 0b010001000100, 0b100010001000)
    assert column_classes([merged], 12) == []


def test_all_columns_and_single_columns_make_no_heads() -> None:
    assert column_classes([reach(0b1111, 0b1111), reach(1, 2, 4, 8)], 4) == []


def test_columns_beside_the_heads_belong_to_none() -> None:
    queries = reach(0b000011, 0b000011, 0b001100, 0b001100)
    beside = reach(0b010000, 0b000001, 0b100000)
    latent = reach(0b111111, 0b111111)
    classes = column_classes([queries, beside, latent], 6)
    assert classes == [0b0011, 0b1100]
    assert judge(beside, classes) is None
    mixed = judge(reach(0b0011, 0b010000, 0b1100), classes)
    assert mixed is not None
    assert mixed.runs == runs(head(1, 0), head(1), head(1, 1))
