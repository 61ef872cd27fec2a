"""How far a legal update may be from the exact one: derived, never tuned.

Rounding x = m·2ᵉ to a dtype of unit roundoff u errs uniformly in ±u·2ᵉ, so relative to x by
u/(√3·m); over mantissas m spread logarithmically in [1, 2) its root mean square is u/√3 · 0.735.
A step f(σ) = aσ + bσ³ + cσ⁵ adds the noise of its own products and passes on what came before.
What is passed on is known exactly: in the basis of X's singular vectors the derivative of f
multiplies

    the symmetric part   by (f(σᵢ) − f(σⱼ)) / (σᵢ − σⱼ),
    the antisymmetric    by (f(σᵢ) + f(σⱼ)) / (σᵢ + σⱼ),
    what leaves the row space by f(σᵢ) / σᵢ,

so noise that knows nothing of the basis grows by the root mean square of these. Noise in the
Gram matrix A passes through g(λ) = bλ + cλ² likewise, by b + c(λᵢ + λⱼ). A product over k terms
also rounds its growing partial sums in float32 (float64 in float64), k/3 times the variance of a
single rounding when all terms have one sign and are added one by one. The sum over the steps is
one standard deviation; SAFETY of them is the bound. On directions below the noise floor the
gains are large and the bound grows by itself.
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
    error = S.norm() * u * 2.0  # the cast, the norm and the division
    for coefficients in schedule(arithmetic):
        local = _variance(S, coefficients, (rows, cols), u, summing)
        error = (error.square() * _gain(S, coefficients, cols) + local).sqrt()
        S = _f(S, coefficients)
    factor = GRAM if arithmetic.form == "gram" else 1.0
    return float(SAFETY * factor * error / S.norm().clamp(min=1e-300))


def _roundoffs(arithmetic: Arithmetic) -> tuple[float, float]:
    """Root mean square relative error of one rounding, to the dtype and in a running sum."""
    double = arithmetic.cpu_dtype == "float64"
    summing = torch.finfo(torch.float64 if double else torch.float32).eps / 2
    return arithmetic.roundoff * _RMS, summing * _RMS


def _f(S: Tensor, coefficients: Coefficients) -> Tensor:
    a, b, c = coefficients
    return a * S + b * S**3 + c * S**5


def _variance(
    S: Tensor, coefficients: Coefficients, shape: tuple[int, int], u: float, summing: float
) -> Tensor:
    """Square of the Frobenius norm that one step's own roundings add."""
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
    # Noise in B is spread over all its entries: it meets X as E·X with ‖E·X‖ ≈ ‖E‖‖X‖/√rows.
    through = in_b * _energy(S) / rows
    in_x = (_energy(a * S) + _energy(_f(S, coefficients))) * u**2 + _energy(polynomial * S) * short
    return through + in_x


def _energy(S: Tensor) -> Tensor:
    return S.square().sum()


def _gain(S: Tensor, coefficients: Coefficients, cols: int) -> Tensor:
    """Mean square gain of basis-free noise through one step."""
    a, b, c = coefficients
    one, other = S.unsqueeze(0), S.unsqueeze(1)
    squares = one.square() + other.square()
    # The divided differences of x, x³ and x⁵, written without dividing.
    minus = (
        a
        + b * (squares + one * other)
        + c * (one**4 + one**3 * other + one.square() * other.square() + one * other**3 + other**4)
    )
    plus = (
        a
        + b * (squares - one * other)
        + c * (one**4 - one**3 * other + one.square() * other.square() - one * other**3 + other**4)
    )
    inside = (minus.square() + plus.square()).sum() / 2
    ratio = a + b * S.square() + c * S**4
    outside = ratio.square().sum() * (cols - len(S))
    return (inside + outside) / (len(S) * cols)
