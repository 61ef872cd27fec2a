"""How far a legal update may be from the exact one: derived, never tuned.

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

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.newton_schulz import Coefficients, schedule

# One false alarm in 10⁹ blocks.
_TAIL = math.log(1e9)
# Roundings are not quite independent of each other: those of a symmetric product come in pairs.
_DEPENDENT = 2.0
_RMS = 0.735 / 3**0.5
# The Gram form squares singular values before it rounds; at most eight times the standard form's
# error was measured over Gaussian, log-spaced, outlier and rank-deficient spectra with a restart.
GRAM = 10.0


def rounding_bound(block: Tensor, arithmetic: Arithmetic) -> float:
    """The relative Frobenius error that rounding may cause in one block's update.

    Args:
        block: What is orthogonalised, shape ``[rows, cols]``.
        arithmetic: Its CPU dtype sets the roundoff, its coefficients the gains.

    Returns:
        ‖computed − exact‖ / ‖exact‖ that one block in 10⁹ exceeds.
    """
    X = block.double()
    wide = X if X.shape[0] <= X.shape[1] else X.mT
    rows, cols = wide.shape
    S = torch.linalg.svdvals(wide)
    S = S / S.square().sum().sqrt().clamp(min=1e-300) / arithmetic.norm_factor
    u, summing = _roundoffs(arithmetic)
    slope, largest = S, _largest_norm_error(arithmetic, rows * cols)
    # Variances of the entries inside the row space, and of those outside it, alike in each column.
    start = 2 * _energy(S) * u**2 / (rows * cols)
    inside, outside = start.expand(rows, rows), start.expand(rows)
    for coefficients in schedule(arithmetic):
        spread, through = _added(S, coefficients, (rows, cols), u, summing)
        inside = _passed_inside(inside, S, coefficients) + spread + through
        outside = outside * _ratio(S, coefficients).square() + spread
        slope = slope * _slope(S, coefficients)
        S = _f(S, coefficients)
    noise = _tail(inside.flatten(), outside, cols - rows).sqrt()
    factor = GRAM if arithmetic.form == "gram" else 1.0
    return float(factor * (noise + largest * slope.norm()) / S.norm().clamp(min=1e-300))


def _tail(inside: Tensor, outside: Tensor, copies: int) -> Tensor:
    """What the squared error may reach, given the variance of each entry."""
    total = inside.sum() + copies * outside.sum()
    squares = _energy(inside) + copies * _energy(outside)
    largest = torch.cat([inside, outside]).max()
    return _DEPENDENT * (total + 2 * (_TAIL * squares).sqrt() + 2 * _TAIL * largest)


def _largest_norm_error(arithmetic: Arithmetic, elements: int) -> float:
    """The norm's own rounding, that with the factor and ε, and its sum of squares."""
    double = arithmetic.cpu_dtype == "float64"
    summing = torch.finfo(torch.float64 if double else torch.float32).eps / 2
    return 3 * arithmetic.roundoff + summing * (elements / 3) ** 0.5


def _roundoffs(arithmetic: Arithmetic) -> tuple[float, float]:
    """Root mean square relative error of one rounding, to the dtype and in a running sum."""
    double = arithmetic.cpu_dtype == "float64"
    summing = torch.finfo(torch.float64 if double else torch.float32).eps / 2
    return arithmetic.roundoff * _RMS, summing * _RMS


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
