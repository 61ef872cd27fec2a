"""Is what shards come to the same as in a single process, also when a run is resumed elsewhere?"""

from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonsplit.checks.case import Case
from muonsplit.checks.compare import judged, wrong
from muonsplit.checks.ranks import sharding_of
from muonsplit.checks.registry import Finding, Findings, SkipError, UndecidedError, check
from muonsplit.checks.variants import Weights, bare
from muonsplit.errors import RefusedError, SubjectFaultError
from muonsplit.layout import Layout
from muonsplit.subjects.drive import Checkpoint, Outcome
from muonsplit.subjects.ranks import Ranks, same_bits

# Strong enough that what is not decayed shows in what Muon does not train, too.
_DECAY = 0.1
# An elementwise step is a dozen operations, each rounded by half an ulp of what it moves by.
_ELEMENTWISE = 12 * torch.finfo(torch.float32).eps


@check("sharding.uneven", "uneven and empty shards are stepped as the weights they are parts of")
def uneven(case: Case) -> Findings:
    """Bare weights whose rows the ranks do not divide, or of which there are fewer than ranks.

    Heads reach over the ends of shards, and the last ranks hold less or nothing. Direction and size
    are those of the logical rows. Each weight is stepped by itself, so that what cannot be stepped
    is named. Seen in public: a hang and a crash on empty shards (dion #74, #83), padded rows that
    enter the iteration and the scale (Megatron #6740).
    """
    sharding = sharding_of(case)
    if not sharding.holds_shards:
        raise SkipError("every rank is given whole weights")
    raises = case.dialect.split.cut_heads == "raise"
    asked, n = 0, sharding.world
    undecided: list[UndecidedError] = []
    for name, (shape, layout) in _uneven(n).items():
        varied = bare(case, {name: (shape, layout)})
        if raises and varied.cut_heads:
            continue  # see sharding.cut_heads
        asked += 1
        drawn, where = varied.conditioned("uneven"), f"{shape[0]} × {shape[1]} on {n} ranks"
        try:
            yield from wrong(varied, judged(varied, drawn, varied.probe(drawn)), where)
        except (RefusedError, SubjectFaultError) as fault:
            said = f"{where}: {fault.message}"
            yield Finding(name, said, "a step", "none", tail=getattr(fault, "tail", ""))
        except UndecidedError as error:
            undecided.append(error)
    if undecided and len(undecided) == asked:
        raise undecided[0]


def _uneven(world: int) -> Weights:
    """Weights of which some rank holds less than others, or nothing."""
    return {
        "a.q_proj.weight": ((15, 24), Layout.heads("q", 3, 5)),
        "b.q_proj.weight": ((12 * world + 6, 20), Layout.heads("q", 2 * world + 1, 6)),
        "c.up_proj.weight": ((world + 1, 10), None),
        "d.up_proj.weight": ((world - 1, 10), None),
        "e.o_proj.weight": ((9, 2 * world + 1), None),
    }


@check("sharding.invariance", "a sharded step is the step of a single process")
def invariance(case: Case) -> Findings:
    """Two steps with decay, sharded and by the same subject in a single process.

    Every parameter is compared, those too that Muon does not train. Where bits differ, the
    difference must stay within what rounding may do to both: sums over ranks are in another order.
    Which weights have the same bits is reported as observed. Seen in public: an update rule that
    depends on the parallelism (Megatron #6380), whole matrices that change with the number of
    ranks.
    """
    sharding_of(case)
    both = _both(case)
    limits = case.rounding(both.drawn[0])
    for d in case.plan.decisions:
        one, other = (case.update(d.name, run.after[0]) for run in (both.seen, both.wanted))
        equal = same_bits(both.seen.after[0][d.name], both.wanted.after[0][d.name])
        case.alone[d.name] = 0.0 if equal else float((one - other).norm() / other.norm())
        if d.name not in case.diverged and not case.alone[d.name] <= 2 * limits[d.name]:
            said = f"the update is not that of one process: off by {case.alone[d.name]:.3g}"
            numbers = {"off": case.alone[d.name], "allowed": 2 * limits[d.name]}
            yield Finding(d.name, said, "the step of one process", "another", numbers)
    for d in case.plan.others:
        end, wanted = both.seen.after[-1][d.name], both.wanted.after[-1][d.name]
        if said := _apart(end, wanted, case.start[d.name], steps=2):
            yield Finding(d.name, f"two steps are not those of one process: {said}")


def _apart(end: Tensor, wanted: Tensor, start: Tensor, steps: int) -> str:
    """How far elementwise steps are from where they must end; empty if rounding explains it."""
    moved = float((wanted - start).norm())
    off, limit = float((end - wanted).norm()), steps * _ELEMENTWISE * (moved + float(wanted.norm()))
    return "" if off <= limit else f"off by {off:.3g} of {moved:.3g}, {limit:.3g} allowed"


class _Both(NamedTuple):
    """A run on all ranks and one in a single process.

    Attributes:
        drawn: The gradients of both.
        seen: On all ranks.
        wanted: In one process.
    """

    drawn: list[dict[str, Tensor]]
    seen: Outcome
    wanted: Outcome


def _both(case: Case) -> _Both:
    drawn = [case.conditioned("invariance", i) for i in range(2)]
    hyper = replace(case.hyper, weight_decay=_DECAY)
    return _Both(drawn, case.run(drawn, hyper=hyper), case.run(drawn, hyper=hyper, **_alone(case)))


def _alone(case: Case) -> dict[str, Any]:
    driver = case.driver
    assert isinstance(driver, Ranks)
    return {"driver": driver.alone, "sharding": None}


@check("sharding.resume", "a run is resumed on another number of ranks as if it went on")
def resume(case: Case) -> Findings:
    """Two steps on all ranks, a checkpoint, two more in a single process; and the other way round.

    The checkpoint is one of ``torch.distributed.checkpoint``, which puts shards together by name.
    The end must be that of four steps in a single process within what rounding may do to each.
    A momentum that is lost, local or out of place is off by as much as a step; so is what is kept
    for parameters that Muon does not train.
    """
    sharding_of(case)
    drawn = [case.conditioned("resume", i) for i in range(4)]
    whole = case.run(drawn, **_alone(case)).after
    limits = case.rounding(drawn[0])
    for first, second, said in (
        ({}, _alone(case), "saved on all ranks, resumed on one"),
        (_alone(case), {}, "saved on one rank, resumed on all"),
    ):
        with TemporaryDirectory(prefix="muonsplit-") as folder:
            begun = case.run(drawn[:2], keep=Checkpoint(save=folder), **first).after[-1]
            end = case.run(drawn[2:], begun, keep=Checkpoint(load=folder), **second).after[-1]
        for d in case.weights:
            moved = float((whole[-1][d.name] - whole[1][d.name]).norm())
            off = float((end[d.name] - whole[-1][d.name]).norm()) / moved
            # Each of the four steps of either run is rounded, and two of them are what is moved.
            limit = 2 * 4 * limits[d.name]
            if not off <= limit:
                numbers = {"off": off, "allowed": limit}
                yield Finding(d.name, f"{said}: off by {off:.3g}", "as if it went on", "", numbers)
        for d in case.plan.others:
            if apart := _apart(end[d.name], whole[-1][d.name], case.start[d.name], steps=8):
                yield Finding(d.name, f"{said}: {apart}", "as if it went on")
