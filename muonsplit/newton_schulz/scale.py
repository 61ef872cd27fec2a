"""The factor on an orthogonalised block."""

from muonsplit.dialect import Arithmetic


def scale_factor(arithmetic: Arithmetic, rows: int, cols: int) -> float:
    """The factor on the update of a block of ``rows`` × ``cols`` (output × input)."""
    factors = {
        "jordan": max(1.0, rows / cols) ** 0.5,
        "moonlight": 0.2 * max(rows, cols) ** 0.5,
        "spectral": max(rows, cols) ** 0.5,
        "bernstein": (rows / cols) ** 0.5,
        "none": 1.0,
    }
    return factors[arithmetic.scale] * arithmetic.extra_scale
