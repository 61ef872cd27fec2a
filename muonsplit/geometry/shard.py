"""A plan on one rank: where the heads of each of its weights are in what the rank holds."""

from collections.abc import Mapping

from muonsplit.dialect import Dialect, dialect_named
from muonsplit.errors import CutHeadError, LayoutError, UsageError
from muonsplit.geometry.leaf import SPLITTABLE
from muonsplit.geometry.plan import Decision, Plan
from muonsplit.sharding import Local, Shard, sharded
from muonsplit.sharding.local import HINT

# An MLP's leaves, as most models call them.
_UP = frozenset(
    {"gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "w13", "fc1", "fc_in"}
    | {"dense_h_to_4h", "linear_fc1"}
)
_DOWN = frozenset({"down_proj", "w2", "fc2", "fc_out", "dense_4h_to_h", "linear_fc2"})
# Down to the rank of a gate of low rank.
_GATE_DOWN = frozenset({"g_a_proj", "f_a_proj"})


def shard_plan(plan: Plan, shards: Mapping[str, Shard], dialect: Dialect | str) -> dict[str, Local]:
    """What becomes of every weight of a plan on one rank.

    Args:
        plan: The plan of the whole model.
        shards: What the rank holds, one for each weight that Muon trains. A weight that is left
            out is an error, not a whole one: a shard nobody mentioned is how heads are halved.
        dialect: A dialect or its name; says what happens to a shard that cuts a head.

    Returns:
        One answer a weight, in model order.

    Raises:
        UsageError: If a weight has no shard, or a shard no weight.
        LayoutError: If a shard is not one of its weight.
        CutHeadError: If heads are cut and the dialect raises, or if every split weight that the
            rank holds was dropped. It lists each weight; other ranks may not see the same.
    """
    chosen = dialect_named(dialect) if isinstance(dialect, str) else dialect
    rule = chosen.split.cut_heads
    _check_names(plan, shards)
    answers: dict[str, Local] = {}
    for decision in plan.decisions:
        _check_size(decision, shards[decision.name])
        # Raising waits until every weight has been seen, so that all can be listed.
        quiet = "drop" if rule == "raise" else rule
        answers[decision.name] = sharded(decision.layout, shards[decision.name], quiet)
    dropped = [f"  {n}: {a.reason}" for n, a in answers.items() if a.outcome == "dropped"]
    kept = [n for n, a in answers.items() if a.outcome in ("heads", "gather")]
    if dropped and (rule == "raise" or not kept):
        what = "cut heads" if kept else "cut heads in every split weight they hold"
        raise CutHeadError(
            f"The shards of this rank {what}, {len(dropped)} in all, under dialect "
            f"{chosen.name}:\n" + "\n".join(dropped) + "\n",
            HINT,
        )
    return answers


def _check_names(plan: Plan, shards: Mapping[str, Shard]) -> None:
    wanted = {d.name for d in plan.decisions}
    missing = sorted(wanted - shards.keys())
    unknown = sorted(shards.keys() - wanted - {d.name for d in plan.others})
    if missing or unknown:
        raise UsageError(
            "Shards are needed for exactly the weights of the plan"
            + (f"; none is given for {', '.join(missing)}" if missing else "")
            + (f"; no parameter of the plan is {', '.join(unknown)}" if unknown else "")
            + ".",
            "Name parameters as the plan does; a weight that is not divided is Shard.whole(rows).",
        )


def _check_size(decision: Decision, shard: Shard) -> None:
    if shard.axis >= len(decision.shape) or decision.shape[shard.axis] != shard.size:
        raise LayoutError(
            f"{decision.name} has the whole shape {decision.shape}; a shard of {shard.size} on "
            f"axis {shard.axis} is none of it.",
            "A shard is stated in rows of the whole weight, without padding.",
        )


def tensor_parallel_axes(plan: Plan) -> dict[str, int]:
    """The axis along which the usual recipe of tensor parallelism divides each weight.

    query … value, split or not      heads: outputs
    output gate of attention         outputs; one of low rank on the way up
    output projection                inputs
    gate, up | down of an MLP        outputs | inputs, by leaf name
    stack of experts                 experts

    Weights that are not named every rank holds.

    Args:
        plan: The plan of the whole model.
    """
    found = {d.name: _tensor_axis(d) for d in plan.decisions}
    return {name: axis for name, axis in found.items() if axis is not None}


def _tensor_axis(d: Decision) -> int | None:
    if d.layout is not None:
        return d.layout.axis
    if len(d.shape) == 3 or d.kind in SPLITTABLE:
        return 0
    match d.kind:
        case "output":
            return 1
        case "gate":
            return None if d.leaf in _GATE_DOWN else 0
        case "other":
            return 0 if d.leaf in _UP else 1 if d.leaf in _DOWN else None
        case _:
            return None
