"""The kernel: one program a block, which runs a list of operations on it.

Promised: a block's result depends on its own bits, its shape, the dtype and the binary, and on
nothing else. One program touches one block at a time, in scratch that is its own; tiles come from a
table; every element is summed by one program in ascending order; there are no atomics. The number
of blocks only says how often the outermost loop runs.

Rounding points are those of the operations (:mod:`muonsplit.kernels.program`). Products are summed
in float32, from operands that are rounded; float32 operands are multiplied as they are (``ieee``).

Scratch is padded to whole tiles. What lies beyond d rows and columns within a row of tiles is zero,
because the panel enters with zeros around it; what lies beyond that is never written, and no tile
that is kept is made of it.

In the interpreter bfloat16 has two faults, which ``INTERPRETED`` avoids: ``dot`` multiplies bit
patterns, and a cast truncates.
"""

# Arguments stand in groups; triton.jit compares types with == and needs its branches.
# fmt: off
# ruff: noqa: SIM300, SIM102, RET505
import triton
import triton.language as tl

# Whether these functions were made for the interpreter: TRITON_INTERPRET=1 when this was imported.
INTERPRETED: bool = triton.knobs.runtime.interpret

# The interpreter prepares every call of its own functions anew, which takes longer than the call.
_part = (lambda function: function) if INTERPRETED else triton.jit

# An operation is as many integers and as many floats in the tables.
_INTEGERS = tl.constexpr(7)
_FLOATS = tl.constexpr(3)
# muonsplit.kernels.program.Kind
_GRAM = tl.constexpr(0)
_ELEMENT = tl.constexpr(1)
_PRODUCT = tl.constexpr(2)
# Rows at once where nothing is multiplied; it divides every tile.
_ROWS = tl.constexpr(16)


