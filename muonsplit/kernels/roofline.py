"""What a launch of the kernel should take, from counts of what it does; nothing here is measured.

Assumed of the kernel, and it is all that the numbers rest on:

- Products, memory and cache each run at their full rate beside the others, so that the slowest of
  the three decides. A tile that waits for its first operands is not modelled.
- Each tile of a product reads both its operands from the cache anew: no hits in a multiprocessor's
  own cache, no multicast. Products are of whole tiles; what is padding is multiplied and read too.
- A block is read from memory twice, for its norm and to enter, and its result is written once.
- Panels stay in the cache if the scratch of all programs that run fits, matrices if theirs does.
  Else each operation moves each panel, or each matrix, between cache and memory once. In truth
  some would be moved more often: at worst everything goes at the rate of memory.
- A program has its share of a whole device, also where too few blocks are there to fill it: what
  remains idle is lost. So one with four warps that is alone on a multiprocessor counts as half.
- Elementwise operations cost only their traffic, and the launch overlaps with what it launches.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from muonsplit.kernels.program import Kind, Op, Program
from muonsplit.kernels.tiles import Tile, padded, tile

# Kernels of the loop form beside its operations: the norm, and the division.
_NORMALISATION = 2


@dataclass(frozen=True, slots=True)
class Machine:
    """A device, by its rates.

    Attributes:
        name: What it is called.
        architecture: Its key in the tile table.
        half_flops: Operations a second on bfloat16 and float16 operands.
        single_flops: The same on float32 operands, without tensor cores.
        memory_bandwidth: Bytes a second.
        cache_bandwidth: Bytes a second of the cache that all multiprocessors share.
        cache_bytes: Its size.
        multiprocessors: How many there are.
        launch_s: Seconds from one launch to the next, as a host issues them.
    """

    name: str
    architecture: str
    half_flops: float
    single_flops: float
    memory_bandwidth: float
    cache_bandwidth: float
    cache_bytes: int
    multiprocessors: int
    launch_s: float


# What large products and copies reach; float32, the cache and the launch are assumed.
H200 = Machine("H200", "sm_90", 790e12, 60e12, 4.3e12, 5.5e12, 60_000_000, 132, 5e-6)


class Prediction(NamedTuple):
    """One launch.

    Attributes:
        flop: Operations of the products that are asked for.
        executed: Operations of the whole tiles that are multiplied.
        hbm_bytes: Between memory and the shared cache.
        l2_bytes: Between the shared cache and multiprocessors.
        programs: How many the device holds at once.
        waves: How many blocks the busiest of them runs.
        quantisation: Time over that of a device that is always full.
        bound: Which rate decides: ``products``, ``memory`` or ``cache``.
        seconds: How long it takes.
        launches: How many: one.
    """

    flop: int
    executed: int
    hbm_bytes: int
    l2_bytes: int
    programs: int
    waves: int
    quantisation: float
    bound: str
    seconds: float
    launches: int = 1


class Loop(NamedTuple):
    """The loop form: block after block, a kernel an operation.

    Attributes:
        launches: How many.
        seconds: How long it takes: to launch them, or to multiply at the full rate.
    """

    launches: int
    seconds: float


class _Traffic(NamedTuple):
    """One operation on one block: products executed, bytes of tiles, panels, matrices moved."""

    executed: int
    tiles: int
    panels: int
    matrices: int


def predict(
    blocks: int, rows: int, cols: int, program: Program, dtype: torch.dtype, machine: Machine = H200
) -> Prediction:
    """Predicts one launch on a batch of blocks in float32, with a result in the iteration's dtype.

    Args:
        blocks: How many.
        rows: Rows of a block.
        cols: Columns.
        program: What is done with one.
        dtype: Of the iteration.
        machine: Where.
    """
    entry = tile(rows, cols, dtype, machine.architecture)
    short, long = sorted((rows, cols))
    each = [_traffic(op, short, long, entry, dtype.itemsize) for op in program.ops]
    executed, tiles, panels, matrices = (sum(column) for column in zip(*each, strict=True))
    programs = machine.multiprocessors * entry.at_once
    waves = -(-blocks // programs)
    ends = short * long * (2 * torch.float32.itemsize + dtype.itemsize)
    # The last panel that is written stands for the one that enters: a wide block's is the result.
    # A tall block's is written, and read once more to be transposed.
    more = 2 * _panel(short, long, entry, dtype.itemsize) if rows > cols else 0
    held, panels_held = _scratch(short, long, program.slots, entry, dtype.itemsize)
    fit = machine.cache_bytes // min(blocks, programs)
    streamed = panels + more if held + panels_held > fit else 0
    streamed += matrices if held > fit else 0
    hbm, l2 = blocks * (ends + streamed), blocks * (ends + tiles + more)
    took = {
        "products": blocks * executed / _flops(dtype, machine),
        "memory": hbm / machine.memory_bandwidth,
        "cache": l2 / machine.cache_bandwidth,
    }
    bound = max(took, key=took.__getitem__)
    quantisation = waves * programs / blocks
    return Prediction(
        flop=blocks * program.operations(short, long),
        executed=blocks * executed,
        hbm_bytes=hbm,
        l2_bytes=l2,
        programs=programs,
        waves=waves,
        quantisation=quantisation,
        bound=bound,
        seconds=max(machine.launch_s, took[bound] * quantisation),
    )


def loop(
    blocks: int, rows: int, cols: int, program: Program, dtype: torch.dtype, machine: Machine = H200
) -> Loop:
    """Predicts the same work done block after block, with a kernel an operation.

    Its arguments are those of :func:`predict`.
    """
    launches = blocks * (len(program.ops) + _NORMALISATION)
    flop = blocks * program.operations(*sorted((rows, cols)))
    return Loop(launches, max(launches * machine.launch_s, flop / _flops(dtype, machine)))


def _flops(dtype: torch.dtype, machine: Machine) -> float:
    return machine.single_flops if dtype is torch.float32 else machine.half_flops


def _panel(short: int, long: int, entry: Tile, size: int) -> int:
    """Bytes of what is used of a panel, or of a matrix where both sides are short."""
    return padded(short, entry.rows) * padded(long, entry.cols) * size


def _scratch(short: int, long: int, slots: int, entry: Tile, size: int) -> tuple[int, int]:
    """Bytes that one program holds: of matrices, and of panels."""
    side, length = entry.scratch(short, long)
    return slots * side * side * size, 2 * side * length * size


def _traffic(op: Op, short: int, long: int, entry: Tile, size: int) -> _Traffic:
    panel, matrix = (_panel(short, width, entry, size) for width in (long, short))
    if op.kind is Kind.ELEMENT:
        return _Traffic(0, 2 * matrix, 0, 2 * matrix)
    written = panel if op.kind is Kind.APPLY else matrix
    terms = padded(long if op.kind is Kind.GRAM else short, entry.inner)
    products = 2 * written // size * terms
    # For each element of a tile that is written, its row and its column are shared by the tile.
    operands = written * terms * (entry.rows + entry.cols) // (entry.rows * entry.cols)
    tiles = operands + written * (2 if op.beta else 1)
    if op.kind is Kind.PRODUCT:
        read = {op.left, op.right, op.added} if op.beta else {op.left, op.right}
        return _Traffic(products, tiles, 0, (1 + len(read)) * matrix)
    return _Traffic(products, tiles, panel if op.kind is Kind.GRAM else 2 * panel, matrix)
