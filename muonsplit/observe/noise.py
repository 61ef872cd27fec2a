"""What one rounding adds to a block, and what a step makes of the noise that is there.

Rounding x = m·2ᵉ to a dtype of unit roundoff u errs uniformly in ±u·2ᵉ, so relative to x by
u/(√3·m); over mantissas m spread logarithmically in [1, 2) its root mean square is u/√3 · 0.735.
A step f(σ) = aσ + bσ³ + cσ⁵ adds the noise of its own products and passes on what came before.
What a step passes on is known: in the basis of X's singular vectors the derivative of f
multiplies

    the symmetric part inside the row space   by (f(σᵢ) − f(σⱼ)) / (σᵢ − σⱼ),
    the antisymmetric part inside it          by (f(σᵢ) + f(σⱼ)) / (σᵢ + σⱼ),
    what leaves the row space                 by f(σᵢ) / σᵢ,

so the variance of the noise is followed entry by entry in that basis, an entry and its mirror as if
they were independent, which after the first step they are not. Noise in the Gram matrix A
passes through g(λ) = bλ + cλ², by b + c(λᵢ + λⱼ), and reaches X inside its row space.

A product over k terms also rounds its growing partial sums in float32 (float64 in float64): k/3
times the variance of one rounding of the result, and k/6 times that of its terms, by which a
partial sum strays on its way there.

The diagonal of XXᵀ and of what is made of it has d entries near the mean of the eigenvalues, within
std(λ)·√(2/(d + 2)) for random singular vectors. Where that is less than a step of the dtype they
are rounded alike, to one side, and all eigenvalues move together. The mean of a rounding over
Gaussian values of spread s, in steps of h, is exp(−2π²s²/h²) times that of a single one. It is all
of it where a number is added to a diagonal that is rounded already.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.newton_schulz import Coefficients

# Root mean square of a rounding, in unit roundoffs.
_RMS = 0.735 / 3**0.5


class Roundings(NamedTuple):
    """What roundings add to matrices of given singular values.

    Energies are squared Frobenius norms.

    Attributes:
        unit: Unit roundoff of the dtype.
        sums: Unit roundoff of running sums.
        rows: Short side of the block.
        cols: Long side.
    """

    unit: float
    sums: float
    rows: int
    cols: int

    def of(self, *results: Tensor) -> Tensor:
        """Energy added when some matrices are rounded."""
        return (_RMS * self.unit) ** 2 * energy(torch.stack(results))

    def product(self, left: Tensor, right: Tensor, terms: int) -> Tensor:
        """Energy added to a product of matrices with the same singular vectors."""
        made, straying = energy(left * right), energy(left) * energy(right) / self.rows
        in_sums = (_RMS * self.sums) ** 2 * terms * (made / 3 + straying / 6)
        return (_RMS * self.unit) ** 2 * made + in_sums

    def sum(self, C: Tensor, a: float, left: Tensor, right: Tensor) -> Tensor:
        """Energy added to aC + left·right."""
        return self.of(a * C, a * C + left * right) + self.product(left, right, self.rows)

    def square(self, A: Tensor, coefficients: Coefficients) -> Tensor:
        """Energy added to bA + cA²."""
        _, b, c = coefficients
        return self.of(b * A, c * A**2, b * A + c * A**2) + self.product(c * A, A, self.rows)

    def gram(self, S: Tensor) -> Tensor:
        """Energy added to XXᵀ."""
        return self.of(S.square()) + self.product(S, S, self.cols)

    def error(self, number: float) -> float:
        """By how much a number itself is rounded."""
        mantissa, exponent = math.frexp(number)
        return math.ldexp(round(mantissa / self.unit) * self.unit - mantissa, exponent)

    def shift(self, *results: Tensor) -> Tensor:
        """Standard error of all eigenvalues alike when some symmetric matrices are rounded."""
        each = torch.stack(results)
        mean, spread = each.mean(1).abs(), each.std(1, correction=0) * (2 / (self.rows + 2)) ** 0.5
        steps = spread / (2 * self.unit * mean).clamp(min=1e-300)
        return (_RMS * self.unit * mean * torch.exp(-2 * (math.pi * steps).square())).norm()

    def alike(self, result: Tensor) -> Tensor:
        """The same when a number was added to a rounded diagonal: all entries err alike."""
        return _RMS * self.unit * result.mean().abs()


@dataclass(slots=True)
class Noise:
    """What rounding has added to a block so far.

    Attributes:
        inside: Variances in the row space, by pairs of singular vectors.
        outside: Variances outside it, by singular vector, alike in ``copies`` columns.
        copies: Columns outside the row space.
        common: Largest error of each singular value by single numbers that are rounded.
        shared: Standard errors of singular values that move together, one row a rounding.
        result: Singular values of the exact block.
    """

    inside: Tensor
    outside: Tensor
    copies: int
    common: Tensor
    shared: Tensor
    result: Tensor

    def pass_on(self, coefficients: Coefficients) -> None:
        """Takes everything through one exact step."""
        a, b, c = coefficients
        S = self.result
        ratio = a + b * S.square() + c * S**4
        slope = a + 3 * b * S.square() + 5 * c * S**4
        self.inside = _passed_inside(self.inside, S, coefficients)
        self.outside = self.outside * ratio.square()
        self.common = self.common * slope.abs()
        self.shared = self.shared * slope
        self.result = S * ratio

    def add(self, everywhere: Tensor, inside: Tensor, shared: Tensor) -> None:
        """Adds variances to every entry and to those inside, and errors that are shared."""
        self.inside = self.inside + everywhere + inside
        self.outside = self.outside + everywhere
        self.shared = torch.cat((self.shared, shared))


def take_step(
    noise: Noise, coefficients: Coefficients, roundings: Roundings, *, factored: bool
) -> None:
    """One step on the block itself.

    Args:
        noise: Updated in place.
        coefficients: a, b and c.
        roundings: What they add.
        factored: Whether bI + cA and aI + … are matrices that are rounded.
    """
    (a, b, c), S = coefficients, noise.result
    rows, cols = roundings.rows, roundings.cols
    A = S.square()
    B = b * A + c * A**2
    passed = roundings.gram(S) * (b + c * (A.unsqueeze(0) + A.unsqueeze(1))).square()
    in_B = (passed + roundings.square(A, coefficients)) / rows**2
    everywhere = roundings.sum(S, a, B, S) / (rows * cols)
    moved = [roundings.shift(A) * (b + 2 * c * A), *shifts(roundings, A, coefficients, factored)]
    if factored:
        everywhere = everywhere + roundings.product(a + B, S, rows) / (rows * cols)
        moved.append(roundings.alike(a + B).expand_as(S))
    noise.pass_on(coefficients)
    # E·X in the basis: entry (i, j) of E times σⱼ.
    noise.add(everywhere, in_B * A.unsqueeze(0), torch.stack(moved) * S)


def shifts(
    roundings: Roundings, A: Tensor, coefficients: Coefficients, factored: bool
) -> list[Tensor]:
    """How eigenvalues of bA + cA² move together as it is made, one standard error a rounding."""
    _, b, c = coefficients
    square = c * A**2
    if factored:
        return [roundings.alike(b + c * A) * A, roundings.shift(b * A + square).expand_as(A)]
    rounded = roundings.shift(b * A, square, b * A + square)
    return [roundings.shift(c * A) * A, rounded.expand_as(A)]


def energy(S: Tensor) -> Tensor:
    """The squared Frobenius norm of a matrix with given singular values."""
    return (S * S).sum()


def _passed_inside(variance: Tensor, S: Tensor, coefficients: Coefficients) -> Tensor:
    """Variances after one step: an entry and its mirror mix by their sum and difference."""
    a, b, c = coefficients
    one, other = S.unsqueeze(0), S.unsqueeze(1)
    squares, product = one.square() + other.square(), one * other
    # Half the sum and half the difference of the two divided differences, without dividing.
    kept = a + b * squares + c * (one**4 + other**4 + product.square())
    mirrored = product * (b + c * squares)
    return kept.square() * variance + mirrored.square() * variance.mT
