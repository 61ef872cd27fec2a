"""The hard cases of recognition: plan and truth against answers that neither of them made.

``golden/cases.json`` was obtained by other means than the package's own: a trace that follows the
first view of each projection, a functional oracle on tiny models, and the published configs.
"""

import functools
import json
import re
from typing import Any

import pytest

from muonsplit import Layout, Plan, plan
from muonsplit.geometry.owner import LINEAR_ATTENTION
from muonsplit.goldens import cases
from muonsplit.models.load import build, golden_root, resolve

CASES = cases()


@functools.cache
def planned(model: str, split: str = "") -> Plan:
    return plan(build(resolve(model).config), f"deepspeed-0.19.8{split}")


def layer_free(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".N", name)


def identity(case: dict[str, Any]) -> str:
    return f"{case['model']}-{case['owner']}.{case['weight'].split('.')[-2]}-{case['shape'][0]}"


def found(case: dict[str, Any], split: str = "") -> list[Any]:
    made = planned(case["model"], split)
    # A numbered layer of a published config stands for its kind.
    wanted = (layer_free(case["weight"]), case["owner"], tuple(case["shape"]))
    matching = [
        d
        for d in (*made.decisions, *made.others)
        if (layer_free(d.name), d.owner, d.shape) == wanted
        or (layer_free(d.name), d.shape) == (wanted[0], wanted[2])
    ]
    assert matching, f"{case['model']} has no {wanted}"
    return matching


@pytest.mark.parametrize("case", CASES, ids=identity)
def test_plan_gives_the_answer(case: dict[str, Any]) -> None:
    for decision in found(case):
        if case["heads"] is None:
            assert decision.layout is None, decision
            assert decision.reason
        else:
            heads, width = case["heads"]
            spans = [block.spans for block in decision.layout.blocks()]
            assert spans == [((h * width, (h + 1) * width),) for h in range(heads)]


@pytest.mark.parametrize("case", [c for c in CASES if c["by_heads"]], ids=identity)
def test_fused_weights_are_cut_in_their_own_order(case: dict[str, Any]) -> None:
    wanted = Layout.parse(case["by_heads"])
    assert {d.layout for d in found(case, ":fused_qkv=heads")} == {wanted}
    roles = {d.layout for d in found(case, ":fused_qkv=projections")}
    assert roles == {Layout(wanted.segments, wanted.groups, wanted.axis, joined=True)}


@pytest.mark.parametrize("case", CASES, ids=identity)
def test_the_models_own_computation_gives_the_answer(case: dict[str, Any]) -> None:
    """The reviewed truths; ``muonsplit golden check`` computes them anew."""
    name = case["model"].removeprefix("transformers:")
    golden = json.loads((golden_root() / "truth" / f"{name}.json").read_text())
    wanted = (layer_free(case["weight"]), case["shape"])
    rows = [row for row in golden["weights"] if (row["weight"], row["shape"]) == wanted]
    if not rows:
        pytest.skip("not a weight of attention: the plan leaves it whole for that")
    for row in rows:
        assert row["outcome"] in ("right", "declined"), row
        if case["heads"] is not None:
            heads, width = case["heads"]
            truth = Layout.parse(row["truth"])
            bounds = {start for block in truth.blocks() for start, _ in block.spans}
            assert bounds >= {head * width for head in range(heads)}
            assert truth.rows == heads * width


@pytest.mark.parametrize(("ending", "name"), LINEAR_ATTENTION.items())
def test_linear_attention_is_admitted_by_a_truth(ending: str, name: str) -> None:
    golden = json.loads((golden_root() / "truth" / f"{name}.json").read_text())
    admitted = [row for row in golden["weights"] if row["owner"].endswith(ending)]
    assert any(row["counted"] and row["outcome"] == "right" for row in admitted) or any(
        row["fused"] == "right" for row in admitted
    )
