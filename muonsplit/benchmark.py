"""How long the kernel takes on matrices of known models, beside what else computes the same.

    python -m muonsplit.benchmark [--out FILE.json]

A time is the median of CUDA events, with nothing of the input left in the L2 cache. The host has a
head start of about a millisecond, so that launching one kernel is not what is measured; a loop over
heads needs longer than that, and pays for it, as it does in training.

Inputs are bfloat16. The floor of a way is that of its operations at the rate of an H200's tensor
cores, or of reading a matrix once and writing it once, whichever is longer. No way with its state
in the L2 cache gets there; it says how far there is to go at most.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic, dialect_named
from muonsplit.errors import MuonsplitError
from muonsplit.kernels.launch import launches
from muonsplit.kernels.named import NAMED, Matrix
from muonsplit.kernels.roofline import H200
from muonsplit.newton_schulz import newton_schulz, schedule
from muonsplit.newton_schulz.gram import gram, on_gram
from muonsplit.newton_schulz.products import step
from muonsplit.newton_schulz.program import program

# Bytes of an element on its way in and out.
_ELEMENT = 2
REPEATS = 20
SECONDS = 1.5
# Seconds after which no further matrix is begun.
BUDGET = 300.0
# Bytes that are written to flush the L2 cache, and how often: it takes an H200 about 1 ms.
_FLUSHED = 1 << 30
_FLUSHES = 4
_UNAVAILABLE = 69

GRAM = dialect_named("deepspeed-0.19.8").arithmetic
STANDARD = dialect_named("deepspeed-0.19.8-standard").arithmetic


def name_of(matrix: Matrix) -> str:
    """Model and weight."""
    return f"{matrix.model} {matrix.weight}"


def whole(matrix: Matrix) -> Matrix:
    """The same weight as one block."""
    return matrix._replace(blocks=1, rows=matrix.blocks * matrix.rows)


def operations(matrix: Matrix, arithmetic: Arithmetic) -> int:
    """Multiplications and additions of the products of one layer's weight."""
    ops = program(arithmetic, matrix.rows, matrix.cols, torch.float32)
    return matrix.blocks * ops.operations(*sorted((matrix.rows, matrix.cols)))


def moved(matrix: Matrix) -> int:
    """Bytes of one layer's weight, read once and written once."""
    return 2 * _ELEMENT * matrix.blocks * matrix.rows * matrix.cols


def floor(matrix: Matrix, arithmetic: Arithmetic) -> float:
    """Seconds that one layer's weight takes at least: its operations, or one read and one write."""
    count, size = operations(matrix, arithmetic), moved(matrix)
    return max(count / H200.half_flops, size / H200.memory_bandwidth)


class Way(NamedTuple):
    """One way to orthogonalise a matrix.

    Attributes:
        name: As it is printed.
        arithmetic: What it computes.
        work: Takes blocks, shape ``[B, M, N]``.
        many: Whether as many layers as fit in memory are taken at once.
        whole: Whether the matrix is one block.
    """

    name: str
    arithmetic: Arithmetic
    work: Callable[[Tensor, Arithmetic], object]
    many: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """A time, and what it is to be compared with.

    Attributes:
        matrix: Its name.
        way: Likewise.
        dtype: Of the iteration.
        layers: In one call.
        seconds: A layer.
        operations: A layer.
        floor: Seconds a layer.
    """

    matrix: str
    way: str
    dtype: str
    layers: int
    seconds: float
    operations: int
    floor: float

    @property
    def teraflops(self) -> float:
        """10¹² operations a second."""
        return self.operations / self.seconds / 1e12


