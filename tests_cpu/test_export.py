"""The plan in each framework's own form, against forms written out by hand."""

import dataclasses
import functools
import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from muonsplit.errors import LayoutError, UsageError
from muonsplit.geometry import Decision, Plan, plan
from muonsplit.geometry.export import (
    FORMS,
    FUNCTIONS,
    apply_tags,
    bind_groups,
    by_parameter,
    deepspeed_tags,
    dion_groups,
    export,
    megatron_tags,
    split_functions,
    xtuner_split_sizes,
)
from muonsplit.layout import Layout, Segment
from muonsplit.models.load import build, resolve

FRAMEWORKS = (
    "deepspeed",
    "dion",
    "gram-newton-schulz",
    "megatron",
    "muonium",
    "optax",
    "optimuon",
    "prime-rl",
    "xtuner",
)


def decision(name: str, shape: tuple[int, ...], layout: str | None = None) -> Decision:
    cut = None if layout is None else Layout.parse(layout)
    return Decision(name, shape, "Attention", name, "other", cut, None, None, "", "")


EQUAL = Plan(
    "some-dialect",
    (
        decision("0.q", (32, 24), "q 4×8"),
        decision("0.k", (16, 24), "k 2×8"),
        decision("0.o", (24, 32)),
        decision("1.q", (32, 24), "q 4×8"),
        decision("1.one", (8, 24), "q 8"),
    ),
    (decision("embed", (40, 24)), decision("norm", (24,))),
)


def one(layout: str | None, shape: tuple[int, ...]) -> Plan:
    """A plan of a single weight."""
    return Plan("some-dialect", (decision("attn.w", shape, layout),), ())


def form(p: Plan, framework: str) -> Any:
    return export(p, framework)[FORMS[framework].key]


def test_there_is_a_form_for_each_framework() -> None:
    assert tuple(FORMS) == FRAMEWORKS


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_export_is_plain_and_says_where_its_form_was_read(framework: str) -> None:
    written = export(EQUAL, framework)
    assert json.loads(json.dumps(written)) == written
    assert written["framework"] == framework
    assert written["dialect"] == "some-dialect"
    assert any(character.isdigit() for character in written["source"])


def test_a_form_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="deepsped") as raised:
        export(EQUAL, "deepsped")
    assert "deepspeed" in raised.value.hint


def test_deepspeed_counts_heads() -> None:
    whole = {"use_muon": True, "muon_num_heads": None, "muon_head_dim": None}
    other = {"use_muon": False, "muon_num_heads": None, "muon_head_dim": None}
    assert form(EQUAL, "deepspeed") == {
        "0.q": {"use_muon": True, "muon_num_heads": 4, "muon_head_dim": 8},
        "0.k": {"use_muon": True, "muon_num_heads": 2, "muon_head_dim": 8},
        "0.o": whole,
        "1.q": {"use_muon": True, "muon_num_heads": 4, "muon_head_dim": 8},
        "1.one": whole,
        "embed": other,
        "norm": other,
    }


def test_dion_groups_what_is_cut_alike() -> None:
    assert form(EQUAL, "dion") == [
        {"params": ["0.q", "1.q"], "num_heads": 4, "algorithm": "muon"},
        {"params": ["0.k"], "num_heads": 2, "algorithm": "muon"},
        {"params": ["0.o", "1.one"], "algorithm": "muon"},
        {"params": ["embed", "norm"], "algorithm": "adamw"},
    ]


def test_muonium_lists_rows() -> None:
    assert form(EQUAL, "muonium") == [
        {"params": ["0.q", "1.q"], "split_sizes": [8, 8, 8, 8], "algorithm": "muon"},
        {"params": ["0.k"], "split_sizes": [8, 8], "algorithm": "muon"},
        {"params": ["0.o", "1.one"], "algorithm": "muon"},
        {"params": ["embed", "norm"], "algorithm": "adamw"},
    ]


