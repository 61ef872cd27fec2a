"""Families of gradients: what one hides, another shows.

Made block by block, so that heads can be equal, zero, or of different size.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from muonsplit.layout import Layout
from muonsplit.observe.gradients import generator

# Blocks [B, rows, cols] of standard normal numbers, and a source → blocks of the family; float64.
Make = Callable[[Tensor, torch.Generator], Tensor]

_TINY = 1e-6
_DECADES = 3.0
_CONDITION = 1e4


def _iid(blocks: Tensor, source: torch.Generator) -> Tensor:
    return blocks


def _scaled(blocks: Tensor, source: torch.Generator) -> Tensor:
    exponents = torch.rand(len(blocks), 1, 1, generator=source, dtype=blocks.dtype) * 2 - 1
    return blocks * 10.0 ** (_DECADES * exponents)


def _tiny(blocks: Tensor, source: torch.Generator) -> Tensor:
    return blocks * _TINY


def _one_zero(blocks: Tensor, source: torch.Generator) -> Tensor:
    if len(blocks) == 1:  # nothing would be left
        return blocks
    emptied = blocks.clone()
    emptied[int(torch.randint(len(blocks), (), generator=source))] = 0
    return emptied


def _equal(blocks: Tensor, source: torch.Generator) -> Tensor:
    return blocks[:1].expand_as(blocks)


def _rank_two(blocks: Tensor, source: torch.Generator) -> Tensor:
    return blocks[:, :, :2] @ blocks[:, :2, :]


def _orthonormal(blocks: Tensor, source: torch.Generator) -> Tensor:
    U, _, Vh = torch.linalg.svd(blocks, full_matrices=False)
    return U @ Vh


def _ill_conditioned(blocks: Tensor, source: torch.Generator) -> Tensor:
    U, S, Vh = torch.linalg.svd(blocks, full_matrices=False)
    steps = torch.linspace(0, 1, S.shape[-1], dtype=S.dtype)
    return (U * _CONDITION**-steps) @ Vh


def _integers(blocks: Tensor, source: torch.Generator) -> Tensor:
    return (2 * blocks).round().clamp(-3, 3)


FAMILIES: Mapping[str, Make] = {
    "iid": _iid,
    "head scales 1e±3": _scaled,
    "tiny 1e-6": _tiny,
    "one zero head": _one_zero,
    "equal heads": _equal,
    "rank-2 heads": _rank_two,
    "orthonormal heads": _orthonormal,
    "ill-conditioned": _ill_conditioned,
    "integers |x| ≤ 3": _integers,
}


def of_family(family: str, shape: tuple[int, ...], layout: Layout | None, *key: object) -> Tensor:
    """A gradient of a family; float32.

    Args:
        family: A name in :data:`FAMILIES`.
        shape: Shape of the weight, two or three dimensions.
        layout: How it is cut; None for one block, or one for each matrix of a stack.
        key: Seeds it.
    """
    source = generator(*key, family)
    drawn = torch.randn(shape, generator=source, dtype=torch.float64)
    make = FAMILIES[family]
    if layout is None:
        stack = drawn if drawn.ndim == 3 else drawn.unsqueeze(0)
        return make(stack, source).reshape(shape).float()
    made = torch.empty_like(drawn)
    layout.write([make(batch, source) for batch in layout.batches(drawn)], made)
    return made.float()
