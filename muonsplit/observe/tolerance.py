"""How far a legal update may be from the exact one: derived, with three stated constants.

Rounding x = m·2ᵉ to a dtype of unit roundoff u errs uniformly in ±u·2ᵉ, so relative to x by
u/(√3·m); over mantissas m spread logarithmically in [1, 2) its root mean square is u/√3 · 0.735.
A step f(σ) = aσ + bσ³ + cσ⁵ adds the noise of its own products and passes on what came before.
What is passed on is known exactly: in the basis of X's singular vectors the derivative of f
multiplies

    the symmetric part inside the row space   by (f(σᵢ) − f(σⱼ)) / (σᵢ − σⱼ),
    the antisymmetric part inside it          by (f(σᵢ) + f(σⱼ)) / (σᵢ + σⱼ),
    what leaves the row space                 by f(σᵢ) / σᵢ,

so the variance of the noise is followed entry by entry in that basis. Noise in the Gram matrix A
passes through g(λ) = bλ + cλ², by b + c(λᵢ + λⱼ), and reaches X inside its row space. A product
over k terms also rounds its growing partial sums in float32 (float64 in float64), k/3 times the
variance of a single rounding when all terms have one sign and are added one by one.

The squared error is then a sum of independent squares with variances v, which exceeds

    Σv + 2·√(t·Σv²) + 2·t·max v

with probability e⁻ᵗ at most (Laurent and Massart, Annals of Statistics 28, 2000, lemma 1).

The norm is one number: its error is a common factor, which does not average out. It moves each
singular value by σ·F′(σ), F being all steps, and its largest value is allowed beside the noise.

On directions below the noise floor the gains are large and the bound grows by itself.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.newton_schulz import Coefficients, schedule

# Chosen: one false alarm in 10⁹ blocks.
_TAIL = math.log(1e9)
# Assumed: roundings are not quite independent, those of a symmetric product come in pairs.
_DEPENDENT = 2.0
_RMS = 0.735 / 3**0.5
# Measured: the Gram form squares singular values before it rounds. Its error was at most eight
# times the standard form's over Gaussian, log-spaced, outlier and rank-deficient spectra.
GRAM = 10.0


def rounding_bound(block: Tensor, arithmetic: Arithmetic) -> float:
    """The relative Frobenius error that rounding may cause in one block's update.

    Args:
        block: What is orthogonalised, shape ``[rows, cols]``.
        arithmetic: Its CPU dtype sets the roundoff, its coefficients the gains.

    Returns:
        ‖computed − exact‖ / ‖exact‖ that one block in 10⁹ exceeds.
    """
    noise = _propagate(block, arithmetic)
    total = noise.inside.sum() + noise.copies * noise.outside.sum()
    squares = _energy(noise.inside) + noise.copies * _energy(noise.outside)
    tail = total + 2 * (_TAIL * squares).sqrt() + 2 * _TAIL * noise.largest
    return noise.relative((_DEPENDENT * tail).sqrt(), noise.common.norm())


def size_bound(block: Tensor, arithmetic: Arithmetic) -> float:
    """The error that rounding may cause in the size of one block's update, ⟨U, O⟩ / ⟨O, O⟩.

    A size is one projection of all the noise, on the update itself, which has only its singular
    values in that basis; it is far sharper than :func:`rounding_bound`.

    Args:
        block: As for :func:`rounding_bound`.
        arithmetic: Likewise.
    """
    noise = _propagate(block, arithmetic)
    projected = noise.common.dot(noise.result).abs() / noise.result.norm().clamp(min=1e-300)
    weights = noise.result.square() / noise.result.square().sum().clamp(min=1e-300)
    variance = noise.inside.diagonal().dot(weights)
    return noise.relative((_DEPENDENT * 2 * _TAIL * variance).sqrt(), projected)


class _Noise(NamedTuple):
    """What rounding adds to a block's update.

    Attributes:
        inside: Variances in the row space, by pairs of singular vectors.
        outside: Variances outside it, by singular vector, alike in ``copies`` columns.
        copies: Columns outside the row space.
        common: Largest error of each singular value by the norm's own rounding.
        result: Singular values of the exact update.
        factor: How much worse than the standard form the form is.
    """

    inside: Tensor
    outside: Tensor
    copies: int
    common: Tensor
    result: Tensor
    factor: float

    @property
    def largest(self) -> Tensor:
        """The largest variance of an entry."""
        return torch.maximum(self.inside.max(), self.outside.max())

    def relative(self, random: Tensor, common: Tensor) -> float:
        """Both kinds of error over the size of the update."""
        return float(self.factor * (random + common) / self.result.norm().clamp(min=1e-300))


def _propagate(block: Tensor, arithmetic: Arithmetic) -> _Noise:
    X = block.double()
    wide = X if X.shape[0] <= X.shape[1] else X.mT
    rows, cols = wide.shape
    S = torch.linalg.svdvals(wide)
    S = S / S.square().sum().sqrt().clamp(min=1e-300) / arithmetic.norm_factor
    u, summing = _RMS * arithmetic.roundoff, _RMS * _summing(arithmetic)
    # The norm's own rounding, those of the factor and ε, and its sum of squares.
    norm_error = 3 * arithmetic.roundoff + _summing(arithmetic) * (rows * cols / 3) ** 0.5
    slope = S
    # The cast and the division, over all entries.
    inside = (2 * _energy(S) * u**2 / (rows * cols)).expand(rows, rows)
    outside = inside[0]
    for coefficients in schedule(arithmetic):
        spread, through = _added(S, coefficients, (rows, cols), u, summing)
        inside = _passed_inside(inside, S, coefficients) + spread + through
        outside = outside * _ratio(S, coefficients).square() + spread
        slope = slope * _slope(S, coefficients)
        S = _f(S, coefficients)
    factor = GRAM if arithmetic.iteration != "standard" else 1.0
    return _Noise(inside, outside, cols - rows, norm_error * slope.abs(), S.abs(), factor)


def _summing(arithmetic: Arithmetic) -> float:
    """Unit roundoff of a running sum."""
    double = arithmetic.cpu_dtype == "float64"
    return torch.finfo(torch.float64 if double else torch.float32).eps / 2


def _f(S: Tensor, coefficients: Coefficients) -> Tensor:
    a, b, c = coefficients
    return a * S + b * S**3 + c * S**5


def _added(
    S: Tensor, coefficients: Coefficients, shape: tuple[int, int], u: float, summing: float
) -> tuple[Tensor, Tensor]:
    """Variances that one step's roundings add: to every entry of X, and inside through B."""
    (a, b, c), (rows, cols) = coefficients, shape
    gram, quartic = S.square(), S**4
    polynomial = b * gram + c * quartic
    short, long = (u**2 + summing**2 * k / 3 for k in (rows, cols))
    passed = (b + c * (gram.unsqueeze(0) + gram.unsqueeze(1))).square()
    direct = (_energy(b * gram) + _energy(c * quartic) + _energy(polynomial)) * u**2
    in_b = _energy(gram) * long * passed + direct + _energy(c * quartic) * short
    in_x = (_energy(a * S) + _energy(_f(S, coefficients))) * u**2 + _energy(polynomial * S) * short
    # E·X in the basis: entry (i, j) of E times σⱼ.
    return in_x / (rows * cols), in_b / rows**2 * S.square().unsqueeze(0)


def _passed_inside(variance: Tensor, S: Tensor, coefficients: Coefficients) -> Tensor:
    """Variances after one step: an entry and its mirror mix by their sum and difference."""
    a, b, c = coefficients
    one, other = S.unsqueeze(0), S.unsqueeze(1)
    squares, product = one.square() + other.square(), one * other
    # Half the sum and half the difference of the two divided differences, without dividing.
    kept = a + b * squares + c * (one**4 + other**4 + product.square())
    mirrored = product * (b + c * squares)
    return kept.square() * variance + mirrored.square() * variance.mT


def _ratio(S: Tensor, coefficients: Coefficients) -> Tensor:
    a, b, c = coefficients
    return a + b * S.square() + c * S**4


def _energy(S: Tensor) -> Tensor:
    return S.square().sum()


def _slope(S: Tensor, coefficients: Coefficients) -> Tensor:
    a, b, c = coefficients
    return a + 3 * b * S.square() + 5 * c * S**4
