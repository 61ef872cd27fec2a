"""The quick road on a CPU: fused products, reused buffers, as many blocks at once as stay in cache.

Floor: 8·d²·n + 28·d³ operations a d × n block by Gram with one restart, 20·d²·n + 10·d³ by the
standard iteration, over the rate of sgemm. Gram pays off where n > 1.5·d.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.dialect.coefficients import Coefficients, schedule
from muonsplit.newton_schulz.gram import segments
from muonsplit.newton_schulz.normalize import normalized

# Measured on two kinds of CPU: what the second and a share of the third cache hold.
_CACHE_BYTES = 8 << 20
_ALIGNMENT = 64  # bytes; BLAS chooses kernels by it

_Piece = tuple[Tensor, Tensor]


def aligned(X: Tensor) -> bool:
    """Whether every block of a batch, and of its Gram matrices, starts on a 64-byte boundary.

    BLAS chooses kernels by alignment on a CPU, so elsewhere in a batch a block would be summed in
    another order. On an accelerator equal bits for another batch are not ours to promise.
    """
    short, long = sorted(X.shape[-2:])
    return X.device.type != "cpu" or (short * short % 16 == 0 and short * long % 16 == 0)


def gram_pays(short: int, long: int) -> bool:
    """Whether the Gram iteration with one restart takes fewer operations than the standard one."""
    return 2 * long > 3 * short


def orthogonalize_into(
    sources: Sequence[Tensor], targets: Sequence[Tensor], arithmetic: Arithmetic
) -> None:
    """Orthogonalises the blocks of several batches of one shape, without the scale.

    Beside sources and targets it holds two blocks and four Gram matrices for each block that is
    worked on at once.

    Args:
        sources: Batches ``[B, M, N]`` of one M and N, read only, any strides.
        targets: As many of the same shapes, written.
        arithmetic: Coefficients, steps, restarts and normalisation; the dtype it computes in.
    """
    rows, cols = sources[0].shape[-2:]
    dtype = arithmetic.dtype_on(sources[0].device)
    workspace = _Workspace(min(rows, cols), max(rows, cols), dtype, sources[0])
    at_once = workspace.at_once if aligned(sources[0]) else 1
    for pieces in _chunks(sources, targets, at_once):
        _chunk(pieces, workspace, arithmetic)


class _Workspace:
    """Buffers for as many blocks as are worked on at once."""

    def __init__(self, short: int, long: int, dtype: torch.dtype, like: Tensor) -> None:
        size = torch.finfo(dtype).bits // 8
        self.at_once = max(1, _CACHE_BYTES // (size * (2 * short * long + 4 * short * short)))
        self._shapes = ((short, long),) * 2 + ((short, short),) * 4
        self._like, self._dtype = like, dtype
        self._made: tuple[Tensor, ...] = ()

    def take(self, blocks: int) -> tuple[Tensor, ...]:
        """Two buffers of whole blocks and four of Gram matrices, uninitialised."""
        if not self._made or len(self._made[0]) < blocks:
            self._made = tuple(
                self._like.new_empty((blocks, *s), dtype=self._dtype) for s in self._shapes
            )
        return tuple(buffer[:blocks] for buffer in self._made)


def _chunks(
    sources: Sequence[Tensor], targets: Sequence[Tensor], at_once: int
) -> Iterator[list[_Piece]]:
    """Runs of blocks that fill a chunk, across the ends of batches."""
    chunk: list[_Piece] = []
    room = at_once
    for source, target in zip(sources, targets, strict=True):
        start = 0
        while start < len(source):
            stop = min(len(source), start + room)
            chunk.append((source[start:stop], target[start:stop]))
            room -= stop - start
            start = stop
            if room == 0:
                yield chunk
                chunk, room = [], at_once
    if chunk:
        yield chunk


def _chunk(pieces: Sequence[_Piece], workspace: _Workspace, arithmetic: Arithmetic) -> None:
    X, Y, *small = workspace.take(sum(len(source) for source, _ in pieces))
    start = 0
    for source, _ in pieces:
        _enter(source, X[start : start + len(source)], arithmetic)
        start += len(source)
    steps = schedule(arithmetic)
    if arithmetic.iteration != "standard" and gram_pays(*X.shape[-2:]):
        last = _gram(X, Y, small, segments(steps, arithmetic.restarts))
    else:
        last = _standard(X, Y, small, steps)
    start = 0
    for source, target in pieces:
        last.write(slice(start, start + len(source)), target)
        start += len(source)


def _enter(source: Tensor, into: Tensor, arithmetic: Arithmetic) -> None:
    """Normalises blocks into a buffer, the short side first."""
    if arithmetic.pre_cast is not None:
        source = source.to(getattr(torch, arithmetic.pre_cast))
    as_it_is = source.dtype == into.dtype and source[0].is_contiguous()
    if not as_it_is:
        # Norms over strided views sum in another order.
        source = source.to(into.dtype).contiguous()
    normalized(source, arithmetic, into.mT if _is_tall(source) else into)


class _Last(NamedTuple):
    """The last product of an iteration, left so that it can be written where it belongs."""

    C: Tensor | None
    a: float
    left: Tensor
    right: Tensor

    def write(self, blocks: slice, target: Tensor) -> None:
        """Writes aC + left·right, or left·right alone, of some of the blocks."""
        left, right = self.left[blocks], self.right[blocks]
        C = None if self.C is None else self.C[blocks]
        if _is_tall(target):
            left, right, C = right.mT, left.mT, None if C is None else C.mT
        fits = target.dtype == left.dtype and target[0].is_contiguous()
        out = (
            target if fits and target.data_ptr() % _ALIGNMENT == 0 else left.new_empty(target.shape)
        )
        if C is None:
            torch.bmm(left, right, out=out)
        else:
            torch.baddbmm(C, left, right, beta=self.a, out=out)
        if out is not target:
            target.copy_(out)


def _is_tall(X: Tensor) -> bool:
    return X.size(-2) > X.size(-1)


def _standard(
    X: Tensor, Y: Tensor, small: Sequence[Tensor], steps: Sequence[Coefficients]
) -> _Last:
    A, B, *_ = small
    for i, (a, b, c) in enumerate(steps):
        torch.bmm(X, X.mT, out=A)
        torch.baddbmm(A, A, A, beta=b, alpha=c, out=B)
        if i + 1 == len(steps):
            return _Last(X, a, B, X)
        torch.baddbmm(X, B, X, beta=a, out=Y)
        X, Y = Y, X
    return _nothing(X, A)


def _gram(
    X: Tensor, Y: Tensor, small: Sequence[Tensor], runs: Sequence[Sequence[Coefficients]]
) -> _Last:
    for run in runs:
        Q = _polynomial(X, small, run)
        if run is runs[-1]:
            return _Last(None, 1.0, Q, X)
        torch.bmm(Q, X, out=Y)
        X, Y = Y, X
    return _nothing(X, small[0])


def _polynomial(X: Tensor, small: Sequence[Tensor], run: Sequence[Coefficients]) -> Tensor:
    """The Q of a run of Gram steps."""
    R, Z, Q, T = small
    torch.bmm(X, X.mT, out=R)
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


def _nothing(X: Tensor, small: Tensor) -> _Last:
    """No step at all: the identity."""
    small.zero_().diagonal(dim1=-2, dim2=-1).fill_(1)
    return _Last(None, 1.0, small, X)
