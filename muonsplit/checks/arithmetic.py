"""Is the right thing computed on each block? Direction and size apart, against float64."""

from muonsplit.checks.case import Case, matrices
from muonsplit.checks.registry import Finding, Findings, SkipError, check
from muonsplit.observe.fit import compare


@check("arithmetic.direction", "each block's update has the direction its dialect computes")
def direction(case: Case) -> Findings:
    """Compares each block with the float64 iteration, after the best rescaling.

    The bound is derived from the dialect's dtype and the block's own spectrum. Fails for other
    coefficients, steps or ε, an iteration on the wrong matrix, or a missing transposition.
    """
    base = case.base.after[0]
    for d in case.weights:
        limit = case.bound(d)
        seen = matrices(case.update(d.name, base), d.layout)
        for i, (block, wanted) in enumerate(
            zip(seen, matrices(case.expected(d), d.layout), strict=True)
        ):
            found = compare("as planned", block, wanted)
            if not found.residual <= limit:
                said = (
                    f"block {i} points elsewhere: off by {found.residual:.3g}, {limit:.3g} allowed"
                )
                numbers = {"off": found.residual, "allowed": limit}
                yield Finding(d.name, said, case.dialect.name, str(found), numbers)
                break


@check("arithmetic.scale", "each block's update has the size its own shape gives")
def scale(case: Case) -> Findings:
    """Compares the size of each block's update with the float64 one.

    Seen in public: the factor of the whole matrix used on blocks (dion before #90, VeOmni, Primus),
    which is √H too large on tall weights and has a perfect cosine; transposed shapes.
    """
    if not case.knows_lr:
        raise SkipError("the subject states no learning rate, so sizes cannot be judged")
    base = case.base.after[0]
    for d in case.weights:
        limit = case.bound(d)
        seen = matrices(case.update(d.name, base), d.layout)
        for i, (block, wanted) in enumerate(
            zip(seen, matrices(case.expected(d), d.layout), strict=True)
        ):
            size = compare("as planned", block, wanted).size
            if not abs(size - 1) <= limit:
                rows, cols = block.shape
                said = f"block {i} of {rows} × {cols} is {size:.4g} times its size"
                yield Finding(d.name, said, "1", f"{size:.6g}", {"size": size, "allowed": limit})
                break
