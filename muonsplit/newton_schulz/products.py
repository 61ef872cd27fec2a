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
        commuted: Whether the Gram iteration takes RZ rather than ZR, which are equal but for
            rounding.
    """

    square: Callable[[Tensor, float, float, Rounding], Tensor]
    add: Callable[[Tensor, float, Tensor, Tensor, Rounding], Tensor]
    commuted: bool


def _matmul_square(A: Tensor, b: float, c: float, q: Rounding) -> Tensor:
    return q(q(b * A) + q(q(c * A) @ A))


def _paren_square(A: Tensor, b: float, c: float, q: Rounding) -> Tensor:
    return q(q(b * A) + q(c * q(A @ A)))


def _addmm_square(A: Tensor, b: float, c: float, q: Rounding) -> Tensor:
    return q(torch.baddbmm(A, A, A, beta=b, alpha=c))


def _matmul_add(C: Tensor, a: float, left: Tensor, right: Tensor, q: Rounding) -> Tensor:
    return q(q(a * C) + q(left @ right))


def _addmm_add(C: Tensor, a: float, left: Tensor, right: Tensor, q: Rounding) -> Tensor:
    return q(torch.baddbmm(C, left, right, beta=a))


PRODUCTS = {
    "matmul": Products(_matmul_square, _matmul_add, commuted=False),
    "paren": Products(_paren_square, _matmul_add, commuted=False),
    "addmm": Products(_addmm_square, _addmm_add, commuted=True),
    "paren_addmm": Products(_paren_square, _addmm_add, commuted=True),
}


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
    products = PRODUCTS[form]
    B = products.square(A, b, c, q)
    return products.add(X, a, *((X, B) if right else (B, X)), q)
