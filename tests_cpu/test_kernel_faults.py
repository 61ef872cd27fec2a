"""Faults planted in the kernel, each caught by the property that is named, and by it first.

A fault is a change of the kernel's own text, so that it stays one as the kernel changes; one whose
text is not found any more fails.
"""

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from torch import Tensor

from muonsplit.kernels.tiles import Tile
from tests_cpu import kernel_case as case

pytest.importorskip("triton", reason="run with tox -e interp")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run with tox -e interp: TRITON_INTERPRET=1", allow_module_level=True)

from muonsplit.kernels import kernel as ours

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Fault(NamedTuple):
    """A change and the first property that it breaks.

    Attributes:
        old: Text of the kernel, found once.
        new: What stands there instead.
        breaks: Name of a property.
    """

    old: str
    new: str
    breaks: str


FAULTS = {
    "a column too many is read": Fault(
        "inside = (m + rows < D) & (n + cols < N)\n"
        "            x = tl.load(X + (m + rows) * LD + (n + cols) * ND, mask=inside, other=0.0)\n"
        "            x = _rounded(x.to(tl.float32), NORM, INTERPRETED)\n"
        "            squares",
        "inside = (m + rows < D) & (n + cols <= N)\n"
        "            x = tl.load(X + (m + rows) * LD + (n + cols) * ND, mask=inside, other=0.0)\n"
        "            x = _rounded(x.to(tl.float32), NORM, INTERPRETED)\n"
        "            squares",
        "exact_on_integers",
    ),
    "an element beyond the end, times zero": Fault(
        "mask=inside, other=0.0)\n            x = _rounded(x.to(tl.float32), NORM, INTERPRETED)\n"
        "            x = tl.where(inside,",
        "mask=(m + rows < D) & (n + cols < N + 1), other=0.0)\n"
        "            x = _rounded(x.to(tl.float32), NORM, INTERPRETED)\n"
        "            x = x * inside.to(tl.float32)\n            x = tl.where(inside | ~inside,",
        "exact_on_integers",
    ),
    "the block before, times zero": Fault(
        "X + at, factor, epsilon, depth",
        "X + at, factor, epsilon + 0.0 * tl.load(X + (block - (block > 0)) * (D * N)), depth",
        "neighbours_do_not_show",
    ),
    "two programs are taken for granted": Fault(
        "range(first, blocks, tl.num_programs(0))",
        "range(first, blocks, 2)",
        "any_number_of_programs",
    ),
    "heads swapped on their way out": Fault(
        "matrices, panels, OUT + at,",
        "matrices, panels, OUT + (blocks - 1 - block) * (D * N),",
        "exact_on_integers",
    ),
    "a tall block leaves by the stride of a wide one": Fault(
        "OUT + m + rows + (n + cols) * D", "OUT + m + rows + (n + cols) * (D - 1)", "agrees"
    ),
    "a tall block enters untransposed": Fault(
        "LD: tl.constexpr = 1 if TALL else N\n    ND: tl.constexpr = D if TALL else 1\n    first",
        "LD: tl.constexpr = N\n    ND: tl.constexpr = 1\n    first",
        "agrees",
    ),
    "the last terms of a product are left out": Fault(
        "for k in range(0, length, BK):", "for k in range(0, length - BK, BK):", "exact_on_integers"
    ),
    "a sum is not begun anew for each tile": Fault(
        "            for k in range(0, depth, BK):\n"
        "                left = tl.load(L + (m + rows) * S",
        "            acc += 1.0 * (n > 0)\n"
        "            for k in range(0, depth, BK):\n"
        "                left = tl.load(L + (m + rows) * S",
        "exact_on_integers",
    ),
    "what is added is taken from the wrong slot": Fault(
        "tl.load(integers + 4) * (S * S)", "tl.load(integers + 3) * (S * S)", "exact_on_integers"
    ),
    "the panels are not swapped": Fault(
        "now = tl.load(integers + 6)", "now = 0 * tl.load(integers + 6)", "exact_on_integers"
    ),
    "what was never written is read": Fault(
        "tl.range(0, _whole(depth, BM), _ROWS, disable_licm=True):\n"
        "        for n in tl.range(0, length, BN, disable_licm=True):\n"
        "            inside = (m + rows < D) & (n + cols < N)\n"
        "            x = tl.load(X",
        "tl.range(0, depth - _ROWS, _ROWS, disable_licm=True):\n"
        "        for n in tl.range(0, length, BN, disable_licm=True):\n"
        "            inside = (m + rows < D) & (n + cols < N)\n"
        "            x = tl.load(X",
        "exact_on_integers",
    ),
    "a zero is multiplied by what is not added": Fault(
        "mask=tl.zeros_like(acc) + beta != 0.0, other=0.0)",
        "mask=tl.zeros_like(acc) == 0.0, other=0.0)",
        "exact_on_integers",
    ),
    "the norm is that of a batch": Fault(
        "    norm = _rounded(tl.sqrt_rn(tl.sum(squares))",
        "    norm = _rounded(tl.sqrt_rn(tl.sum(squares) + 1e-3 * tl.load(X + D * N))",
        "exact_on_integers",
    ),
    "the scale is lost": Fault(
        "x = _rounded(scale * _rounded(x, RESULT, INTERPRETED), RESULT, INTERPRETED)\n"
        "                inside",
        "x = _rounded(x, RESULT, INTERPRETED)\n                inside",
        "scales_and_rounds_last",
    ),
    "a rounding is left out": Fault(
        "product = _rounded(alpha * _rounded(acc, DTYPE, INTERPRETED), DTYPE, INTERPRETED)",
        "product = _rounded(alpha * acc, DTYPE, INTERPRETED)",
        "rounds_as_said",
    ),
    "half precision is truncated": Fault(
        "even = bits + 0x7FFF + ((bits >> 16) & 1)", "even = bits", "rounds_as_said"
    ),
}


def planted(fault: Fault, folder: Path) -> ModuleType:
    """The kernel's module with a fault in it."""
    text = Path(ours.__file__).read_text()
    assert text.count(fault.old) == 1
    file = folder / "faulty_kernel.py"
    file.write_text(text.replace(fault.old, fault.new))
    spec = importlib.util.spec_from_file_location("faulty_kernel", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_broken(launch: case.Launch) -> str:
    """The first property that does not hold."""
    return next((p.__name__ for p in case.PROPERTIES if not p(launch)), "")


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_breaks_its_property(name: str, tmp_path: Path) -> None:
    module = planted(FAULTS[name], tmp_path)
    launch = case.launch_of(module.newton_schulz_kernel)
    assert first_broken(launch) == FAULTS[name].breaks


def test_without_a_fault_nothing_is_broken() -> None:
    assert first_broken(case.launch_of(ours.newton_schulz_kernel)) == ""


def by_batch(X: Tensor) -> Tile:
    """What a tuner does that looks at the whole batch."""
    return Tile(16, 16, 16, 4, 2) if len(X) > 2 else Tile(32, 32, 32, 4, 2)


def test_a_tile_chosen_by_the_batch_breaks_the_shard_property() -> None:
    tuned = case.launch_of(ours.newton_schulz_kernel, by_batch)
    assert first_broken(tuned) == "shards_keep_bits"
