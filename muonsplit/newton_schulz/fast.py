"""The quick road on a CPU: fused products, reused buffers, as many blocks at once as stay in cache.

A block is never copied, divided or transposed where it lies in memory as BLAS wants it: its Gram
matrix is divided by the squared norm, which is that matrix's own trace, and the polynomial by the
norm. Floor: 8·d²·n + 28·d³ operations a d × n block by Gram with one restart, 20·d²·n + 10·d³ by
the standard iteration, over the rate of sgemm. Gram pays off where n > 1.5·d.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.dialect.coefficients import Coefficients, schedule
from muonsplit.newton_schulz.gram import gram_pays, segments
from muonsplit.newton_schulz.normalize import denominator, power_of_two

# Measured on two kinds of CPU: what the second and a share of the third cache hold.
_CACHE_BYTES = 8 << 20
_ALIGNMENT = 64  # bytes; BLAS chooses kernels by it
# Traces between which a square, and a product of two, neither over- nor underflows in float32.
_SAFE = (1e-24, 1e24)


def may_share(X: Tensor) -> bool:
    """Whether blocks may be in one batch without its size showing in their bits.

    BLAS chooses kernels by alignment on a CPU, so every block, and every Gram matrix, has to start
    on a 64-byte boundary; and it divides a product that stands alone between threads, but not one
    among others. On an accelerator equal bits for another batch are not ours to promise.
    """
    if X.device.type != "cpu":
        return True
    short, long = sorted(X.shape[-2:])
    return torch.get_num_threads() == 1 and short * short % 16 == 0 and short * long % 16 == 0


def orthogonalize_into(
    sources: Sequence[Tensor], targets: Sequence[Tensor], arithmetic: Arithmetic
) -> None:
    """Orthogonalises the blocks of several batches of one shape, without the scale.

    Beside sources and targets it holds one or two blocks and four Gram matrices for each block that
    is worked on at once, together no more than twice the targets.

    Args:
        sources: Batches ``[B, M, N]`` of one M and N, read only, any strides.
        targets: As many of the same shapes, written.
        arithmetic: Coefficients, steps, restarts and normalisation; the dtype it computes in.
    """
    dtype, like = arithmetic.dtype_on(sources[0].device), sources[0]
    runs = _runs(like, arithmetic)
    copied = len(runs) > 2 or not all(_lies_well(source, dtype) for source in sources)
    rows, cols = like.shape[-2:]
    held = (2 if copied else 1) * rows * cols + 4 * min(rows, cols) ** 2
    at_once = min(
        _CACHE_BYTES * 8 // (torch.finfo(dtype).bits * held),
        2 * sum(map(len, sources)) * rows * cols // held,
    )
    workspace = _Workspace(rows, cols, dtype, like)
    for pieces in _chunks(sources, targets, max(1, at_once) if may_share(like) else 1):
        _chunk(pieces, workspace, runs, arithmetic)


class _Workspace:
    """Buffers for as many blocks as are worked on at once."""

    def __init__(self, rows: int, cols: int, dtype: torch.dtype, like: Tensor) -> None:
        short = min(rows, cols)
        self._shapes = ((rows, cols), *((short, short),) * 4)
        self._like, self._dtype = like, dtype
        self._made: tuple[Tensor, ...] = ()

    def take(self, blocks: int) -> tuple[Tensor, ...]:
        """A buffer of whole blocks and four of Gram matrices, uninitialised."""
        if not self._made or len(self._made[0]) < blocks:
            self._made = tuple(
                self._like.new_empty((blocks, *s), dtype=self._dtype) for s in self._shapes
            )
        return tuple(buffer[:blocks] for buffer in self._made)


class _Piece(NamedTuple):
    """Consecutive blocks of one batch.

    Attributes:
        source: What is read.
        target: What is written.
        at: Where they are in the chunk.
    """

    source: Tensor
    target: Tensor
    at: slice


def _chunks(
    sources: Sequence[Tensor], targets: Sequence[Tensor], at_once: int
) -> Iterator[list[_Piece]]:
    """Runs of blocks that fill a chunk, across the ends of batches."""
    chunk: list[_Piece] = []
    filled = 0
    for source, target in zip(sources, targets, strict=True):
        start = 0
        while start < len(source):
            stop = min(len(source), start + at_once - filled)
            at = slice(filled, filled + stop - start)
            chunk.append(_Piece(source[start:stop], target[start:stop], at))
            filled, start = at.stop, stop
            if filled == at_once:
                yield chunk
                chunk, filled = [], 0
    if chunk:
        yield chunk


def _chunk(
    pieces: Sequence[_Piece],
    workspace: _Workspace,
    runs: Sequence[Sequence[Coefficients]],
    arithmetic: Arithmetic,
) -> None:
    Y, *small = workspace.take(pieces[-1].at.stop)
    R = small[0]
    given: list[Tensor] = []
    scales: list[Tensor] = []
    for piece in pieces:
        x = _operand(piece.source, Y.dtype, arithmetic)
        _gram_of(x, R[piece.at])
        x, scale = _scaled(x, R[piece.at], x is piece.source, arithmetic)
        given.append(x)
        scales.append(scale)
    first, *rest = runs
    Q = _polynomial(small, first).mul_(torch.cat(scales))
    if not rest:
        for piece, x in zip(pieces, given, strict=True):
            _write(Q[piece.at], x, piece.target)
        return
    for piece, x in zip(pieces, given, strict=True):
        _times(Q[piece.at], x, Y[piece.at])
    X = torch.empty_like(Y) if len(rest) > 1 else Y
    for run in rest[:-1]:
        _gram_of(Y, R)
        _times(_polynomial(small, run), Y, X)
        X, Y = Y, X
    _gram_of(Y, R)
    Q = _polynomial(small, rest[-1])
    for piece in pieces:
        _write(Q[piece.at], Y[piece.at], piece.target)


def _runs(X: Tensor, arithmetic: Arithmetic) -> list[Sequence[Coefficients]]:
    """The steps between restarts; with one before every step they are the standard iteration."""
    steps = schedule(arithmetic)
    gram = arithmetic.iteration != "standard" and gram_pays(*X.shape[-2:])
    restarts = arithmetic.restarts if gram else range(1, len(steps))
    return segments(steps, restarts) or [()]


def _operand(source: Tensor, dtype: torch.dtype, arithmetic: Arithmetic) -> Tensor:
    """Blocks as BLAS wants them: the source itself, or a copy if it lies otherwise in memory."""
    if arithmetic.pre_cast is not None:
        source = source.to(getattr(torch, arithmetic.pre_cast))
    if _lies_well(source, dtype):
        return source
    return source.new_empty(source.shape, dtype=dtype).copy_(source)


def _lies_well(X: Tensor, dtype: torch.dtype) -> bool:
    return X.dtype == dtype and X.is_contiguous() and X.data_ptr() % _ALIGNMENT == 0


def _scaled(x: Tensor, R: Tensor, given: bool, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """Divides Gram matrices by squared norms; the blocks, and what else they are multiplied by.

    A block whose squares would over- or underflow is multiplied by a power of two first, in a copy
    if the blocks are as they were given. Which are is decided by each block alone, so that its
    neighbours' bits do not depend on it.
    """
    trace = R.diagonal(dim1=-2, dim2=-1).sum(-1)
    powers = torch.ones(len(x), dtype=torch.float64, device=x.device)
    for i in (~((trace > _SAFE[0]) & (trace < _SAFE[1]))).nonzero().flatten().tolist():
        x, given = (x.clone() if given else x), False
        x[i], powers[i] = power_of_two(x[i])
        _gram_of(x[i : i + 1], R[i : i + 1])
        trace[i] = R[i].diagonal().sum()
    divisor = denominator(trace.double().sqrt() * powers, arithmetic)
    scale = (powers / divisor).to(x.dtype).view(-1, 1, 1)
    R.mul_(scale.square())
    return x, scale


def _gram_of(X: Tensor, out: Tensor) -> None:
    """The Gram matrix on the short side."""
    torch.bmm(*((X.mT, X) if _is_tall(X) else (X, X.mT)), out=out)


def _times(Q: Tensor, X: Tensor, out: Tensor) -> None:
    """QX, or XQ for more rows than columns."""
    torch.bmm(*((X, Q) if _is_tall(X) else (Q, X)), out=out)


def _write(Q: Tensor, X: Tensor, target: Tensor) -> None:
    if _lies_well(target, X.dtype):
        _times(Q, X, target)
    else:
        out = torch.empty_like(X)
        _times(Q, X, out)
        target.copy_(out)


def _is_tall(X: Tensor) -> bool:
    return X.size(-2) > X.size(-1)


def _polynomial(small: Sequence[Tensor], run: Sequence[Coefficients]) -> Tensor:
    """The Q of a run of steps, from the Gram matrix in the first buffer."""
    R, Z, Q, T = small
    if not run:
        Q.zero_().diagonal(dim1=-2, dim2=-1).fill_(1)
    for i, (a, b, c) in enumerate(run):
        torch.baddbmm(R, R, R, beta=b, alpha=c, out=Z)
        if i == 0:
            Q.copy_(Z).diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            torch.baddbmm(Q, Z, Q, beta=a, out=T)
            Q, T = T, Q
        if i + 1 < len(run):
            torch.baddbmm(R, R, Z, beta=a, out=T)
            torch.baddbmm(T, Z, T, beta=a, out=R)
    return Q
