"""The founding measurement: how far a weight moves, by scale and heads per block.

Newton–Schulz leaves a block of r × c and full rank with min(r, c) singular values σ near 1, so its
update has ‖O‖² = min(r, c)·⟨σ²⟩, times the scale squared. A weight of R × C has R/r such blocks:

    scale       its square      a block       the weight
    moonlight   0.04·max(r, c)  0.04·r·c      0.04·R·C         whatever the blocks
    spectral    max(r, c)       r·c           R·C              whatever the blocks
    jordan      max(1, r/c)     r             R                whatever the blocks
    bernstein   r/c             r·min(1, r/c) R·min(1, r/c)    grows until a block is square
    none        1               min(r, c)     R·min(1, c/r)    shrinks from there on

dion and prime-rl call the first `rms_norm` and the fourth `spectral_norm`. So what prime-rl saw,
the same movement for whole weights, single heads and groups of them, holds for Jordan's scale and
for max(r, c)^½ as well: Jordan's two regimes meet. It ends where the scale is that of the whole
matrix, s(R, C)²·(R/r)·min(r, c), and where a block is short of rank: k directions of a gradient
are k of the whole weight, and k of every block.

Over several steps this is the sum of what each moves. The way from start to end is its n-fold if
gradients keep their direction; where they turn, it also holds products of one step with another,
which heads do change.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from muonsplit.dialect import DIALECTS, Arithmetic, Dialect, SplitRule, dialect_named
from muonsplit.layout import Layout
from muonsplit.muon import PerHeadMuon
from muonsplit.newton_schulz import polynomial, singular_value_oracle
from muonsplit.newton_schulz.normalize import denominator
from muonsplit.observe.gradients import generator
from muonsplit.observe.tolerance import rounding_bound

HEADS, WIDTH = 8, 8
ROWS = HEADS * WIDTH
# Every block is wide; one or two heads are wide and four or all are tall; every block is tall.
COLUMNS = {"wide": 80, "crossing": 24, "tall": 6}
HEADS_PER_BLOCK = (1, 2, 4, HEADS)
STEPS, LR, BETA = 4, 0.02, 0.95

# ‖O‖² of 64 × C by the table above, worked by hand for 1, 2, 4 and all heads a block.
ALONE = {
    "moonlight": {"wide": (204.8,) * 4, "crossing": (61.44,) * 4, "tall": (15.36,) * 4},
    "spectral": {"wide": (5120,) * 4, "crossing": (1536,) * 4, "tall": (384,) * 4},
    "jordan": {"wide": (64,) * 4, "crossing": (64,) * 4, "tall": (64,) * 4},
    "bernstein": {
        "wide": (6.4, 12.8, 25.6, 51.2),
        "crossing": (64 / 3, 128 / 3, 64, 64),
        "tall": (64,) * 4,
    },
    "none": {"wide": (64,) * 4, "crossing": (64, 64, 48, 24), "tall": (48, 24, 12, 6)},
}
# The same where every block is scaled by the shape of the whole weight.
BY_MATRIX = {
    "moonlight": {
        "wide": (204.8,) * 4,
        "crossing": (163.84, 163.84, 122.88, 61.44),
        "tall": (122.88, 61.44, 30.72, 15.36),
    },
    "spectral": {
        "wide": (5120,) * 4,
        "crossing": (4096, 4096, 3072, 1536),
        "tall": (3072, 1536, 768, 384),
    },
    "jordan": {
        "wide": (64,) * 4,
        "crossing": (512 / 3, 512 / 3, 128, 64),
        "tall": (512, 256, 128, 64),
    },
    "bernstein": {
        "wide": (51.2,) * 4,
        "crossing": (512 / 3, 512 / 3, 128, 64),
        "tall": (512, 256, 128, 64),
    },
    "none": ALONE["none"],
}


class Movement(NamedTuple):
    """What four steps did, over the square of the learning rate."""

    by_step: tuple[float, ...]
    in_all: float


def layout(heads: int) -> Layout | None:
    return None if heads == HEADS else Layout.heads("q", HEADS, WIDTH).per_block(heads)


def gradients(columns: int, kind: str) -> Iterator[Tensor]:
    """Four gradients in float64: one direction, a drift with noise on it, or rank 3."""
    source = generator("founding", columns, kind)
    tall, wide = (
        torch.randn(shape, generator=source, dtype=torch.float64)
        for shape in ((ROWS, 3), (3, columns))
    )
    steady = torch.randn(ROWS, columns, generator=source, dtype=torch.float64)
    for _ in range(STEPS):
        noise = torch.randn(ROWS, columns, generator=source, dtype=torch.float64)
        yield {"steady": steady, "turning": steady + noise, "rank 3": tall @ wide}[kind]


def moved(dialect: Dialect, columns: int, heads: int, kind: str) -> Movement:
    """Trains a weight from zero with the reference optimizer."""
    dtype = torch.float64 if dialect.arithmetic.cpu_dtype == "float64" else torch.float32
    weight = Parameter(torch.zeros(ROWS, columns, dtype=dtype))
    optimizer = PerHeadMuon(
        [("w", weight)], {"w": layout(heads)}, dialect=dialect, lr=LR, momentum=BETA
    )
    by_step: list[float] = []
    for gradient in gradients(columns, kind):
        before = weight.detach().clone()
        weight.grad = gradient.to(dtype)
        optimizer.step()
        by_step.append(squared(weight.detach() - before))
    return Movement(tuple(by_step), squared(weight.detach()))


def squared(delta: Tensor) -> float:
    return float(delta.double().square().sum()) / LR**2


def polar(**choices: Any) -> Dialect:
    """Exact orthogonalisation: forty cubic steps leave a singular value of 10⁻⁴ at 1 ± 10⁻¹⁵."""
    arithmetic = Arithmetic(coefficients="cubic", steps=40, cpu_dtype="float64", **choices)
    return Dialect("polar", SplitRule(), arithmetic, {})


# Forty steps of float64 products pass on no rounding but their own, some 10⁻¹⁵ of the result.
ROUNDED = {"rel": 1e-12}


@pytest.mark.parametrize("heads", HEADS_PER_BLOCK)
@pytest.mark.parametrize("shape", COLUMNS)
@pytest.mark.parametrize("per", ["block", "matrix"])
@pytest.mark.parametrize("scale", ALONE)
def test_full_rank_blocks_move_as_predicted(scale: str, per: str, shape: str, heads: int) -> None:
    table = ALONE if per == "block" else BY_MATRIX
    predicted = table[scale][shape][HEADS_PER_BLOCK.index(heads)]
    seen = moved(polar(scale=scale, scale_per=per), COLUMNS[shape], heads, "steady")
    assert seen.by_step == pytest.approx((predicted,) * STEPS, **ROUNDED)
    # Momentum of one gradient keeps its direction, so four equal steps are one of four times.
    assert seen.in_all == pytest.approx(STEPS**2 * predicted, **ROUNDED)


@pytest.mark.parametrize("shape", COLUMNS)
@pytest.mark.parametrize("scale", ["moonlight", "spectral", "jordan"])
def test_gradients_that_turn_move_each_step_as_predicted(scale: str, shape: str) -> None:
    seen = [moved(polar(scale=scale), COLUMNS[shape], h, "turning") for h in HEADS_PER_BLOCK]
    for movement in seen:
        assert movement.by_step == pytest.approx((ALONE[scale][shape][0],) * STEPS, **ROUNDED)
    # The way from start to end is another matter: its products between steps know the heads.
    ends = [movement.in_all for movement in seen]
    assert max(ends) > 1.01 * min(ends)


@pytest.mark.parametrize("heads", HEADS_PER_BLOCK)
def test_blocks_short_of_rank_show_how_many_they_are(heads: int) -> None:
    # Three directions a block: 0.04·80·3 for the whole weight, eight times that for eight blocks.
    predicted = 9.6 * HEADS / heads
    seen = moved(polar(scale="moonlight"), COLUMNS["wide"], heads, "rank 3")
    assert seen.by_step == pytest.approx((predicted,) * STEPS, **ROUNDED)


class Exact(NamedTuple):
    """Movement by the polynomial on singular values, and what rounding may add to it."""

    movement: Movement
    rounding: float
    smallest: float
    largest: float


def exact(dialect: Dialect, columns: int, heads: int, kind: str) -> Exact:
    """Momentum by hand, blocks by hand, float64; no step of the optimizer is asked."""
    arithmetic = dialect.arithmetic
    ema = arithmetic.momentum == "ema"
    buffer, way = torch.zeros(2, ROWS, columns, dtype=torch.float64).unbind()
    by_step: list[float] = []
    values: list[Tensor] = []
    rounding = 0.0
    for gradient in gradients(columns, kind):
        given = (1 - BETA) * gradient if ema else gradient
        buffer = BETA * buffer + given
        update = BETA * buffer + given if arithmetic.nesterov else buffer
        blocks = update.view(HEADS // heads, heads * WIDTH, columns)
        scale = by_hand(arithmetic.scale, heads * WIDTH, columns)
        S = torch.linalg.svdvals(blocks)
        S = S / denominator(S.square().sum(-1, keepdim=True).sqrt(), arithmetic)
        values.append(polynomial(S, arithmetic))
        by_step.append(float(values[-1].square().sum()) * scale**2)
        way += (singular_value_oracle(blocks, arithmetic) * scale).flatten(0, 1)
        rounding = max(rounding, *(rounding_bound(block, arithmetic) for block in blocks))
    found = torch.cat([v.flatten() for v in values])
    in_all = float(way.square().sum())
    return Exact(Movement(tuple(by_step), in_all), rounding, float(found.min()), float(found.max()))


def by_hand(scale: str, rows: int, columns: int) -> float:
    return {
        "moonlight": 0.2 * max(rows, columns) ** 0.5,
        "spectral": max(rows, columns) ** 0.5,
        "jordan": max(1, rows / columns) ** 0.5,
        "bernstein": (rows / columns) ** 0.5,
    }[scale]


def in_float64(name: str) -> Dialect:
    dialect = DIALECTS[name]
    return Dialect(name, dialect.split, dialect.arithmetic.exact(), {})


NAMES = ("moonlight", "prime-rl", "jordan", "deepspeed-0.19.8", "dion", "megatron")


@pytest.mark.parametrize("heads", HEADS_PER_BLOCK)
@pytest.mark.parametrize("shape", COLUMNS)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_moves_by_the_squares_of_its_singular_values(
    name: str, shape: str, heads: int
) -> None:
    dialect = in_float64(name)
    wanted = exact(dialect, COLUMNS[shape], heads, "turning")
    seen = moved(dialect, COLUMNS[shape], heads, "turning")
    # What rounding adds in any direction is at most that part of a norm, twice that of its square.
    within = {"rel": 2.1 * wanted.rounding}
    assert wanted.rounding < 1e-11
    assert seen.by_step == pytest.approx(wanted.movement.by_step, **within)
    # Steps that nearly cancel would round by more of what is left; these do not.
    assert seen.in_all > max(seen.by_step)
    assert seen.in_all == pytest.approx(wanted.movement.in_all, rel=2.1 * STEPS * wanted.rounding)


@pytest.mark.parametrize("kind", ["steady", "turning"])
@pytest.mark.parametrize("shape", COLUMNS)
@pytest.mark.parametrize("name", ["prime-rl", "glm-5", "kimi-k3", "dion-newton-schulz"])
def test_rms_norm_hides_heads_per_block_up_to_the_spread_of_singular_values(
    name: str, shape: str, kind: str
) -> None:
    """In float32: 0.04·R·C times the mean of σ², which is all that heads change."""
    dialect, columns = dialect_named(f"{name}:cpu_dtype=float32,pre_cast=none"), COLUMNS[shape]
    found: list[Exact] = []
    for heads in HEADS_PER_BLOCK:
        wanted = exact(dialect, columns, heads, kind)
        seen = moved(dialect, columns, heads, kind)
        # Beside the iteration's own: the weight, by then at most four steps long, is rounded too.
        most = 2.1 * wanted.rounding + 2 * STEPS * 2**-23
        assert most < 0.01
        assert seen.by_step == pytest.approx(wanted.movement.by_step, rel=most)
        mean = sum(seen.by_step) / (STEPS * 0.04 * ROWS * columns)
        assert wanted.smallest**2 - most <= mean <= wanted.largest**2 + most
        found.append(wanted)
    totals = [sum(one.movement.by_step) for one in found]
    low, high = min(one.smallest for one in found), max(one.largest for one in found)
    assert max(totals) / min(totals) <= (high / low) ** 2


@pytest.mark.parametrize("heads", HEADS_PER_BLOCK)
@pytest.mark.parametrize("shape", COLUMNS)
@pytest.mark.parametrize("scale", ["jordan", "spectral", "bernstein", "none"])
def test_in_bfloat16_another_scale_moves_by_the_predicted_factor(
    scale: str, shape: str, heads: int
) -> None:
    """The same O under two scales, so that neither its spread nor its rounding is in the factor."""
    prime, which = DIALECTS["prime-rl"], HEADS_PER_BLOCK.index(heads)
    other = Dialect(scale, prime.split, replace(prime.arithmetic, scale=scale), {})
    seen = [moved(d, COLUMNS[shape], heads, "steady").in_all for d in (other, prime)]
    predicted = ALONE[scale][shape][which] / ALONE["moonlight"][shape][which]
    # The step is rounded to bfloat16, each entry by 2⁻⁸ of itself: twice that in a square, and
    # there are two.
    assert seen[0] / seen[1] == pytest.approx(predicted, rel=4 * 2**-8)


@pytest.mark.parametrize("shape", COLUMNS)
def test_the_founding_measurement_of_prime_rl(shape: str) -> None:
    """Its three runs: whole weights, one head, groups of heads; four steps, one squared delta."""
    prime, columns = DIALECTS["prime-rl"], COLUMNS[shape]
    # Where Polar Express leaves the singular values it is made for, from 10⁻³ to 1.
    left = polynomial(torch.logspace(-3, 0, 100_001, dtype=torch.float64), prime.arithmetic)
    low, high = float(left.min()) ** 2, float(left.max()) ** 2
    assert (low, high) == pytest.approx((0.8589**2, 1.1411**2), rel=1e-3)
    law = STEPS**2 * 0.04 * ROWS * columns
    seen = [moved(prime, columns, heads, "steady").in_all / law for heads in HEADS_PER_BLOCK]
    assert all(low <= one <= high for one in seen)
