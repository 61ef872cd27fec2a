"""What every kernel must do, as questions that a faulty one answers wrongly.

Each takes something with the signature of :func:`muonsplit.kernels.launch.launch` and says whether
the property holds. Bits are compared as integers: ``torch.equal`` calls +0 and −0 equal.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from muonsplit.dialect import DIALECTS, Arithmetic
from muonsplit.kernels import Ends, Kind, Op, Program
from muonsplit.kernels.launch import constants, tables
from muonsplit.kernels.tiles import Tile
from muonsplit.newton_schulz import newton_schulz
from muonsplit.newton_schulz.accelerated import ends_of
from muonsplit.newton_schulz.program import program
from muonsplit.observe.tolerance import rounding_bound

GRAM = DIALECTS["deepspeed-0.19.8"].arithmetic
STANDARD = DIALECTS["optax-0.2.8"].arithmetic
HALF = DIALECTS["dtensor-muon-0.1.0"].arithmetic
SMALL = Tile(16, 16, 16, 4, 2)
UNNORMALISED = {"factor": 0.0, "epsilon": 1.0}
INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


class Launch(Protocol):
    """A kernel: batch, program, ends, and optionally a tile and a number of programs."""

    def __call__(
        self,
        X: Tensor,
        program: Program,
        ends: Ends,
        entry: Tile | None = None,
        programs: int | None = None,
    ) -> Tensor: ...


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = INTEGERS[a.dtype]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def ends(dtype: torch.dtype = torch.float32, **how: float) -> Ends:
    return Ends(dtype, torch.float32, dtype, **{"epsilon": 1e-7, **how})


def run(launch: Launch, X: Tensor, arithmetic: Arithmetic, **how: Tile | int) -> Tensor:
    around = ends_of(X, arithmetic)
    made = program(arithmetic, X.shape[1], X.shape[2], around.dtype)
    return launch(X, made, around, **how)  # pyright: ignore[reportArgumentType]


def agrees(launch: Launch) -> bool:
    """Float32 results are the exact ones up to rounding, wide, tall and square."""
    for arithmetic in (GRAM, STANDARD):
        for shape in ((2, 20, 40), (1, 40, 20), (1, 20, 20)):
            X = normal(*shape)
            exact = newton_schulz(X.double(), arithmetic.exact())
            for x, found, wanted in zip(X, run(launch, X, arithmetic), exact, strict=True):
                off = (found.double() - wanted).norm() / wanted.norm()
                if not off <= rounding_bound(x, arithmetic):
                    return False
    return True


def rounds_as_said(launch: Launch) -> bool:
    """In bfloat16, where a rounding that is left out or added is seen, most bits are emulated."""
    X = normal(4, 20, 40)
    emulated = newton_schulz(X, HALF).to(torch.bfloat16)
    # Sums in another order are rounded otherwise now and then, and then the block differs.
    found = run(launch, X, HALF)
    return sum(same_bits(a, b) for a, b in zip(found, emulated, strict=True)) >= 3


def exact_on_integers(launch: Launch) -> bool:
    """(XXᵀ)X of small integers, with every slot and operation used: no order of sums matters."""
    X = normal(2, 20, 40).div(2.0).trunc().clamp(-1, 1)  # few, so that all sums stay below 2²⁴
    ops = (
        Op(Kind.GRAM, 1),
        Op(Kind.ELEMENT, 2, 1, alpha=2.0, diagonal=3.0),
        Op(Kind.PRODUCT, 3, 1, 2),  # with what was never written, times zero
        Op(Kind.PRODUCT, 0, 1, 3, 2, alpha=1.0, beta=-2.0),
        Op(Kind.APPLY, left=1, beta=5.0),
        Op(Kind.APPLY, left=2, beta=1.0),
        Op(Kind.ELEMENT, 0, 0, alpha=1.0, diagonal=1.0),
        Op(Kind.APPLY, left=0),
    )
    found = launch(X, Program(ops, 4), ends(**UNNORMALISED), SMALL)
    Y = X.to(torch.int64)
    A = Y @ Y.mT
    eye = torch.eye(20, dtype=torch.int64)
    B = 2 * A + 3 * eye
    C = A @ (A @ B) - 2 * B + eye
    Y = A @ Y + 5 * Y
    Y = C @ (B @ Y + Y)
    assert int(Y.abs().max()) < 1 << 24
    return torch.equal(found.double(), Y.double())


def shards_keep_bits(launch: Launch) -> bool:
    """Float32: any run of heads, any order, alone or together."""
    X = normal(4, 20, 40)
    for arithmetic in (GRAM, STANDARD):
        whole = run(launch, X, arithmetic)
        order = [2, 3, 0, 1]
        shards = (X[:2], X[2:3], X[order])
        wanted = (whole[:2], whole[2:3], whole[order])
        found = (run(launch, shard, arithmetic) for shard in shards)
        if not all(same_bits(a, b) for a, b in zip(found, wanted, strict=True)):
            return False
    return True


def any_number_of_programs(launch: Launch) -> bool:
    """The blocks may be shared among any number of programs."""
    X = normal(3, 20, 24)
    found = [run(launch, X, GRAM, programs=n) for n in (1, 2, 3)]
    return all(same_bits(found[0], other) for other in found[1:])


def neighbours_do_not_show(launch: Launch) -> bool:
    """All other blocks, and what lies around the batch, are NaN: the same bits. Scratch is, too."""
    for shape in ((2, 20, 41), (2, 41, 20)):
        X = normal(*shape)
        alone = run(launch, X, GRAM)
        held = torch.full((4, *shape[1:]), torch.nan)
        held[1] = X[1]
        if not same_bits(run(launch, held[:2], GRAM)[1], alone[1]):
            return False
    return True


def scales_and_rounds_last(launch: Launch) -> bool:
    """The scale is applied to the rounded result, which is rounded again."""
    X = normal(2, 20, 24)
    made = program(GRAM, 20, 24, torch.float32)
    plain, scaled = (launch(X, made, ends(scale=s)) for s in (1.0, 0.3))
    low = launch(X, made, ends(scale=0.3)._replace(result=torch.float16))
    # The factor is a float32 number.
    factor = torch.tensor(0.3)
    return same_bits(scaled, factor * plain) and same_bits(
        low, (factor * plain.half().float()).half()
    )


PROPERTIES: Sequence[Callable[[Launch], bool]] = (
    exact_on_integers,
    agrees,
    neighbours_do_not_show,
    shards_keep_bits,
    any_number_of_programs,
    scales_and_rounds_last,
    rounds_as_said,
)


def launch_of(kernel: object, choose: Callable[[Tensor], Tile] = lambda X: SMALL) -> Launch:
    """A launch of another kernel than ours, without a GPU; scratch, and all around, is NaN.

    ``choose`` takes the batch and says which tile, where nobody else does.
    """

    def launched(
        X: Tensor,
        program: Program,
        ends: Ends,
        entry: Tile | None = None,
        programs: int | None = None,
    ) -> Tensor:
        blocks, rows, cols = X.shape
        around = torch.full((X.numel() + 512,), torch.nan, dtype=X.dtype)
        X = around[256:-256].view(X.shape).copy_(X)
        entry = entry or choose(X)
        fixed = constants(rows, cols, program, ends, entry, interpreted=True)
        count = min(blocks, programs or 2)
        S, P = fixed["S"], fixed["P"]
        matrices = torch.full((count, program.slots, S, S), torch.nan, dtype=ends.dtype)
        panels = torch.full((count, 2, S, P), torch.nan, dtype=ends.dtype)
        out = torch.full_like(X, torch.nan, dtype=ends.result)
        numbers = (blocks, len(program.ops), fixed["D"], fixed["N"])
        held = (X, out, matrices, panels, *tables(program, X.device))
        grid = (count,)
        kernel[grid](*held, *numbers, ends.factor, ends.epsilon, ends.scale, **fixed)  # pyright: ignore
        return out

    return launched
