"""The largest singular value of every block of a change of weights.

B: blocks, D: rows of a block, N: its columns.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.layout import Layout

# Up to here all singular values by the Gram matrix are quicker than the largest by Lanczos.
_SMALL = 512
# Golub-Kahan steps. The largest value is then within 1e-3 also where many are nearly as large:
# after k steps on a spectrum of width w under the largest, the error is about w·(π/2k)².
_STEPS = 64


class Sized(NamedTuple):
    """Blocks of one shape under one hypothesis.

    Attributes:
        rows: Rows of a block, output × input.
        cols: Its columns.
        blocks: How many there are.
        still: How many of them did not move at all.
        least: The smallest of their largest singular values, of those that moved; 0 if none did.
        most: The largest.
        hidden: The largest that rounding of the checkpoints may have added or taken.
    """

    rows: int
    cols: int
    blocks: int
    still: int
    least: float
    most: float
    hidden: float


def blocks_of(change: Tensor, layout: Layout | None) -> list[Tensor]:
    """The blocks of a matrix or of a stack of matrices; equal shapes together, ``[B, D, N]``."""
    if layout is not None:
        return layout.batches(change)
    return [change if change.ndim == 3 else change.unsqueeze(0)]


def sized(change: Tensor, layout: Layout | None, unsure: Tensor | None) -> tuple[Sized, ...]:
    """The sizes of a weight's blocks, one entry a shape.

    Args:
        change: Before less after, ``[rows, cols]`` or a stack of such; float32.
        layout: The hypothesis; None for whole matrices.
        unsure: Standard deviation of each element of the change, if it is not negligible.
    """
    hidden = [0.0 for _ in blocks_of(change, layout)]
    if unsure is not None:
        hidden = [rounding(blocks) for blocks in blocks_of(unsure, layout)]
    found: dict[tuple[int, int], list[tuple[Tensor, float]]] = {}
    for blocks, noise in zip(blocks_of(change, layout), hidden, strict=True):
        shape = blocks.shape[1], blocks.shape[2]
        found.setdefault(shape, []).append((largest(blocks), noise))
    return tuple(_sized(shape, parts) for shape, parts in found.items())


def _sized(shape: tuple[int, int], parts: list[tuple[Tensor, float]]) -> Sized:
    tops = torch.cat([top for top, _ in parts])
    moved = tops[tops > 0]
    least, most = (float(moved.min()), float(moved.max())) if len(moved) else (0.0, 0.0)
    still = len(tops) - len(moved)
    return Sized(*shape, len(tops), still, least, most, max(noise for _, noise in parts))


def largest(blocks_BDN: Tensor) -> Tensor:
    """The largest singular value of every block, shape ``[B]``, float64."""
    if min(blocks_BDN.shape[1:]) <= _SMALL:
        return values(blocks_BDN)[:, -1]
    return torch.stack([_lanczos(block) for block in blocks_BDN])


def values(blocks_BDN: Tensor) -> Tensor:
    """All singular values of blocks, ascending, by their Gram matrices; ``[B, min(D, N)]``."""
    return torch.cat([_by_gram(block) for block in _few(blocks_BDN)])


def _few(blocks_BDN: Tensor) -> Iterator[Tensor]:
    """Blocks in batches that copying or multiplying costs no more than a small weight."""
    yield from blocks_BDN.split(max(1, (1 << 22) // max(blocks_BDN[0].numel(), 1)))


def _by_gram(blocks: Tensor) -> Tensor:
    blocks = blocks.float()
    scale = blocks.abs().amax((1, 2)).clamp(min=1e-38).view(-1, 1, 1)
    blocks = blocks / scale
    gram = blocks @ blocks.mT if blocks.shape[1] <= blocks.shape[2] else blocks.mT @ blocks
    squares = torch.linalg.eigvalsh(gram.double()).clamp(min=0)
    return squares.sqrt() * scale.view(-1, 1).double()


def _lanczos(block: Tensor) -> Tensor:
    """The largest singular value by Golub-Kahan bidiagonalisation with full reorthogonalisation."""
    source = torch.Generator().manual_seed(0)
    right = torch.randn(block.shape[1], generator=source)
    right = right / right.norm()
    lefts, rights = list[Tensor](), [right]
    diagonal, beside = list[Tensor](), list[Tensor]()
    for _ in range(min(_STEPS, *block.shape)):
        left = _orthogonal(block @ rights[-1], lefts)
        diagonal.append(left.norm())
        if diagonal[-1] == 0:
            break
        lefts.append(left / diagonal[-1])
        right = _orthogonal(block.mT @ lefts[-1], rights)
        beside.append(right.norm())
        if beside[-1] <= 1e-6 * diagonal[0]:
            break
        rights.append(right / beside[-1])
    bidiagonal = torch.diag(torch.stack(diagonal))
    for i, value in enumerate(beside[: len(diagonal) - 1]):
        bidiagonal[i, i + 1] = value
    return torch.linalg.svdvals(bidiagonal.double())[0]


def _orthogonal(vector: Tensor, others: list[Tensor]) -> Tensor:
    if not others:
        return vector
    basis = torch.stack(others)
    for _ in range(2):
        vector = vector - basis.mT @ (basis @ vector)
    return vector


def rounding(unsure_BDN: Tensor) -> float:
    """A bound on the spectral norm of independent errors, for the largest block.

    The largest row norm and the largest column norm of the standard deviations, and what the
    largest element may add: Bandeira and van Handel, Annals of Probability 44, 2016, theorem 1.1
    and corollary 3.12; for one wrong answer in 10⁹, t = 6.5 standard deviations.
    """
    most = 0.0
    for part in _few(unsure_BDN):
        squares = part.float().square()
        rows, cols = squares.sum(2).amax().sqrt(), squares.sum(1).amax().sqrt()
        largest = squares.amax().sqrt()
        tail = 6.5 + (2 * torch.tensor(float(sum(part.shape[1:]))).log()).sqrt()
        most = max(most, float(rows + cols + tail * largest))
    return most


def unsure(before: Tensor, after: Tensor) -> Tensor:
    """The standard deviation of the error of each element of a change, from rounding; bfloat16.

    Both were rounded to nearest: an error is uniform within a unit in the last place, whose
    variance is ulp² / 12.
    """
    squares = _ulp(before).square_()
    squares += _ulp(after).square_()
    return squares.div_(12).sqrt_().bfloat16()


def _ulp(x: Tensor) -> Tensor:
    """The unit in the last place of each element; float32."""
    info = torch.finfo(x.dtype)
    exponent = torch.frexp(x.float())[1]
    return torch.ldexp(torch.full_like(exponent, info.eps / 2, dtype=torch.float32), exponent)
