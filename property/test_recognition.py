"""Recognition under hostile input: it never crashes, never guesses, never splits what has no head.

Rows of an output projection or an MLP divide by the head count all the time; the properties here
let the config say so and ask that it changes nothing.
"""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from muonsplit.geometry import Plan, plan
from muonsplit.geometry.candidates import HeadGeometry, candidates
from muonsplit.geometry.confirm import confirm
from muonsplit.geometry.leaf import SPLITTABLE
from muonsplit.layout import Segment

# Every cut of 24 rows into heads of several rows, and some that are none.
CONFIRMING = [(2, 12), (3, 8), (4, 6), (6, 4), (8, 3), (12, 2)]
FAILING = [(2, 11), (5, 5), (24, 2), (1, 23), (7, 3)]
GEOMETRIES = [
    HeadGeometry(h, w, f"route {i}", (Segment("q", h, w),))
    for h, w in CONFIRMING + FAILING
    for i in range(2)
]

LEAVES = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "qkv_proj")
NEVER = ("o_proj", "out_proj", "wo", "dense", "c_proj", "g_proj", "gate_proj", "g_b_proj")
DOWN = ("kv_a_proj_with_mqa", "kv_a_proj", "q_a_proj", "wkv_a")
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "num_q_heads", "num_k_heads")
KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "num_v_heads", "num_key_value_groups")
WIDTHS = ("head_dim", "head_size", "qk_head_dim", "v_head_dim", "head_k_dim", "head_v_dim")
PARTS = ("qk_nope_head_dim", "qk_rope_head_dim", "hidden_size", "layer_idx", "per_layer_config")
FIELDS = (*COUNTS, *KV_COUNTS, *WIDTHS, *PARTS)


class Raising:
    """A value that raises whatever is done with it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __getitem__(self, key: object) -> Any:
        raise RuntimeError(str(key))


HOSTILE = st.one_of(
    st.integers(-3, 40),
    st.integers(),
    st.booleans(),
    st.floats(),
    st.text(max_size=3),
    st.none(),
    st.lists(st.integers(0, 8), max_size=3),
    st.builds(Raising),
)


class Config:
    """Holds what it is given; a value that is an exception is raised when it is read."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.attribute_map = dict.fromkeys(fields, "")  # how a config of transformers names fields

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__["fields"].get(name, AttributeError(name))
        if isinstance(value, Exception):
            raise value
        return value


CONFIGS = st.one_of(
    st.none(),
    st.builds(Raising),
    st.dictionaries(
        st.sampled_from(FIELDS), HOSTILE | st.builds(RuntimeError) | st.builds(KeyError)
    ).map(lambda fields: Config(**fields)),
)
ATTRIBUTES = st.dictionaries(st.sampled_from(FIELDS), HOSTILE)


class StubAttention(nn.Module):
    """One leaf, whatever attributes, whatever config."""

    def __init__(self, leaf: str, shape: tuple[int, ...], attributes: Any, config: Any) -> None:
        super().__init__()
        self.config = config
        for name, value in attributes.items():
            setattr(self, name, value)
        holder = nn.Module()
        holder.weight = nn.Parameter(torch.empty(shape, device="meta"))
        setattr(self, leaf, holder)


def stub_plan(leaf: str, shape: tuple[int, ...], attributes: Any, config: Any) -> Plan:
    return plan(nn.ModuleDict({"self_attn": StubAttention(leaf, shape, attributes, config)}))


