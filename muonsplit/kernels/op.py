"""The kernel as an operator of torch, so that compilers and graphs take it as it is.

``torch.library.custom_op`` rather than ``triton_op``: that one is traced through, and the
interpreter touches data.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from muonsplit.errors import InputError
from muonsplit.kernels.launch import architecture, launch
from muonsplit.kernels.program import Ends, Kind, Op, Program
from muonsplit.kernels.tiles import DTYPES, tile


def run(X_BMN: Tensor, program: Program, ends: Ends) -> Tensor:
    """Runs a program on every block of a batch.

    Args:
        X_BMN: Blocks, shape ``[B, M, N]``, float32, bfloat16 or float16, any strides: what is not
            contiguous and aligned is copied.
        program: What is done with a block.
        ends: What is done before and after.

    Returns:
        Shape ``[B, M, N]``, contiguous, in ``ends.result``.

    Raises:
        UsageError: If triton is missing or too old.
        InputError: If the device, a dtype or the short side of a block is none of the kernel's.
    """
    _, rows, cols = X_BMN.shape
    tile(rows, cols, ends.dtype, architecture(X_BMN.device))
    for name, dtype in (("input", X_BMN.dtype), ("norm", ends.norm), ("result", ends.result)):
        if dtype not in DTYPES:
            names = ", ".join(map(str, DTYPES))
            raise InputError(f"The kernels take an {name} in {names}, got {dtype}.")
    integers = [int(x) for op in program.ops for x in op[:6]]
    floats = [float(x) for op in program.ops for x in op[6:]]
    return _run(X_BMN, integers, floats, program.slots, *ends)


@torch.library.custom_op("muonsplit::newton_schulz", mutates_args=())
def _run(
    X: Tensor,
    integers: Sequence[int],
    floats: Sequence[float],
    slots: int,
    dtype: torch.dtype,
    norm: torch.dtype,
    result: torch.dtype,
    clamp: bool,
    factor: float,
    epsilon: float,
    scale: float,
) -> Tensor:
    numbers = zip(*[iter(integers)] * 6, strict=True), zip(*[iter(floats)] * 3, strict=True)
    ops = tuple(
        Op._make((Kind(kind), *held, *rest)) for (kind, *held), rest in zip(*numbers, strict=True)
    )
    ends = Ends(dtype, norm, result, clamp, factor, epsilon, scale)
    return launch(X, Program(ops, slots), ends)


@_run.register_fake
def _(
    X: Tensor,
    integers: Sequence[int],
    floats: Sequence[float],
    slots: int,
    dtype: torch.dtype,
    norm: torch.dtype,
    result: torch.dtype,
    *rest: object,
) -> Tensor:
    return torch.empty_like(X, dtype=result, memory_format=torch.contiguous_format)
