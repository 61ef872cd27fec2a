"""Every error budget against what legal arithmetic does; `python test_tolerances.py` prints it."""

import itertools
import math
from collections.abc import Callable, Sequence
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
from muonsplit.observe import tolerance
from muonsplit.observe.fit import compare
from muonsplit.observe.gradients import conditioned
from muonsplit.observe.gram_noise import Order, _Pair, take_run
from muonsplit.observe.noise import Noise, Roundings, take_step
from muonsplit.observe.tolerance import (
    _distance,
    _noises,
    _projection,
    _spectrum,
    bounds,
    rounding_bound,
)

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


# Noise followed by force: in float64, by its derivative along every entry that errs. Units are
# coarse, so that each term is a visible share. Eigenvalues near each other move together.
UNIT, SUMS = 2.0**-2, 2.0**-3
NEAR = torch.tensor([0.50, 0.47, 0.53], dtype=torch.float64)
APART = torch.tensor([0.80, 0.15, 0.45], dtype=torch.float64)
LONG = 5
COARSE = Roundings(UNIT, SUMS, len(NEAR), LONG)
RUN = ((3.4, -2.0, 4.0), (2.3, -1.7, 0.4), (1.9, -1.2, 0.3))
# Uniform in a step, and ∫ m⁻³ dm / ln 2 over mantissas from 1 to 2. The package says 0.735².
MEAN_SQUARE = 1 / 3 * 3 / (8 * math.log(2))


def near(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=3e-3, atol=0.0)


def rounded(unit: float, *results: Tensor) -> float:
    return MEAN_SQUARE * unit**2 * sum(float((x * x).sum()) for x in results)


def multiplied(left: Tensor, right: Tensor, terms: int) -> float:
    strayed = float((left * left).sum() * (right * right).sum()) / len(left)
    in_sums = rounded(SUMS, left * right) / 3 + MEAN_SQUARE * SUMS**2 * strayed / 6
    return rounded(UNIT, left * right) + terms * in_sums


def summed(C: Tensor, a: float, left: Tensor, right: Tensor) -> float:
    made = rounded(UNIT, a * C, a * C + left * right)
    return made + multiplied(left, right, len(NEAR))


def squared(A: Tensor, b: float, c: float) -> float:
    made = rounded(UNIT, b * A, c * A * A, b * A + c * A * A)
    return made + multiplied(c * A, A, len(NEAR))


def one_sided(*results: Tensor) -> float:
    """What rounding diagonals moves all eigenvalues by: less the more steps they spread over."""
    total = 0.0
    for x in results:
        values = [float(v) for v in x]
        mean = sum(values) / len(values)
        variance = sum((v - mean) ** 2 for v in values) / len(values) * 2 / (len(values) + 2)
        step = 2 * UNIT * abs(mean)
        total += MEAN_SQUARE * (UNIT * mean * math.exp(-2 * math.pi**2 * variance / step**2)) ** 2
    return total**0.5


def all_of_it(x: Tensor) -> float:
    return MEAN_SQUARE**0.5 * UNIT * abs(sum(float(v) for v in x)) / len(x)


def alike(energy: float, rows: int, cols: int) -> Tensor:
    return torch.full((rows, cols), energy / (rows * cols), dtype=torch.float64)