def kernel(X: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The kernel, in one launch."""
    return newton_schulz(X, arithmetic, backend="triton")


def reference(X: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The reference, which takes the norms one by one."""
    return newton_schulz(X, arithmetic)


def loop(X: Tensor, arithmetic: Arithmetic) -> list[Tensor]:
    """One head at a time."""
    return [newton_schulz(X[i : i + 1], arithmetic) for i in range(len(X))]


def batched(X: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Batched products as frameworks take them: all norms at once, then the reference's steps."""
    tall = X.size(-2) > X.size(-1)
    Y = (X.mT if tall else X).to(arithmetic.dtype_on(X.device))
    norms = torch.linalg.vector_norm(Y, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    Y = Y / (norms + arithmetic.epsilon).to(Y.dtype)
    steps = schedule(arithmetic)
    if on_gram(X.size(-2), X.size(-1), arithmetic):
        Y = gram(Y, steps, arithmetic.restarts, arithmetic.form, "left", _as_it_is)
    else:
        for coefficients in steps:
            Y = step(Y, coefficients, False, arithmetic.form, _as_it_is)
    return Y.mT if tall else Y


def _as_it_is(x: Tensor) -> Tensor:
    return x


WAYS = (
    Way("kernel, Gram", GRAM, kernel),
    Way("kernel, Gram, many layers", GRAM, kernel, many=True),
    Way("kernel, standard", STANDARD, kernel),
    Way("kernel, standard, many layers", STANDARD, kernel, many=True),
    Way("torch.bmm, DeepSpeed's Gram", GRAM, batched),
    Way("torch.bmm, standard", STANDARD, batched),
    Way("reference, standard", STANDARD, reference),
    Way("loop over heads, standard", STANDARD, loop),
    Way("full matrix, standard", STANDARD, batched, whole=True),
)


def layers_that_fit(matrix: Matrix, free: int) -> int:
    """How many layers may be in one call: a fifth of the memory stays free.

    Args:
        matrix: Whose input and result are held, each once.
        free: Bytes.
    """
    return max(1, min(matrix.layers, free * 4 // 5 // moved(matrix)))


def measured(matrix: Matrix, way: Way, flush: Tensor) -> Measured:
    """Times one way on random blocks of one matrix."""
    torch.cuda.empty_cache()  # what is kept for later counts as used
    free, _ = torch.cuda.mem_get_info(flush.device)
    layers = layers_that_fit(matrix, free) if way.many else 1
    cut = whole(matrix) if way.whole else matrix
    shape = (layers * cut.blocks, cut.rows, cut.cols)
    X = torch.empty(shape, dtype=torch.bfloat16, device=flush.device).normal_()
    seconds = median_time(lambda: way.work(X, way.arithmetic), flush) / layers
    return Measured(
        name_of(matrix),
        way.name,
        way.arithmetic.compute_dtype,
        layers,
        seconds,
        operations(cut, way.arithmetic),
        floor(cut, way.arithmetic),
    )


def median_time(work: Callable[[], object], flush: Tensor) -> float:
    """Seconds of the device, after three runs that are not counted."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    began, times = time.monotonic(), list[float]()
    while len(times) < 3 or (len(times) < REPEATS and time.monotonic() - began < SECONDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(_FLUSHES):
            flush.zero_()
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


_HEAD = ("matrix", "way", "dtype", "layers", "ms a layer", "TFLOP/s", "floor ms", "× floor")


def table(found: Iterable[Measured]) -> str:
    """The report: one time a line, numbers to the right."""
    rows = [
        (
            m.matrix,
            m.way,
            m.dtype,
            str(m.layers),
            f"{m.seconds * 1e3:.4f}",
            f"{m.teraflops:.1f}",
            f"{m.floor * 1e3:.4f}",
            f"{m.seconds / m.floor:.1f}",
        )
        for m in found
    ]
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
    return "\n".join(_line(row, widths) for row in (_HEAD, *rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    sides = (*"<<<", *">>>>>")
    aligned = (f"{c:{side}{w}}" for c, side, w in zip(cells, sides, widths, strict=True))
    return "  ".join(aligned).rstrip()


def document(found: Iterable[Measured], left_out: Sequence[str], card: str) -> dict[str, Any]:
    """Everything as JSON holds it.

    Args:
        found: All times.
        left_out: Matrices for which there was no time.
        card: What it ran on.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": card,
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
        "cuda": torch.version.cuda,
        "operations_rate": H200.half_flops,
        "bytes_rate": H200.memory_bandwidth,
        "kernels": [each._asdict() for each in launches],
        "matrices": [matrix._asdict() for matrix in NAMED],
        "results": [asdict(m) | {"teraflops": m.teraflops} for m in found],
        "left_out": list(left_out),
    }


def _all(out: Path | None) -> None:
    """Times every way on every matrix; what is found is shown and kept matrix by matrix."""
    began, card = time.monotonic(), torch.cuda.get_device_name()
    flush = torch.empty(_FLUSHED, dtype=torch.uint8, device="cuda")
    found: list[Measured] = []
    left_out: list[str] = []
    for matrix in NAMED:
        if time.monotonic() - began > BUDGET:
            left_out.append(name_of(matrix))
        else:
            new = [measured(matrix, way, flush) for way in WAYS]
            found += new
            print(f"{table(new)}\n", flush=True)
        if out is not None:
            out.write_text(json.dumps(document(found, left_out, card), indent=1) + "\n")
    if left_out:
        print(f"No time was left for {'; '.join(left_out)}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
        arguments: By default those of the process.

    Returns:
        Exit status: 69 without a CUDA device.
    """
    parser = argparse.ArgumentParser("python -m muonsplit.benchmark")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where figures are kept")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: the benchmark needs a CUDA device, and torch sees none", file=sys.stderr)
        return _UNAVAILABLE
    try:
        _all(options.out)
    except MuonsplitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
