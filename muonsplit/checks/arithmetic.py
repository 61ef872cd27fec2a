"""Is the right thing computed on each block? Direction and size apart, against float64."""

from collections.abc import Iterator
from typing import NamedTuple

from muonsplit.checks.case import Case, matrices
from muonsplit.checks.registry import Finding, Findings, SkipError, UndecidedError, check
from muonsplit.geometry import Decision
from muonsplit.muon import orthogonalize
from muonsplit.observe.fit import Fit, compare

# Beyond this rounding alone could turn a block about as far as a structural fault does.
_BLIND = 0.3


class _Judged(NamedTuple):
    """One block of a weight, compared with the exact one."""

    weight: Decision
    number: int
    shape: tuple[int, int]
    found: Fit
    limit: float

    @property
    def named(self) -> str:
        return f"block {self.number} of {self.shape[0]} × {self.shape[1]}"


@check("arithmetic.direction", "each block's update has the direction its dialect computes")
def direction(case: Case) -> Findings:
    """Compares each block with the float64 iteration, after the best rescaling.

    The bound is derived from the dialect's dtype and the block's own spectrum. Fails for other
    coefficients, steps or ε, an iteration on the wrong matrix, or a missing transposition.
    Undecided where the dtype is so coarse for the spectrum that rounding could look the same.
    """
    judged = list(_judged(case))
    blind = [b for b in judged if b.limit > _BLIND]
    if blind:
        worst = max(blind, key=lambda b: b.limit)
        raise UndecidedError(
            f"rounding alone may turn {worst.named} of {worst.weight.name} by {worst.limit:.2g}"
        )
    for b in judged:
        if not b.found.residual <= b.limit:
            said = (
                f"{b.named} points elsewhere: off by {b.found.residual:.3g}, {b.limit:.3g} allowed"
            )
            numbers = {"off": b.found.residual, "allowed": b.limit}
            yield Finding(b.weight.name, said, case.dialect.name, str(b.found), numbers)


@check("arithmetic.scale", "each block's update has the size its own shape gives")
def scale(case: Case) -> Findings:
    """Compares the size of each block's update with the float64 one.

    Seen in public: the factor of the whole matrix used on blocks (dion before #90, VeOmni, Primus),
    which is √H too large on tall weights and has a perfect cosine; transposed shapes.
    """
    if not case.knows_lr:
        raise SkipError("the subject states no learning rate, so sizes cannot be judged")
    for b in _judged(case):
        if not abs(b.found.size - 1) <= b.limit:
            said = f"{b.named} is {b.found.size:.4g} times its size"
            numbers = {"size": b.found.size, "allowed": b.limit}
            yield Finding(b.weight.name, said, "1", f"{b.found.size:.6g}", numbers)


def _judged(case: Case) -> Iterator[_Judged]:
    """The block of each weight that is furthest from the exact one, for what it may be."""
    drawn, after = case.first_step
    for d in case.weights:
        given = case.direction(d.name, drawn)
        wanted = orthogonalize(given, d.layout, case.dialect.arithmetic.exact())
        limit = case.bound(d, given)
        blocks = zip(
            matrices(case.update(d.name, after), d.layout), matrices(wanted, d.layout), strict=True
        )
        compared = [
            _Judged(d, i, (seen.shape[0], seen.shape[1]), compare("as planned", seen, exact), limit)
            for i, (seen, exact) in enumerate(blocks)
        ]
        yield max(compared, key=lambda b: max(b.found.residual, abs(b.found.size - 1)))
