"""The largest singular value of every block of a change of weights.

B: blocks, D: rows of a block, N: its columns.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.layout import Layout

# Up to here all singular values by the Gram matrix are quicker than the largest by Lanczos. One
# block takes 3 against 19 ms at a side of 256, 11 against 24 at 384, 48 against 26 at 512.
_SMALL = 384
# Up to here Lanczos is quicker on the Gram matrix, which fits a cache.
_GRAM = 1024
# Golub-Kahan steps. The largest value is then within 1e-3 also where many are nearly as large:
# after k steps on a spectrum of width w under the largest, the error is about w·(π/2k)².
_STEPS = 40
# Elements of which copies are made at once.
_AT_ONCE = 1 << 22


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
    side = min(blocks_BDN.shape[1:])
    if side <= _SMALL:
        return values(blocks_BDN)[:, -1]
    find = _lanczos_of_gram if side <= _GRAM else _lanczos
    return torch.cat([find(part) for part in _few(blocks_BDN)])


def values(blocks_BDN: Tensor) -> Tensor:
    """All singular values of blocks, ascending, by their Gram matrices; ``[B, min(D, N)]``."""
    return torch.cat([_by_gram(block) for block in _few(blocks_BDN)])


def _few(blocks_BDN: Tensor) -> Iterator[Tensor]:
    """Blocks in batches that copying or multiplying costs no more than a small weight."""
    yield from blocks_BDN.split(max(1, _AT_ONCE // max(blocks_BDN[0].numel(), 1)))


def _by_gram(blocks: Tensor) -> Tensor:
    gram, scale = _gram(blocks)
    squares = torch.linalg.eigvalsh(gram.double()).clamp(min=0)
    return squares.sqrt() * scale.view(-1, 1)


def _lanczos_of_gram(blocks: Tensor) -> Tensor:
    """The largest singular values by Lanczos tridiagonalisation of Gram matrices.

    The subspace is that of :func:`_lanczos`, for half of its products.
    """
    gram, scale = _gram(blocks)
    steps = min(_STEPS, gram.shape[1])
    basis, tridiagonal = _first(gram), gram.new_zeros(len(gram), steps, steps)
    for k in range(steps):
        image = (gram @ basis[:, -1].unsqueeze(2)).squeeze(2)
        tridiagonal[:, k, k] = (image * basis[:, -1]).sum(1)
        if k + 1 < steps:
            image, norms = _next(image, basis, tridiagonal[:, 0, 0])
            tridiagonal[:, k, k + 1] = tridiagonal[:, k + 1, k] = norms
            basis = torch.cat((basis, image.unsqueeze(1)), 1)
    return torch.linalg.eigvalsh(tridiagonal.double())[:, -1].clamp(min=0).sqrt() * scale


def _first(blocks: Tensor) -> Tensor:
    """A vector of norm one along the last axis, the same for each block; ``[B, 1, N]``."""
    drawn = torch.randn(blocks.shape[2], generator=torch.Generator().manual_seed(0))
    return (drawn / drawn.norm()).expand(len(blocks), 1, -1)


def _gram(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Gram matrices on the smaller side of blocks over their largest elements, and those."""
    scale = torch.maximum(blocks.amax((1, 2)), -blocks.amin((1, 2))).float().clamp(min=1e-38)
    blocks = blocks.float() / scale.view(-1, 1, 1)
    wide = blocks.shape[1] <= blocks.shape[2]
    return blocks @ blocks.mT if wide else blocks.mT @ blocks, scale.double()


