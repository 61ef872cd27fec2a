"""Is it right on inputs that an ordinary gradient does not hold?"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from muonsplit.checks.case import Case, axis_of, batches, cast, lines_first, mapped
from muonsplit.checks.compare import Judged, judged, wrong
from muonsplit.checks.follow import decayed, followed
from muonsplit.checks.registry import Finding, Findings, SkipError, UndecidedError, check
from muonsplit.checks.variants import Weights, bare
from muonsplit.errors import RefusedError, SubjectFaultError
from muonsplit.geometry import Decision
from muonsplit.layout import Layout, Segment
from muonsplit.observe import gradients

# From gradients that an ε of 1e-7 matters to, to those of a loss scale.
_SCALES = (1e-10, 1e-5, 1e5, 1e15)
_ULP = torch.finfo(torch.float32).eps


@check("inputs.scale", "tiny and huge gradients give the update that the dialect's own ε gives")
def scale(case: Case) -> Findings:
    """One step each with every Muon gradient times 1e-10, 1e-5, 1e5 and 1e15.

    Newton–Schulz forgets the size of what it is given, but for the dialect's ε. Seen in public:
    a cast to float16 before the normalisation, infinite beyond 65504 and a zero update from it
    (DeepSpeed #8533); norms below 1e-7 taken for zero (Emerging-Optimizers #229), which blocks
    reach sooner than whole weights.
    """
    reported, lost = set[str](), 0
    for size in _SCALES:
        drawn = case.conditioned("scale", size)
        sized = {d.name: drawn[d.name] * size for d in case.plan.decisions}
        after = case.probe({**drawn, **sized})
        # ε sees what momentum makes of a gradient, and an average is as good as a sum.
        blocks = _judged(case, drawn, size, after)
        lost += not any(b.legible for weight in blocks for b in weight)
        off = _named(case, blocks, f"with gradients times {size:g}")
        for factor in _sums(case) if off else ():
            other = _judged(case, drawn, size * factor, after)
            off = min(off, _named(case, other, f"with gradients times {size:g}"), key=len)
        for found in off:
            if found.weight not in reported:
                reported.add(found.weight)
                yield found
    if lost == len(_SCALES):
        raise UndecidedError("rounding alone may turn every block as far as a fault")


def _sums(case: Case) -> tuple[float, float]:
    """What the first momentum of a sum is of that of an average, and the other way around."""
    kept = 1 - case.stated(case.weights[0].name, case.base.settings[0]).momentum
    return 1 / kept, kept


def _judged(
    case: Case, drawn: Mapping[str, Tensor], size: float, after: Mapping[str, Tensor]
) -> list[list[Judged]]:
    sized = {d.name: drawn[d.name] * size for d in case.plan.decisions}
    return list(judged(case, {**drawn, **sized}, after))


def _named(case: Case, weights: Sequence[Sequence[Judged]], where: str) -> list[Finding]:
    """What is wrong, if the dialect's own ε and dtype leave anything to compare."""
    legible = any(b.legible for weight in weights for b in weight)
    return list(wrong(case, weights, where)) if legible else []


@check("inputs.zero", "a head without a gradient gets no update, and changes no other")
def zero(case: Case) -> Findings:
    """Sets one block's gradient to zero: its update is zero, all others are as before.

    Seen in public: zero divided by a zero norm (dion 2971bba; a zero-initialised `o_proj`).
    """
    base, drawn = case.first_step[1], dict(case.first_step[0])
    emptied: dict[str, list[int]] = {}
    for d in case.weights:
        blocks = case.blocks(d)
        source = gradients.generator(case.seed, "zero", d.name)
        chosen = int(torch.randint(len(blocks), (), generator=source))
        emptied[d.name] = sorted(blocks[chosen])
        drawn[d.name] = _without(drawn[d.name], emptied[d.name], d)
    after, limits = case.probe(drawn), case.rounding(case.first_step[0])
    for d in case.weights:
        axis = axis_of(d.layout)
        kept = decayed(case, d, [case.stated(d.name, case.base.settings[0])])
        start = case.start[d.name].double()
        moved = (after[d.name].double() - kept * start).abs() > _ULP * start.abs()
        lines = moved.flatten(0, -2).any(1 - axis).nonzero().flatten().tolist()
        if touched := set(lines) & set(emptied[d.name]):
            said = f"line {min(touched)} moves, though its block has no gradient"
            yield Finding(d.name, said, "no update", "an update from nothing")
            continue
        others = {d.name: after[d.name]}
        change = (case.update(d.name, others) - case.update(d.name, base)).movedim(axis, 0)
        change.view(-1, change.shape[-1])[emptied[d.name]] = 0
        off = float(change.norm() / case.update(d.name, base).norm())
        if off > 2 * limits[d.name]:
            said = f"other blocks change by {off:.3g} when one has no gradient"
            yield Finding(d.name, said, "other blocks as before", "other", {"off": off})


def _without(gradient: Tensor, lines: list[int], d: Decision) -> Tensor:
    emptied = gradient.clone()
    lines_first(emptied, axis_of(d.layout))[lines] = 0
    return emptied


@check("inputs.rank", "a block short of one direction is orthogonalised in all others")
def rank(case: Case) -> Findings:
    """Takes the smallest singular value of every block away, and compares in the rest.

    What rounding makes of the missing direction is amplified and means nothing; along all others
    the update is the exact one. Fails for an iteration that gives up, adds a ridge, or takes the
    gradient as it is where a block is singular.
    """
    full = case.conditioned("rank")
    missing = {d.name: _smallest(full[d.name], d) for d in case.weights}
    drawn = dict(full)
    for d in case.weights:
        drawn[d.name] = _beside(missing[d.name], full[d.name], d)

    def resolved(d: Decision, update: Tensor) -> Tensor:
        return _beside(missing[d.name], update, d)

    found = judged(case, drawn, case.probe(drawn), resolved, full)
    yield from wrong(case, found, "where a block is short of one direction")


Vectors = list[tuple[Tensor, Tensor]]


def _smallest(gradient: Tensor, d: Decision) -> Vectors:
    """The singular vectors of the smallest singular value, for each batch of blocks."""
    found: Vectors = []
    for batch in batches(gradient.double(), d.layout):
        U, _, Vh = torch.linalg.svd(batch, full_matrices=False)
        found.append((U[..., -1:], Vh[..., -1:, :]))
    return found


def _beside(vectors: Vectors, weight: Tensor, d: Decision) -> Tensor:
    """A weight without what its blocks have along these vectors, on either side."""
    given = iter(vectors)

    def without(batch: Tensor) -> Tensor:
        u, vh = next(given)
        left = batch.double() - u @ (u.mT @ batch.double())
        return (left - (left @ vh.mT) @ vh).to(batch.dtype)

    return mapped(weight, d.layout, without)


@check("inputs.shapes", "odd shapes are right, one after the other, stored by rows or by columns")
def shapes(case: Case) -> Findings:
    """Bare weights with heads of 2, 4, 5 and 7 rows and columns that 8 does not divide, in turn.

    Seen in public: the scale of a second shape rounded to a whole ratio under a compiler
    (DeepSpeed's `_aspect_ratio_scale`), kernels that need 16-byte strides (Emerging-Optimizers
    #245), a gradient read in the wrong storage order.
    """
    odd: Weights = {
        "a.q_proj.weight": ((12, 27), Layout.heads("q", 6, 2)),
        "b.q_proj.weight": ((64, 12), Layout.heads("q", 2, 32)),
        "c.q_proj.weight": ((20, 13), Layout.heads("q", 4, 5)),
        "d.q_proj.weight": ((16, 7), Layout.heads("q", 4, 4)),
        "e.q_proj.weight": ((21, 9), Layout.heads("q", 3, 7)),
        "f.up_proj.weight": ((5, 3), None),
        "g.up_proj.weight": ((2, 50), None),
        "h.down_proj.weight": ((29, 1), None),
    }
    if case.sharding is not None:
        raise SkipError("shards of odd shapes are asked about in sharding.uneven")
    varied = bare(case, odd)
    drawn = varied.conditioned("shapes")
    found = judged(varied, drawn, varied.probe(drawn))
    yield from wrong(varied, found, "on odd shapes")
    after = varied.run([drawn], turned=True).after[0]
    yield from wrong(varied, judged(varied, drawn, after), "on odd shapes stored by columns")


@check("inputs.storage", "the same heads in separate, fused and interleaved weights are the same")
def storage(case: Case) -> Findings:
    """Bare weights that hold four query, two key and two value heads in four ways of storing them.

    Each is held to the same exact blocks: separate, one below the other, interleaved by group, and
    as input × output; one that the subject says it cannot take is left out. Seen in public:
    interleaved rows cut as if they were contiguous (Megatron #7077, torchtitan `w13`), and a fused
    weight stepped √3 times too far (DeepSpeed #8580).
    """
    for name, ways in _stored().items():
        varied = bare(case, ways)
        drawn = varied.conditioned("storage")
        try:
            after = varied.probe(drawn)
        except (RefusedError, SubjectFaultError) as fault:
            # What it cannot store otherwise it may say; only what is wrong in silence is a fault.
            said = isinstance(fault, RefusedError) or fault.raised
            if name == "separate" or not said:
                raise
            continue
        yield from wrong(varied, judged(varied, drawn, after), f"stored {name}")


def _stored() -> dict[str, Weights]:
    cols = 31
    # Values narrower than keys, so that rows of another storing make no heads of this one.
    roles = [Segment("q", 4, 12), Segment("k", 2, 12), Segment("v", 2, 10)]
    group = tuple(Segment(s.role, s.heads // 2, s.width) for s in roles)
    fused, interleaved = Layout(tuple(roles)), Layout(group, groups=2)
    turned = Layout(tuple(roles), axis=1)
    separate = {f"a.{s.role}_proj.weight": ((s.heads * s.width, cols), Layout((s,))) for s in roles}
    return {
        "separate": separate,
        "fused": {"a.qkv_proj.weight": ((fused.rows, cols), fused)},
        "interleaved": {"a.query_key_value.weight": ((fused.rows, cols), interleaved)},
        "by columns": {"a.c_attn.weight": ((cols, fused.rows), turned)},
    }


@check("inputs.dtype", "bfloat16 parameters are trained the same")
def dtype(case: Case) -> Findings:
    """Three steps of the model in bfloat16, compared with float64 from the same start.

    Seen in public: the split lost on the float32 master copy (Megatron, Primus), and
    torch.optim.Muon 2.13 without Nesterov, which normalises the momentum buffer in place where the
    buffer is bfloat16 already.
    """
    steps = [cast(case.conditioned("dtype", i), torch.bfloat16) for i in range(3)]
    start = cast(case.start, torch.bfloat16)
    try:
        outcome = case.run(steps, start)
    except SubjectFaultError as fault:
        if not fault.raised:
            raise
        raise SkipError(f"bfloat16 parameters are refused: {fault.message}") from None
    yield from followed(case, steps, start, outcome, torch.bfloat16)
