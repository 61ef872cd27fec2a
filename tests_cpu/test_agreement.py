"""Two oracles that know nothing of each other say the same of real models, and not of a wrong one.

What a model's heads are is written out here from its class: which leaves have any, and how many.
"""

import functools
import inspect
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from muonsplit.errors import MuonsplitError
from muonsplit.geometry import plan
from muonsplit.models.load import build, complete, resolve
from muonsplit.models.miniature import miniature
from muonsplit.recognition.witnesses import short_chunks, witnesses
from muonsplit.truth import Truth
from muonsplit.truth.agreement import agreement
from muonsplit.truth.answer import Run
from muonsplit.truth.gradients import gradients
from muonsplit.truth.views import views

Heads = Sequence[int]


def truth(*pieces: tuple[int, Heads], axis: int = 0, evidence: str = "") -> Truth:
    """Heads from (rows, the heads they serve), in order."""
    runs: list[Run] = []
    for rows, heads in pieces:
        start = runs[-1].stop if runs else 0
        runs.append(Run(start, start + rows, frozenset(heads)))
    return Truth("heads", axis, runs[-1].stop, tuple(runs), evidence)


def each(heads: int, width: int, axis: int = 0) -> Truth:
    return truth(*((width, [h]) for h in range(heads)), axis=axis)


def none(rows: int, evidence: str = "in one piece", axis: int = 0) -> Truth:
    return Truth("none", axis, rows, (), evidence)


def unknown(evidence: str) -> Truth:
    return Truth("unknown", 0, 16, (), evidence)


FUSED = truth((4, [0]), (4, [1]), (4, [0]), (4, [1]))
CHANNELS = truth((8, [0]), (8, [1]), evidence="2 heads; one column a row; a norm was held")

AGREE = {
    "the same heads": (each(4, 4), each(4, 4)),
    "the same columns": (each(4, 4, axis=1), each(4, 4, axis=1)),
    "the same heads, counted in another order": (each(2, 8), truth((8, [7]), (8, [3]))),
    "none and none": (none(16), none(16)),
    "[q | k] as one run a head and as two": (each(2, 8), truth(*2 * [(4, [0])], *2 * [(4, [1])])),
    "grouped keys, which serve two queries each": (each(2, 8), truth((8, [0, 1]), (8, [2, 3]))),
    "the second of two slabs": (FUSED, FUSED),
    "a gate that multiplies channels": (none(16), CHANNELS),
    "a gate of one row a head": (none(4), each(4, 1)),
}
DIFFER = {
    "half the heads": (each(2, 8), each(4, 4)),
    "heads of another width": (each(4, 4), truth((6, [0]), (6, [1]), (4, [2]))),
    "a boundary one row off": (each(2, 8), truth((7, [0]), (9, [1]))),
    "slabs swapped": (truth((8, [0]), (8, [1])), truth((4, [0]), (4, [1]), (4, [0]), (4, [1]))),
    "heads on the other axis": (each(4, 4), each(4, 4, axis=1)),
    "heads against none": (each(4, 4), none(16)),
    "none against heads": (none(16), each(4, 4)),
    "a gate only in part of each head": (
        none(16),
        truth((8, [0]), (8, [1]), evidence="one column a row in part of each head"),
    ),
}


@pytest.mark.parametrize("name", AGREE)
def test_the_same_heads_agree(name: str) -> None:
    assert agreement(*AGREE[name])[0] == "agree"


@pytest.mark.parametrize("name", DIFFER)
def test_other_heads_differ(name: str) -> None:
    found, why = agreement(*DIFFER[name])
    assert found == "differ"
    assert "views: " in why
    assert "gradients" in why


def test_heads_that_are_subtracted_are_coupled() -> None:
    found, why = agreement(each(4, 4), truth((4, [0]), (4, [1]), (4, [0]), (4, [1])))
    assert found == "coupled"
    assert "4 heads of the views are 2" in why


def test_weights_of_three_dimensions_have_other_rows_to_each() -> None:
    assert agreement(each(4, 1), each(4, 8))[0] == "silent"
    assert "4 and 32 rows" in agreement(each(4, 1), each(4, 8))[1]


@pytest.mark.parametrize("other", [each(4, 4), none(16), unknown("not reached")])
def test_one_that_does_not_speak_is_silence_with_its_reason(other: Truth) -> None:
    assert agreement(unknown("lost in foo"), other) == ("silent", "views: lost in foo")
    if other.state != "unknown":
        assert agreement(other, unknown("no path")) == ("silent", "gradients: no path")


# Real architectures at their defaults: leaf → its heads in the miniature as the views count them.


