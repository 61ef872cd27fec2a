"""Every error budget against what legal arithmetic does; `python test_tolerances.py` prints it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from muonsplit.checks.registry import BLIND
from muonsplit.dialect import DIALECTS, Arithmetic
from muonsplit.errors import UsageError
from muonsplit.newton_schulz import gram, newton_schulz, schedule, singular_value_oracle
from muonsplit.newton_schulz.products import PRODUCTS
from muonsplit.observe.fit import compare
from muonsplit.observe.gradients import conditioned
from muonsplit.observe.gram_noise import Order, _Pair
from muonsplit.observe.noise import Roundings
from muonsplit.observe.tolerance import bounds, rounding_bound

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
        found.size_bounds.append(bounds([(block, arithmetic)])[0].size)
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


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("jordan", (256, 256)),
        ("heavyball-3.2.1", (256, 256)),
        ("pytorch-optimizer-4.1.0-gram", (256, 256)),
        ("gram-newton-schulz-0.1.6", (128, 96)),
    ],
)
def test_sizes_of_large_blocks_are_inside(name: str, shape: tuple[int, int]) -> None:
    # Their diagonals are rounded to one side, and one rounds a: not all averages out over entries.
    found = measure(DIALECTS[name].arithmetic, "conditioned", shape)
    assert found.room >= 1
    assert all(s <= b for s, b in zip(found.sizes, found.size_bounds, strict=True))


@pytest.mark.parametrize(
    ("form", "iteration"),
    [
        ("matmul", "standard"),
        ("fast", "standard"),
        ("factored", "standard"),
        ("matmul", "gram"),
        ("fast", "gram"),
    ],
)
def test_noise_alone_is_predicted(form: str, iteration: str) -> None:
    # Ten steep steps on a block of low rank in float32: nearly all of the error is noise outside
    # the row space, which many entries average, so that measured is derived: √2 is left, assumed.
    arithmetic = arithmetic_of("deepseek-v4", "float32", iteration, form)
    assert 1.2 < measure(arithmetic, "rank d/8", (96, 288)).room < 2


PERTURBED = 1e-7
EXACT = Roundings(0.0, 0.0, 5, 8)


class Noisy(Roundings):
    """Exact but for given variances in Z."""

    variances: Tensor

    def square(self, A: Tensor, coefficients: Any) -> Tensor:
        return self.variances * self.rows**2


@pytest.mark.parametrize("form", ["matmul", "addmm", "addmm_diagonal", "paren_gram"])
@pytest.mark.parametrize("tall", ["transpose", "transpose_copy", "right"])
@pytest.mark.parametrize("shape", [(5, 8), (8, 5)], ids=str)
@pytest.mark.parametrize("noisy", ["R", "Z"])
def test_noise_in_a_gram_iteration_passes_on_as_derived(
    form: Any, tall: Any, shape: tuple[int, int], noisy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first R or Z is perturbed in float64, and multiplied in the order the form takes."""
    source = torch.Generator().manual_seed(0)
    S = torch.rand(5, generator=source, dtype=torch.float64) + 0.1
    E = torch.rand(5, 5, generator=source, dtype=torch.float64)
    block = torch.zeros(shape, dtype=torch.float64)
    block[:5, :5] = torch.diag(S)
    arithmetic = Arithmetic(
        compute_dtype="float64",
        cpu_dtype="float64",
        iteration="gram",
        form=form,
        tall=tall,
        steps=3,
        epsilon=0.0,
    )
    clean = newton_schulz(block.unsqueeze(0), arithmetic)[0]
    added = iter([PERTURBED * E])

    def perturbed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: make(*args) + next(added, torch.zeros(()))

    if noisy == "R":
        monkeypatch.setattr(gram, "gram_matrix", perturbed(gram.gram_matrix))
    else:
        products = PRODUCTS[form]
        monkeypatch.setitem(PRODUCTS, form, products._replace(square=perturbed(products.square)))
    changed = (newton_schulz(block.unsqueeze(0), arithmetic)[0] - clean)[:5, :5] / PERTURBED
    order = Order.of(arithmetic, shape[0] > shape[1])
    S = S / S.norm()
    right = shape[0] > shape[1] and tall == "right"
    variances = (E.mT if right else E).square()
    pair, first = _Pair(S, EXACT), Noisy(*EXACT)
    pair.RR = variances if noisy == "R" else torch.zeros_like(E)
    first.variances = variances if noisy == "Z" else torch.zeros_like(E)
    for i, step in enumerate(schedule(arithmetic)):
        pair.step(step, order, first if i == 0 else EXACT, first=i == 0)
    wide = changed.mT if shape[0] > shape[1] else changed
    # First order in the perturbation; the second is about as much smaller again.
    assert torch.allclose(wide.abs(), pair.QQ.sqrt() * S, rtol=1e-4, atol=1e-6)


