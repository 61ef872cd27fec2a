"""Normalisation: every block divided by its own Frobenius norm."""

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.newton_schulz.rounding import Rounding


def denominator(norms: Tensor, arithmetic: Arithmetic) -> Tensor:
    """What a block of a norm is divided by."""
    if arithmetic.norm_factor != 1.0:
        norms = norms * arithmetic.norm_factor
    if arithmetic.normalize == "clamp":
        return norms.clamp(min=arithmetic.epsilon)
    if arithmetic.normalize == "scaled":
        return torch.where(norms == 0, 1.0, norms)
    return norms + arithmetic.epsilon


def normalize(X_BMN: Tensor, arithmetic: Arithmetic, q: Rounding) -> Tensor:
    """Every block over its norm, as the arithmetic forms it."""
    X = _prepared(X_BMN, arithmetic)
    return q(X / _divisors(X, arithmetic, q))


def normalized(X_BMN: Tensor, arithmetic: Arithmetic, out: Tensor) -> None:
    """:func:`normalize` into a buffer, which may be transposed, with nothing rounded between."""
    X = _prepared(X_BMN, arithmetic)
    torch.div(X, _divisors(X, arithmetic, lambda x: x), out=out)


def _prepared(X: Tensor, arithmetic: Arithmetic) -> Tensor:
    if arithmetic.normalize == "scaled":
        return torch.stack([_scaled_down(x) for x in X])
    return X


def _divisors(X: Tensor, arithmetic: Arithmetic, q: Rounding) -> Tensor:
    # One reduction a block: a batched norm may reduce in another order for another batch size.
    norms = torch.stack([q(x.norm()) for x in X]).view(-1, 1, 1)
    return q(denominator(norms, arithmetic))


def _scaled_down(x: Tensor) -> Tensor:
    """A block by the power of two of its largest entry, which is exact, so that squares fit."""
    largest = x.abs().amax()
    _, exponent = torch.frexp(torch.where(largest == 0, 1.0, largest))
    # In two factors, since 2⁻¹⁴⁹ has no reciprocal in float32.
    half = torch.div(exponent, 2, rounding_mode="floor")
    return torch.ldexp(torch.ldexp(x, -half), half - exponent)
