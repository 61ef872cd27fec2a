"""The exact result by another road: the polynomial applied to singular values."""

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.dialect.coefficients import schedule
from muonsplit.newton_schulz.normalize import denominator


def polynomial(S: Tensor, arithmetic: Arithmetic) -> Tensor:
    """What the iteration makes of singular values, as :func:`normalize` left them.

    Args:
        S: Any shape, float64.
        arithmetic: Only its coefficients and steps matter.
    """
    for a, b, c in schedule(arithmetic):
        S = a * S + b * S**3 + c * S**5
    return S


def singular_value_oracle(X_BMN: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The exact result of an iteration, in float64.

    Args:
        X_BMN: Blocks, shape ``[B, M, N]``.
        arithmetic: Only its coefficients, steps and normalisation matter.

    Returns:
        Shape ``[B, M, N]``, float64, without the scale.
    """
    U, S, Vh = torch.linalg.svd(X_BMN.double(), full_matrices=False)
    norms = S.square().sum(-1, keepdim=True).sqrt()
    S = polynomial(S / denominator(norms, arithmetic), arithmetic)
    return (U * S.unsqueeze(-2)) @ Vh
