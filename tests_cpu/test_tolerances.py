"""Every error budget against what legal arithmetic does; `python test_tolerances.py` prints it."""

from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from muonsplit.checks.registry import BLIND
from muonsplit.dialect import DIALECTS, Arithmetic
from muonsplit.errors import UsageError
from muonsplit.newton_schulz import newton_schulz, singular_value_oracle
from muonsplit.observe.fit import compare
from muonsplit.observe.gradients import conditioned
from muonsplit.observe.tolerance import rounding_bound, size_bound

# Wide, tall, square, and wider than a tile.
SHAPES = [(16, 64), (64, 16), (32, 32), (48, 144)]
SEEDS = 3
# A bound further from what is measured is no budget.
ABSURD = 30.0


def gaussian(rows: int, cols: int, source: torch.Generator) -> Tensor:
    return torch.randn(rows, cols, generator=source, dtype=torch.float64)


def spaced(X: Tensor, last: float) -> Tensor:
    """The same singular vectors with singular values from 1 down, evenly in their logarithm."""
    U, S, Vh = torch.linalg.svd(X, full_matrices=False)
    return (U * last ** torch.linspace(0, 1, len(S), dtype=S.dtype)) @ Vh


def with_outlier(X: Tensor) -> Tensor:
    U, S, Vh = torch.linalg.svd(X, full_matrices=False)
    S[0] *= 100
    return (U * S) @ Vh


def of_low_rank(X: Tensor) -> Tensor:
    rank = max(1, min(X.shape) // 8)
    return X[:, :rank] @ X[:rank]


SPECTRA = {
    "Gaussian": lambda X: X,
    "conditioned": lambda X: conditioned(X.unsqueeze(0))[0],
    "log-spaced, 1e-3": lambda X: spaced(X, 1e-3),
    "log-spaced, 1e-6": lambda X: spaced(X, 1e-6),
    "one outlier × 100": with_outlier,
    "rank d/8": of_low_rank,
}
COEFFICIENTS = {"jordan": 5, "polar-express-5": 5, "deepseek-v4": 10}
DTYPES = ("float32", "float16", "bfloat16")


@dataclass
class Measured:
    """One shape under one arithmetic, over several seeds."""

    errors: list[float]
    bounds: list[float]
    sizes: list[float]
    size_bounds: list[float]

    @property
    def room(self) -> float:
        """How far the bound is above the largest error."""
        return min(b / e for e, b in zip(self.errors, self.bounds, strict=True))


def measure(arithmetic: Arithmetic, spectrum: str, shape: tuple[int, int]) -> Measured:
    found = Measured([], [], [], [])
    for seed in range(SEEDS):
        source = torch.Generator().manual_seed(seed)
        block = SPECTRA[spectrum](gaussian(*shape, source)).float() * (1 + seed / SEEDS)
        exact = singular_value_oracle(block.unsqueeze(0), arithmetic)[0]
        computed = newton_schulz(block.unsqueeze(0), arithmetic)[0].double()
        found.errors.append(float((computed - exact).norm() / exact.norm()))
        found.bounds.append(rounding_bound(block, arithmetic))
        found.sizes.append(abs(compare("", computed, exact).size - 1))
        found.size_bounds.append(size_bound(block, arithmetic))
    return found


def restarts(steps: int, dtype: str) -> tuple[int, ...]:
    """After two steps, and then as often as the dtype needs it."""
    return tuple(range(2, steps, 2 if dtype == "bfloat16" else 3))


def arithmetic_of(coefficients: str, dtype: str, iteration: Any, form: Any) -> Arithmetic:
    steps = COEFFICIENTS[coefficients]
    return Arithmetic(
        coefficients=coefficients,
        steps=steps,
        norm_factor=1.02 if coefficients.startswith("polar") else 1.0,
        cpu_dtype=dtype,  # type: ignore[arg-type]
        compute_dtype=dtype,  # type: ignore[arg-type]
        iteration=iteration,
        restarts=() if iteration == "standard" else restarts(steps, dtype),
        form=form,
    )


def forms() -> list[str]:
    return list(get_args(get_type_hints(Arithmetic)["form"]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("iteration", ["standard", "gram"])
@pytest.mark.parametrize("coefficients", COEFFICIENTS)
def test_measured_errors_are_inside_their_bounds_and_near(
    coefficients: str, iteration: str, dtype: str
) -> None:
    for form in ("matmul", "addmm"):
        arithmetic = arithmetic_of(coefficients, dtype, iteration, form)
        for spectrum in SPECTRA:
            for shape in SHAPES:
                found = measure(arithmetic, spectrum, shape)
                assert found.room >= 1, (form, spectrum, shape)
                assert all(s <= b for s, b in zip(found.sizes, found.size_bounds, strict=True))
                # Beyond that nothing is judged: noise has saturated, and its bound goes on.
                if min(found.bounds) < BLIND:
                    assert found.room < ABSURD, (form, spectrum, shape)


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("tall", ["transpose", "transpose_copy", "right"])
def test_every_order_of_products_is_inside(form: str, tall: Any) -> None:
    for coefficients in ("jordan", "polar-express-5"):
        for iteration in ("standard", "gram", "gram_always", "auto"):
            for dtype in ("float32", "bfloat16"):
                try:
                    found = replace(arithmetic_of(coefficients, dtype, iteration, form), tall=tall)
                except UsageError:
                    continue
                for spectrum in ("Gaussian", "rank d/8"):
                    assert measure(found, spectrum, (40, 16)).room >= 1, (iteration, dtype)


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_is_inside(name: str) -> None:
    arithmetic = DIALECTS[name].arithmetic
    for shape in [(4, 40), (40, 8), (24, 24), (32, 96)]:
        found = measure(arithmetic, "conditioned", shape)
        assert found.room >= 1
        assert all(s <= b for s, b in zip(found.sizes, found.size_bounds, strict=True))


@pytest.mark.parametrize("name", ["jordan", "heavyball-3.2.1", "pytorch-optimizer-4.1.0-gram"])
def test_sizes_of_large_blocks_are_inside(name: str) -> None:
    # Their diagonals are rounded to one side: what averages out over entries is not all.
    arithmetic = DIALECTS[name].arithmetic
    found = measure(arithmetic, "conditioned", (256, 256))
    assert found.room >= 1
    assert all(s <= b for s, b in zip(found.sizes, found.size_bounds, strict=True))


def table() -> str:
    """The table of docs/tolerances.md: largest legal error, and the bound on that very block."""
    heads = ("iteration", "coefficients", "spectrum", *DTYPES)
    rows = [heads, ("---",) * len(heads)]
    for iteration in ("standard", "gram"):
        for coefficients in COEFFICIENTS:
            for spectrum in SPECTRA:
                cells: list[str] = []
                for dtype in DTYPES:
                    arithmetic = arithmetic_of(coefficients, dtype, iteration, "matmul")
                    every = [measure(arithmetic, spectrum, shape) for shape in SHAPES]
                    pairs = [p for m in every for p in zip(m.errors, m.bounds, strict=True)]
                    cells.append("{:.1e} ≤ {:.1e}".format(*max(pairs)))
                rows.append((iteration, coefficients, spectrum, *cells))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table())