@pytest.mark.parametrize("framework", ["gram-newton-schulz", "optimuon"])
def test_functions_are_described_by_their_layout(framework: str) -> None:
    assert form(EQUAL, framework) == [
        {"params": ["0.q", "1.q"], "layout": "q 4×8", "split_sizes": [8, 8, 8, 8]},
        {"params": ["0.k"], "layout": "k 2×8", "split_sizes": [8, 8]},
        {"params": ["0.o", "1.one"]},
    ]


@pytest.mark.parametrize("framework", ["xtuner", "prime-rl"])
def test_sizes_are_listed_of_what_is_cut(framework: str) -> None:
    assert form(EQUAL, framework) == {
        "0.q": [8, 8, 8, 8],
        "0.k": [8, 8],
        "1.q": [8, 8, 8, 8],
    }


def test_megatron_tags_what_is_cut() -> None:
    tags = form(EQUAL, "megatron")
    assert tags["0.k"] == {"use_muon": True, "is_qkv": True, "qkv_split_shapes": [8, 8]}
    assert tags["0.o"] == tags["1.one"] == {"use_muon": True, "is_qkv": False}
    assert tags["embed"] == {"use_muon": False, "is_qkv": False}


# Falcon-40B's fused weight: in each of 8 groups 16 query heads and one each of key and value.
FALCON = "8 × (q 16×64 | k 64 | v 64)"


@pytest.mark.parametrize(
    ("layout", "rows", "shapes"),
    [
        # _get_qkv_split_shapes: 128 heads // 8 groups × 64 channels, 64, 64.
        (f"{FALCON}, joined", 9216, [1024, 64, 64]),
        (FALCON, 9216, [64] * 144),
        ("q 2×8 | k 4 | v 4, joined", 24, [16, 4, 4]),
        ("2 × (k 4 | v 6)", 20, [4, 6, 4, 6]),
    ],
    ids=["projections", "heads", "one group", "uneven"],
)
def test_megatron_shapes_are_of_one_group(layout: str, rows: int, shapes: list[int]) -> None:
    tags = form(one(layout, (rows, 16)), "megatron")
    assert tags["attn.w"]["qkv_split_shapes"] == shapes


def axes(shape: list[int], reduction: list[int], output: list[int]) -> dict[str, list[int]]:
    return {"reshape": shape, "reduction_axis": reduction, "output_axis": output}


@pytest.mark.parametrize(
    ("layout", "shape", "written"),
    [
        ("q 4×8", (32, 24), axes([4, 8, 24], [2], [1])),
        ("q 3×8, axis 1", (12, 24), axes([12, 3, 8], [0], [2])),
        (None, (24, 16), axes([24, 16], [1], [0])),
        (None, (3, 8, 12), axes([3, 8, 12], [2], [1])),
        ("6 × (gate 1 | up 1), joined", (12, 10), axes([6, 2, 1, 10], [3], [0, 2])),
        ("6 × (gate 2 | up 2), axis 1, joined", (10, 24), axes([10, 6, 2, 2], [0], [1, 3])),
        ("q 2×4 | k 8, joined", (16, 10), axes([2, 8, 10], [2], [1])),
    ],
)
def test_optax_makes_the_heads_an_axis(
    layout: str | None, shape: tuple[int, ...], written: dict[str, list[int]]
) -> None:
    assert form(one(layout, shape), "optax") == {"attn.w": written}


def test_optax_leaves_the_rest_to_adam() -> None:
    assert form(EQUAL, "optax")["embed"] is None


UNEVEN = ("2 × (k 4 | v 6)", (20, 12))
JOINED = ("2 × (q 8 | k 4), joined", (24, 12))
COLUMNS = ("q 3×8, axis 1", (12, 24))
WHOLE_COLUMNS = ("q 24, axis 1", (12, 24))
STACK = (None, (3, 8, 12))
TWICE = ("2 × (q 4 | k 4 | q 4), joined", (24, 12))

