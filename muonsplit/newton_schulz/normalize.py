"""Normalisation: every block divided by its own Frobenius norm."""

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.newton_schulz.rounding import Rounding


def denominator(norms: Tensor, arithmetic: Arithmetic, q: Rounding = lambda x: x) -> Tensor:
    """What a block of a norm is divided by, rounded; never zero, so that a zero block stays zero.

    Args:
        norms: Any shape.
        arithmetic: Its factor, ε and rule.
        q: The rounding, below which ε may vanish.
    """
    if arithmetic.norm_factor != 1.0:
        norms = norms * arithmetic.norm_factor
    if arithmetic.normalize == "clamp":
        norms = norms.clamp(min=arithmetic.epsilon)
    elif arithmetic.normalize == "add":
        norms = norms + arithmetic.epsilon
    divisors = q(norms)
    return torch.where(divisors == 0, 1.0, divisors)


def normalize(X_BMN: Tensor, arithmetic: Arithmetic, q: Rounding) -> Tensor:
    """Every block over its norm, as the arithmetic forms it."""
    X = _prepared(X_BMN, arithmetic)
    return q(X / _divisors(X, arithmetic, q))


def _prepared(X: Tensor, arithmetic: Arithmetic) -> Tensor:
    if arithmetic.normalize == "scaled":
        return torch.stack([power_of_two(x)[0] for x in X])
    return X


def _divisors(X: Tensor, arithmetic: Arithmetic, q: Rounding) -> Tensor:
    # One reduction a block: a batched norm may reduce in another order for another batch size.
    norms = torch.stack([q(x.norm()) for x in X]).view(-1, 1, 1)
    return denominator(norms, arithmetic, q)


def power_of_two(x: Tensor) -> tuple[Tensor, float]:
    """A block over the power of two of its largest entry, which is exact, and that power."""
    largest = x.abs().amax()
    if largest == 0 or not bool(torch.isfinite(largest)):
        return x, 1.0
    exponent = int(torch.frexp(largest)[1])
    # In two factors, since 2⁻¹⁴⁹ has no reciprocal in float32.
    half = exponent // 2
    return x * 2.0**-half * 2.0 ** (half - exponent), 2.0**exponent
