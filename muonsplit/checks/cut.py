"""Is each weight cut where the plan says?"""

from torch import Tensor

from muonsplit.checks.case import Case, batches, mapped, separating
from muonsplit.checks.registry import Finding, Findings, SkipError, check
from muonsplit.geometry import Decision
from muonsplit.observe.cut import differing_lines
from muonsplit.observe.fit import fit, hypotheses

# Exact, and no sign change: only a norm that is shared can carry it to other rows.
_LOUDER = 4.0


@check("recognition.split", "every weight that the plan splits is split")
def split(case: Case) -> Findings:
    """For each weight the plan cuts into heads, the observed cut has more than one block.

    Seen in public: tags dropped on some code paths (DeepSpeed #8612: stage 0, and flat partitions
    that need padding), fused or MLA names that a recogniser does not know (Megatron, xtuner).
    """
    planned = [d for d in case.weights if not _planned_whole(d)]
    if not case.plan.split:
        raise SkipError("the plan splits no weight of this model")
    for d in planned:
        if _observed_whole(case, d):
            said = f"whole matrix observed where {d.heads} heads planned, of {d.width} rows each"
            yield Finding(d.name, said, str(d.layout), "whole", _explained(case, d))


@check("recognition.whole", "every weight that the plan keeps whole is whole")
def whole(case: Case) -> Findings:
    """For each matrix the plan keeps whole, all rows move together.

    Seen in public: the rows of `o_proj` cut although its heads are columns, `dense` matched as a
    substring of MLP names (DeepSpeed #8384 before its merge), GLM-5's indexer split because 64 × 64
    rows confirm beside it (released DeepSpeed 0.19.8).
    """
    for d in case.weights:
        if _planned_whole(d) and len(d.shape) == 2 and not case.rows[d.name].whole:
            seen = case.rows[d.name]
            blocks = len(seen.blocks)
            said = f"observed as {blocks} heads of {d.shape[0] // blocks} rows, planned whole"
            yield Finding(d.name, f"{said}: {d.reason}", "whole", str(seen), _explained(case, d))


def _planned_whole(d: Decision) -> bool:
    """Whether a weight is one block: not split, or as many heads a block as it has."""
    return d.layout is None or d.layout.is_whole


@check("cut.rows", "every split weight is cut at the planned rows")
def rows(case: Case) -> Findings:
    """Compares the observed row blocks with the planned ones, boundary by boundary.

    Seen in public: half heads after tensor parallelism (a stale head count still divides), K and V
    cut by the query count, experts orthogonalised as one matrix, boundaries off by one.
    """
    for d in case.weights:
        seen, wanted = case.rows[d.name], case.blocks(d)
        if set(seen.blocks) != set(wanted):
            said = f"cut into {seen}; planned {_spelled(d, wanted)}"
            yield Finding(d.name, said, str(d.layout or "whole"), str(seen), _explained(case, d))


@check("cut.placement", "each block's update lands in the rows of its own gradient")
def placement(case: Case) -> Findings:
    """For each probe, the row whose gradient was changed is among the rows that moved.

    Heads recombined in another order than they were split keep every norm and singular value.
    """
    for d in case.weights:
        seen = case.rows[d.name]
        if seen.displaced:
            line = seen.displaced[0]
            moved = sorted(seen.moved[line])
            said = f"the gradient of row {line} moves rows {moved[0]} to {moved[-1]} instead"
            yield Finding(d.name, said, f"row {line} in its own block", str(seen))


@check("cut.columns", "no weight is cut along its other axis")
def columns(case: Case) -> Findings:
    """Changes signs in one column: every column moves.

    A split on the input axis divides as well and shows in no shape.
    """
    for d in case.weights:
        seen = case.columns[d.name]
        if set(seen.blocks) != set(case.blocks(d, axis=1)):
            yield Finding(d.name, f"columns are cut into {seen}", "one block of columns", str(seen))


