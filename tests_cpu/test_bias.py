"""The signed bias of singular values: what it reads, what it forgives, and what it sees."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from muonsplit.certificate.run import Certificate, Question, certify
from muonsplit.dialect import Arithmetic, dialect_named
from muonsplit.faulty import steps
from muonsplit.newton_schulz import COEFFICIENTS, newton_schulz, schedule
from muonsplit.observe.bias import Bias, biases, observe
from muonsplit.observe.gradients import conditioned
from muonsplit.subjects.drive import Outcome, Task
from muonsplit.subjects.process import InProcess

Steps = Sequence[tuple[float, float, float]]

JORDAN = (3.4445, -4.7750, 2.0315)
FAULTS = {"b": (3.4445, -4.7770, 2.0315), "c": (3.4445, -4.7750, 2.0310)}
# 2¹⁴ singular values, as the check takes in bfloat16; wide, tall and square, of two short sides.
SHAPES = [(768, 8, 40), (384, 16, 16), (256, 48, 16)]


def drawn(count: int, rows: int, cols: int, seed: int) -> Tensor:
    """Conditioned blocks of random size."""
    source = torch.Generator().manual_seed(seed * 7919 + rows)
    sizes = 4 ** (torch.rand(count, 1, 1, generator=source) - 0.5)
    return conditioned(torch.randn(count, rows, cols, generator=source)) * sizes


def exact(X: Tensor, coefficients: Steps) -> Tensor:
    """The iteration on singular values, in float64."""
    U, S, Vh = torch.linalg.svd(X.double(), full_matrices=False)
    S = S / (S.square().sum(-1, keepdim=True).sqrt() + 1e-7)
    for a, b, c in coefficients:
        S = a * S + b * S**3 + c * S**5
    return (U * S.unsqueeze(-2)) @ Vh


def plain(X: Tensor, coefficients: Steps, form: str) -> Tensor:
    """Newton–Schulz as one writes it down, each product in float32 and rounded to bfloat16."""
    tall = X.shape[1] > X.shape[2]
    X = half(X.mT if tall else X)
    X = half(X / half(half(torch.stack([x.norm() for x in X])) + 1e-7).view(-1, 1, 1))
    for a, b, c in coefficients:
        A = half(X @ X.mT)
        if form == "addmm":
            B = half(b * A + c * (A @ A))
            X = half(a * X + B @ X)
        elif form == "compiled":  # elementwise operations fused, as a compiler does
            B = half(b * A + half(half(c * A) @ A))
            X = half(a * X + half(B @ X))
        else:
            B = half(half(b * A) + half(half(c * A) @ A))
            X = half(half(a * X) + half(B @ X))
    return X.mT if tall else X


def half(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def read(seen: Sequence[Tensor], legal: Sequence[Tensor], given: Sequence[Tensor], a: Arithmetic):
    observed = [observe(X, update, a) for X, update in zip(given, seen, strict=True)]
    return biases(observed, legal, a)


def found(bias: Sequence[Bias], name: str, where: str = "all blocks") -> Bias:
    return next(b for b in bias if b.coefficient == name and b.where == where)


def worst(bias: Sequence[Bias]) -> float:
    return max(abs(b.off) / b.allowed for b in bias)


@pytest.mark.parametrize("letter", ["a", "b", "c"])
@pytest.mark.parametrize("shape", [(6, 8, 24), (6, 24, 8), (6, 12, 12)], ids=str)
def test_a_shift_of_a_coefficient_is_read_off(letter: str, shape: tuple[int, int, int]) -> None:
    X = drawn(*shape, 0)
    shifted = [x + 1e-6 * (i == "abc".index(letter)) for i, x in enumerate(JORDAN)]
    seen = exact(X, [tuple(shifted)] * 5)
    bias = read([seen], [exact(X, [JORDAN] * 5)], [X], Arithmetic())
    name = f"{letter} of every step"
    # First order in the shift: the second is smaller by the shift itself times a slope.
    assert found(bias, name).seen == pytest.approx(1e-6, rel=1e-3)
    assert found(bias, name).legal == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize("letter", ["a", "b", "c"])
def test_each_step_of_a_schedule_is_read_apart(letter: str, step: int) -> None:
    X = drawn(6, 8, 24, 1)
    you = COEFFICIENTS["you"]
    shifted = list(you)
    moved = [x + 1e-7 * (i == "abc".index(letter)) for i, x in enumerate(you[step])]
    shifted[step] = (moved[0], moved[1], moved[2])
    bias = read([exact(X, shifted)], [exact(X, you)], [X], Arithmetic(coefficients="you"))
    assert found(bias, f"{letter} of step {step + 1}").off == pytest.approx(1e-7, rel=1e-3)


def test_size_is_not_bias() -> None:
    X = drawn(6, 8, 24, 2)
    seen, legal = exact(X, [FAULTS["b"]] * 5), exact(X, [JORDAN] * 5)
    sizes = torch.logspace(-3, 3, 6, dtype=torch.float64).view(-1, 1, 1)
    once = read([seen], [legal], [X], Arithmetic())
    again = read([seen * sizes], [legal * sizes.flip(0)], [X], Arithmetic())
    assert [b.off for b in again] == pytest.approx([b.off for b in once], rel=1e-9)


def test_one_rounding_more_is_not_accused() -> None:
    # The same bits but for the last: what is left of the noise is small, and to one side.
    given = [drawn(*shape, 11) for shape in SHAPES]
    legal = [newton_schulz(X, Arithmetic()) for X in given]
    assert worst(read([half(X * 0.0137) for X in legal], legal, given, Arithmetic())) < 0.1


SPOKEN = (
    "jordan",
    "torch-2.13",
    "moonlight",
    "deepspeed-0.19.8",
    "deepspeed-0.19.8-standard",
    "dion",
    "gram-newton-schulz-0.1.6",
    "heavyball-3.2.1",
    "emerging-optimizers-0.3.0",
)


def spoken(name: str, dtype: str | None = None) -> Arithmetic:
    arithmetic = dialect_named(name).arithmetic
    if dtype is None:
        return arithmetic
    # Gram needs more restarts the coarser the dtype.
    restarts = (2, 4) if arithmetic.iteration == "gram" else ()
    return replace(
        arithmetic, cpu_dtype=dtype, compute_dtype=dtype, restarts=restarts, pre_cast=None
    )


@pytest.mark.parametrize("name", SPOKEN)
def test_the_iteration_itself_has_no_bias(name: str) -> None:
    # What excuses a bias in half precision is the iteration's own: in float32 it may have none.
    arithmetic = replace(spoken(name, "float32"), norm_factor=1.0)
    given = [drawn(64, rows, cols, 3) for _, rows, cols in SHAPES]
    seen = [newton_schulz(X, arithmetic) for X in given]
    coefficients = COEFFICIENTS[arithmetic.coefficients]
    legal = [exact(X, list(coefficients) * (5 // len(coefficients))) for X in given]
    bias = read(seen, legal, given, arithmetic)
    assert worst(bias) < 1
    # Far below a typing error in the fourth digit.
    assert all(b.allowed < 1e-4 for b in bias if arithmetic.coefficients == "jordan")


@pytest.mark.parametrize("form", ["matmul", "addmm", "compiled"])
def test_plain_code_is_not_accused(form: str) -> None:
    given = [drawn(*shape, 4) for shape in SHAPES]
    arithmetic = Arithmetic(form="addmm" if form == "addmm" else "matmul")
    legal = [newton_schulz(X, arithmetic) for X in given]
    seen = [plain(X * 1.37, [JORDAN] * 5, form) for X in given]
    assert worst(read(seen, legal, given, arithmetic)) < 1


def test_legal_rounding_is_biased_as_much_as_a_typing_error() -> None:
    # Why the arithmetic's own rounding points are measured and not bounded.
    X = drawn(96, 64, 64, 5)
    seen = plain(X, [JORDAN] * 5, "matmul")
    bias = found(read([seen], [exact(X, [JORDAN] * 5)], [X], Arithmetic()), "b of every step")
    assert not bias.passes
    assert bias.off < -1e-3


def redrawn(X: Tensor, arithmetic: Arithmetic, seed: int) -> Tensor:
    """The same iteration on blocks of another size, which rounds everything anew."""
    source = torch.Generator().manual_seed(seed)
    return newton_schulz(X * (1 + 0.3 * torch.rand(len(X), 1, 1, generator=source)), arithmetic)


@pytest.mark.parametrize("name", SPOKEN)
def test_no_false_alarm_on_legal_rounding(name: str) -> None:
    """Nine dialects in three dtypes, five seeds each: 135 runs, and each dialect's together."""
    for dtype in ("bfloat16", "float16", "float32"):
        arithmetic = spoken(name, dtype)
        all_given, all_seen, all_legal = [], [], []
        for seed in range(5):
            given = [drawn(count // 16, rows, cols, seed) for count, rows, cols in SHAPES]
            seen = [redrawn(X, arithmetic, seed) for X in given]
            legal = [newton_schulz(X, arithmetic) for X in given]
            assert worst(read(seen, legal, given, arithmetic)) < 1
            all_given += given
            all_seen += seen
            all_legal += legal
        assert worst(read(all_seen, all_legal, all_given, arithmetic)) < 1


@pytest.mark.parametrize("form", ["matmul", "addmm"])
@pytest.mark.parametrize("letter", FAULTS)
def test_a_typing_error_shows_through_bfloat16(letter: str, form: str) -> None:
    arithmetic = Arithmetic(form=form)  # type: ignore[arg-type]
    for seed in range(10):
        given = [drawn(*shape, 10 * seed + len(form)) for shape in SHAPES]
        legal = [newton_schulz(X, arithmetic) for X in given]
        seen = [plain(X, [FAULTS[letter]] * 5, form) for X in given]
        bias = found(read(seen, legal, given, arithmetic), f"{letter} of every step")
        # Twenty seeds a fault, ten a form: on the right side and with room.
        assert bias.off < -1.5 * bias.allowed
        # What it reads is the error itself.
        assert bias.off == pytest.approx(
            FAULTS[letter]["abc".index(letter)] - bias.declared, rel=0.6
        )


def test_a_typing_error_does_not_look_like_another_order() -> None:
    given = [drawn(*shape, 6) for shape in [*SHAPES[:2], (48, 64, 64)]]
    seen = [plain(X, [FAULTS["b"]] * 5, "addmm") for X in given]
    for form in ("matmul", "paren", "addmm", "factored"):
        arithmetic = Arithmetic(form=form)  # type: ignore[arg-type]
        legal = [newton_schulz(X, arithmetic) for X in given]
        assert worst(read(seen, legal, given, arithmetic)) > 1


def test_blocks_with_nothing_to_read_are_left_out() -> None:
    X = drawn(4, 8, 24, 7)
    lone = torch.cat((X, torch.zeros(1, 8, 24), X[:1, :, :1] @ X[:1, :1, :]))
    seen = exact(X, [FAULTS["b"]] * 5)
    once = read([seen], [exact(X, [JORDAN] * 5)], [X], Arithmetic())
    rest = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(0)).double()
    padded = [torch.cat((y, rest)) for y in (seen, exact(X, [JORDAN] * 5))]
    again = read(padded[:1], padded[1:], [lone], Arithmetic())
    assert [b.off for b in again] == pytest.approx([b.off for b in once], rel=1e-9)
    row = drawn(4, 1, 24, 7)
    assert read([row], [row], [row], Arithmetic()) == []


def test_what_is_no_number_does_not_pass() -> None:
    X = drawn(4, 8, 24, 8)
    seen = exact(X, [JORDAN] * 5)
    seen[0, 0, 0] = float("nan")
    assert not any(b.passes for b in read([seen], [exact(X, [JORDAN] * 5)], [X], Arithmetic()))


def test_a_coefficient_that_later_steps_hide_is_not_read() -> None:
    # Two cubic-like steps at the end pin singular values at 1; eight before them are forgotten.
    arithmetic = Arithmetic(coefficients="deepseek-v4", steps=10)
    X = drawn(96, 8, 24, 9)
    legal = newton_schulz(X, arithmetic)
    names = {b.coefficient for b in read([legal], [legal], [X], arithmetic)}
    assert {"a of steps 9, 10", "b of steps 9, 10", "c of steps 9, 10"} <= names
    pinned = replace(arithmetic, coefficients="polar-express-8", steps=8)
    names = {b.coefficient for b in read([legal], [legal], [X], pinned)}
    assert "a of step 8" not in names


def grown(sigma: float, steps: Steps) -> float:
    """F(σ)."""
    for a, b, c in steps:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


def sensitivities(sigma: float, steps: Steps) -> list[float]:
    """∂ ln F / ∂θ by central differences, for a, b and c of each different step."""
    found: list[float] = []
    for triple in dict.fromkeys(steps):
        for i in range(3):
            ahead, behind = (
                [
                    tuple(x + h * (j == i) for j, x in enumerate(s)) if s == triple else s
                    for s in steps
                ]
                for h in (1e-6, -1e-6)
            )
            slope = (grown(sigma, ahead) - grown(sigma, behind)) / 2e-6  # type: ignore[arg-type]
            found.append(slope / grown(sigma, steps))
    return found


def centred(values: Sequence[float]) -> list[float]:
    mean = sum(values) / len(values)
    return [x - mean for x in values]


def taken_apart(x: Tensor, update: Tensor, steps: Steps) -> tuple[Tensor, Tensor]:
    """One block by hand: its centred sensitivities ``[k, θ]``, and Σ e·ρ of an update."""
    U, S, Vh = torch.linalg.svd(x.double(), full_matrices=False)
    values = [float(s) / (float(S.norm()) + 1e-7) for s in S]
    slopes = [sensitivities(value, steps) for value in values]
    columns = [centred(column) for column in zip(*slopes, strict=True)]
    e = torch.tensor(columns, dtype=torch.float64).mT
    parts = [
        float(U[:, k] @ update.double() @ Vh[k]) / grown(value, steps)
        for k, value in enumerate(values)
    ]
    mean = sum(parts) / len(parts)
    rho = torch.tensor([part / mean - 1 for part in parts], dtype=torch.float64)
    return e, e.mT @ rho


def said_by_hand(
    where: str,
    blocks: Sequence[tuple[Tensor, Tensor, Tensor]],
    names: Sequence[str],
    steps: Steps,
    unit: float,
) -> list[Bias]:
    """Every bias of some blocks, their updates and their legal ones, from the formulas."""
    taken = [
        (taken_apart(x, seen, steps), taken_apart(x, legal, steps)) for x, seen, legal in blocks
    ]
    values = [value for triple in dict.fromkeys(steps) for value in triple]
    deviations = (2 * (9 * math.log(10) + math.log(2))) ** 0.5
    told: list[Bias] = []
    for j, (name, value) in enumerate(zip(names, values, strict=True)):
        energies = [
            sum(float(e[:, j] @ e[:, i]) for (e, _), _ in taken) for i in range(len(values))
        ]
        energy = energies[j]
        seen = [float(s[j]) / energy for (_, s), _ in taken]
        legal = [float(s[j]) / energy for _, (_, s) in taken]
        apart = sum((s - t) ** 2 for s, t in zip(seen, legal, strict=True)) ** 0.5
        error = max(apart, 0.5 * sum(t * t for t in legal) ** 0.5)
        # Seven roundings to float32 of each coefficient's term, all to one side.
        reach = sum(abs(x * v) for x, v in zip(energies, values, strict=True)) / energy
        slack = 7 * 2.0**-24 * reach
        triple = values[j // 3 * 3 : j // 3 * 3 + 3]
        if max(map(abs, triple)) * energy**0.5 > deviations * unit:
            told.append(Bias(name, where, value, sum(seen), sum(legal), error, slack, energy))
    return told


def perturbed(X: Tensor, steps: Steps, noise: float, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    update = exact(X, steps)
    return update + noise * torch.randn(update.shape, generator=source, dtype=torch.float64)


@pytest.mark.parametrize(
    ("coefficients", "count", "dtype"),
    [("jordan", 5, "float32"), ("you", 3, "float32"), ("deepseek-v4", 10, "bfloat16")],
)
@pytest.mark.parametrize("differ", [0.3, 1.0])
def test_every_number_is_what_its_formula_says(
    coefficients: str, count: int, dtype: Any, differ: float
) -> None:
    arithmetic = Arithmetic(
        coefficients=coefficients, steps=count, cpu_dtype=dtype, compute_dtype=dtype
    )
    steps = schedule(arithmetic)
    given = [drawn(*shape, 12) for shape in [(3, 6, 7), (2, 4, 9), (2, 9, 4), (3, 2, 5)]]
    legal = [perturbed(X, steps, 0.01, 1) for X in given]
    # As far apart as they are off, or so near that half of how far they are off counts.
    seen = [
        y + differ * (perturbed(X, steps, 0.01, 2) - exact(X, steps))
        for X, y in zip(given, legal, strict=True)
    ]
    found = read([y * 1.7 for y in seen], [y * 0.2 for y in legal], given, arithmetic)
    names = {
        "jordan": [f"{x} of every step" for x in "abc"],
        "you": [f"{x} of step {i}" for i in (1, 2, 3) for x in "abc"],
        "deepseek-v4": [
            *(f"{x} of steps 1, 2, 3, 4, 5, 6, 7, 8" for x in "abc"),
            *(f"{x} of steps 9, 10" for x in "abc"),
        ],
    }[coefficients]
    unit = torch.finfo(getattr(torch, dtype)).eps / 2
    blocks = [list(zip(*each, strict=True)) for each in zip(given, seen, legal, strict=True)]
    expected: list[Bias] = []
    for where, chosen in (
        ("all blocks", [each for some in blocks for each in some]),
        ("blocks of short side 2", blocks[3]),
        ("blocks of short side 4", [*blocks[1], *blocks[2]]),
        ("blocks of short side 6", blocks[0]),
    ):
        expected += said_by_hand(where, chosen, names, steps, unit)
    assert [(b.coefficient, b.where) for b in found] == [(b.coefficient, b.where) for b in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.declared == other.declared
        for field in ("seen", "legal", "error", "slack", "energy"):
            wanted = pytest.approx(getattr(other, field), rel=1e-5, abs=0)
            assert getattr(one, field) == wanted, field
    # Blocks of one short side are read once.
    for count, sides in ((1, set()), (2, {4, 6})):
        some = read(seen[:count], legal[:count], given[:count], arithmetic)
        places = {"all blocks"} | {f"blocks of short side {side}" for side in sides}
        assert {b.where for b in some} == places


def test_what_is_allowed_is_chance_and_float32() -> None:
    bias = Bias("a", "all blocks", 3.4445, 0.5, 0.2, 0.04, 0.1, 1.0)
    assert bias.off == pytest.approx(0.3)
    # 2·exp(−z²/2) = 10⁻⁹ on either of two sides.
    z = (2 * math.log(2e9)) ** 0.5
    assert bias.allowed == pytest.approx(z * 0.04 + 0.1)
    assert bias.passes
    assert not replace(bias, seen=0.2 + 1.001 * bias.allowed).passes
    assert not replace(bias, seen=0.2 - 1.001 * bias.allowed).passes


def test_directions_in_the_noise_of_the_cast_do_not_count() -> None:
    # In bfloat16, 32 roundoffs of the norm over 6, the root of 36 entries: 0.0208 of it.
    norm, values = 3.0, [0.9, 0.4, 0.0212, 0.0205]
    values[1] = (1 - 0.9**2 - 0.0212**2 - 0.0205**2) ** 0.5
    for rows, cols in [(4, 9), (9, 4)]:
        X = torch.zeros(2, rows, cols, dtype=torch.float64)
        X.diagonal(dim1=1, dim2=2).copy_(norm * torch.tensor(values))
        seen = observe(X, exact(X, [JORDAN] * 5), Arithmetic())
        assert seen.exact.isfinite().tolist() == [[True, True, True, False]] * 2
        assert seen.e[:, 3].abs().max() == 0
        # The others are centred among themselves.
        assert seen.e.sum(1).abs().max() < 1e-12
        assert seen.e[:, :3].abs().min() > 1e-3


def test_one_direction_has_no_shape_even_where_nothing_was_made_of_it() -> None:
    X = drawn(2, 8, 24, 13)
    X = X[:, :, :1] @ X[:, :1, :]
    assert observe(X, torch.zeros_like(X), Arithmetic()).seen.eq(0).all()


def test_every_observation_has_its_legal_updates() -> None:
    X = drawn(4, 8, 24, 8)
    seen = exact(X, [JORDAN] * 5)
    for legal in ([], [seen, seen]):
        with pytest.raises(ValueError, match="zip"):
            read([seen], legal, [X], Arithmetic())


class Counting(InProcess):
    """Counts runs."""

    runs = 0

    def run(self, task: Task) -> Outcome:
        self.runs += 1
        return super().run(task)


def asked(spec: str, **question: str) -> Certificate:
    return certify(
        InProcess(spec), Question(only=["arithmetic.bias"], models=["llama"], **question)
    )


def said(certificate: Certificate) -> tuple[str, str]:
    result = certificate.models[0].results[-1]
    return result.status, result.reason + "".join(f.message for f in result.findings)


@pytest.mark.parametrize("letter", FAULTS)
def test_the_check_fails_on_a_typing_error(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_MISTYPED", FAULTS[letter])
    status, message = said(asked("faulty:coefficient-mistyped"))
    assert status == "failed"
    assert "come out as if" in message


def test_the_check_passes_on_the_same_code_without_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "_MISTYPED", JORDAN)
    assert said(asked("faulty:coefficient-mistyped"))[0] == "passed"


def test_another_order_of_products_is_undecided_and_named() -> None:
    # torch fuses what KellerJordan's code rounds apart.
    assert said(asked("torch", dialect="torch-2.13"))[0] == "passed"
    status, message = said(asked("torch", dialect="jordan"))
    assert status == "undecided"
    assert "form=addmm" in message


def test_float32_takes_few_steps() -> None:
    driver = Counting("builtin:reference")
    certify(driver, Question(only=["arithmetic.bias"], models=["llama"]))
    # 32 blocks a step, 96 wanted; two runs are the gates'.
    assert driver.runs == 3 + 2
