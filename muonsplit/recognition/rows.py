"""What is to be reported of each weight of attention: by the rules, settled, and cut by heads."""

import json
import re
from typing import Any

from torch import nn

from muonsplit.geometry import plan
from muonsplit.recognition.judge import Judgement, judge
from muonsplit.truth.views import views

_LAYER = re.compile(r"\.\d+(?=\.|$)")
_FUSED = "deepspeed-0.19.8:fused_qkv=heads"


def weight_rows(model: nn.Module) -> list[dict[str, Any]]:
    """A row for each weight of attention, those that differ only by layer as one.

    Args:
        model: On ``meta``, at full size.

    Returns:
        Plain values: the plan's cut and reason, the truth and its evidence, how they compare, how
        they do when open questions are settled, and how a fused weight would be cut by heads.
    """
    truths = views(model)
    cuts = {name: truth.layout for name, truth in truths.items()}
    settled = {j.decision.name: j for j in judge(plan(model, arbiter=lambda: cuts), truths)}
    fused = {j.decision.name: j for j in judge(plan(model, _FUSED), truths)}
    merged: dict[str, dict[str, Any]] = {}
    for found in judge(plan(model), truths):
        name = found.decision.name
        if found.decision.reason.startswith("not attention") and found.outcome != "wrong":
            continue
        row = _row(found, settled[name], fused[name])
        key = json.dumps(row, sort_keys=True, ensure_ascii=False)
        merged.setdefault(key, row | {"count": 0})["count"] += 1
    return list(merged.values())


def _row(found: Judgement, settled: Judgement, fused: Judgement) -> dict[str, Any]:
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
        "fused": fused.outcome if is_fused else None,
        "by_heads": str(fused.decision.layout) if is_fused and fused.decision.layout else None,
    }