EXPRESSIBLE = {
    "deepspeed": (STACK,),
    "dion": (UNEVEN, STACK),
    "gram-newton-schulz": (UNEVEN, JOINED, COLUMNS, WHOLE_COLUMNS, STACK, TWICE),
    "megatron": (UNEVEN, JOINED),
    "muonium": (UNEVEN, STACK),
    "optax": (COLUMNS, WHOLE_COLUMNS, STACK),
    "optimuon": (UNEVEN, JOINED, COLUMNS, WHOLE_COLUMNS, TWICE),
    "prime-rl": (UNEVEN, STACK),
    "xtuner": (UNEVEN,),
}


@pytest.mark.parametrize(
    "weight",
    [UNEVEN, JOINED, COLUMNS, WHOLE_COLUMNS, STACK, TWICE],
    ids=["uneven", "joined", "columns", "whole columns", "stack", "role twice"],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_a_form_cannot_express_is_an_error(
    framework: str, weight: tuple[str | None, tuple[int, ...]]
) -> None:
    asked = one(*weight)
    if weight in EXPRESSIBLE[framework]:
        assert export(asked, framework)["framework"] == framework
        return
    with pytest.raises(LayoutError) as raised:
        export(asked, framework)
    message = raised.value.message.lower()
    assert "attn.w" in message
    assert str(weight[1]) in message
    assert (weight[0] or "whole") in message
    assert message.startswith(framework)
    assert raised.value.hint


def test_a_weight_of_another_form_spoils_the_export_of_all() -> None:
    mixed = dataclasses.replace(
        EQUAL, decisions=(*EQUAL.decisions, decision("late.kv", (20, 12), UNEVEN[0]))
    )
    with pytest.raises(LayoutError, match=r"late\.kv"):
        export(mixed, "deepspeed")
    assert form(mixed, "dion")[3] == {
        "params": ["late.kv"],
        "split_sizes": [4, 6, 4, 6],
        "algorithm": "muon",
    }


def module(p: Plan) -> nn.Module:
    """A module with the parameters of a plan."""
    root = nn.Module()
    for d in (*p.decisions, *p.others):
        parent = root
        *path, leaf = d.name.split(".")
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.register_parameter(leaf, nn.Parameter(torch.zeros(d.shape)))
    return root


def test_tags_are_set_over_whatever_was_there() -> None:
    model = module(EQUAL)
    wrong = dict(model.named_parameters())["0.o"]
    wrong.muon_num_heads = 64
    apply_tags(model, deepspeed_tags(EQUAL))
    seen = {n: (p.use_muon, p.muon_num_heads) for n, p in model.named_parameters()}
    assert seen["0.q"] == (True, 4)
    assert seen["0.o"] == (True, None)
    assert seen["norm"] == (False, None)


@pytest.mark.parametrize("drop", ["0.q", "norm"])
def test_tags_of_another_model_are_refused(drop: str) -> None:
    tags = megatron_tags(EQUAL)
    del tags[drop]
    model = module(EQUAL)
    with pytest.raises(LayoutError, match=drop):
        apply_tags(model, tags)
    assert not any(hasattr(p, "is_qkv") for p in model.parameters())


def test_groups_hold_the_parameters_themselves() -> None:
    model = module(EQUAL)
    named = dict(model.named_parameters())
    written = dion_groups(EQUAL)
    groups = bind_groups(model, written)
    assert groups[0]["params"] == [named["0.q"], named["1.q"]]
    assert groups[0]["num_heads"] == 4
    assert written[0]["params"] == ["0.q", "1.q"]
    assert sum(len(group["params"]) for group in groups) == len(named)


def test_a_wrapped_model_needs_a_plan_of_its_own() -> None:
    wrapped = nn.ModuleDict({"module": module(EQUAL)})
    with pytest.raises(LayoutError, match="wrapped"):
        bind_groups(wrapped, dion_groups(EQUAL))


def test_a_parameter_is_in_one_group() -> None:
    groups = [{"params": ["0.q"]}, {"params": ["0.k", "0.q"]}]
    with pytest.raises(LayoutError, match=r"0\.q stands in two"):
        bind_groups(module(EQUAL), groups)


@pytest.mark.parametrize("framework", FUNCTIONS)
def test_groups_get_the_two_functions(framework: str) -> None:
    split_name, recombine_name = FUNCTIONS[framework]
    groups = bind_groups(module(EQUAL), form(EQUAL, framework), FUNCTIONS[framework])
    weight = torch.arange(32.0 * 24).view(32, 24)
    blocks = groups[0][split_name](weight)
    assert [block.tolist() for block in blocks] == [
        weight[8 * head : 8 * head + 8].tolist() for head in range(4)
    ]
    assert torch.equal(groups[0][recombine_name](blocks), weight)
    assert [set(group) for group in groups] == [
        {"params", split_name, recombine_name},
        {"params", split_name, recombine_name},
        {"params"},
    ]


def test_xtuner_is_asked_by_parameter() -> None:
    model = module(EQUAL)
    named = dict(model.named_parameters())
    found = by_parameter(model, xtuner_split_sizes(EQUAL))
    assert set(found) == {named["0.q"], named["0.k"], named["1.q"]}
    assert found[named["0.k"]] == (8, 8)
    with pytest.raises(LayoutError, match="gone"):
        by_parameter(model, {"gone": [8, 8]})


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    segment = st.builds(
        Segment, st.sampled_from(["q", "k", "v"]), st.integers(1, 3), st.integers(1, 4)
    )
    segments = tuple(draw(st.lists(segment, min_size=1, max_size=3)))
    return Layout(
        segments, draw(st.integers(1, 3)), draw(st.sampled_from([0, 1])), draw(st.booleans())
    )


def counted(layout: Layout) -> set[tuple[int, ...]]:
    """The lines of each block, counted one by one."""
    found: dict[object, list[int]] = {}
    line = itertools.count()
    for group in range(layout.groups):
        for place, (role, heads, width) in enumerate(layout.segments):
            for head, _ in itertools.product(range(heads), range(width)):
                key = role if layout.joined else (group, place, head)
                found.setdefault(key, []).append(next(line))
    return {tuple(lines) for lines in found.values()}


@given(layouts())
def test_functions_take_any_layout_apart_and_put_it_together(layout: Layout) -> None:
    split, recombine = split_functions(str(layout))
    lines = torch.arange(float(layout.rows)).unsqueeze(1).expand(-1, 2)
    weight = (lines.mT if layout.axis else lines).contiguous()
    blocks = split(weight)
    assert {tuple(int(x) for x in block[:, 0]) for block in blocks} == counted(layout)
    assert all(block.shape[1] == 2 for block in blocks)
    marked = recombine([block + 100 for block in blocks])
    assert torch.equal(marked, weight + 100)
    assert torch.equal(split(weight)[0], blocks[0])


@functools.cache
def published(name: str, dialect: str) -> Plan:
    return plan(build(resolve(name).config), dialect)


KV_B = "model.layers.3.self_attn.kv_b_proj.weight"


def test_glm_with_key_and_value_apart() -> None:
    p = published("glm-5.2", "glm-5")
    cut = dataclasses.replace(p, decisions=p.split)
    # xtuner's own DSA-MLA module: (qk_nope_head_dim, v_head_dim) × num_attention_heads.
    assert form(cut, "xtuner")[KV_B] == [192, 256] * 64
    groups = {tuple(g.get("split_sizes", ())): g for g in form(p, "dion")}
    assert KV_B in groups[(192, 256) * 64]["params"]
    with pytest.raises(LayoutError, match=r"kv_b_proj.*192, 256 rows"):
        export(p, "deepspeed")
    with pytest.raises(LayoutError, match="experts") as raised:
        export(p, "xtuner")
    assert "plan.split" in raised.value.hint


def test_glm_with_key_and_value_together() -> None:
    tags = form(published("glm-5.2", "deepspeed-0.19.8"), "deepspeed")
    counts = {n.split(".")[-2]: t["muon_num_heads"] for n, t in tags.items() if t["use_muon"]}
    assert counts["kv_b_proj"] == counts["q_b_proj"] == 64
    assert counts["wq_b"] is counts["o_proj"] is None
    assert tags[KV_B]["muon_head_dim"] == 192 + 256
    assert not tags["lm_head.weight"]["use_muon"]
