"""In-place operations as a list or one by one, which round factors differently on a CPU.

A list operation of torch rounds a Python factor to the dtype of bfloat16 tensors on a CPU.
"""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import torch
from torch import Tensor


def mul_(x: Tensor, factor: float, foreach: bool) -> None:
    """Multiplies: x ← factor·x."""
    if foreach:
        torch._foreach_mul_([x], factor)
    else:
        x.mul_(factor)


def lerp_(x: Tensor, towards: Tensor, weight: float, foreach: bool) -> None:
    """Interpolates: x ← x + weight·(towards − x)."""
    if foreach:
        torch._foreach_lerp_([x], [towards], weight)
    else:
        x.lerp_(towards, weight)


def add_(x: Tensor, other: Tensor, alpha: float, foreach: bool) -> None:
    """Adds: x ← x + alpha·other."""
    if foreach:
        torch._foreach_add_([x], [other], alpha=alpha)
    else:
        x.add_(other, alpha=alpha)