@check("independence.heads", "no head's update depends on another head's gradient")
def heads(case: Case) -> Findings:
    """Multiplies some blocks' gradients by four: the bits of every other block stay.

    Every two blocks are told apart by one of the probes. A Frobenius norm over the whole weight
    couples heads without multiplying their rows, and is finite and plausible; equal heads hide it.
    """
    cut = {d: case.blocks(d) for d in case.weights if len(case.blocks(d)) > 1}
    if not cut:
        raise SkipError("no weight of this model has more than one block")
    if case.coupled:
        raise SkipError("all weights are coupled, heads with them: see independence.weights")
    base, reported = case.base.after[0], set[str]()
    for half in separating(max(len(blocks) for blocks in cut.values())):
        louder = {d: sorted(_lines(blocks, half)) for d, blocks in cut.items()}
        changed = {d.name: _louder(case.gradients[d.name], rows) for d, rows in louder.items()}
        after = case.probe({**case.gradients, **changed})
        for d, rows in louder.items():
            moved = differing_lines(after[d.name], base[d.name], 0) - set(rows)
            if moved and d.name not in reported:
                reported.add(d.name)
                said = f"row {min(moved)} moves when only rows of other blocks are louder"
                yield Finding(d.name, said, "blocks do not see each other", "they share a norm")


@check("independence.copies", "heads with equal gradients get equal updates")
def copies(case: Case) -> Findings:
    """Every block of a weight is given the gradient of its first: all updates must be the same.

    What depends on a head's number, its place in a batch, or how many there are beside it, shows
    here and in no comparison of norms. Seen in public: batched heads reduced over the batch
    (Emerging-Optimizers #262, #270).
    """
    cut = [d for d in case.weights if len(case.blocks(d)) > 1 and d.layout is not None]
    if not cut:
        raise SkipError("no weight of this model has more than one block")
    drawn = case.conditioned("copies")
    for d in cut:
        drawn[d.name] = mapped(drawn[d.name], d.layout, lambda batch: batch[:1].expand_as(batch))
    after, limits = case.probe(drawn), case.rounding(drawn)
    for d in cut:
        allowed = 2 * limits[d.name]
        for batch in batches(case.update(d.name, after), d.layout):
            off = (batch - batch[:1]).norm(dim=(1, 2)) / batch[0].norm()
            if float(off.max()) > allowed:
                head = int(off.argmax())
                said = f"block {head} gets another update than block 0 from the same gradient"
                numbers = {"off": float(off.max()), "allowed": allowed}
                yield Finding(d.name, said, "equal updates", "unequal", numbers)
                break


def _lines(blocks: tuple[frozenset[int], ...], half: list[int]) -> frozenset[int]:
    return frozenset().union(*(blocks[i] for i in half if i < len(blocks)))


def _louder(gradient: Tensor, rows: list[int]) -> Tensor:
    louder = gradient.clone()
    louder.view(-1, gradient.shape[-1])[rows] *= _LOUDER
    return louder


def _observed_whole(case: Case, decision: Decision) -> bool:
    assert decision.layout is not None
    axis = decision.layout.axis
    return (case.columns if axis else case.rows)[decision.name].whole


def _spelled(decision: Decision, blocks: tuple[frozenset[int], ...]) -> str:
    return str(decision.layout) if decision.layout else f"{len(blocks)} × {len(blocks[0])}"


def _explained(case: Case, decision: Decision) -> dict[str, float]:
    """How far each usual hypothesis is from the observed update: numbers for the finding."""
    if len(decision.shape) != 2 or (decision.layout and decision.layout.axis):
        return {}
    update = case.update(decision.name, case.base.after[0])
    named = hypotheses(decision.layout, decision.shape[0])
    fits = fit(update, case.direction(decision.name), named, case.dialect.arithmetic)
    return {f"off if {found.hypothesis}": found.residual for found in fits}
