"""The plan of every golden model against answers that were obtained without it."""

import dataclasses
import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from muonsplit.dialect import Dialect, SplitRule, dialect_named
from muonsplit.errors import NothingRecognisedError
from muonsplit.geometry import Decision, Plan, plan
from muonsplit.models.load import build, resolve

MODELS = Path(__file__).parents[1] / "golden" / "models"
NAMES = sorted(path.name for path in MODELS.iterdir())
# What the answers call a weight whose heads are blocks of rows that no dialect leaves alone.
BY_HEAD = {"q", "k", "v", "kda-q", "kda-k", "kda-v", "mla-q", "mla-kv"}
ATTENTION = {
    "DeepseekV2Attention",
    "GPTNeoXAttention",
    "GlmMoeDsaAttention",
    "KimiDeltaAttention",
    "KimiLinearAttention",
    "KimiLinearDeltaAttention",
    "KimiMLAAttention",
    "LlamaAttention",
}

# (owner, leaf, shape) → (weights, heads, width), from the published structure of each model.
Split = dict[tuple[str, str, tuple[int, int]], tuple[int, int, int]]
SPLIT: dict[str, Split] = {
    "kimi-k3-0.40b": {
        ("KimiDeltaAttention", "q_proj", (256, 1024)): (6, 8, 32),
        ("KimiDeltaAttention", "k_proj", (256, 1024)): (6, 8, 32),
        ("KimiDeltaAttention", "v_proj", (256, 1024)): (6, 8, 32),
        ("KimiMLAAttention", "q_b_proj", (768, 256)): (2, 8, 96),
        ("KimiMLAAttention", "kv_b_proj", (1024, 128)): (2, 8, 128),
    },
    "kimi-k3": {
        ("KimiDeltaAttention", "q_proj", (12288, 7168)): (69, 96, 128),
        ("KimiDeltaAttention", "k_proj", (12288, 7168)): (69, 96, 128),
        ("KimiDeltaAttention", "v_proj", (12288, 7168)): (69, 96, 128),
        ("KimiMLAAttention", "q_b_proj", (18432, 1536)): (24, 96, 192),
        ("KimiMLAAttention", "kv_b_proj", (24576, 512)): (24, 96, 256),
    },
    "glm-5.2": {
        ("GlmMoeDsaAttention", "q_b_proj", (16384, 2048)): (78, 64, 256),
        ("GlmMoeDsaAttention", "kv_b_proj", (28672, 512)): (78, 64, 448),
    },
    "glm-5.2-0.8b": {
        ("GlmMoeDsaAttention", "q_b_proj", (4096, 512)): (6, 16, 256),
        ("GlmMoeDsaAttention", "kv_b_proj", (5120, 128)): (6, 16, 320),
    },
    "deepseek-v2-lite": {
        ("DeepseekV2Attention", "q_proj", (3072, 2048)): (27, 16, 192),
        ("DeepseekV2Attention", "kv_b_proj", (4096, 512)): (27, 16, 256),
    },
    "gpt-neox-20b": {},
}


@functools.cache
def model(name: str) -> nn.Module:
    return build(resolve(name).config)


@functools.cache
def planned(name: str, dialect: str = "deepspeed-0.19.8") -> Plan:
    return plan(model(name), dialect)


def found(name: str, owner: str, leaf: str) -> list[Decision]:
    return [d for d in planned(name).decisions if (d.owner, d.leaf) == (owner, leaf)]


def written(decisions: list[Decision]) -> set[str]:
    return {str(d.layout) for d in decisions}


