"""The tile table: which piece of a matrix a program works on at once, and with how many threads.

A pure function of a block's shape, the dtype and the architecture, and of nothing else: the number
of blocks, heads, layers and ranks cannot reach it, so the result of a shard is the shard of the
result. Nothing is tuned at run time; what is measured is entered here by hand.

Limits that the entries keep, checked by ``muonsplit.kernels.compile_gate``: shared memory of one
program (sm_80 163 KiB, sm_90 and sm_100 227 KiB, gfx942 64 KiB), no spilled registers, tensor-core
instructions for half precision.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from muonsplit.errors import InputError

LARGEST = 576
# Architectures that entries are compiled for, and the interpreter, which has none of its own.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
INTERPRETER = "interpreter"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Tile(NamedTuple):
    """One entry.

    Attributes:
        rows: Rows of a tile of the result.
        cols: Columns of it.
        inner: Terms of a product at once; divides ``rows`` and ``cols``.
        warps: Warps of a program.
        stages: Loads in flight.
        registers: The most a thread may have, if the assembler is told; else it takes fewer, to
            make room for a second program, and spills.
    """

    rows: int
    cols: int
    inner: int
    warps: int
    stages: int
    registers: int = 0

    @property
    def name(self) -> str:
        """As it is written: ``128x128x64 w8 s3``."""
        limit = f" r{self.registers}" if self.registers else ""
        return f"{self.rows}x{self.cols}x{self.inner} w{self.warps} s{self.stages}{limit}"

    @property
    def at_once(self) -> int:
        """Programs that a multiprocessor holds: eight warps."""
        return max(1, 8 // self.warps)

    def scratch(self, short: int, long: int) -> tuple[int, int]:
        """The side of a matrix and the length of a panel in scratch, in whole tiles."""
        return padded(short, max(self.rows, self.cols)), padded(long, self.cols)


def padded(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


# Short sides up to → tile, where a block is wide.
_Table = Mapping[int, Tile]
_SINGLE = {
    16: Tile(16, 32, 16, 4, 2),
    LARGEST: Tile(64, 64, 32, 4, 2),
}
_HALF = {
    16: Tile(16, 64, 16, 4, 3),
    64: Tile(64, 64, 64, 4, 3),
    128: Tile(64, 128, 64, 8, 4),
    192: Tile(64, 64, 64, 4, 4),
    256: Tile(128, 128, 64, 8, 3),
    LARGEST: Tile(64, 128, 64, 8, 4),
}


def _limited(table: _Table, most: int) -> _Table:
    return {short: each._replace(registers=most) for short, each in table.items()}


def _staged(table: _Table, stages: int, warps: int) -> _Table:
    return {short: t._replace(stages=stages, warps=warps) for short, t in table.items()}


_TABLES: Mapping[str, tuple[_Table, _Table]] = {
    "sm_80": (_limited(_SINGLE, 255), _limited(_HALF, 255)),
    "sm_90": (_limited(_SINGLE, 255), _HALF),
    "sm_100": (_limited(_SINGLE, 255), _limited(_HALF, 255)),
    # Its shared memory is 64 KiB, half or less of the others'.
    "gfx942": (_staged(_SINGLE, 3, 8), {**_staged(_HALF, 2, 8), 16: Tile(16, 64, 16, 4, 2)}),
    INTERPRETER: (_SINGLE, _HALF),
}
# A tall block is transposed on its way in and out, which takes registers.
_TALL = {
    ("sm_80", 256): Tile(64, 128, 64, 8, 4, 255),
    ("sm_90", 256): Tile(64, 128, 64, 8, 4),
}


def tile(rows: int, cols: int, dtype: torch.dtype, architecture: str) -> Tile:
    """The entry for blocks of a shape.

    Args:
        rows: Rows of a block.
        cols: Columns.
        dtype: Of the iteration.
        architecture: One of :data:`ARCHITECTURES`, or the interpreter's.

    Raises:
        InputError: If there is no entry.
    """
    short = min(rows, cols)
    if not 1 <= short <= LARGEST:
        raise InputError(
            f"The kernels take blocks whose short side is 1 to {LARGEST}, got {rows} × {cols}.",
            "Use backend='torch'.",
        )
    if dtype not in DTYPES:
        names = ", ".join(map(str, DTYPES))
        raise InputError(f"The kernels iterate in {names}, not in {dtype}.", "Use backend='torch'.")
    if architecture not in _TABLES:
        raise InputError(
            f"The kernels have no tiles for {architecture}; they have for "
            f"{', '.join(ARCHITECTURES)}.",
            "Use backend='torch'.",
        )
    single, half = _TABLES[architecture]
    table = single if dtype is torch.float32 else half
    most = next(most for most in table if short <= most)
    if rows > cols and table is half:
        return _TALL.get((architecture, most), table[most])
    return table[most]


def classes(architecture: str) -> list[tuple[int, torch.dtype]]:
    """The classes of an architecture: the largest short side, and the dtype."""
    single, half = _TABLES[architecture]
    return [(most, d) for d in DTYPES for most in (single if d is torch.float32 else half)]
