"""What is to be reported of each weight of attention: by the rules, settled, and cut by heads."""

import json
import re
from collections import Counter
from collections.abc import Collection
from typing import Any

from torch import nn

from muonsplit.errors import MuonsplitError
from muonsplit.geometry import Decision, plan
from muonsplit.recognition.judge import Judgement, judge, judged
from muonsplit.recognition.witnesses import witnesses
from muonsplit.truth.agreement import agreement
from muonsplit.truth.views import views

Row = dict[str, Any]

_LAYER = re.compile(r"\.\d+(?=\.|$)")
_FUSED = "deepspeed-0.19.8:fused_qkv=heads"


def weight_rows(model: nn.Module) -> list[Row]:
    """A row for each weight of attention, those that differ only by layer as one.

    Args:
        model: On ``meta``, at full size.

    Returns:
        Plain values: the plan's cut and reason, the truth and its evidence, how they compare, how
        they do when open questions are settled, and how a fused weight would be cut by heads.
    """
    truths = views(model)
    cuts = {name: truth.layout for name, truth in truths.items()}
    settled = {d.name: d for d in plan(model, arbiter=lambda: cuts).decisions}
    fused = {d.name: d for d in plan(model, _FUSED).decisions}
    merged: dict[str, Row] = {}
    for found in judge(plan(model), truths):
        name = found.decision.name
        if found.decision.reason.startswith("not attention") and found.outcome != "wrong":
            continue
        row = _row(found, again(found, settled[name]), again(found, fused[name]))
        key = json.dumps(row, sort_keys=True, ensure_ascii=False)
        merged.setdefault(key, row | {"count": 0})["count"] += 1
    return list(merged.values())


def again(found: Judgement, decision: Decision) -> Judgement:
    """The judgement of another decision on the same weight."""
    if decision.layout == found.decision.layout:
        return found
    return judged(decision, found.truth)


def _row(found: Judgement, settled: Judgement, fused: Judgement) -> Row:
    decision, truth = found.decision, found.truth
    is_fused = decision.kind == "fused_qkv"
    return {
        "weight": _LAYER.sub(".N", decision.name),
        "owner": decision.owner,
        "leaf": decision.leaf,
        "kind": decision.kind,
        "shape": list(decision.shape),
        "plan": None if decision.layout is None else str(decision.layout),
        "reason": decision.reason,
        "truth": truth.state if truth.layout is None else str(truth.layout),
        "evidence": truth.evidence,
        "outcome": found.outcome,
        "objection": found.objection,
        "counted": found.counted and not is_fused,
        "settled": settled.outcome,
        "settled_plan": None if settled.decision.layout is None else str(settled.decision.layout),
        "fused": fused.outcome if is_fused else None,
        "by_heads": str(fused.decision.layout) if is_fused and fused.decision.layout else None,
    }


def witness_row(config: dict[str, Any], task: str | None, weights: Collection[str]) -> Row:
    """How the two truths of a config's miniature compare on some of its weights.

    Args:
        config: Of the full model.
        task: As :func:`muonsplit.models.load.build` takes it.
        weights: Which, with layers written as ``N``.

    Returns:
        ``counts`` by agreement, and ``why`` they do not agree, with how often; or ``error``, why
        there are not two.
    """
    try:
        by_views, by_gradients = witnesses(config, task)
    except MuonsplitError as error:
        return no_witnesses(error.message)
    except Exception as error:  # a model may raise anything, and costs its own row only
        said = " ".join(str(error).split())[:200]
        return no_witnesses(f"{type(error).__name__}: {said}")
    found = [
        (layerless, *agreement(truth, by_gradients[name]))
        for name, truth in by_views.items()
        if name in by_gradients and (layerless := _LAYER.sub(".N", name)) in weights
    ]
    counts = Counter(how for _, how, _ in found)
    apart = Counter((how, name, why) for name, how, why in found if how != "agree")
    why = [{"how": h, "weight": n, "why": w, "count": c} for (h, n, w), c in apart.items()]
    return {"counts": dict(sorted(counts.items())), "why": why, "error": None}


def no_witnesses(error: str) -> Row:
    """What stands in the place of a comparison that could not be made."""
    return {"counts": {}, "why": [], "error": error}
