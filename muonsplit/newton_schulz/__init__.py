"""Newton–Schulz on a batch of blocks: coefficient sets, iterations, rounding points, oracle.

    X_BMN   blocks: B blocks of M rows and N columns
    A_BMM   X Xᵀ, the Gram matrix on the short side
    q       rounds to the dtype of the iteration

On a CPU, bfloat16 and float16 are emulated unless asked for natively: operands are rounded and
multiplied in float32, which is what tensor cores do and many times faster than half-precision
products on a CPU that has no instructions for them.

Oracle order, the most trusted first: :func:`singular_value_oracle`, then :func:`newton_schulz`
in float64, then the lower precisions.
"""

from muonsplit.dialect.coefficients import COEFFICIENTS, Coefficients, schedule
from muonsplit.newton_schulz import refuse
from muonsplit.newton_schulz.accelerated import accelerated
from muonsplit.newton_schulz.fast import orthogonalize_into
from muonsplit.newton_schulz.oracle import polynomial, singular_value_oracle
from muonsplit.newton_schulz.refuse import Backend
from muonsplit.newton_schulz.rounding import Rounding, rounding, rounding_of
from muonsplit.newton_schulz.run import newton_schulz
from muonsplit.newton_schulz.scale import scale_factor

__all__ = [
    "COEFFICIENTS",
    "Backend",
    "Coefficients",
    "Rounding",
    "accelerated",
    "newton_schulz",
    "orthogonalize_into",
    "polynomial",
    "refuse",
    "rounding",
    "rounding_of",
    "scale_factor",
    "schedule",
    "singular_value_oracle",
]
