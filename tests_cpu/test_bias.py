"""The signed bias of singular values: what it reads, what it forgives, and what it sees."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from muonsplit.certificate.run import Certificate, Question, certify
from muonsplit.dialect import Arithmetic, dialect_named
from muonsplit.faulty import steps
from muonsplit.newton_schulz import COEFFICIENTS, newton_schulz
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