def slopes_of(make: Callable[..., Tensor], arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Derivatives of every entry that is made by every entry of each argument, about zero."""
    return torch.autograd.functional.jacobian(make, tuple(torch.zeros_like(x) for x in arguments))


def spread(slopes: Sequence[Tensor], variances: Sequence[Tensor]) -> Tensor:
    """Variances of what is made when each argument has noise of such variances, entry by entry."""
    every = [(s.square() * v).flatten(2).sum(2) for s, v in zip(slopes, variances, strict=True)]
    return torch.stack(every).sum(0)


def along(slopes: Tensor, diagonal: Tensor) -> Tensor:
    """How singular values of what is made move when one argument has an error on its diagonal."""
    return (slopes.diagonal(dim1=2, dim2=3) * diagonal).sum(2).diagonal()


def held(
    found: Noise, made: Tensor, variances: Tensor, common: Tensor, shared: Sequence[Tensor]
) -> None:
    """What is followed is what comes out by force."""
    rows = len(NEAR)
    assert torch.allclose(found.result, made.diagonal(), rtol=1e-12)
    assert near(found.inside, variances[:, :rows])
    assert near(found.outside, variances[:, rows])
    assert near(found.common, common)
    # Errors that are shared are known up to their order and sign.
    expected = torch.stack(list(shared))
    assert near(found.shared.mT @ found.shared, expected.mT @ expected)


def noisy(S: Tensor) -> tuple[Noise, Tensor]:
    """Noise of every kind that has come before, and the block it is on."""
    source = torch.Generator().manual_seed(5)
    rows = len(S)
    shapes = [(rows, rows), (rows,), (rows,), (2, rows)]
    inside, outside, common, shared = (
        torch.rand(shape, generator=source, dtype=torch.float64) * 0.1 for shape in shapes
    )
    # An entry and its mirror are taken to be independent, which on the diagonal are one.
    inside.diagonal().zero_()
    X = torch.zeros(rows, LONG, dtype=torch.float64)
    X.diagonal().copy_(S)
    return Noise(inside, outside, LONG - rows, common, shared, S), X


def test_products_and_sums_round_at_every_point() -> None:
    C, left, right = torch.tensor(
        [[2.0, 0.3, -1.5], [1.0, -3.0, 0.5], [0.7, 2.0, -1.1]], dtype=torch.float64
    )
    assert float(COARSE.of(C, left)) == pytest.approx(rounded(UNIT, C, left), rel=3e-3)
    for terms in (3, 40):
        found = float(COARSE.product(left, right, terms))
        assert found == pytest.approx(multiplied(left, right, terms), rel=3e-3)
    found = float(COARSE.sum(C, -1.7, left, right))
    assert found == pytest.approx(summed(C, -1.7, left, right), rel=3e-3)
    found = float(COARSE.square(C, (9.0, -1.2, 0.8)))
    assert found == pytest.approx(squared(C, -1.2, 0.8), rel=3e-3)
    found = float(COARSE.gram(C))
    assert found == pytest.approx(rounded(UNIT, C * C) + multiplied(C, C, LONG), rel=3e-3)


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("S", [NEAR, APART], ids=["near", "apart"])
def test_a_step_passes_noise_on_and_adds_its_own(S: Tensor, factored: bool) -> None:
    (a, b, c), (noise, X), rows = RUN[0], noisy(S), len(S)
    A = S * S
    B = b * A + c * A * A

    def make(of_X: Tensor, of_A: Tensor, of_B: Tensor, of_result: Tensor) -> Tensor:
        Y = X + of_X
        gram_of_Y = Y @ Y.mT + of_A
        return a * Y + (b * gram_of_Y + c * gram_of_Y @ gram_of_Y + of_B) @ Y + of_result

    leaving = summed(S, a, B, S) + (multiplied(a + B, S, rows) if factored else 0)
    variances = [
        torch.cat((noise.inside, noise.outside.unsqueeze(1).expand(rows, LONG - rows)), 1),
        alike(rounded(UNIT, A) + multiplied(S, S, LONG), rows, rows),
        alike(squared(A, b, c), rows, rows),
        alike(leaving, rows, LONG),
    ]
    # Which argument errs, and on its diagonal.
    errors = [(0, noise.shared[0]), (0, noise.shared[1]), (1, one_sided(A) * torch.ones(rows))]
    if factored:
        errors += [(2, all_of_it(b + c * A) * A), (2, one_sided(b * A + c * A * A) + 0 * A)]
        errors += [(2, all_of_it(a + B) + 0 * A)]
    else:
        errors += [(2, one_sided(c * A) * A)]
        errors += [(2, one_sided(b * A, c * A * A, b * A + c * A * A) + 0 * A)]
    slopes = slopes_of(make, variances)
    shared = [along(slopes[which], error) for which, error in errors]
    common = along(slopes[0], noise.common).abs()
    wanted = make(*(torch.zeros_like(v) for v in variances))
    expected = spread(slopes, variances)
    take_step(noise, RUN[0], COARSE, factored=factored)
    held(noise, wanted, expected, common, shared)


ORDERS = [Order(*flags) for flags in itertools.product([False, True], repeat=4)]


@pytest.mark.parametrize("order", ORDERS, ids=lambda o: "".join(str(int(x)) for x in o))
@pytest.mark.parametrize("S", [NEAR, APART], ids=["near", "apart"])
def test_a_gram_run_passes_noise_on_and_adds_its_own(S: Tensor, order: Order) -> None:
    (noise, X), rows = noisy(S), len(S)
    # After one step an entry and its mirror depend on each other, which is neglected.
    noise.inside = torch.zeros_like(noise.inside)
    unit_matrix = torch.eye(rows, dtype=torch.float64)

    def sided(M: Tensor, Z: Tensor, first: bool) -> Tensor:
        return M @ Z if first else Z @ M

    def make(of_X: Tensor, of_R: Tensor, *rest: Tensor) -> Tensor:
        Y, of = X + of_X, iter(rest)
        R, Q = Y @ Y.mT + of_R, unit_matrix
        for i, (a, b, c) in enumerate(RUN):
            Z = b * R + c * R @ R + next(of)
            Q = (a * Q + sided(Q, Z, order.q_first) if i else a * Q + Z) + next(of)
            T = a * R + sided(R, Z, order.r_first) + next(of)
            R = a * T + sided(T, Z, order.last_first) + next(of)
        return Q @ Y + next(of)

    R, Q = S * S, torch.ones_like(S)
    variances = [
        torch.cat((noise.inside, noise.outside.unsqueeze(1).expand(rows, LONG - rows)), 1),
        alike(rounded(UNIT, R) + multiplied(S, S, LONG), rows, rows),
    ]
    errors = [(0, noise.shared[0]), (0, noise.shared[1]), (1, one_sided(R) + 0 * R)]
    for i, (a, b, c) in enumerate(RUN):
        Z = b * R + c * R * R
        T = a * R + Z * R
        energies = (
            squared(R, b, c),
            summed(Q, a, Z, Q) if i else rounded(UNIT, a + Z),
            summed(R, a, Z, R),
            summed(T, a, Z, T),
        )
        at = len(variances)
        variances += [alike(energy, rows, rows) for energy in energies]
        errors += [
            (at, one_sided(c * R) * R),
            (at, one_sided(b * R, c * R * R, Z) + 0 * R),
            (at + 1, (one_sided(a * Q, Z * Q, a * Q + Z * Q) if i else all_of_it(a + Z)) + 0 * R),
            (at + 2, one_sided(a * R, Z * R, T) + 0 * R),
            (at + 3, one_sided(a * T, Z * T, a * T + Z * T) + 0 * R),
        ]
        R, Q = a * T + Z * T, a * Q + Z * Q
    variances.append(alike(multiplied(Q, S, rows), rows, LONG))
    slopes = slopes_of(make, variances)
    shared = [along(slopes[which], error) for which, error in errors]
    common = along(slopes[0], noise.common).abs()
    if order.identity:
        # Two bits hold 3 for 3.4, on the diagonal of the first Q alone.
        common = common + along(slopes[3], 0.4 + 0 * R).abs()
    wanted = make(*(torch.zeros_like(v) for v in variances))
    expected = spread(slopes, variances)
    take_run(noise, RUN, order, COARSE)
    held(noise, wanted, expected, common, shared)


def test_a_bound_is_a_tail_of_everything_that_errs() -> None:
    noise, _ = noisy(NEAR)
    noise.result = torch.tensor([0.2, -0.5, 0.4], dtype=torch.float64)
    # Laurent and Massart's t, for one in 10⁹, and twice the noise, as roundings come in pairs.
    t = math.log(1e9)
    variances = [float(v) for v in noise.inside.flatten()]
    variances += [float(v) for v in noise.outside] * noise.copies
    variances += [sum(float(x) ** 2 for x in row) for row in noise.shared]
    tail = sum(variances) + 2 * math.sqrt(t * sum(v * v for v in variances))
    tail += 2 * t * max(variances)
    size = math.sqrt(0.2**2 + 0.5**2 + 0.4**2)
    common = math.sqrt(sum(float(x) ** 2 for x in noise.common))
    assert float(_distance(noise)) == pytest.approx((math.sqrt(2 * tail) + common) / size)
    # The largest variance is one of each kind in turn.
    for kind in ("inside", "outside", "shared"):
        larger = replace(noise, **{kind: 100 * getattr(noise, kind)})
        factor = 1e4 if kind == "shared" else 100
        grown = {"inside": variances[:9], "outside": variances[9:-2], "shared": variances[-2:]}
        grown[kind] = [factor * v for v in grown[kind]]
        every = [v for values in grown.values() for v in values]
        tail = sum(every) + 2 * math.sqrt(t * sum(v * v for v in every)) + 2 * t * max(every)
        assert float(_distance(larger)) == pytest.approx((math.sqrt(2 * tail) + common) / size)


def test_a_size_is_one_projection_of_everything_that_errs() -> None:
    noise, _ = noisy(NEAR)
    noise.inside = noise.inside + torch.diag(torch.tensor([0.02, 0.03, 0.05])).double()
    # Smaller than one, as an update of low rank may be.
    result = [0.2, -0.5, 0.4]
    noise.result = torch.tensor(result, dtype=torch.float64)
    size = math.sqrt(sum(x * x for x in result))
    shares = [x / size for x in result]
    variance = sum(v * share**2 for v, share in zip((0.02, 0.03, 0.05), shares, strict=True))
    for row in noise.shared:
        variance += sum(float(x) * share for x, share in zip(row, shares, strict=True)) ** 2
    # P(|x| > √(2·t·v)) is about e⁻ᵗ for one Gaussian; twice the variance, as above.
    random = math.sqrt(2 * math.log(1e9) * 2 * variance)
    common = sum(float(x) * abs(share) for x, share in zip(noise.common, shares, strict=True))
    assert float(_projection(noise)) == pytest.approx((random + common) / size)


def block_of(*values: float) -> Tensor:
    block = torch.zeros(3, 5, dtype=torch.float64)
    block.diagonal().copy_(torch.tensor(values, dtype=torch.float64))
    return block


def test_bounds_are_of_every_road_and_second_order_is_in_the_size() -> None:
    block = gaussian(8, 40, torch.Generator().manual_seed(9))
    asked = Arithmetic(cpu_dtype="bfloat16", iteration="auto", restarts=(2, 4), form="addmm")
    roads = [replace(asked, iteration=iteration) for iteration in ("standard", "gram")]
    standard, gram_only, auto = bounds([(block, each) for each in (*roads, asked)])
    assert standard != gram_only
    assert auto.rounding == max(standard.rounding, gram_only.rounding)
    assert auto.size == max(standard.size, gram_only.size)
    S = torch.linalg.svdvals(block)
    noise = _noises(S / S.norm(), (8, 40), roads[0])[0]
    assert standard.rounding == pytest.approx(float(_distance(noise)), rel=1e-4)
    assert standard.size == pytest.approx(
        float(_projection(noise)) + float(_distance(noise)) ** 2, rel=1e-4
    )


@pytest.mark.parametrize("iteration", ["standard", "gram", "gram_always", "auto"])
@pytest.mark.parametrize("shape", [(3, 3), (3, 5), (5, 3)], ids=str)
def test_each_iteration_has_its_roads(iteration: Any, shape: tuple[int, int]) -> None:
    asked = arithmetic_of("jordan", "float32", iteration, "addmm")
    square = shape[0] == shape[1]
    own = {
        "standard": ["standard"],
        "gram": ["standard"] if square else ["gram"],
        "gram_always": ["gram"],
        "auto": ["standard", "gram"],
    }[iteration]
    runs = {"standard": [(i, i + 1) for i in range(5)], "gram": [(0, 2), (2, 5)]}
    if iteration == "standard":
        asked = replace(asked, restarts=())
    expected = [by_hand(asked, shape, runs[road], gram_run=road == "gram") for road in own]
    for found, wanted in zip(_noises(NEAR, shape, asked), expected, strict=True):
        same(found, wanted)


def by_hand(
    arithmetic: Arithmetic,
    shape: tuple[int, int],
    runs: Sequence[tuple[int, int]],
    *,
    gram_run: bool,
    units: tuple[float, float, float] = (2.0**-24, 2.0**-24, 2.0**-24),
    single: float = 2.0**-24,
) -> Noise:
    """Noise of a block on its way: what enters, runs of steps, what leaves.

    Args:
        arithmetic: Decides the steps and their order.
        shape: Of the block.
        runs: First steps and ends.
        gram_run: Whether they are runs of a Gram iteration.
        units: Roundoffs of the iteration, of the pre-cast and of the norm.
        single: Roundoff of running sums and of what is outside the iteration.
    """
    unit, outer, of_norm = units
    short, long = min(shape), max(shape)
    entries, S = short * long, NEAR
    entering = 4 * rounded(single, S) + rounded(outer, S) + rounded(unit, S)
    inside = torch.full((short, short), entering / entries, dtype=torch.float64)
    norm = 3 * of_norm + single * math.sqrt(entries / 3)
    none = torch.zeros(0, short, dtype=torch.float64)
    noise = Noise(inside, inside[0], long - short, norm * S, none, S)
    roundings = Roundings(unit, single, short, long)
    steps = schedule(arithmetic)
    for start, end in runs:
        if gram_run:
            order = Order.of(arithmetic, shape[0] > shape[1])
            take_run(noise, steps[start:end], order, roundings)
        else:
            factored = arithmetic.form == "factored"
            take_step(noise, steps[start], roundings, factored=factored)
    leaving = (2 * rounded(outer, noise.result) + 2 * rounded(single, noise.result)) / entries
    noise.inside, noise.outside = noise.inside + leaving, noise.outside + leaving
    return noise


def same(found: Noise, wanted: Noise) -> None:
    assert found.copies == wanted.copies
    assert torch.allclose(found.result, wanted.result, rtol=1e-12)
    for kind in ("inside", "outside", "common", "shared"):
        assert near(getattr(found, kind), getattr(wanted, kind)), kind


@pytest.mark.parametrize("tall", ["transpose", "right"])
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (3, 3)], ids=str)
@pytest.mark.parametrize("form", ["fast", "factored", "matmul"])
def test_the_order_of_a_form_is_followed(form: Any, shape: tuple[int, int], tall: Any) -> None:
    asked = Arithmetic(cpu_dtype="float32", form=form, tall=tall)
    runs = [(i, i + 1) for i in range(5)]
    (found,) = _noises(NEAR, shape, asked)
    # The fast form multiplies by a Q at every step, whatever the iteration.
    same(found, by_hand(asked, shape, runs, gram_run=form == "fast"))


HALF, SINGLE, DOUBLE = 2.0**-8, 2.0**-24, 2.0**-53


@pytest.mark.parametrize(
    ("changes", "units", "single"),
    [
        ({"cpu_dtype": "bfloat16"}, (HALF, HALF, HALF), SINGLE),
        ({"cpu_dtype": "float16"}, (2.0**-11,) * 3, SINGLE),
        ({"cpu_dtype": "float64"}, (DOUBLE,) * 3, DOUBLE),
        ({"cpu_dtype": "bfloat16", "norm_dtype": "input"}, (HALF, HALF, SINGLE), SINGLE),
        ({"cpu_dtype": "bfloat16", "norm_dtype": "float32"}, (HALF, HALF, SINGLE), SINGLE),
        ({"cpu_dtype": "float32", "pre_cast": "bfloat16"}, (SINGLE, HALF, SINGLE), SINGLE),
        ({"cpu_dtype": "bfloat16", "pre_cast": "float16"}, (HALF, 2.0**-11, HALF), SINGLE),
    ],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_dtypes_round_where_they_are_used(
    changes: dict[str, Any], units: tuple[float, float, float], single: float, steps: int
) -> None:
    asked = Arithmetic(steps=steps, **changes)
    runs = [(i, i + 1) for i in range(steps)]
    (found,) = _noises(NEAR, (3, 5), asked)
    same(found, by_hand(asked, (3, 5), runs, gram_run=False, units=units, single=single))


def test_many_blocks_have_the_bounds_of_each() -> None:
    source = torch.Generator().manual_seed(6)
    arithmetics = [Arithmetic(), Arithmetic(norm_factor=1.5), Arithmetic(cpu_dtype="float32")]
    asked = [(gaussian(*shape, source), a) for shape in [(4, 6), (6, 4)] for a in arithmetics]
    asked = [*asked, (asked[0][0] * 3, asked[0][1]), (asked[3][0], asked[4][1])]
    together = bounds(asked)
    assert together == [bounds([each])[0] for each in asked]
    # The last is the fifth arithmetic on the fourth block; the one before it the first, larger.
    assert len(set(together)) == 7
    assert together[6] == together[0]


def test_spectra_are_alike_to_five_digits() -> None:
    asked = Arithmetic(norm_factor=2.0, cpu_dtype="float32")
    found = _spectrum(block_of(4.0, 3.0, 1e-9), asked)
    assert found.shape == (3, 5)
    assert found.arithmetic == Arithmetic(cpu_dtype="float32")
    # Relative to each: the mantissa has 17 bits.
    assert found.values == pytest.approx((0.4, 0.3, 1e-10), rel=2.0**-17, abs=0)
    for value, exact in zip(found.values[:2], (0.4, 0.3), strict=True):
        assert value != pytest.approx(exact, rel=2.0**-22, abs=0)
    assert _spectrum(block_of(8.0, 6.0, 2e-9 * (1 + 1e-9)), asked) == found
    assert _spectrum(block_of(8e-8, 6e-8, 2e-17), asked) == found
    assert _spectrum(block_of(4.0, 3.0, 1e-9 * (1 + 1e-4)), asked) != found
    assert _spectrum(block_of(0.0, 0.0, 0.0), asked).values == (0.0, 0.0, 0.0)


def test_what_was_derived_is_not_derived_again(monkeypatch: pytest.MonkeyPatch) -> None:
    derived: list[int] = []

    def counting(alike: Sequence[Any]) -> Any:
        derived.append(len(alike))
        return derive(alike)

    derive = tolerance._derived
    monkeypatch.setattr(tolerance, "_derived", counting)
    monkeypatch.setattr(tolerance, "_known", {})
    monkeypatch.setattr(tolerance, "_MOST_KNOWN", 3)
    blocks = [block_of(1.0, 0.1 * i, 0.05) for i in range(1, 5)]
    asked = [(block, Arithmetic()) for block in blocks]
    # Two equal ones are one; blocks of one shape are derived together.
    first = bounds([*asked[:2], asked[0]])
    assert derived == [2]
    assert bounds(asked[:2]) == first[:2]
    assert derived == [2]
    bounds(asked[1:])
    assert derived == [2, 2]
    # Three are remembered, and the first is the oldest.
    assert len(tolerance._known) == 3
    bounds(asked[1:])
    assert derived == [2, 2]
    bounds(asked[:1])
    assert derived == [2, 2, 1]


def test_bounds_are_in_proportion_to_the_roundoff() -> None:
    # Where eigenvalues spread over many steps, every error is a multiple of it.
    block = spaced(gaussian(6, 20, torch.Generator().manual_seed(10)), 0.1)
    single, double = (
        bounds([(block, Arithmetic(cpu_dtype=dtype, compute_dtype=dtype))])[0]
        for dtype in ("float32", "float64")
    )
    assert double.rounding * 2.0**29 == pytest.approx(single.rounding, rel=1e-6, abs=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_of_one_row_is_inside(dtype: str) -> None:
    for shape in [(1, 24), (24, 1), (1, 1)]:
        asked = arithmetic_of("jordan", dtype, "standard", "matmul")
        assert measure(asked, "Gaussian", shape).room >= 1


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
