"""Do all ranks do the same, and is what they do that of the mean gradient?"""

from muonsplit.checks.case import Case
from muonsplit.checks.registry import Finding, Findings, SkipError, check
from muonsplit.sharding.ways import Sharding
from muonsplit.subjects.drive import Outcome
from muonsplit.subjects.ranks import same_bits

# A power of two, so that the mean over micro-batches is exact.
_MICRO_BATCHES = 4


def sharding_of(case: Case) -> Sharding:
    """How a case is divided.

    Raises:
        SkipError: If it is not.
    """
    if case.sharding is None:
        raise SkipError("the model is not divided")
    return case.sharding


@check("sharding.agreement", "all ranks hold the same parameters after each step")
def agreement(case: Case) -> Findings:
    """Three steps, every rank with a gradient of its own; all bits are compared.

    Where a parameter is divided, what is compared is all of it as each rank gathers it. Seen in
    public: a rank that orthogonalises a matrix of which only its own slice is reduced (DeepSpeed
    #7807, mended by #8090 and #8141).
    """
    sharding_of(case)
    _, outcome = case.three_steps
    told = set[str]()
    for step, disagreeing in enumerate(outcome.disagreeing, 1):
        for name, ranks in disagreeing.items():
            if name not in told:
                told.add(name)
                said = f"rank {', '.join(map(str, ranks))} and rank 0 differ after step {step}"
                yield Finding(name, said, "the same on every rank", "another update a rank")


@check("sharding.mean", "the update is that of the mean gradient over all ranks")
def mean(case: Case) -> Findings:
    """Three steps in which ranks have gradients of their own, and three with their mean on each.

    Every element's gradient is on one rank only, times their number, so that the mean is exact and
    every bit of every parameter must be the same. Fails for an iteration on what a rank has before
    it is reduced, and for a mean over updates instead of gradients.
    """
    sharding = sharding_of(case)
    if sharding.data(0)[1] == 1:
        raise SkipError("all ranks have the same data under tensor parallelism")
    steps, own = case.three_steps
    alike = case.run(steps, alike=True)
    yield from _other_bits(own, alike, "with a gradient of its own on each rank", case)


@check("sharding.accumulation", "micro-batches accumulate to the update of their mean")
def accumulation(case: Case) -> Findings:
    """Three steps of four micro-batches each, and three of one; every bit is compared.

    The micro-batches are such that their mean is exact. Seen in public: Newton–Schulz once a
    micro-batch in ZeRO-3's reduce hook, and momentum advanced four times (DeepSpeed #8443, #8600).
    """
    if case.sharding is None and "micro_batches" not in case.described["takes"]:
        raise SkipError("one process adds up gradients outside of this subject")
    steps, one = case.three_steps
    several = case.run(steps, micro_batches=_MICRO_BATCHES)
    yield from _other_bits(several, one, f"in {_MICRO_BATCHES} micro-batches", case)


def _other_bits(seen: Outcome, wanted: Outcome, how: str, case: Case) -> Findings:
    """A finding a weight whose bits differ, at the first step at which they do."""
    told = set[str]()
    for step, (one, other) in enumerate(zip(seen.after, wanted.after, strict=True), 1):
        for name in case.shapes:
            if name not in told and not same_bits(one[name], other[name]):
                told.add(name)
                moved = (other[name] - case.start[name]).norm()
                off = float((one[name] - other[name]).norm() / moved.clamp(min=1e-300))
                said = f"{how} step {step} is another: off by {off:.3g}"
                yield Finding(name, said, "the same bits", "other bits", {"off": off})
