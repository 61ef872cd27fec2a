"""Is the right thing computed on each block? Direction and size apart, against float64."""

from muonsplit.checks.case import Case
from muonsplit.checks.compare import judged
from muonsplit.checks.registry import Finding, Findings, UndecidedError, check


@check("arithmetic.direction", "each block's update has the direction its dialect computes")
def direction(case: Case) -> Findings:
    """Compares each block with the float64 iteration, after the best rescaling.

    The bound is derived from the dialect's dtype and the block's own spectrum: some 10⁻⁶ in
    float32, 5 to 13 % in bfloat16. Fails for other coefficients or steps beyond it, and for an
    iteration on the wrong matrix. Undecided where the dtype is so coarse for the spectrum that
    rounding could look the same.
    """
    weights = list(judged(case, *case.first_step))
    blind = [b for blocks in weights for b in blocks if not b.legible]
    if blind:
        worst = max(blind, key=lambda b: b.limit)
        raise UndecidedError(
            f"rounding alone may turn {worst.named} of {worst.weight.name} by {worst.limit:.2g}"
        )
    for blocks in weights:
        b = max(blocks, key=lambda b: b.found.residual / b.limit)
        if not b.spoken:
            case.allow("direction", b.limit)
        if b.turned:
            yield Finding(b.weight.name, b.turned, case.dialect.name, str(b.found), b.numbers)


@check("arithmetic.scale", "each block's update has the size its own shape gives")
def scale(case: Case) -> Findings:
    """Compares the size of each block's update with the float64 one.

    Seen in public: the factor of the whole matrix used on blocks (dion before #90, VeOmni, Primus),
    which is √H too large on tall weights and has a perfect cosine; transposed shapes.
    """
    for blocks in judged(case, *case.first_step):
        b = max(blocks, key=lambda b: abs(b.found.size - 1) / b.size_limit)
        if not case.stated(b.weight.name, case.base.settings[0]).known:
            raise UndecidedError(
                f"the learning rate of {b.weight.name} is neither given nor stated"
            )
        if not b.spoken:
            case.allow("size", b.size_limit)
        if b.resized:
            numbers = {"size": b.found.size, "allowed": b.size_limit}
            wanted = f"× {case.dialect.arithmetic.scale}"
            yield Finding(b.weight.name, b.resized, wanted, "other", numbers)
