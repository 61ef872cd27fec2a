"""What a kernel does with one block, as a list of operations on matrices.

The kernel knows no iteration: it runs such a list. One binary therefore serves every coefficient
set, number of steps, restart, form and order of products, and what is computed can be counted,
printed, and run by anything else that can multiply.

    panel    d × n, the block itself: the last one and the next
    matrix   d × d, in numbered slots
    q        rounds to the dtype of the iteration

d is the short side: a tall block enters transposed.
"""

from enum import IntEnum
from typing import NamedTuple

import torch


class Kind(IntEnum):
    """What an operation does.

    Attributes:
        GRAM: matrix[out] = q(panel · panelᵀ).
        ELEMENT: matrix[out] = q(q(α · matrix[left]) + δI).
        PRODUCT: matrix[out] = β · matrix[added] + α · matrix[left] · matrix[right].
        APPLY: next panel = β · panel + matrix[left] · panel, and it is the panel from then on.
    """

    GRAM = 0
    ELEMENT = 1
    PRODUCT = 2
    APPLY = 3


class Op(NamedTuple):
    """One operation.

    Attributes:
        kind: What it does.
        out: Slot that is written; not one of those that are read, but for ``ELEMENT``.
        left: Slot of the left factor.
        right: Slot of the right factor.
        added: Slot of what is added.
        apart: Whether product and addend are rounded before they are added, else only the sum.
        alpha: Factor on the product.
        beta: Factor on what is added; 0: nothing is.
        diagonal: What is added to a diagonal.
    """

    kind: Kind
    out: int = 0
    left: int = 0
    right: int = 0
    added: int = 0
    apart: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    diagonal: float = 0.0


class Program(NamedTuple):
    """What is done with one block after it is normalised.

    Attributes:
        ops: In order; the last is ``APPLY``.
        slots: How many matrices it needs.
    """

    ops: tuple[Op, ...]
    slots: int

    def operations(self, short: int, long: int) -> int:
        """Multiplications and additions of a block's products: 2·d²·n and 2·d³ each."""
        each = {Kind.GRAM: long, Kind.APPLY: long, Kind.PRODUCT: short, Kind.ELEMENT: 0}
        return sum(2 * short * short * each[op.kind] for op in self.ops)


class Ends(NamedTuple):
    """What is done with a block before its program and after it.

    Attributes:
        dtype: Of the iteration.
        norm: Of the normalisation: block, norm and quotient are rounded to it.
        result: Of the result.
        clamp: Whether it is divided by max(‖X‖·f, ε), else by ‖X‖·f + ε; by one if that is zero.
        factor: The f.
        epsilon: The ε.
        scale: Factor on the result, which is rounded before and after.
    """

    dtype: torch.dtype
    norm: torch.dtype
    result: torch.dtype
    clamp: bool = False
    factor: float = 1.0
    epsilon: float = 0.0
    scale: float = 1.0
