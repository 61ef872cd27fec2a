"""What may not change an answer: the order of a config, what else it says, and wrappers."""

import random
from typing import Any

import pytest

from muonsplit import Layout, plan, planned
from muonsplit.models.load import build, resolve
from muonsplit.truth.views import views

NAMES = ["llama", "glm-5.2-0.8b", "deepseek-v2-lite", "kimi-k3-0.40b", "transformers:gemma4_text"]
# Fields that some configs have beside those of attention, and some that none has.
BESIDE = {"comment": "x", "mamba_num_heads": 3, "index_n_heads_old": 5, "unknown_section": {"a": 1}}


def config_of(name: str) -> dict[str, Any]:
    return dict(resolve(name).config)


def cuts(config: dict[str, Any]) -> dict[str, Layout | None]:
    return plan(build(config)).layouts()


@pytest.mark.parametrize("name", NAMES)
def test_neither_order_nor_other_fields_of_a_config_matter(name: str) -> None:
    config = config_of(name)
    shuffled = list((config | BESIDE).items())
    random.Random(0).shuffle(shuffled)
    assert list(dict(shuffled)) != list(config)
    before = build(config)
    after = build(dict(shuffled))
    assert plan(after).layouts() == plan(before).layouts()
    assert views(after) == views(before)


def halved(name: str) -> dict[str, Any]:
    config = config_of(name)
    fewer = config | {"num_attention_heads": config["num_attention_heads"] // 2}
    if name == "llama":
        fewer |= {"head_dim": 2 * 128, "num_key_value_heads": config["num_key_value_heads"] // 2}
    return fewer


@pytest.mark.parametrize("name", ["llama", "kimi-k3-0.40b"])
def test_heads_that_the_config_counts_otherwise_are_other_heads(name: str) -> None:
    """The property above can fail: fields that do matter change plan and truth alike."""
    model = build(halved(name))
    before, after = cuts(config_of(name)), planned(model, arbiter="views").layouts()
    changed = [key for key in before if before[key] != after.get(key)]
    assert changed
    truths = views(model)
    assert all(truths[key].objection(after[key]) == "" for key in changed)


def test_an_arbiter_settles_what_shape_confirms_twice() -> None:
    """Delta attention's 8 × 32 values are 4 × 64 by the latent attention beside it."""
    model = build(halved("kimi-k3-0.40b"))
    name = "model.layers.0.self_attn.v_proj.weight"
    alone = next(d for d in plan(model).decisions if d.name == name)
    assert alone.layout is None
    assert "8 × 32" in alone.reason
    assert "4 × 64" in alone.reason
    settled = next(d for d in planned(model, arbiter="views").decisions if d.name == name)
    assert str(settled.layout) == "v 8×32"
    assert settled.reason.startswith("arbiter: 8 × 32")
