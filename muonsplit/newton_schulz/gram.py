"""The Gram iteration: steps on R = XXᵀ, the polynomial gathered in Q, so that the result is QX.

After https://tridao.me/blog/2026/gram-newton-schulz/, the same products in the same order as
deepspeed 0.19.8, gram-newton-schulz 0.1.6 and optimuon 0.1.1 take them.
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.dialect.coefficients import Coefficients
from muonsplit.newton_schulz.products import PRODUCTS, Products, gram_matrix, plus_diagonal
from muonsplit.newton_schulz.rounding import Rounding


def segments(
    steps: Sequence[Coefficients], restarts: Sequence[int]
) -> list[Sequence[Coefficients]]:
    """The steps between two restarts."""
    starts = sorted({0, *(r for r in restarts if 0 < r < len(steps)), len(steps)})
    return [steps[a:b] for a, b in pairwise(starts)]


def gram_pays(rows: int, cols: int) -> bool:
    """Whether the Gram iteration with one restart takes fewer operations than the standard one."""
    short, long = sorted((rows, cols))
    return 2 * long > 3 * short


def on_gram(rows: int, cols: int, arithmetic: Arithmetic) -> bool:
    """Whether blocks of a shape are iterated on their Gram matrices."""
    return {
        "standard": False,
        "gram": rows != cols,
        "gram_always": True,
        "auto": gram_pays(rows, cols),
    }[arithmetic.iteration]


def gram(
    X: Tensor,
    steps: Sequence[Coefficients],
    restarts: Sequence[int],
    form: str,
    side: str,
    q: Rounding,
) -> Tensor:
    """Iterates on the Gram matrix of the short side.

    Args:
        X: Normalised blocks, shape ``[B, M, N]``; M ≤ N unless the side is ``right``.
        steps: Coefficients of every step.
        restarts: Steps before which the full matrix is formed anew.
        form: Order of the products.
        side: ``left`` for QX; ``right`` for XQ; ``flipped`` if X is a transposed block, whose
            last product is taken from the right and so rounds as in the block's own orientation.
        q: The rounding.
    """
    right = side == "right"
    runs = segments(steps, restarts)
    for run in runs:
        Q = _polynomial(gram_matrix(X, right, q), run, PRODUCTS[form], side, q)
        if side == "flipped" and run is runs[-1]:
            return q(X.mT @ Q.mT).mT
        X = q(X @ Q if right else Q @ X)
    return X


def _polynomial(
    R: Tensor, run: Sequence[Coefficients], products: Products, side: str, q: Rounding
) -> Tensor:
    """The Q of a run of steps, from its first Gram matrix."""
    Q: Tensor | None = None
    for i, (a, b, c) in enumerate(run):
        Z = products.square(R, b, c, q)
        if Q is None:
            Q = plus_diagonal(Z, _rounded(a, Z, q) if products.identity else a, q)
        else:
            Q = products.add(Q, a, *((Q, Z) if side in products.q_first else (Z, Q)), q)
        if i + 1 < len(run):
            RZ = products.add(R, a, *((R, Z) if products.r_first else (Z, R)), q)
            R = products.add(RZ, a, Z, RZ, q)
    assert Q is not None
    return Q


def _rounded(a: float, like: Tensor, q: Rounding) -> float:
    """A number as a matrix of the iteration's dtype holds it."""
    return float(q(like.new_tensor(a)))
