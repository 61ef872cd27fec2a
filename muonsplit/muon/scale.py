"""Where the scale of a block goes: on its update, on the result, on the learning rate."""

from collections.abc import Sequence
from typing import NamedTuple

from muonsplit.dialect import Arithmetic
from muonsplit.newton_schulz import scale_factor


class Factors(NamedTuple):
    """The scale of a block as an arithmetic divides it.

    Attributes:
        update: On what the iteration gives, in its dtype.
        result: On the result, in the parameter's dtype.
        rate: On the learning rate.
    """

    update: float = 1.0
    result: float = 1.0
    rate: float = 1.0


def factors(arithmetic: Arithmetic, block: Sequence[int], matrix: Sequence[int]) -> Factors:
    """The scale of one block.

    Args:
        arithmetic: Its ``scale``, ``scale_on`` and ``scale_per``.
        block: Shape of the block, output × input in its last two axes.
        matrix: Shape of the whole matrix that it is a block of, likewise.
    """
    whole = scale_factor(arithmetic, *matrix[-2:])
    own = whole if arithmetic.scale_per == "matrix" else scale_factor(arithmetic, *block[-2:])
    if arithmetic.scale_on == "update":
        return Factors(update=own)
    if arithmetic.scale_on == "result":
        return Factors(result=own)
    if arithmetic.scale_per == "block_on_matrix":
        return Factors(update=own / whole, rate=whole)
    return Factors(rate=own)
