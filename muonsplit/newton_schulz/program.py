"""An arithmetic as the list of operations that a kernel runs on one block."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from muonsplit.dialect import Arithmetic
from muonsplit.dialect.coefficients import Coefficients, schedule
from muonsplit.errors import InputError
from muonsplit.kernels.program import Kind, Op, Program
from muonsplit.newton_schulz.gram import on_gram, segments
from muonsplit.newton_schulz.products import PRODUCTS, STANDARD


@lru_cache(maxsize=256)
def program(arithmetic: Arithmetic, rows: int, cols: int, dtype: torch.dtype) -> Program:
    """The operations of an arithmetic on a block of ``rows`` × ``cols``.

    Rounding points are those of :func:`muonsplit.newton_schulz.newton_schulz`; the order in which
    a product is summed is the kernel's own.

    Args:
        arithmetic: Its coefficients, steps, restarts, form and iteration; ``fast`` is
            ``addmm_diagonal``, which rounds least often.
        rows: Rows of a block.
        cols: Columns.
        dtype: What the kernel iterates in.

    Raises:
        InputError: If there are no steps.
    """
    steps = schedule(arithmetic)
    if not steps:
        raise InputError("The kernels take at least one step, got steps=0.", "Use the reference.")
    form = "addmm_diagonal" if arithmetic.form == "fast" else arithmetic.form
    if not on_gram(rows, cols, arithmetic):
        return _standard(steps, STANDARD.get(form, form))
    right = rows > cols and arithmetic.tall == "right"
    return _gram(segments(steps, arithmetic.restarts), form, dtype, right=right)


def _standard(steps: Sequence[Coefficients], form: str) -> Program:
    A, B, spare = range(3)
    ops: list[Op] = []
    for a, b, c in steps:
        ops.append(Op(Kind.GRAM, A))
        if form == "factored":
            ops += [
                Op(Kind.ELEMENT, spare, A, alpha=c, diagonal=b),
                Op(Kind.PRODUCT, B, spare, A),
                Op(Kind.ELEMENT, B, B, diagonal=a),
                Op(Kind.APPLY, left=B),
            ]
        else:
            ops += _square(form, B, A, spare, b, c)
            ops.append(Op(Kind.APPLY, left=B, apart=not _fused(form), beta=a))
    return Program(tuple(ops), 3)


def _gram(
    runs: Sequence[Sequence[Coefficients]], form: str, dtype: torch.dtype, *, right: bool
) -> Program:
    products, apart = PRODUCTS[form], not (_fused(form) or form == "paren_gram")
    # A tall block enters transposed, and so do its products if it is multiplied from the right.
    q_first = (("right" if right else "left") in products.q_first) != right
    r_first = products.r_first != right
    ops: list[Op] = []

    def add(out: int, M: int, Z: int, a: float, *, m_first: bool) -> None:
        """The sum aM + MZ, or aM + ZM."""
        factors = (M, Z) if m_first else (Z, M)
        ops.append(Op(Kind.PRODUCT, out, *factors, M, apart, beta=a))

    for run in runs:
        R, Z, Q, free, spare = range(5)
        ops.append(Op(Kind.GRAM, R))
        for i, (a, b, c) in enumerate(run):
            ops += _square(form, Z, R, spare, b, c)
            if i == 0:
                held = float(torch.tensor(a, dtype=dtype)) if products.identity else a
                ops.append(Op(Kind.ELEMENT, Q, Z, diagonal=held))
            else:
                add(free, Q, Z, a, m_first=q_first)
                Q, free = free, Q
            if i + 1 < len(run):
                add(free, R, Z, a, m_first=r_first)
                add(R, free, Z, a, m_first=right)
        ops.append(Op(Kind.APPLY, left=Q))
    return Program(tuple(ops), 5)


def _square(form: str, out: int, A: int, spare: int, b: float, c: float) -> list[Op]:
    """The square bA + cA²."""
    if form == "matmul":
        scaled = Op(Kind.ELEMENT, spare, A, alpha=c)
        return [scaled, Op(Kind.PRODUCT, out, spare, A, A, apart=True, beta=b)]
    return [Op(Kind.PRODUCT, out, A, A, A, apart=not _fused(form), alpha=c, beta=b)]


def _fused(form: str) -> bool:
    return form in ("addmm", "addmm_diagonal")
