"""Candidates are collected, shape decides, and nothing a config holds or raises gets through."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, Mistral3Config

from muonsplit.geometry import plan
from muonsplit.geometry.candidates import HeadGeometry, candidates
from muonsplit.geometry.confirm import Answer, confirm
from muonsplit.geometry.leaf import Kind
from muonsplit.geometry.stated import Reader
from muonsplit.layout import Segment


def of(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


def found(heads: int, width: int, source: str = "here") -> HeadGeometry:
    return HeadGeometry(heads, width, source, (Segment("q", heads, width),))


def said(answer: Answer) -> tuple[int, int, str] | None:
    return None if answer.geometry is None else answer.geometry[:3]


def confirmed(kind: Kind, rows: int, owner: Any, config: Any) -> tuple[int, int] | None:
    geometry = confirm(rows, candidates(kind, owner, config)).geometry
    return None if geometry is None else geometry[:2]


def sizes(kind: Kind, owner: Any, config: Any) -> set[tuple[int, int]]:
    return {(c.heads, c.width) for c in candidates(kind, owner, config)}


def test_one_candidate_confirms() -> None:
    answer = confirm(32, [found(4, 8, "owner.num_heads × owner.head_dim")])
    assert said(answer) == (4, 8, "owner.num_heads × owner.head_dim")
    assert answer.reason == "confirmed: 4 × 8 = 32 (owner.num_heads × owner.head_dim)"


def test_two_routes_to_one_answer_are_one_answer() -> None:
    routes = [found(8, 96, "config.a × config.b"), found(8, 96, "owner.a × owner.b")]
    for order in (routes, routes[::-1]):
        answer = confirm(768, order)
        assert said(answer) == (8, 96, "owner.a × owner.b")


def test_disagreement_is_ambiguous_and_names_both() -> None:
    both = [found(8, 96, "owner.a × owner.b"), found(12, 64, "config.c × config.d")]
    for order in (both, both[::-1]):
        answer = confirm(768, order)
        assert answer.geometry is None
        assert "ambiguous" in answer.reason
        assert "8 × 96 = 768 (owner.a × owner.b)" in answer.reason
        assert "12 × 64 = 768 (config.c × config.d)" in answer.reason


def test_a_candidate_that_fails_does_not_make_it_ambiguous() -> None:
    answer = confirm(768, [found(8, 96, "right"), found(12, 65, "wrong")])
    assert said(answer) == (8, 96, "right")


@pytest.mark.parametrize(
    ("heads", "width", "off"), [(8, 95, "-8"), (8, 97, "+8"), (7, 96, "-96"), (769, 1, "+1")]
)
def test_a_miss_says_by_how_much(heads: int, width: int, off: str) -> None:
    answer = confirm(768, [found(heads, width, "here")])
    assert answer.geometry is None
    assert f"{heads} × {width} = {heads * width} (here), off by {off}" in answer.reason
    assert "768 rows" in answer.reason


def test_the_closest_misses_are_named() -> None:
    far, near, nearer = (found(n, 1, f"n{n}") for n in (10, 700, 767))
    reason = confirm(768, [far, near, nearer]).reason
    assert "n767" in reason
    assert "n700" in reason
    assert "n10" not in reason


def test_misses_are_closest_first() -> None:
    # By their quotients 1 × 10 would come before 2 × 100.
    far, near = found(2, 100, "far"), found(10, 70, "near")
    farther = found(1, 10, "farther")
    reason = confirm(768, [farther, far, near]).reason
    assert reason.endswith("10 × 70 = 700 (near), off by -68; 2 × 100 = 200 (far), off by -568")


def test_divisibility_alone_confirms_nothing() -> None:
    answer = confirm(768, [found(8, 48, "half"), found(8, 192, "twice")])
    assert answer.geometry is None


def test_nothing_stated() -> None:
    answer = confirm(768, [])
    assert answer.geometry is None
    assert "768 rows" in answer.reason


def test_what_no_rule_decides_is_left_open() -> None:
    assert confirm(768, []).open is True
    assert confirm(768, [found(8, 95)]).open is True
    assert confirm(768, [found(8, 96), found(12, 64)]).open is True
    for heads, width in ((8, 96), (1, 768), (768, 1)):
        assert confirm(768, [found(heads, width)]).open is False


def test_of_those_that_disagree_the_plainest_is_named_first() -> None:
    # The owner before the config, and what is stated before what is derived.
    ways = [
        found(4, 192, "config.h / 4"),
        found(12, 64, "config.c × config.d"),
        found(24, 32, "owner.a × owner.b"),
    ]
    for order in (ways, ways[::-1]):
        assert confirm(768, order).reason.endswith(
            "each of 24 × 32 = 768 (owner.a × owner.b), 12 × 64 = 768 (config.c × config.d), "
            "4 × 192 = 768 (config.h / 4)"
        )


def test_queries_with_a_gate_count_only_where_none_without_fits() -> None:
    plain, gated = found(8, 96, "plain"), found(4, 192, "gated")._replace(gated=True)
    assert said(confirm(768, [gated, plain])) == (8, 96, "plain")
    assert said(confirm(768, [gated])) == (4, 192, "gated")


def test_candidates_of_one_size_may_order_their_roles_differently() -> None:
    def fused(groups: int) -> HeadGeometry:
        heads = 6 // groups // 3
        parts = tuple(Segment(role, heads, 8) for role in "qkv")
        return HeadGeometry(6, 8, "here", parts, groups)

    apart, together = fused(1), fused(2)
    assert confirm(48, [apart, apart]).one_order is True
    assert confirm(48, [apart, together]).one_order is False
    assert confirm(48, [apart, together]).geometry is not None


def test_one_head_is_whole() -> None:
    answer = confirm(512, [found(1, 512, "here")])
    assert answer.geometry is None
    assert answer.reason.startswith("whole: one head of 512 rows")


def test_heads_of_one_row_are_declined() -> None:
    answer = confirm(48, [found(48, 1, "here")])
    assert answer.geometry is None
    assert answer.reason == "declined: 48 heads of a single row each"


class Raises:
    """As transformers' per-layer configs do for a field that differs by layer."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} differs by layer")


