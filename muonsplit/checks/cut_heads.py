"""Is a head that a shard cuts treated as the dialect declares?"""

from collections.abc import Iterator

from muonsplit.checks.case import Case
from muonsplit.checks.registry import BLIND, Finding, Findings, SkipError, check
from muonsplit.checks.variants import ordinary
from muonsplit.errors import RefusedError, SubjectFaultError
from muonsplit.geometry import Decision
from muonsplit.layout import Layout, Segment, compress
from muonsplit.observe.fit import fit


@check("sharding.cut_heads", "a head that a shard cuts is treated as the dialect declares")
def cut_heads(case: Case) -> Findings:
    """Looks at the weights of which a shard cuts a head; the dialect gathers, drops or raises.

    Where it gathers, the update is that of whole heads; where it drops, that of the whole matrix.
    Neither each rank's part, nor its part of a head, may be orthogonalised on its own. Where it
    raises, the subject must say so, though it takes a step where no head is cut, and nothing else
    is asked of it under this sharding.
    Seen in public: half heads after tensor parallelism (DeepSpeed #8384), shards smaller than a
    head (torchtitan #4078), shards taken for matrices (AReaL #1270, Moonlight #27).
    """
    if not case.cut_heads:
        raise SkipError("no shard cuts a head" if case.way else "the model is not divided")
    raises = case.dialect.split.cut_heads == "raise"
    try:
        after = case.base.after[0]
    except (SubjectFaultError, RefusedError) as error:
        if raises and getattr(error, "raised", True) and _steps_uncut(case):
            case.ended = f"the subject refuses shards that cut heads: {error.message}"
            return
        raise SkipError("the subject takes no step: see subject.answers") from None
    for name, d in case.cut_heads.items():
        if raises:
            said = "a shard cuts its heads, and nothing is said"
            yield Finding(name, said, "an error", "a step was taken")
        else:
            yield from _misfit(case, d, after[name])


def _steps_uncut(case: Case) -> bool:
    """Whether the subject takes a step under the same sharding where no head is cut.

    One that finds the heads itself has none to find on bare weights, and is taken at its word.
    """
    if case.described["recognises"]:
        return True
    uncut = ordinary(case)
    try:
        uncut.run([uncut.gradients])
    except (SubjectFaultError, RefusedError):
        return False
    return True


def _misfit(case: Case, d: Decision, after: object) -> Iterator[Finding]:
    """A finding if something other than what is declared explains an update."""
    declared = next(p for p in case.plan.decisions if p.name == d.name).layout
    named = {"as declared": declared, "whole heads": d.layout, "the whole matrix": None}
    named |= _by_shard(case, d)
    update = case.update(d.name, {d.name: after})  # pyright: ignore[reportArgumentType]
    best, *others = fit(update, case.direction(d.name), named, case.dialect.arithmetic)
    wanted = next((f for f in (best, *others) if f.hypothesis == "as declared"), best)
    if best is wanted or best.residual > BLIND or wanted.residual <= 2 * best.residual:
        return
    policy = {"gather": "its heads are gathered", "drop": "it is kept whole"}
    said = f"shards cut its heads, and the update is that of {best.hypothesis}"
    numbers = {f"off if {f.hypothesis}": f.residual for f in (best, *others)}
    planned = policy[case.dialect.split.cut_heads]
    yield Finding(d.name, said, planned, best.hypothesis, numbers)


def _by_shard(case: Case, d: Decision) -> dict[str, Layout | None]:
    """The ways to be wrong about what a rank holds, where it holds consecutive lines."""
    assert d.layout is not None
    assert case.sharding is not None
    axis, size = d.layout.axis, d.shape[d.layout.axis]
    held = {r[axis] for r in case.sharding.regions(d.name, d.shape) if all(r)}
    parts = sorted({stop for spans in held for _, stop in spans})
    heads = [block.spans[-1][1] for block in d.layout.blocks()]
    assert parts[-1] == size
    ends = {
        "each rank's part": parts,
        "each rank's part of a head": sorted({*parts, *heads}),
        "as many heads on each rank": _counted_again(parts, len(heads)),
    }
    found = {name: _rows(stops) for name, stops in ends.items()}
    # A line alone has nothing to orthogonalise.
    return {name: _at(rows, axis) for name, rows in found.items() if min(rows, default=0) > 1}


def _counted_again(parts: list[int], heads: int) -> list[int]:
    """Where blocks end if each part is cut into as many heads as the whole; nowhere if not even."""
    rows = _rows(parts)
    if any(n % heads for n in rows):
        return []
    starts = zip(parts, rows, strict=True)
    return [stop - n + n // heads * (i + 1) for stop, n in starts for i in range(heads)]


def _rows(stops: list[int]) -> list[int]:
    return [stop - start for start, stop in zip([0, *stops], stops, strict=False)]


def _at(rows: list[int], axis: int) -> Layout:
    """The layout of consecutive blocks."""
    segments, groups = compress([Segment("part", 1, n) for n in rows])
    return Layout(segments, groups, axis)
