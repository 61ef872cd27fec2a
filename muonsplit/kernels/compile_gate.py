"""Compiles every entry of the tile table ahead of time, without a GPU, and looks at the binary.

That something compiled proves nothing: triton 3.6.0 was seen to make a kernel for sm_100 whose body
is a trap. So instructions are counted: half precision must reach the tensor cores, nothing may be
spilled to memory, and shared memory and registers must fit. Digests are kept in a lock file; one
that changes is a notice to test on a device again, not a failure.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from muonsplit.errors import UsageError
from muonsplit.kernels.launch import constants, installed, kernel, options
from muonsplit.kernels.named import NAMED
from muonsplit.kernels.program import Ends, Program
from muonsplit.kernels.tiles import ARCHITECTURES, Tile, classes, tile

# Bytes of shared memory that one program may have.
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
# Tensor-core instructions in the code of a device; sm_90 has none of its own kind below 64 rows.
MATRIX = {
    "sm_80": r"\bHMMA\.",
    "sm_90": r"\bHGMMA\.",
    "sm_100": r"\bUTC\w*MMA\b",
    "gfx942": r"\bv_mfma_\w+(?:f16|bf16)\b",
}
_SMALL = r"\bHMMA\."
_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_REGISTERS = 65536
# Slots of the longer of the two iterations.
_SLOTS = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """What an entry is compiled for.

    Attributes:
        rows: Rows of a block.
        cols: Columns.
        dtype: Of the iteration and of the result; blocks come in float32.
    """

    rows: int
    cols: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """As it is written: ``256x2048 bf16``."""
        return f"{self.rows}x{self.cols} {_SHORT[self.dtype]}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """One binary and what was found in it.

    Attributes:
        architecture: What it is for.
        shape: Of a block.
        tile: Its entry.
        registers: A thread.
        spills: Instructions that move registers to memory and back; on gfx942 registers spilled.
        shared: Bytes a program.
        matrix: Tensor-core instructions.
        trap: Whether it holds a trap.
        digest: SHA-256.
    """

    architecture: str
    shape: Shape
    tile: Tile
    registers: int
    spills: int
    shared: int
    matrix: int
    trap: bool
    digest: str

    @property
    def problems(self) -> list[str]:
        """What is wrong with it."""
        threads = self.tile.warps * (64 if self.architecture == "gfx942" else 32)
        found = {
            "its body is a trap": self.trap,
            "no tensor-core instruction": not self.matrix and self.shape.dtype != torch.float32,
            f"{self.spills} spills": self.spills > 0,
            f"{self.shared} B of shared memory": self.shared > SHARED[self.architecture],
            f"{self.registers} registers × {threads} threads": self.registers * threads
            > (2 if self.architecture == "gfx942" else 1) * _REGISTERS,
        }
        return [problem for problem, is_so in found.items() if is_so]


def shapes(architecture: str) -> Iterator[Shape]:
    """For each class a wide block of whole tiles and a tall one that no tile divides, and NAMED."""
    for most, dtype in classes(architecture):
        yield Shape(most, 4 * most, dtype)
        yield Shape(2 * most + 1, most - 1, dtype)
    for rows, cols in dict.fromkeys((matrix.rows, matrix.cols) for matrix in NAMED):
        yield Shape(rows, cols, torch.bfloat16)


def compiled(shape: Shape, architecture: str, entry: Tile | None = None) -> Compiled:
    """Compiles the kernel for one shape and looks at it.

    Args:
        shape: Of a block.
        architecture: One of the tile table.
        entry: Tile; by default that of the table.

    Raises:
        RuntimeError: If it does not compile.
    """
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

    triton: Any = import_module("triton")

    entry = entry or tile(shape.rows, shape.cols, shape.dtype, architecture)
    kind, _, number = architecture.partition("_")
    target = GPUTarget("cuda", int(number), 32) if kind == "sm" else GPUTarget("hip", kind, 64)
    triton.knobs.compilation.disable_line_info = True  # a digest must not depend on a path
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        made: Any = triton.compile(_source(shape, entry), target=target, options=options(entry))
    look = _looked_at_amd if kind == "gfx942" else _looked_at_nvidia
    return Compiled(architecture, shape, entry, *look(made, shape, entry))


def _source(shape: Shape, entry: Tile) -> Any:
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    ends = Ends(shape.dtype, torch.float32, shape.dtype)
    fixed = constants(shape.rows, shape.cols, Program((), _SLOTS), ends, entry, interpreted=False)
    held = f"*{_SHORT[shape.dtype]}"
    given = {"X": "*fp32", "OUT": held, "MATRICES": held, "PANELS": held}
    given |= {"INTEGERS": "*i32", "FLOATS": "*fp32"}
    given |= dict.fromkeys(("blocks", "ops", "depth", "length"), "i32")
    given |= dict.fromkeys(("factor", "epsilon", "scale"), "fp32")
    function = kernel()
    names: list[str] = function.arg_names
    return ASTSource(
        function,
        {name: given.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in fixed.items()},
        # Tensors are aligned, which launch() sees to.
        {(names.index(n),): [["tt.divisibility", 16]] for n, t in given.items() if t[0] == "*"},
    )


def _looked_at_nvidia(made: Any, shape: Shape, entry: Tile) -> tuple[int, int, int, int, bool, str]:
    binaries = Path(str(import_module("triton").__file__)).parent / "backends" / "nvidia" / "bin"
    cubin: bytes = made.asm["cubin"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        usage = _said_by(binaries / "cuobjdump", "-res-usage", str(file))
        code = _said_by(binaries / "nvdisasm", str(file))
    registers = max(int(n) for n in re.findall(r"REG:(\d+)", usage))
    architecture = f"sm_{made.metadata.target.arch}"
    # Only a product of 64 rows or more is one of the newer instructions.
    pattern = _SMALL if min(entry.rows, entry.cols) < 64 else MATRIX[architecture]
    return (
        registers,
        len(re.findall(r"\b(?:LDL|STL)\b", code)),
        made.metadata.shared,
        0 if shape.dtype == torch.float32 else len(re.findall(pattern, code)),
        "trap" in made.asm["ptx"] or not re.search(r"\bST[GS]\b", code),
        hashlib.sha256(cubin).hexdigest(),
    )


def _looked_at_amd(made: Any, shape: Shape, entry: Tile) -> tuple[int, int, int, int, bool, str]:
    code: str = made.asm["amdgcn"]
    numbers = {
        name: sum(int(n) for n in re.findall(rf"\.{name}: *(\d+)", code))
        for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    }
    return (
        numbers["vgpr_count"],
        numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"],
        made.metadata.shared,
        0 if shape.dtype == torch.float32 else len(re.findall(MATRIX["gfx942"], code)),
        "s_trap" in code,
        hashlib.sha256(made.asm["hsaco"]).hexdigest(),
    )


def _said_by(*command: str | os.PathLike[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def table(found: list[Compiled]) -> str:
    """The report: a Markdown table with one binary a line."""
    lines = [
        "| for | block | tile | registers | spills | shared KiB | tensor-core | problem |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for c in found:
        cells = (c.architecture, c.shape.name, c.tile.name, c.registers, c.spills)
        cells = (*cells, round(c.shared / 1024), c.matrix, "; ".join(c.problems))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def digests(found: list[Compiled]) -> dict[str, str]:
    """Digests by architecture, block and tile, for the lock file."""
    return {f"{c.architecture} {c.shape.name} {c.tile.name}": c.digest for c in found}


def main() -> None:
    """Compiles everything, prints the table, and writes the lock file that is named."""
    try:
        version = installed()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    found = [compiled(shape, a) for a in ARCHITECTURES for shape in shapes(a)]
    print(table(found))
    for path in map(Path, sys.argv[1:]):
        locks = json.loads(path.read_text()) if path.exists() else {}
        locks[version] = digests(found)
        path.write_text(json.dumps(locks, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
