"""How far a legal update may be from the exact one: derived, never tuned.

Rounding x = m·2ᵉ to a dtype of unit roundoff u errs uniformly in ±u·2ᵉ, so relative to x by
u/(√3·m); over mantissas m spread logarithmically in [1, 2) its root mean square is u/√3 · 0.735.
A step f(σ) = aσ + bσ³ + cσ⁵ adds the noise of its own products and passes on what came before.
What is passed on is known exactly: in the basis of X's singular vectors the derivative of f
multiplies

    the symmetric part inside the row space   by (f(σᵢ) − f(σⱼ)) / (σᵢ − σⱼ),
    the antisymmetric part inside it          by (f(σᵢ) + f(σⱼ)) / (σᵢ + σⱼ),
    what leaves the row space                 by f(σᵢ) / σᵢ,

so noise inside and outside grows by the root mean square of these. Noise in the Gram matrix A
passes through g(λ) = bλ + cλ², by b + c(λᵢ + λⱼ), and reaches X inside its row space only. A
product over k terms also rounds its growing partial sums in float32 (float64 in float64), k/3
times the variance of a single rounding when all terms have one sign and are added one by one. The
sum over the steps is one standard deviation; SAFETY of them are allowed.

The norm is one number: its error is a common factor, which does not average out. It moves each
singular value by σ·F′(σ), F being all steps, and its largest value is allowed beside the noise.

On directions below the noise floor the gains are large and the bound grows by itself.
"""

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.newton_schulz import Coefficients, schedule

# Standard deviations. Errors in a matrix of two rows are few and correlated; in one of hundreds
# their norm hardly varies.
SAFETY = 4.0
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
        ‖computed − exact‖ / ‖exact‖, at SAFETY standard deviations.
    """
    X = block.double()
    wide = X if X.shape[0] <= X.shape[1] else X.mT
    rows, cols = wide.shape
    S = torch.linalg.svdvals(wide)
    S = S / S.square().sum().sqrt().clamp(min=1e-300) / arithmetic.norm_factor
    u, summing = _roundoffs(arithmetic)
    slope, largest = S, _largest_norm_error(arithmetic, rows * cols)
    share = rows / cols
    # Variance inside and outside the row space: of the cast and of the division.
    inside = outside = 2 * _energy(S) * u**2
    inside, outside = inside * share, outside * (1 - share)
    for coefficients in schedule(arithmetic):
        spread, through = _variances(S, coefficients, (rows, cols), u, summing)
        gain_in, gain_out = _gains(S, coefficients)
        inside = inside * gain_in + spread * share + through
        outside = outside * gain_out + spread * (1 - share)
        slope = slope * _slope(S, coefficients)
        S = _f(S, coefficients)
    noise = SAFETY * (inside + outside).sqrt()
    factor = GRAM if arithmetic.form == "gram" else 1.0
    return float(factor * (noise + largest * slope.norm()) / S.norm().clamp(min=1e-300))


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


def _variances(
    S: Tensor, coefficients: Coefficients, shape: tuple[int, int], u: float, summing: float
) -> tuple[Tensor, Tensor]:
    """Squared Frobenius norms that one step's roundings add: over all of X, and through B."""
    (a, b, c), (rows, cols) = coefficients, shape
    gram, quartic = S.square(), S**4
    polynomial = b * gram + c * quartic
    short, long = (u**2 + summing**2 * k / 3 for k in (rows, cols))
    passed = (b + c * (gram.unsqueeze(0) + gram.unsqueeze(1))).square().mean()
    in_b = (
        _energy(gram) * passed * long
        + (_energy(b * gram) + _energy(c * quartic) + _energy(polynomial)) * u**2
        + _energy(c * quartic) * short
    )
    in_x = (_energy(a * S) + _energy(_f(S, coefficients))) * u**2 + _energy(polynomial * S) * short
    # Noise in B is spread over all its entries: it meets X as E·X with ‖E·X‖ ≈ ‖E‖‖X‖/√rows.
    return in_x, in_b * _energy(S) / rows


def _energy(S: Tensor) -> Tensor:
    return S.square().sum()


def _slope(S: Tensor, coefficients: Coefficients) -> Tensor:
    a, b, c = coefficients
    return a + 3 * b * S.square() + 5 * c * S**4


def _gains(S: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """Mean square gain of noise through one step, inside the row space and outside it."""
    a, b, c = coefficients
    one, other = S.unsqueeze(0), S.unsqueeze(1)
    squares, product = one.square() + other.square(), one * other
    fourth = one**4 + other**4 + product.square()
    # The divided differences of x, x³ and x⁵, written without dividing.
    minus = a + b * (squares + product) + c * (fourth + product * squares)
    plus = a + b * (squares - product) + c * (fourth - product * squares)
    ratio = a + b * S.square() + c * S**4
    return (minus.square() + plus.square()).mean() / 2, ratio.square().mean()