@pytest.mark.parametrize(
    "value",
    [True, False, 4.0, "4", None, 0, -4, 10**18, [4], {"a": 4}, float("nan"), object],
    ids=repr,
)
def test_what_is_no_count_is_not_read(value: object) -> None:
    assert Reader("config", of(num_heads=value)).get("num_heads") is None
    assert not sizes("query", of(num_heads=value, head_dim=8), of(num_attention_heads=value))
    assert not sizes("query", of(num_heads=4, head_dim=value), None)


@pytest.mark.parametrize("value", [1, 4, 2**20])
def test_a_count_is_read(value: int) -> None:
    assert Reader("config", of(num_heads=value)).get("num_heads") == value


def test_a_config_that_raises_is_passed_over() -> None:
    # 16 rows a head are its queries and its output gate in one projection.
    both = {(4, 8), (4, 16)}
    assert sizes("query", of(num_heads=4, head_dim=8), Raises()) == both
    assert sizes("query", Raises(), of(num_attention_heads=4, head_dim=8)) == both
    assert not sizes("query", Raises(), Raises())


def test_the_layers_own_view_of_a_config_counts() -> None:
    class Global(Raises):
        per_layer_config = (
            of(num_attention_heads=8, head_dim=256),
            of(num_attention_heads=4, head_dim=512),
        )

    assert sizes("query", of(layer_idx=0), Global()) == {(8, 256), (8, 512)}
    assert sizes("query", of(layer_idx=1), Global()) == {(4, 512), (4, 1024)}
    assert not sizes("query", of(layer_idx=7), Global())


def test_counts_and_widths_are_crossed() -> None:
    owner, config = of(head_dim=8), of(num_attention_heads=4)
    assert sizes("key", owner, config) == {(4, 8)}
    assert sizes("query", owner, config) == {(4, 8), (4, 16)}