def answers(name: str) -> list[dict[str, Any]]:
    return json.loads((MODELS / name / "answers.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_plan_agrees_with_the_answers(name: str) -> None:
    everything = [*planned(name).decisions, *planned(name).others]
    for answer in answers(name):
        key = (answer["owner"], answer["leaf"], tuple(answer["shape"]))
        mine = [d for d in everything if (d.owner, d.leaf, d.shape) == key]
        assert len(mine) == answer["count"], key
        for d in mine:
            if answer["kind"] in BY_HEAD:
                heads, width = answer["heads"], answer["width"]
                assert (d.heads, d.width) == (heads, width), d
                assert d.layout is not None
                spans = [block.spans for block in d.layout.blocks()]
                assert spans == [((h * width, (h + 1) * width),) for h in range(heads)]
            else:
                assert d.layout is None, d
                assert d.reason


@pytest.mark.parametrize("name", NAMES)
def test_every_attention_matrix_has_an_answer(name: str) -> None:
    answered = {(a["owner"], a["leaf"]) for a in answers(name)}
    split = {(d.owner, d.leaf) for d in planned(name).split}
    assert split <= answered
    assert {owner for owner, _ in split} <= ATTENTION


@pytest.mark.parametrize("name", SPLIT)
def test_exactly_these_weights_are_split(name: str) -> None:
    seen = Counter((d.owner, d.leaf, d.shape, d.heads, d.width) for d in planned(name).split)
    wanted = {(*key, heads, width): count for key, (count, heads, width) in SPLIT[name].items()}
    assert seen == wanted


@pytest.mark.parametrize(
    ("name", "muon", "split"),
    [("kimi-k3-0.40b", None, 22), ("glm-5.2-0.8b", 69, 12), ("gpt-neox-20b", 176, 0)],
)
def test_totals(name: str, muon: int | None, split: int) -> None:
    assert len(planned(name).split) == split
    assert muon in (None, len(planned(name).decisions))


@pytest.mark.parametrize(
    ("name", "owner", "leaf", "count", "reason"),
    [
        ("kimi-k3-0.40b", "KimiDeltaAttention", "g_proj", 6, "gate"),
        ("kimi-k3", "KimiDeltaAttention", "f_b_proj", 69, "gate"),
        ("glm-5.2", "GlmMoeDsaIndexer", "wq_b", 21, "role"),
        ("glm-5.2", "GlmMoeDsaIndexer", "wk", 21, "role"),
        ("glm-5.2", "GlmMoeDsaAttention", "q_a_proj", 78, "down-projection"),
        ("deepseek-v2-lite", "DeepseekV2Attention", "o_proj", 27, "output projection"),
        ("gpt-neox-20b", "GPTNeoXAttention", "dense", 44, "output projection"),
        ("gpt-neox-20b", "GPTNeoXAttention", "query_key_value", 44, "fused QKV"),
    ],
)
def test_whole_with_a_reason(name: str, owner: str, leaf: str, count: int, reason: str) -> None:
    decisions = found(name, owner, leaf)
    assert len(decisions) == count
    assert all(d.layout is None and reason in d.reason for d in decisions)


def test_the_indexer_is_refused_although_its_rows_confirm() -> None:
    # 64 heads × head_dim 64 is 4096 too: only the role keeps it whole.
    shapes = {d.shape for d in found("glm-5.2", "GlmMoeDsaIndexer", "wq_b")}
    assert shapes == {(4096, 2048)}


def test_nothing_recognised_names_the_leaf_and_why() -> None:
    with pytest.raises(NothingRecognisedError) as raised:
        planned("gpt-neox-20b").raise_if_nothing()
    message = str(raised.value)
    assert "query_key_value (18432, 6144) ×44: fused QKV" in message
    assert "dense (6144, 6144) ×44: output projection" in message
    assert "deepspeed-0.19.8" in message
    assert raised.value.exit_code >= 64


def test_nothing_raises_where_something_is_split() -> None:
    planned("llama").raise_if_nothing()


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_decided_once_in_model_order(name: str) -> None:
    order = [n for n, _ in model(name).named_parameters()]
    p = planned(name)
    assert sorted(d.name for d in (*p.decisions, *p.others)) == sorted(order)
    assert [d.name for d in p.decisions] == [n for n in order if n in p.layouts()]
    assert [d.name for d in p.others] == [n for n in order if n not in p.layouts()]


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_heads_and_vectors_are_not_muons(name: str) -> None:
    modules = dict(model(name).named_modules())
    for d in planned(name).decisions:
        holder = d.name.rpartition(".")[0]
        assert len(d.shape) > 1
        assert not isinstance(modules.get(holder), nn.Embedding | nn.Conv1d)
        assert d.leaf not in {"lm_head", "embed_out"}
    others = {d.leaf for d in planned(name).others}
    assert others & {"embed_tokens", "embed_in"}
    assert others & {"lm_head", "embed_out"}


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_decided_once(tied: bool) -> None:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=40,
        tie_word_embeddings=tied,
    )
    decided = [d for d in plan(LlamaForCausalLM(config)).others if d.shape == (40, 32)]
    assert [d.kind for d in decided] == (["embedding"] if tied else ["embedding", "head"])


def test_a_parametrised_embedding_is_an_embedding_still() -> None:
    class Same(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 1.0

    holder = nn.ModuleDict({"embed_tokens": nn.Embedding(8, 4)})
    nn.utils.parametrize.register_parametrization(holder["embed_tokens"], "weight", Same())
    assert [d.kind for d in plan(holder).others] == ["embedding"]


def test_key_and_value_apart() -> None:
    decisions = planned("glm-5.2", "glm-5").split
    by_leaf = {leaf: [d for d in decisions if d.leaf == leaf] for leaf in ("q_b_proj", "kv_b_proj")}
    assert written(by_leaf["q_b_proj"]) == {"q 64×256"}
    assert written(by_leaf["kv_b_proj"]) == {"64 × (k 192 | v 256)"}
    assert len(decisions) == 156


def test_key_and_value_together() -> None:
    decisions = [d for d in planned("glm-5.2").split if d.leaf == "kv_b_proj"]
    assert written(decisions) == {"kv 64×448"}


@pytest.mark.parametrize("name", ["llama", "glm-5.2"])
def test_a_whole_matrix_dialect_splits_nothing_and_says_so(name: str) -> None:
    whole = planned(name, "torch-2.13")
    assert not whole.split
    by_default = {d.name for d in planned(name).split}
    reasons = {d.reason for d in whole.decisions if d.name in by_default}
    assert reasons == {"the dialect keeps every weight whole"}


def test_two_heads_a_block() -> None:
    decisions = planned("glm-5.2", "prime-rl:heads_per_block=2").split
    assert written([d for d in decisions if d.leaf == "q_b_proj"]) == {"q 32×512"}
    assert written([d for d in decisions if d.leaf == "kv_b_proj"]) == {"kv 32×896"}


def test_heads_that_do_not_divide_into_blocks_are_declined() -> None:
    # llama-odd has 6 query and 2 key-value heads.
    p = planned("llama-odd", "prime-rl:heads_per_block=3")
    assert {(d.leaf, str(d.layout)) for d in p.split} == {("q_proj", "q 2×24")}
    keys = [d for d in p.decisions if d.leaf == "k_proj"]
    assert len(keys) == 2
    for d in keys:
        assert d.reason.startswith("declined")
        assert "3 heads a block do not divide the 2" in d.reason


def test_fused_weights_are_cut_where_the_dialect_asks() -> None:
    asked = dialect_named("deepspeed-0.19.8")
    split = dataclasses.replace(asked.split, fused_qkv="heads")
    fused = plan(model("gpt-neox-20b"), Dialect("asked", split, asked.arithmetic, asked.sources))
    # 64 heads of 96, and each has its own query, key and value rows.
    assert {(d.leaf, d.heads, d.width) for d in fused.split} == {("query_key_value", 192, 96)}
    assert len(fused.split) == 44
    assert SplitRule().fused_qkv == "whole"


def test_table_counts_layers() -> None:
    rows = {(d.leaf, count) for d, count in planned("llama").table() if d.layout is not None}
    assert rows == {("q_proj", 32), ("k_proj", 32), ("v_proj", 32)}


def test_json_is_plain_and_spells_layouts() -> None:
    spelled = json.loads(json.dumps(planned("llama-odd").to_json()))
    assert [(d["leaf"], d["layout"]) for d in spelled["decisions"][:4]] == [
        ("q_proj", "q 6×8"),
        ("k_proj", "k 2×8"),
        ("v_proj", "v 2×8"),
        ("o_proj", None),
    ]
    assert len(spelled["others"]) == len(planned("llama-odd").others)