def roundoff_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_rounding_has_the_size_it_is_said_to_have(dtype: torch.dtype) -> None:
    # Mantissas spread logarithmically, as products of many factors are.
    x = 2 ** torch.rand(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = (x.float().to(dtype).double() - x) / x
    derived = Roundings(roundoff_of(dtype), 0.0, 1, 1).of(torch.ones(1)).sqrt()
    assert float(error.square().mean().sqrt()) == pytest.approx(float(derived), rel=0.01)


@pytest.mark.parametrize("signs", ["alike", "cancelling"])
def test_running_sums_round_as_they_are_said_to(signs: str) -> None:
    terms, trials = 64, 4000
    source = torch.Generator().manual_seed(1)
    left, right = torch.rand(2, trials, terms, generator=source).unbind()
    products = left * right
    if signs == "cancelling":
        products[:, 1::2] = -products[:, ::2]
        products = products.gather(1, torch.rand(products.shape, generator=source).argsort(1))
    total = torch.zeros(trials)
    for term in products.unbind(1):
        total = total + term  # one rounding to float32 each
    error = total.double() - products.double().sum(1)
    # One entry: of all terms the squared sum, and the sum of squares.
    squared, squares = products.double().sum(1).square(), products.double().square().sum(1)
    one_rounding = Roundings(roundoff_of(torch.float32), 0.0, 1, 1).of(torch.ones(1))
    derived = one_rounding * terms * (squared / 3 + squares / 6)
    assert float(error.square().mean()) == pytest.approx(float(derived.mean()), rel=0.25)


def test_a_long_side_is_summed_over() -> None:
    terms, trials = 256, 2000
    rows = torch.randn(trials, terms, generator=torch.Generator().manual_seed(3))
    total = torch.zeros(trials)
    for x in rows.unbind(1):
        total = total + (x * x).float()
    exact = (rows * rows).double().sum(1)
    errors = ((total.double() - exact) / exact).square().mean()
    derived = Roundings(0.0, roundoff_of(torch.float32), 1, terms).gram(torch.ones(1))
    # One row is its own Gram matrix: no sum strays there, for which half as much is allowed.
    assert float(derived) / 2 < float(errors) < float(derived)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("number", [3.4445, -4.7750, 2.0315, 1.0, -0.375, 8.28721201814563])
def test_a_number_is_rounded_as_its_dtype_does(number: float, dtype: torch.dtype) -> None:
    held = float(torch.tensor(number, dtype=dtype))
    assert Roundings(roundoff_of(dtype), 0.0, 1, 1).error(number) == held - number


@pytest.mark.parametrize("steps", [0.0, 0.15, 0.3, 0.45])
def test_a_diagonal_rounds_to_one_side_as_far_as_it_is_said_to(steps: float) -> None:
    # Just above 1, where a step of bfloat16 is 2⁻⁷; further up the same spread is said to be less.
    rows, step = 64, 2.0**-7
    source = torch.Generator().manual_seed(2)
    noise = steps * step * torch.randn(200_000, generator=source, dtype=torch.float64)
    diagonals = [1.1 + i / 16 * step + noise for i in range(16)]
    means = torch.stack([(d.bfloat16().double() - d).mean() for d in diagonals])
    # Eigenvalues of a matrix with such a diagonal.
    spread = torch.linspace(-1, 1, rows, dtype=torch.float64)
    spread *= steps * step / (spread.std(correction=0) * (2 / (rows + 2)) ** 0.5)
    derived = float(Roundings(2.0**-8, 0.0, rows, rows).shift(1.1 + spread))
    measured = float(means.square().mean().sqrt())
    # A step is between one and two roundoffs of a number, and what is derived in the middle.
    assert derived / 2 < measured < 1.5 * derived


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
