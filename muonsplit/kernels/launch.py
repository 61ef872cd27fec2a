"""Launches the kernel: which tile, how much scratch, how many programs."""

from collections import Counter
from functools import lru_cache
from importlib import import_module, metadata
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonsplit.errors import InputError, UsageError
from muonsplit.kernels.program import Ends, Kind, Program
from muonsplit.kernels.tiles import INTERPRETER, Tile, tile

OLDEST = (3, 6)
# Programs of the interpreter: some, so that each runs several blocks, as on a device.
_INTERPRETED_PROGRAMS = 3
_ALIGNMENT = 16  # bytes; another alignment is another binary


class Launch(NamedTuple):
    """What ran, for whoever has to report it.

    Attributes:
        architecture: Of the device, or the interpreter's.
        triton: Its version.
        tile: Entry of the table, as it is written.
        short: d.
        long: n.
        dtype: Of the iteration.
    """

    architecture: str
    triton: str
    tile: str
    short: int
    long: int
    dtype: str


# How often each was launched by this process.
launches: Counter[Launch] = Counter()


def launch(
    X: Tensor, program: Program, ends: Ends, entry: Tile | None = None, programs: int | None = None
) -> Tensor:
    """Runs a program on every block of a batch, in one launch.

    Args:
        X: ``[B, M, N]``, float32, bfloat16 or float16, on a device that the kernel runs on.
        program: What is done with a block.
        ends: What is done before and after.
        entry: Tile; by default that of the table.
        programs: How many programs share the blocks; by default as many as the device holds. It
            does not show in any bit.

    Returns:
        ``[B, M, N]``, contiguous, in ``ends.result``.
    """
    where = architecture(X.device)
    X = aligned(X)
    blocks, rows, cols = X.shape
    entry = entry or tile(rows, cols, ends.dtype, where)
    fixed = constants(rows, cols, program, ends, entry, interpreted=where == INTERPRETER)
    count = min(blocks, programs or _held(X.device, entry))
    short, S, P = fixed["D"], fixed["S"], fixed["P"]
    matrices = X.new_empty((count, program.slots, S, S), dtype=ends.dtype)
    panels = X.new_empty((count, 2, S, P), dtype=ends.dtype)
    out = torch.empty_like(X, dtype=ends.result)
    numbers = (blocks, len(program.ops), short, fixed["N"], ends.factor, ends.epsilon, ends.scale)
    with torch.cuda.device_of(X):  # triton launches on the current one
        kernel()[(count,)](
            X,
            out,
            matrices,
            panels,
            *tables(program, X.device),
            *numbers,
            **fixed,
            **options(entry),
        )
    launches[Launch(where, installed(), entry.name, short, fixed["N"], str(ends.dtype))] += 1
    return out


def kernel() -> Any:
    """The compiled or interpreted function; importing it takes triton."""
    return import_module("muonsplit.kernels.kernel").newton_schulz_kernel


def constants(
    rows: int, cols: int, program: Program, ends: Ends, entry: Tile, *, interpreted: bool
) -> dict[str, Any]:
    """The kernel's compile-time arguments: a function of a block's shape, never of a batch.

    Args:
        rows: Rows of a block.
        cols: Columns.
        program: Says how many matrices are held.
        ends: Their dtypes and rule.
        entry: The tile.
        interpreted: Whether the interpreter runs it.
    """
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    names = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    short, long = sorted((rows, cols))
    side, length = entry.scratch(short, long)
    return {
        "D": short,
        "N": long,
        "TALL": rows > cols,
        "S": side,
        "P": length,
        "SLOTS": program.slots,
        "BM": entry.rows,
        "BN": entry.cols,
        "BK": entry.inner,
        "DTYPE": names[ends.dtype],
        "NORM": names[ends.norm],
        "CLAMP": ends.clamp,
        "RESULT": names[ends.result],
        "INTERPRETED": interpreted,
    }


def options(entry: Tile) -> dict[str, Any]:
    """What decides the binary beside the arguments; fusing products and sums is pinned."""
    limit = {"maxnreg": entry.registers} if entry.registers else {}
    held = {"num_warps": entry.warps, "num_stages": entry.stages, "enable_fp_fusion": False}
    return {**held, **limit}


@lru_cache(maxsize=256)
def tables(program: Program, device: torch.device) -> tuple[Tensor, Tensor]:
    """A program as the kernel reads it.

    Returns:
        Integers ``[ops, 7]``: kind, slots, ``apart``, and which of two panels is the last one;
        and floats ``[ops, 3]``: α, β, δ.
    """
    panels = accumulate((op.kind is Kind.APPLY for op in program.ops), initial=0)
    integers = [
        [o.kind, o.out, o.left, o.right, o.added, o.apart, panel % 2]
        for o, panel in zip(program.ops, panels, strict=False)
    ]
    floats = [[o.alpha, o.beta, o.diagonal] for o in program.ops]
    return (
        torch.tensor(integers, dtype=torch.int32, device=device),
        torch.tensor(floats, dtype=torch.float32, device=device),
    )


def aligned(X: Tensor) -> Tensor:
    """A batch, contiguous and aligned; copied if it is not.

    Strides and alignment choose code, so they come from the shape and never from the caller.
    """
    X = X.contiguous()
    return X.clone() if X.data_ptr() % _ALIGNMENT else X


def architecture(device: torch.device) -> str:
    """The key of a device in the tile table, which may have no entry for it.

    Raises:
        UsageError: If triton is missing or too old.
        InputError: If the kernels do not run there.
    """
    installed()
    from muonsplit.kernels.kernel import INTERPRETED

    if INTERPRETED:
        if device.type != "cpu":
            raise InputError(f"Triton's interpreter takes CPU tensors, got one on {device}.")
        return INTERPRETER
    if device.type != "cuda":
        raise InputError(
            f"backend='triton' needs a GPU or Triton's interpreter, got a tensor on {device}.",
            "Move it to a GPU, set TRITON_INTERPRET=1 before anything is imported, or use "
            "backend='torch'.",
        )
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    # Within a major version what is compiled for the first runs on all that have its memory.
    return f"sm_{torch.cuda.get_device_capability(device)[0]}0"


@lru_cache(maxsize=1)
def installed() -> str:
    """The version of triton.

    Raises:
        UsageError: If there is none, or it is too old.
    """
    try:
        found = metadata.version("triton")
    except metadata.PackageNotFoundError:
        raise UsageError(
            "backend='triton' needs triton, which is not installed.",
            "pip install 'muonsplit[triton]'",
        ) from None
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UsageError(f"backend='triton' needs triton {oldest} or newer, got {found}.")
    return found


def _held(device: torch.device, entry: Tile) -> int:
    """How many programs a device holds at once."""
    if device.type == "cpu":
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * entry.at_once
