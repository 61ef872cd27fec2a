"""Is the right thing computed on each block? Direction and size apart, against float64."""

from collections.abc import Iterator
from typing import NamedTuple

from muonsplit.checks.case import Case, matrices
from muonsplit.checks.registry import BLIND, Finding, Findings, UndecidedError, check
from muonsplit.geometry import Decision
from muonsplit.muon import orthogonalize
from muonsplit.observe.fit import Fit, compare
from muonsplit.observe.tolerance import rounding_bound, size_bound


class _Judged(NamedTuple):
    """One block of a weight, compared with the exact one."""

    weight: Decision
    number: int
    shape: tuple[int, int]
    found: Fit
    limit: float
    size_limit: float

    @property
    def named(self) -> str:
        return f"block {self.number} of {self.shape[0]} × {self.shape[1]}"


@check("arithmetic.direction", "each block's update has the direction its dialect computes")
def direction(case: Case) -> Findings:
    """Compares each block with the float64 iteration, after the best rescaling.

    The bound is derived from the dialect's dtype and the block's own spectrum: some 10⁻⁶ in
    float32, 5 to 13 % in bfloat16. Fails for other coefficients or steps beyond it, and for an
    iteration on the wrong matrix. Undecided where the dtype is so coarse for the spectrum that
    rounding could look the same.
    """
    judged = list(_judged(case))
    blind = [b for blocks in judged for b in blocks if b.limit > BLIND]
    if blind:
        worst = max(blind, key=lambda b: b.limit)
        raise UndecidedError(
            f"rounding alone may turn {worst.named} of {worst.weight.name} by {worst.limit:.2g}"
        )
    for blocks in judged:
        b = max(blocks, key=lambda b: b.found.residual / b.limit)
        if not b.found.residual <= b.limit:
            off, allowed = b.found.residual, b.limit
            said = f"{b.named} points elsewhere: off by {off:.3g}, {allowed:.3g} allowed"
            numbers = {"off": off, "allowed": allowed}
            yield Finding(b.weight.name, said, case.dialect.name, str(b.found), numbers)


@check("arithmetic.scale", "each block's update has the size its own shape gives")
def scale(case: Case) -> Findings:
    """Compares the size of each block's update with the float64 one.

    Seen in public: the factor of the whole matrix used on blocks (dion before #90, VeOmni, Primus),
    which is √H too large on tall weights and has a perfect cosine; transposed shapes.
    """
    for blocks in _judged(case):
        b = max(blocks, key=lambda b: abs(b.found.size - 1) / b.size_limit)
        if not case.stated(b.weight.name, case.base.settings[0]).known:
            raise UndecidedError(
                f"the learning rate of {b.weight.name} is neither given nor stated"
            )
        if not abs(b.found.size - 1) <= b.size_limit:
            said = f"{b.named} is {b.found.size:.3g} times its size"
            numbers = {"size": b.found.size, "allowed": b.size_limit}
            yield Finding(
                b.weight.name, said, f"× {case.dialect.arithmetic.scale}", "other", numbers
            )


def _judged(case: Case) -> Iterator[list[_Judged]]:
    """The blocks of each weight, compared one by one."""
    drawn, after = case.first_step
    for d in case.weights:
        given = case.direction(d.name, drawn)
        wanted = orthogonalize(given, d.layout, case.dialect.arithmetic.exact())
        seen = case.update(d.name, after)
        triples = zip(*(matrices(x, d.layout) for x in (given, seen, wanted)), strict=True)
        yield [
            _Judged(
                d,
                i,
                (block.shape[0], block.shape[1]),
                compare("as planned", block, exact),
                rounding_bound(raw, case.dialect.arithmetic),
                size_bound(raw, case.dialect.arithmetic),
            )
            for i, (raw, block, exact) in enumerate(triples)
        ]