# Fewer layers and heads than by default, where a delta rule makes them slow.
TWO = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
FEW: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **TWO,
        "hidden_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "kimi_linear": {**TWO, "mlp_layer_types": ["dense", "sparse"]},
}


@functools.cache
def both(model_type: str) -> tuple[dict[str, Any], dict[str, tuple[Truth, Truth]]]:
    given = {"model_type": model_type, **FEW.get(model_type, {})}
    config = complete(miniature(given))
    by_views, by_gradients = witnesses(given)
    assert by_views.keys() == by_gradients.keys()
    return config, {name: (by_views[name], by_gradients[name]) for name in by_views}


def heads(found: Truth) -> int:
    return len({head for run in found.runs for head in run.heads})


# What serves its own head each, by the config field that counts them, or in none.
QKV = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
QKV |= {"v_proj": "num_key_value_heads", "o_proj": None}
LINEAR = {"in_proj_qkvz": "linear_num_value_heads", "in_proj_ba": "linear_num_value_heads"}
MLA = {"q_b_proj": "num_attention_heads", "kv_b_proj": "num_attention_heads"}
MLA |= {"kv_a_proj_with_mqa": None, "q_a_proj": None, "o_proj": None}
KDA = dict.fromkeys(("k_proj", "v_proj", "f_b_proj", "b_proj"), "linear_num_heads")
ARCHITECTURES: dict[str, dict[str, str | None]] = {
    "mistral": QKV,
    "olmo2": QKV,  # norms over all heads
    "deepseek_v3": MLA,
    "gpt_neox": {"query_key_value": "num_attention_heads", "attention.dense": None},
    "bloom": {"query_key_value": "n_head"},
    "phi3": {"qkv_proj": "num_attention_heads", "o_proj": None},
    "gpt2": {"c_attn": "n_head", "attn.c_proj": None},
    "qwen3_next": {**QKV, **LINEAR},  # q_proj is [query | gate]; in_proj_qkvz is Gated DeltaNet
    "kimi_linear": {**KDA, "kv_b_proj": "num_attention_heads"},
    "glm_moe_dsa": MLA,
    "gemma4_text": QKV,
    "falcon": {"query_key_value": "num_attention_heads"},  # 71 heads: no divisor
    "mamba2": {"out_proj": None},
}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_views_and_gradients_agree(model_type: str) -> None:
    config, found = both(model_type)
    said = {name: agreement(*pair) for name, pair in found.items()}
    assert not {name: why for name, why in said.items() if why[0] not in ("agree", "silent")}
    for leaf, field in ARCHITECTURES[model_type].items():
        weights = [name for name in found if f".{leaf}." in name]
        assert weights, leaf
        for name in weights:
            assert said[name][0] == "agree", (name, said[name])
            counted = [heads(each) for each in found[name]]
            assert all(each.state == ("heads" if field else "none") for each in found[name])
            assert field is None or counted[0] == config[field] or "k_proj" in leaf


def test_a_head_that_serves_others_is_one_run() -> None:
    config, found = both("mistral")
    keys = config["num_key_value_heads"]
    assert 1 < keys < config["num_attention_heads"]
    for name in (n for n in found if ".k_proj." in n or ".v_proj." in n):
        assert [len(each.runs) for each in found[name]] == [keys, keys]


def test_widths_may_change_from_layer_to_layer() -> None:
    config, found = both("gemma4_text")
    full = complete({"model_type": "gemma4_text"})
    assert full["per_layer_config"]["05"]["head_dim"] == 2 * full["head_dim"]
    rows = {n.split(".")[2]: v.rows for n, (v, _) in found.items() if ".q_proj." in n}
    assert rows["5"] == 2 * rows["0"] == 2 * config["head_dim"] * config["num_attention_heads"]


def test_an_indexer_is_silent_for_want_of_a_gradient() -> None:
    _, found = both("glm_moe_dsa")
    indexer = {name: agreement(*pair) for name, pair in found.items() if ".indexer." in name}
    assert {name.split(".")[-2] for name in indexer} == {"wq_b", "wk", "weights_proj"}
    assert all(
        said == ("silent", "gradients: no gradient path to any projection")
        for said in indexer.values()
    )