def test_keys_have_counts_of_their_own_and_queries_do_not() -> None:
    config = of(num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    for kind in ("key", "value"):
        assert confirmed(kind, 32, of(), config) == (2, 16)
        # Some layers have as many keys as queries: the shape says which.
        assert confirmed(kind, 128, of(), config) == (8, 16)
    assert confirmed("query", 128, of(), config) == (8, 16)
    assert confirmed("query", 32, of(), config) is None


def test_key_value_counts_from_groups() -> None:
    owner = of(num_key_value_groups=4, head_dim=16)
    assert confirmed("key", 32, owner, of(num_attention_heads=8)) == (2, 16)
    assert sizes("key", owner, of(num_attention_heads=6)) == {(6, 16)}


def test_without_key_value_counts_there_are_as_many_as_queries() -> None:
    assert sizes("value", of(), of(num_attention_heads=8, head_dim=16)) == {(8, 16)}


def test_hidden_size_over_heads_only_if_exact() -> None:
    assert sizes("query", of(), of(num_attention_heads=4, hidden_size=64)) == {(4, 16)}
    assert not sizes("query", of(), of(num_attention_heads=4, hidden_size=66))


def test_hidden_size_over_heads_only_if_no_width_is_stated() -> None:
    stated = {(4, 24), (4, 48)}
    config = of(num_attention_heads=4, hidden_size=64, head_dim=24)
    assert sizes("query", of(), config) == stated
    assert sizes("query", of(head_dim=24), of(num_attention_heads=4, hidden_size=64)) == stated


@pytest.mark.parametrize("owner", [of(), of(num_key_value_groups=4)], ids=["kv heads", "groups"])
def test_grouped_keys_divide_hidden_size_by_the_query_heads(owner: Any) -> None:
    # 128 / 8 query heads are 16 rows a head, and there are 2 key heads.
    config = of(num_attention_heads=8, num_key_value_heads=2, hidden_size=128)
    assert confirmed("key", 32, owner, config) == (2, 16)


def test_mla_widths_are_sums() -> None:
    owner = of(num_heads=4, qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=8)
    assert (4, 16) in sizes("mla_query_up", owner, None)
    assert sizes("mla_key_value_up", owner, of(head_dim=5)) == {(4, 20)}


def test_a_sum_needs_all_its_parts() -> None:
    owner = of(num_heads=4, qk_nope_head_dim=12, qk_rope_head_dim=True, v_head_dim=0)
    assert not sizes("mla_query_up", owner, None)
    assert not sizes("mla_key_value_up", owner, None)


@pytest.mark.parametrize("kind", ["output", "gate", "mla_down", "other"])
def test_kinds_without_heads_have_no_candidates(kind: Kind) -> None:
    owner = of(num_heads=4, head_dim=8, num_key_value_heads=4)
    assert candidates(kind, owner, owner) == []


def test_fused_heads_are_queries_keys_and_values() -> None:
    config = of(num_attention_heads=32, num_key_value_heads=8, head_dim=96)
    assert confirmed("fused_qkv", (32 + 8 + 8) * 96, of(), config) == (48, 96)
    alone = candidates("fused_qkv", of(), config, "kv_proj")
    found = confirm((8 + 8) * 96, alone).geometry
    assert found is not None
    assert (found.heads, found.width) == (16, 96)  # keys and values alone


class Attention(nn.Module):
    def __init__(self, rows: int = 32, leaf: str = "q_proj") -> None:
        super().__init__()
        setattr(self, leaf, nn.Linear(8, rows, bias=False))


class Holder(nn.Module):
    def __init__(self, child: nn.Module, config: Any) -> None:
        super().__init__()
        self.config = config
        self.self_attn = child


def test_the_nearest_config_above_is_asked() -> None:
    config = of(num_attention_heads=4, head_dim=8)
    inner = Holder(Attention(), config)
    outer = Holder(inner, of(num_attention_heads=2, head_dim=16))
    assert [str(d.layout) for d in plan(outer).split] == ["q 4×8"]


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((32, 8, 8), "declined: 3-D"),
        ((2, 32, 8, 8), "declined: 4-D"),
        ((32,), "vector"),
        ((), "vector"),
        ((32, 8, 1, 1), "vector"),
    ],
)
def test_only_matrices_have_heads(shape: tuple[int, ...], said: str) -> None:
    attention = Attention()
    attention.q_proj.weight = nn.Parameter(torch.empty(shape, device="meta"))
    decided = plan(Holder(attention, of(num_attention_heads=4, head_dim=8)))
    (decision,) = (*decided.decisions, *decided.others)
    assert decision.layout is None
    assert decision.reason.startswith(said)


def test_a_module_whose_config_raises_is_passed_over() -> None:
    class RaisingAttention(Attention):
        @property
        def config(self) -> Any:
            raise RuntimeError("differs by layer")

    decisions = plan(Holder(RaisingAttention(), of(num_attention_heads=4, head_dim=8))).decisions
    assert [d.leaf for d in decisions] == ["q_proj"]


def test_the_logical_shape_is_asked_under_zero_init() -> None:
    attention = Attention()
    attention.q_proj.weight = nn.Parameter(torch.empty(16))
    attention.q_proj.weight.ds_shape = torch.Size((32, 8))
    decisions = plan(Holder(attention, of(num_attention_heads=4, head_dim=8))).decisions
    assert [(d.shape, str(d.layout)) for d in decisions] == [((32, 8), "q 4×8")]


def test_a_tower_is_asked_with_its_own_config() -> None:
    # The tower's 1024 rows are 16 × 64; by the text config beside it they would be 8 × 128.
    config = Mistral3Config(
        text_config={
            "model_type": "mistral",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 64,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 1024,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 16,
            "head_dim": 64,
            "image_size": 32,
            "patch_size": 16,
        },
    )
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    split = {(d.owner, d.leaf): (d.shape[0], str(d.layout)) for d in plan(model).split}
    assert split == {
        ("PixtralAttention", "q_proj"): (1024, "q 16×64"),
        ("PixtralAttention", "k_proj"): (1024, "k 16×64"),
        ("PixtralAttention", "v_proj"): (1024, "v 16×64"),
        ("MistralAttention", "q_proj"): (2048, "q 16×128"),
        ("MistralAttention", "k_proj"): (1024, "k 8×128"),
        ("MistralAttention", "v_proj"): (1024, "v 8×128"),
    }


def test_an_owners_config_is_used_where_it_states_no_count_itself() -> None:
    class PixtralAttention(Attention):
        def __init__(self) -> None:
            super().__init__(1024, "k_proj")
            self.config = of(num_attention_heads=16, head_dim=64)

    root = of(
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        text_config=of(num_attention_heads=16, num_key_value_heads=8, head_dim=128),
    )
    assert [str(d.layout) for d in plan(Holder(PixtralAttention(), root)).split] == ["k 16×64"]