@_part
def _rounded(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """x, float32, rounded to the nearest number of a dtype; float32."""
    if DTYPE == tl.float32:
        return x
    elif DTYPE == tl.bfloat16 and INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        even = bits + 0x7FFF + ((bits >> 16) & 1)
        return tl.where(x == x, (even & 0xFFFF0000).to(tl.float32, bitcast=True), x)
    else:
        return x.to(DTYPE).to(tl.float32)


@_part
def _dot(left, right, acc, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee")


@_part
def _whole(size, TILE: tl.constexpr):
    """A size in whole tiles."""
    return (size + TILE - 1) // TILE * TILE


@_part
def _divisor(
    X, factor, epsilon, depth, length,
    D: tl.constexpr, N: tl.constexpr, LD: tl.constexpr, ND: tl.constexpr, BN: tl.constexpr,
    NORM: tl.constexpr, CLAMP: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """What a block is divided by: its norm with factor and ε; one for a zero block."""
    rows, cols = tl.arange(0, _ROWS)[:, None], tl.arange(0, BN)[None, :]
    squares = tl.full((_ROWS, BN), 0.0, tl.float32)
    for m in tl.range(0, depth, _ROWS, disable_licm=True):
        for n in tl.range(0, length, BN, disable_licm=True):
            inside = (m + rows < D) & (n + cols < N)
            x = tl.load(X + (m + rows) * LD + (n + cols) * ND, mask=inside, other=0.0)
            x = _rounded(x.to(tl.float32), NORM, INTERPRETED)
            squares += x * x
    norm = _rounded(tl.sqrt_rn(tl.sum(squares)), NORM, INTERPRETED)
    norm = _rounded(norm * factor, NORM, INTERPRETED)
    if CLAMP:
        norm = _rounded(tl.where(norm < epsilon, epsilon, norm), NORM, INTERPRETED)
    else:
        norm = _rounded(norm + epsilon, NORM, INTERPRETED)
    return tl.where(norm == 0.0, 1.0, norm)


@_part
def _enter(
    X, Y, divisor, depth, length,
    D: tl.constexpr, N: tl.constexpr, LD: tl.constexpr, ND: tl.constexpr,
    P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DTYPE: tl.constexpr, NORM: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """A panel: the block over its norm, with zeros around it."""
    rows, cols = tl.arange(0, _ROWS)[:, None], tl.arange(0, BN)[None, :]
    for m in tl.range(0, _whole(depth, BM), _ROWS, disable_licm=True):
        for n in tl.range(0, length, BN, disable_licm=True):
            inside = (m + rows < D) & (n + cols < N)
            x = tl.load(X + (m + rows) * LD + (n + cols) * ND, mask=inside, other=0.0)
            x = _rounded(x.to(tl.float32), NORM, INTERPRETED)
            x = tl.where(inside, tl.div_rn(x, tl.full((_ROWS, BN), divisor, tl.float32)), 0.0)
            x = _rounded(_rounded(x, NORM, INTERPRETED), DTYPE, INTERPRETED)
            tl.store(Y + (m + rows) * P + n + cols, x.to(DTYPE))


@_part
def _gram(
    Y, A, depth, length,
    D: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    DTYPE: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """A = q(Y Yᵀ)."""
    rows, cols, inner = tl.arange(0, BM)[:, None], tl.arange(0, BN), tl.arange(0, BK)[None, :]
    for m in tl.range(0, depth, BM, disable_licm=True):
        for n in tl.range(0, depth, BN, disable_licm=True):
            acc = tl.full((BM, BN), 0.0, tl.float32)
            for k in range(0, length, BK):
                left = tl.load(Y + (m + rows) * P + k + inner)
                at = Y + (n + cols[:, None]) * P + k + inner
                if BN <= BM or D % BN == 0:
                    right = tl.load(at)
                else:
                    # Where a tile is wider than high, these rows may never have been written.
                    right = tl.load(at, mask=n + cols[:, None] < D, other=0.0)
                acc = _dot(left, tl.trans(right), acc, INTERPRETED)
            at = A + (m + rows) * S + n + cols[None, :]
            tl.store(at, _rounded(acc, DTYPE, INTERPRETED).to(DTYPE))


@_part
def _element(
    A, B, depth, alpha, diagonal,
    D: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DTYPE: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """B = q(q(αA) + δI), over all rows of the tiles that were written."""
    rows, cols = tl.arange(0, _ROWS)[:, None], tl.arange(0, BN)[None, :]
    for m in tl.range(0, _whole(depth, BM), _ROWS, disable_licm=True):
        for n in tl.range(0, depth, BN, disable_licm=True):
            at = (m + rows) * S + n + cols
            x = _rounded(tl.load(A + at).to(tl.float32) * alpha, DTYPE, INTERPRETED)
            on = (m + rows == n + cols) & (m + rows < D)
            x = _rounded(tl.where(on, x + diagonal, x), DTYPE, INTERPRETED)
            tl.store(B + at, x.to(DTYPE))


@_part
def _sum(C, at, acc, apart, alpha, beta, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """βC + α·acc, rounded once or in parts; C is not read where β is zero."""
    c = tl.load(C + at, mask=tl.zeros_like(acc) + beta != 0.0, other=0.0).to(tl.float32)
    if apart:
        product = _rounded(alpha * _rounded(acc, DTYPE, INTERPRETED), DTYPE, INTERPRETED)
        result = _rounded(beta * c, DTYPE, INTERPRETED) + product
    else:
        result = beta * c + alpha * acc
    return _rounded(result, DTYPE, INTERPRETED)


@_part
def _product(
    L, R, C, OUT, depth, apart, alpha, beta,
    D: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    DTYPE: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """OUT = βC + αLR, all d × d."""
    rows, cols = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    inner = tl.arange(0, BK)
    for m in tl.range(0, depth, BM, disable_licm=True):
        for n in tl.range(0, depth, BN, disable_licm=True):
            acc = tl.full((BM, BN), 0.0, tl.float32)
            for k in range(0, depth, BK):
                left = tl.load(L + (m + rows) * S + k + inner[None, :])
                right = tl.load(R + (k + inner[:, None]) * S + n + cols)
                acc = _dot(left, right, acc, INTERPRETED)
            at = (m + rows) * S + n + cols
            x = _sum(C, at, acc, apart, alpha, beta, DTYPE, INTERPRETED)
            tl.store(OUT + at, x.to(DTYPE))


@_part
def _apply(
    Q, Y, NEXT, OUT, depth, length, last, apart, beta, scale,
    D: tl.constexpr, N: tl.constexpr, TALL: tl.constexpr,
    S: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    DTYPE: tl.constexpr, RESULT: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """NEXT = βY + QY; the last one of a wide block is written where the result goes."""
    rows, cols = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    inner = tl.arange(0, BK)
    for n in tl.range(0, length, BN, disable_licm=True):
        for m in tl.range(0, depth, BM, disable_licm=True):
            acc = tl.full((BM, BN), 0.0, tl.float32)
            for k in range(0, depth, BK):
                left = tl.load(Q + (m + rows) * S + k + inner[None, :])
                right = tl.load(Y + (k + inner[:, None]) * P + n + cols)
                acc = _dot(left, right, acc, INTERPRETED)
            at = (m + rows) * P + n + cols
            x = _sum(Y, at, acc, apart, 1.0, beta, DTYPE, INTERPRETED)
            if TALL or not last:
                tl.store(NEXT + at, x.to(DTYPE))
            else:
                x = _rounded(scale * _rounded(x, RESULT, INTERPRETED), RESULT, INTERPRETED)
                inside = (m + rows < D) & (n + cols < N)
                tl.store(OUT + (m + rows) * N + n + cols, x.to(RESULT), mask=inside)


@_part
def _leave(
    Y, OUT, depth, length, scale,
    D: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr,
    RESULT: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """The last panel of a tall block, transposed back and scaled."""
    rows, cols = tl.arange(0, _ROWS)[:, None], tl.arange(0, BN)[None, :]
    for m in tl.range(0, depth, _ROWS, disable_licm=True):
        for n in tl.range(0, length, BN, disable_licm=True):
            inside = (m + rows < D) & (n + cols < N)
            x = tl.load(Y + (m + rows) * P + n + cols, mask=inside, other=0.0).to(tl.float32)
            x = _rounded(scale * _rounded(x, RESULT, INTERPRETED), RESULT, INTERPRETED)
            tl.store(OUT + m + rows + (n + cols) * D, x.to(RESULT), mask=inside)


@_part
def _operate(
    integers, floats, MATRICES, PANELS, OUT, last, depth, length, scale,
    D: tl.constexpr, N: tl.constexpr, TALL: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    DTYPE: tl.constexpr, RESULT: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """One operation; the last one also writes the result."""
    kind = tl.load(integers)
    out = MATRICES + tl.load(integers + 1) * (S * S)
    left = MATRICES + tl.load(integers + 2) * (S * S)
    apart = tl.load(integers + 5) != 0
    now = tl.load(integers + 6)
    panel = PANELS + now * (S * P)
    alpha, beta = tl.load(floats), tl.load(floats + 1)
    if kind == _GRAM:
        _gram(panel, out, depth, length, D, S, P, BM, BN, BK, DTYPE, INTERPRETED)
    elif kind == _ELEMENT:
        diagonal = tl.load(floats + 2)
        _element(left, out, depth, alpha, diagonal, D, S, BM, BN, DTYPE, INTERPRETED)
    elif kind == _PRODUCT:
        right = MATRICES + tl.load(integers + 3) * (S * S)
        added = MATRICES + tl.load(integers + 4) * (S * S)
        _product(
            left, right, added, out, depth, apart, alpha, beta,
            D, S, BM, BN, BK, DTYPE, INTERPRETED,
        )
    else:
        following = PANELS + (1 - now) * (S * P)
        _apply(
            left, panel, following, OUT, depth, length, last, apart, beta, scale,
            D, N, TALL, S, P, BM, BN, BK, DTYPE, RESULT, INTERPRETED,
        )
        if TALL:
            if last:
                tl.debug_barrier()
                _leave(following, OUT, depth, length, scale, D, N, P, BN, RESULT, INTERPRETED)


@triton.jit(do_not_specialize=["blocks", "ops", "depth", "length"])
def newton_schulz_kernel(
    X, OUT, MATRICES, PANELS, INTEGERS, FLOATS,
    blocks, ops, depth, length, factor, epsilon, scale,
    D: tl.constexpr, N: tl.constexpr, TALL: tl.constexpr,
    S: tl.constexpr, P: tl.constexpr, SLOTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    DTYPE: tl.constexpr, NORM: tl.constexpr, CLAMP: tl.constexpr, RESULT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Runs the operations on every block that falls to this program.

    X, OUT: ``[blocks, rows, columns]``, contiguous; the short side d is rows unless ``TALL``.
    MATRICES: ``[programs, SLOTS, S, S]``, PANELS: ``[programs, 2, S, P]``, scratch.
    INTEGERS, FLOATS: the operations, see :func:`muonsplit.kernels.launch.tables`.
    depth, length: d and n again, as numbers: loops of a known length are unrolled, and spill.
    """
    LD: tl.constexpr = 1 if TALL else N
    ND: tl.constexpr = D if TALL else 1
    first = tl.program_id(0).to(tl.int64)
    matrices, panels = MATRICES + first * (SLOTS * S * S), PANELS + first * (2 * S * P)
    for block in range(first, blocks, tl.num_programs(0)):
        at = block * (D * N)  # more than 2³¹ elements are addressed in 64 bits
        divisor = _divisor(
            X + at, factor, epsilon, depth, length, D, N, LD, ND, BN, NORM, CLAMP, INTERPRETED,
        )
        _enter(
            X + at, panels, divisor, depth, length,
            D, N, LD, ND, P, BM, BN, DTYPE, NORM, INTERPRETED,
        )
        # Other threads of this program read what these have written.
        tl.debug_barrier()
        for i in tl.range(0, ops, disable_licm=True):
            _operate(
                INTEGERS + i * _INTEGERS, FLOATS + i * _FLOATS, matrices, panels, OUT + at,
                i + 1 == ops, depth, length, scale,
                D, N, TALL, S, P, BM, BN, BK, DTYPE, RESULT, INTERPRETED,
            )
            tl.debug_barrier()
