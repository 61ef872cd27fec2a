"""The tile table: which piece of a matrix a program works on at once, and with how many threads.

A pure function of the short side, the dtype and the architecture, and of nothing else: the number
of blocks, heads, layers and ranks cannot reach it, so the result of a shard is the shard of the
result. Nothing is tuned at run time; what is measured is entered here by hand.

Limits that the entries keep, checked by ``muonsplit.kernels.compile_gate``: shared memory of one
program (sm_80 163 KiB, sm_90 and sm_100 227 KiB, gfx942 64 KiB), no spilled registers, tensor-core
instructions for half precision.
"""

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
    """

    rows: int
    cols: int
    inner: int
    warps: int
    stages: int

    @property
    def name(self) -> str:
        """As it is written: ``128x128x64 w8 s3``."""
        return f"{self.rows}x{self.cols}x{self.inner} w{self.warps} s{self.stages}"


# Short sides up to → tile.
_HALF = {
    16: Tile(16, 64, 16, 4, 3),
    64: Tile(64, 64, 64, 4, 3),
    128: Tile(64, 128, 64, 4, 4),
    192: Tile(64, 64, 64, 4, 4),
    LARGEST: Tile(128, 128, 64, 8, 3),
}
_SINGLE = {
    16: Tile(16, 32, 16, 4, 2),
    LARGEST: Tile(64, 64, 32, 8, 3),
}
# Its shared memory is 64 KiB, half or less of the others'.
_GFX942_HALF = {most: tile._replace(stages=2) for most, tile in _HALF.items()}


def tile(short: int, dtype: torch.dtype, architecture: str) -> Tile:
    """The entry for blocks of a short side.

    Args:
        short: d.
        dtype: Of the iteration.
        architecture: One of :data:`ARCHITECTURES`, or the interpreter's.

    Raises:
        InputError: If there is no entry.
    """
    if not 1 <= short <= LARGEST:
        raise InputError(
            f"The kernels take blocks whose short side is 1 to {LARGEST}, got {short}.",
            "Use backend='torch'.",
        )
    if dtype not in DTYPES:
        names = ", ".join(str(d) for d in DTYPES)
        raise InputError(f"The kernels iterate in {names}, not in {dtype}.", "Use backend='torch'.")
    if architecture not in (*ARCHITECTURES, INTERPRETER):
        raise InputError(
            f"The kernels have no tiles for {architecture}; they have for "
            f"{', '.join(ARCHITECTURES)}.",
            "Use backend='torch'.",
        )
    table = _SINGLE if dtype is torch.float32 else _HALF
    if architecture == "gfx942" and table is _HALF:
        table = _GFX942_HALF
    return next(entry for most, entry in table.items() if short <= most)


def entries(architecture: str) -> list[tuple[int, torch.dtype, Tile]]:
    """Every entry of an architecture with the largest short side that it is for."""
    tables = {dtype: _SINGLE if dtype is torch.float32 else _HALF for dtype in DTYPES}
    return [
        (most, dtype, tile(most, dtype, architecture))
        for dtype, table in tables.items()
        for most in table
    ]