@given(st.data(), st.lists(st.sampled_from(GEOMETRIES), max_size=8))
def test_agreement_is_no_ambiguity_and_disagreement_is(
    data: st.DataObject, drawn: list[HeadGeometry]
) -> None:
    answer = confirm(24, drawn)
    distinct = {(g.heads, g.width) for g in drawn if (g.heads, g.width) in CONFIRMING}
    if len(distinct) == 1:
        assert answer.geometry is not None
        assert {(answer.geometry.heads, answer.geometry.width)} == distinct
    else:
        assert answer.geometry is None
        assert ("ambiguous" in answer.reason) == (len(distinct) > 1)
        assert all(f"{h} × {w} = 24" in answer.reason for h, w in distinct)
    assert confirm(24, data.draw(st.permutations(drawn))) == answer


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12), st.booleans(), st.data())
def test_a_llama_has_its_attention_split_and_nothing_else(
    kv: int, group: int, half: int, square: bool, data: st.DataObject
) -> None:
    heads, width = kv * group, 2 * half
    # Where they are the same, every matrix of the model has as many rows as the query heads.
    hidden = heads * width if square else heads * data.draw(st.integers(1, 8), "hidden // heads")
    inner = hidden if square else data.draw(st.integers(2, 64), "intermediate")
    config = LlamaConfig(
        hidden_size=max(2, hidden),
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=width,
        vocab_size=16,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    cut = {d.leaf: (d.heads, d.width) for d in plan(model).split}
    wanted = {"q_proj": (heads, width), "k_proj": (kv, width), "v_proj": (kv, width)}
    assert cut == {leaf: g for leaf, g in wanted.items() if g[0] > 1}


@given(st.sampled_from(NEVER + DOWN), st.integers(2, 8), st.integers(2, 8), st.integers(2, 40))
def test_no_config_splits_an_output_a_gate_or_a_down_projection(
    leaf: str, heads: int, width: int, cols: int
) -> None:
    counts = dict.fromkeys((*COUNTS, "num_key_value_heads", "num_v_heads"), heads)
    attributes = counts | dict.fromkeys(WIDTHS, width)
    said = stub_plan(leaf, (heads * width, cols), attributes, Config(**attributes))
    assert [d.leaf for d in said.decisions] == [leaf]
    assert not said.split
    # The same rows under a query's name are split: it is the leaf that keeps this one whole.
    assert stub_plan("q_proj", (heads * width, cols), attributes, None).split


@given(st.sampled_from(NEVER + DOWN), ATTRIBUTES, CONFIGS, st.integers(2, 40), st.integers(2, 40))
def test_no_hostile_config_splits_them_either(
    leaf: str, attributes: dict[str, Any], config: Any, rows: int, cols: int
) -> None:
    assert not stub_plan(leaf, (rows, cols), attributes, config).split


@given(
    st.sampled_from(LEAVES),
    ATTRIBUTES,
    CONFIGS,
    st.one_of(
        st.tuples(st.integers(2, 64), st.integers(2, 8)),
        st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    ),
    st.sampled_from(
        [
            "deepspeed-0.19.8",
            "glm-5:gated_query=apart",
            "prime-rl:fused_qkv=heads,heads_per_block=2",
            "prime-rl:fused_qkv=projections",
        ]
    ),
)
def test_hostile_input_never_crashes_and_never_splits_unconfirmed(
    leaf: str, attributes: dict[str, Any], config: Any, shape: tuple[int, ...], dialect: str
) -> None:
    model = nn.ModuleDict({"self_attn": StubAttention(leaf, shape, attributes, config)})
    decided = plan(model, dialect)
    assert len(decided.decisions) + len(decided.others) == 1
    for d in decided.split:
        assert len(shape) == 2
        assert d.heads is not None
        assert d.width is not None
        assert d.layout is not None
        assert d.heads * d.width == shape[0] == d.layout.rows
        assert d.heads > 1
        assert d.width > 1
        stated = plain_integers(attributes) | plain_integers(getattr(config, "fields", {}))
        counts = stated | quotients(stated)
        fused = {a + 2 * b for a in counts | {0} for b in counts}
        assert d.heads in counts | (fused if leaf == "qkv_proj" else set())
        parts = counts | {0}
        widths = {a + b + c for a in parts for b in parts for c in parts}
        assert d.width in widths | (grouped(stated) if leaf == "qkv_proj" else set())


def plain_integers(fields: dict[str, Any]) -> set[int]:
    return {value for value in fields.values() if type(value) is int and value > 0}


def grouped(stated: set[int]) -> set[int]:
    """Rows of a key head's queries, keys, values and gates in a GatedDeltaNet."""
    ratios = quotients(stated)
    return {2 * (key + ratio * value) for key in stated for value in stated for ratio in ratios}


def quotients(values: set[int]) -> set[int]:
    return {a // b for a in values for b in values if a % b == 0}


@given(st.sampled_from(sorted(SPLITTABLE)), ATTRIBUTES, CONFIGS)
def test_candidates_are_positive_whatever_is_read(
    kind: Any, attributes: dict[str, Any], config: Any
) -> None:
    for found in candidates(kind, Config(**attributes), config):
        assert type(found.heads) is int
        assert type(found.width) is int
        assert found.heads > 0
        assert found.width > 0


@given(ATTRIBUTES, CONFIGS, st.sampled_from(["MlpBlock", "TokenIndexer", "AttentionScorer"]))
def test_who_is_not_attention_is_never_split(
    attributes: dict[str, Any], config: Any, name: str
) -> None:
    owner = type(name, (StubAttention,), {})("q_proj", (8, 4), {}, None)
    for key, value in {**attributes, "num_heads": 2, "head_dim": 4}.items():
        setattr(owner, key, value)
    owner.config = config
    assert not plan(nn.ModuleDict({"block": owner})).split