def test_differential_heads_are_coupled_in_pairs() -> None:
    config, found = both("diffllama")
    # Values of two heads are concatenated before the scores meet them: one head to both.
    leaves = {"q_proj": "coupled", "k_proj": "coupled", "v_proj": "agree", "o_proj": "agree"}
    said = {n: agreement(*p) for n, p in found.items() if n.split(".")[-2] in leaves}
    assert len(said) == 4 * config["num_hidden_layers"]
    assert all(kind == leaves[name.split(".")[-2]] for name, (kind, _) in said.items())
    for name in (n for n in said if ".q_proj." in n):
        counted = [heads(each) for each in found[name]]
        assert counted == [config["num_attention_heads"], config["num_attention_heads"] // 2]


# A wrong subject: its shapes are right, the heads of its views are not.


def llama(count: int, device: str) -> nn.Module:
    """Attention weights of 32 rows, viewed as ``count`` heads."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 40}
    config = {"model_type": "llama", "num_attention_heads": count, "head_dim": 32 // count}
    torch.manual_seed(0)
    return build({**config, **sizes, "num_key_value_heads": count}, device)


def ids(model: nn.Module) -> object:
    return model(input_ids=torch.arange(1, 9)[None], use_cache=False)


@pytest.mark.parametrize(("viewed", "computed", "said"), [(4, 4, "agree"), (2, 4, "differ")])
def test_half_the_heads_differ(viewed: int, computed: int, said: str) -> None:
    by_views = views(llama(viewed, "meta"))
    by_gradients = gradients(llama(computed, "cpu"), ids)
    for leaf in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.0.self_attn.{leaf}.weight"
        assert agreement(by_views[name], by_gradients[name])[0] == said


@pytest.mark.parametrize("oracle", ["views", "gradients"])
def test_an_attention_that_swaps_rows_differs(oracle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interleaved heads, in one oracle's model only: row r serves head r mod 4."""
    import transformers.models.llama.modeling_llama as module

    right = module.apply_rotary_pos_emb

    def wrong(q: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
        shuffled = q.transpose(1, 2).flatten(-2).unflatten(-1, (-1, 4)).mT
        return right(shuffled.transpose(1, 2), *rest, **kwargs)

    models = {"views": llama(4, "meta"), "gradients": llama(4, "cpu")}
    found: dict[str, Truth] = {}
    for name, ask in (("views", views), ("gradients", partial(gradients, call=ids))):
        with monkeypatch.context() as patch:
            if name == oracle:
                patch.setattr(module, "apply_rotary_pos_emb", wrong)
            found[name] = ask(models[name])["model.layers.0.self_attn.q_proj.weight"]
    assert len(found[oracle].runs) == 32
    assert agreement(found["views"], found["gradients"])[0] == "differ"


def test_a_miniature_that_is_none_says_so() -> None:
    with pytest.raises(MuonsplitError, match=r"too large: \d+ elements, 144000576 of them"):
        witnesses({"model_type": "blt"})


def test_chunks_of_time_are_as_they_were() -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear as module

    function = inspect.unwrap(module.chunk_kimi_delta_attention)
    before = function.__defaults__
    model = build(miniature({"model_type": "kimi_linear"}))
    with short_chunks(model):
        assert inspect.signature(function).parameters["chunk_size"].default == 8
    assert function.__defaults__ is before
    assert inspect.signature(function).parameters["chunk_size"].default == 64


# A miniature is the same model to the rules.

GOLDEN = sorted(path.name for path in (Path(__file__).parents[1] / "golden" / "models").iterdir())
TYPES = (
    *("afmoe", "apertus", "bloom", "cohere2", "deepseek_v3", "falcon", "gemma2", "gemma3_text"),
    *("gemma4_text", "glm4_moe", "glm_moe_dsa", "gpt2", "gpt_neox", "gpt_oss", "kimi_linear"),
    *("mistral", "olmo2", "phi3", "qwen3_moe", "qwen3_next", "starcoder2"),
)


@pytest.mark.parametrize("name", [*GOLDEN, *(f"transformers:{t}" for t in TYPES)])
def test_a_miniature_keeps_every_decision(name: str) -> None:
    config = resolve(name).config
    full, small = (plan(build(c)).decisions for c in (config, miniature(config)))
    kinds = [{(d.owner, d.leaf, d.kind, d.layout is None) for d in ds} for ds in (full, small)]
    assert kinds[0] == kinds[1]
    # Every count is divided by one number, and every width by one: 32×128 and 8×128 of a model
    # are 8×16 and 2×16 of its miniature.
    cuts = [
        {(d.owner, d.leaf): set[tuple[int, int]]() for d in ds if d.layout is not None}
        for ds in (full, small)
    ]
    for decisions, cut in zip((full, small), cuts, strict=True):
        for d in decisions:
            if d.layout is not None:
                cut[d.owner, d.leaf].add((d.heads or 1, d.width or 1))
    ratios = {
        (Fraction(heads, less), Fraction(width, narrow))
        for leaf, wide in cuts[0].items()
        for (heads, width), (less, narrow) in zip(sorted(wide), sorted(cuts[1][leaf]), strict=True)
    }
    assert len(ratios) <= 1
    assert all(count >= 1 and width >= 1 for count, width in ratios)
