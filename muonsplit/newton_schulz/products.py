"""The products of a step, in each order that frameworks take them, with their rounding points."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.dialect.coefficients import Coefficients
from muonsplit.newton_schulz.rounding import Rounding


class Products(NamedTuple):
    """Two products of small matrices in one order.

    Attributes:
        square: (A, b, c, q) → bA + cA².
        add: (C, a, L, R, q) → aC + LR.
        r_first: Whether the Gram iteration takes RZ rather than ZR, equal but for rounding.
        q_first: On which side of a block it takes QZ rather than ZQ.
        identity: Whether aI is a matrix of the iteration's dtype, so that a is rounded, rather
            than a number that is added to a diagonal.
    """

    square: Callable[[Tensor, float, float, Rounding], Tensor]
    add: Callable[[Tensor, float, Tensor, Tensor, Rounding], Tensor]
    r_first: bool = False
    q_first: frozenset[str] = frozenset()
    identity: bool = False


def _matmul_square(A: Tensor, b: float, c: float, q: Rounding) -> Tensor:
    return q(q(b * A).add_(q(q(c * A) @ A)))


def _paren_square(A: Tensor, b: float, c: float, q: Rounding) -> Tensor:
    return q(q(b * A).add_(q(q(A @ A).mul_(c))))


def _addmm_square(A: Tensor, b: float, c: float, q: Rounding) -> Tensor:
    return q(torch.baddbmm(A, A, A, beta=b, alpha=c))


def _matmul_add(C: Tensor, a: float, left: Tensor, right: Tensor, q: Rounding) -> Tensor:
    return q(q(a * C).add_(q(left @ right)))


def _addmm_add(C: Tensor, a: float, left: Tensor, right: Tensor, q: Rounding) -> Tensor:
    return q(torch.baddbmm(C, left, right, beta=a))


_BOTH = frozenset({"left", "right"})
PRODUCTS = {
    "matmul": Products(_matmul_square, _matmul_add),
    "paren": Products(_paren_square, _matmul_add),
    "addmm": Products(_addmm_square, _addmm_add, True, _BOTH, identity=True),
    "addmm_diagonal": Products(_addmm_square, _addmm_add, True, _BOTH),
    "paren_gram": Products(_paren_square, _addmm_add, True, frozenset({"right"})),
}
# The forms of a standard step that are named otherwise in a Gram iteration.
STANDARD = {"paren_gram": "paren", "addmm_diagonal": "addmm"}


def plus_diagonal(A: Tensor, a: float, q: Rounding) -> Tensor:
    """A + aI."""
    A = A.clone()
    A.diagonal(dim1=-2, dim2=-1).add_(a)
    return q(A)


def gram_matrix(X: Tensor, right: bool, q: Rounding) -> Tensor:
    """XᵀX if X is multiplied from the right, else XXᵀ."""
    return q(X.mT @ X if right else X @ X.mT)


def step(X: Tensor, coefficients: Coefficients, right: bool, form: str, q: Rounding) -> Tensor:
    """One step on the blocks themselves."""
    a, b, c = coefficients
    A = gram_matrix(X, right, q)
    if form == "factored":
        B = plus_diagonal(q(q(plus_diagonal(q(c * A), b, q)) @ A), a, q)
        return q(X @ B if right else B @ X)
    products = PRODUCTS[STANDARD.get(form, form)]
    B = products.square(A, b, c, q)
    return products.add(X, a, *((X, B) if right else (B, X)), q)