def _lanczos(blocks: Tensor) -> Tensor:
    """The largest singular values by Golub-Kahan bidiagonalisation with full reorthogonalisation.

    What is exhausted goes on with zeros, which add zeros to its bidiagonal matrix.
    """
    blocks = blocks.float().contiguous()
    top = float(torch.linalg.vector_norm(blocks, math.inf)) or 1.0
    if top < 1e-15 or top > 1e15:  # whose squares float32 cannot hold
        return _lanczos(blocks / top) * top
    steps = min(_STEPS, *blocks.shape[1:])
    lefts, rights = blocks.new_zeros(0), _first(blocks)
    bidiagonal = blocks.new_zeros(len(blocks), steps, steps)
    for k in range(steps):
        left = (blocks @ rights[:, -1].unsqueeze(2)).squeeze(2)
        left, bidiagonal[:, k, k] = _next(left, lefts, bidiagonal[:, 0, 0])
        lefts = torch.cat((lefts, left.unsqueeze(1)), 1) if k else left.unsqueeze(1)
        if k + 1 < steps:
            right = (left.unsqueeze(1) @ blocks).squeeze(1)
            right, bidiagonal[:, k, k + 1] = _next(right, rights, bidiagonal[:, 0, 0])
            rights = torch.cat((rights, right.unsqueeze(1)), 1)
    return torch.linalg.matrix_norm(bidiagonal.double(), 2)


def _next(vectors: Tensor, others: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors orthogonal to those before, of norm one, and what their norms were."""
    if others.numel():
        for _ in range(2):
            shares = others @ vectors.unsqueeze(2)
            vectors = vectors - (shares.mT @ others).squeeze(1)
    norms = vectors.norm(dim=1)
    norms = torch.where(norms > 1e-6 * first, norms, 0.0)
    return vectors / norms.clamp(min=1e-30).unsqueeze(1) * (norms > 0).unsqueeze(1), norms


def rounding(unsure_BDN: Tensor) -> float:
    """A bound on the spectral norm of independent errors, for the largest block.

    The largest row norm and the largest column norm of the standard deviations, and what the
    largest element may add: Bandeira and van Handel, Annals of Probability 44, 2016, theorem 1.1
    and corollary 3.12; for one wrong answer in 10⁹, t = 6.5 standard deviations.
    """
    most = 0.0
    for part in _few(unsure_BDN):
        _, rows, cols = part.shape
        row, col, top = torch.zeros(()), torch.zeros(len(part), cols), torch.zeros(())
        for some in part.split(max(1, _AT_ONCE // (len(part) * cols)), 1):
            squares = some.float().square()
            row = torch.maximum(row, squares.sum(2).amax())
            top = torch.maximum(top, squares.amax())
            col += squares.sum(1)
        tail = 6.5 + math.sqrt(2 * math.log(rows + cols))
        most = max(most, float(row.sqrt() + col.amax().sqrt() + tail * top.sqrt()))
    return most


def unsure(after: Tensor) -> Tensor:
    """The standard deviation of the error of each element of a change, from rounding; bfloat16.

    An error of rounding to nearest is uniform within a unit in the last place, whose variance is
    ulp² / 12. There are two such errors of halves: each checkpoint's, or decay's and the step's
    where training keeps no more. There are four of float32: decay's and the step's, and both again
    where the change is formed.

    Args:
        after: The weight, as it is stored; before it was of nearly the same size.
    """
    errors = 4 if after.dtype == torch.float32 else 2
    found = torch.empty(after.shape, dtype=torch.bfloat16)
    # What it takes besides is several times as large.
    for part, into in zip(
        after.flatten().split(_AT_ONCE), found.view(-1).split(_AT_ONCE), strict=True
    ):
        into.copy_(_ulp(part).mul_((errors / 12) ** 0.5))
    return found


def _ulp(x: Tensor) -> Tensor:
    """The unit in the last place of each element; float32."""
    info = torch.finfo(x.dtype)
    # Below the smallest normal number, and at zero, it is no longer smaller.
    least = math.frexp(info.tiny)[1]
    exponent = torch.frexp(x.float())[1].masked_fill_(x == 0, least).clamp_(min=least)
    return torch.ldexp(torch.full_like(exponent, info.eps / 2, dtype=torch.float32), exponent)
