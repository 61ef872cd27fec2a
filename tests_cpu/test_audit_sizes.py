"""Sizes of blocks: what an iteration can make of them, what is measured, what rounding hides."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from muonsplit.audit.band import band
from muonsplit.audit.measure import Change, change
from muonsplit.audit.sizes import ANY, Anchor, Rates, allowed, anchored, fitted, rules
from muonsplit.audit.spectra import Sized, largest, rounding, sized, unsure, values
from muonsplit.dialect import DIALECTS, Arithmetic
from muonsplit.evidence.opened import opened
from muonsplit.layout import Layout, Segment
from muonsplit.newton_schulz import newton_schulz, schedule

# Fields that the band depends on by more than rounding; dialects that agree are asked once.
ITERATION = (
    *("coefficients", "steps", "past_end", "norm_factor", "iteration", "restarts"),
    *("compute_dtype", "norm_dtype", "pre_cast"),
)
ITERATIONS: dict[tuple[object, ...], tuple[str, Arithmetic]] = {}
for name, dialect in DIALECTS.items():
    key = tuple(getattr(dialect.arithmetic, field) for field in ITERATION)
    ITERATIONS.setdefault(key, (name, dialect.arithmetic))

iterations = pytest.mark.parametrize(
    "arithmetic", [a for _, a in ITERATIONS.values()], ids=[name for name, _ in ITERATIONS.values()]
)
# Its norms in float16 leave the band on few blocks of few singular values; see `band`.
UNSTABLE = DIALECTS["optimuon-0.1.1"].arithmetic


def lifted(inputs: Tensor, arithmetic: Arithmetic) -> Tensor:
    """What the scalar polynomial makes of singular values of a block of norm one."""
    x = inputs / arithmetic.norm_factor
    for a, b, c in schedule(arithmetic):
        x = x * (a + b * x**2 + c * x**4)
    return x


def with_spectra(S: Tensor, rows: int, cols: int, source: torch.Generator) -> Tensor:
    """Blocks of given singular values, ``[B, rows, cols]``."""
    drawn = torch.randn(len(S), rows, cols, generator=source, dtype=torch.float64)
    U, _, Vh = torch.linalg.svd(drawn, full_matrices=False)
    return ((U * S.unsqueeze(1)) @ Vh).float()


def norm(blocks: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(blocks.double(), 2)


@iterations
@pytest.mark.parametrize("rank", [1, 4, 64, 1024])
def test_the_band_is_what_the_polynomial_makes_of_a_dense_grid(
    arithmetic: Arithmetic, rank: int
) -> None:
    grid = torch.linspace(0, 1, 400_001, dtype=torch.float64)
    out = lifted(grid, arithmetic)
    assert out.min() >= 0  # so that the largest singular value is the largest output
    low, high = out[grid >= rank**-0.5].min(), out.max()
    found = band(arithmetic, rank)
    assert found.low < low < high < found.high
    # Rounding is allowed for at both ends alike, and hardly more than a twentieth.
    assert math.isclose(found.low * found.high, low * high, rel_tol=1e-4)
    assert found.high < 1.08 * high


@iterations
def test_the_band_takes_no_notice_of_the_scale(arithmetic: Arithmetic) -> None:
    scaled = replace(arithmetic, scale="moonlight", extra_scale=3.0, scale_per="matrix")
    assert band(scaled, 64) == band(arithmetic, 64)


def spectra(arithmetic: Arithmetic, rank: int, source: torch.Generator) -> Tensor:
    """Singular values of many kinds: falling, of low rank, and aimed at the ends of the band."""
    falls = torch.tensor([0, 0.3, 1, 2, 3, 4, 5, 6, 7, 10], dtype=torch.float64)
    falling = 10 ** (-falls.unsqueeze(1) * torch.rand(10, rank, generator=source).double())
    few = torch.arange(rank) < torch.tensor([[1], [2], [rank // 4]])
    grid = torch.linspace(rank**-0.5, 1, 10_001, dtype=torch.float64)
    out = lifted(grid, arithmetic)
    ends = [grid[out.argmax()], grid[out.argmin()]]
    aimed = torch.full((6, rank), 1e-9, dtype=torch.float64)
    for spectrum, (end, share) in zip(aimed, product(ends, (0.3, 0.6, 1.0)), strict=True):
        many = min(rank - 1, max(1, int(share / end**2)))
        spectrum[:many], spectrum[-1] = end, (1 - many * end**2).clamp(min=0).sqrt()
    return torch.cat([falling, few.double(), aimed])


@iterations
@pytest.mark.parametrize(
    ("rows", "cols"), [(8, 8), (16, 48), (48, 16), (40, 40), (72, 96)], ids="{}".format
)
def test_no_block_leaves_the_band_in_the_precision_of_a_gpu(
    rows: int, cols: int, arithmetic: Arithmetic
) -> None:
    if arithmetic == UNSTABLE and min(rows, cols) < 32:
        pytest.skip("its norms in float16 are known to leave it")
    source = torch.Generator().manual_seed(rows * cols + 1)
    S = spectra(arithmetic, min(rows, cols), source)
    S = S / S.norm(dim=1, keepdim=True) * torch.tensor([1e-2, 1.0, 30.0]).repeat(7)[:19, None]
    in_half = replace(arithmetic, cpu_dtype=arithmetic.compute_dtype)
    found = norm(newton_schulz(with_spectra(S, rows, cols, source), in_half))
    bounds = band(arithmetic, min(rows, cols))
    assert bounds.low <= found.min()
    assert found.max() <= bounds.high


# Learning rates.


@pytest.mark.parametrize(
    ("one", "other", "off"),
    [
        (Rates(1, 2), Rates(1.5, 3), 1),
        (Rates(1, 2), Rates(2, 3), 1),
        (Rates(1, 2), Rates(3, 4), 1.5),
        (Rates(3, 4), Rates(1, 2), 1.5),
        (Rates(1, 2), Rates(0, 0.5), 2),
        (Rates(4, 1), Rates(1, 4), 2),
        (Rates(9, 1), ANY, 3),
        (Rates(9, 1), Rates(20, 20), 20),
        (Rates(1, 2), Rates(0, 0), math.inf),
        (ANY, ANY, 1),
    ],
)
def test_how_far_intervals_are_apart(one: Rates, other: Rates, off: float) -> None:
    assert one.off(other) == off


@pytest.mark.parametrize("name", DIALECTS)
def test_scale_rules_begin_with_the_declared_one_and_no_two_are_alike(name: str) -> None:
    declared = DIALECTS[name].arithmetic
    found = rules(declared)
    shapes = [((r, c), (m, c)) for r, c, m in [(16, 64, 64), (64, 16, 256), (32, 32, 96)]]
    names = [rule.name for rule in found]
    assert len(set(names)) == len(names)
    first = found[0].arithmetic
    assert (first.scale, first.extra_scale) == (declared.scale, declared.extra_scale)
    assert found[0].name.endswith("matrix" if declared.scale_per == "matrix" else "block")
    kinds = {(d.arithmetic.scale, d.arithmetic.extra_scale) for d in DIALECTS.values()}
    assert len(found) == 2 * len(kinds)
    for rule, (block, matrix) in product(found, shapes):
        r, c = block if rule.name.endswith("block") else matrix
        expected = {
            "jordan": max(1, r / c) ** 0.5,
            "moonlight": 0.2 * max(r, c) ** 0.5,
            "spectral": max(r, c) ** 0.5,
            "bernstein": (r / c) ** 0.5,
            "none": 1.0,
        }[rule.arithmetic.scale]
        assert math.isclose(rule.size(block, matrix), expected * rule.arithmetic.extra_scale)


SHAPES = [(64, 256), (256, 64), (64, 64)]


@pytest.mark.parametrize("name", ["moonlight", "dion", "torch-2.13", "deepspeed-0.19.8", "glm-5"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("heads", [1, 4])
def test_the_rate_of_a_run_is_allowed(heads: int, shape: tuple[int, int], name: str) -> None:
    arithmetic = DIALECTS[name].arithmetic
    rule = rules(arithmetic)[0]
    source = torch.Generator().manual_seed(heads)
    rows = shape[0] // heads
    S = 10 ** (-3 * torch.rand(heads, min(rows, shape[1]), generator=source).double())
    blocks = newton_schulz(with_spectra(S, rows, shape[1], source), arithmetic)
    change = 0.02 * rule.size((rows, shape[1]), shape) * blocks.float().flatten(0, 1)
    layout = None if heads == 1 else Layout.heads("q", heads, rows)
    found = allowed(sized(change, layout, None), rule, shape, 1)
    assert found.low <= 0.02 <= found.high
    assert found.high < 2 * found.low
    twice = allowed(sized(change, layout, None), rule, shape, 2)
    assert (twice.low, twice.high) == (found.low / 2, math.inf)


def test_rates_widen_by_what_rounding_hides_and_skip_blocks_that_did_not_move() -> None:
    rule = rules(DIALECTS["torch-2.13"].arithmetic)[0]
    size, bounds = rule.size((16, 64), (64, 64)), band(rule.arithmetic, 16)
    seen = Sized(16, 64, 4, 1, 2.0, 3.0, 0.5)
    found = allowed([seen, Sized(8, 64, 2, 2, 0.0, 0.0, 9.0)], rule, (64, 64), 1)
    assert found == pytest.approx((2.5 / (bounds.high * size), 2.5 / (bounds.low * size)))
    assert allowed([seen._replace(still=4)], rule, (64, 64), 1) == ANY


def test_the_fitted_rate_is_the_one_that_most_weights_allow() -> None:
    arithmetic = DIALECTS["moonlight"].arithmetic
    allowing = [Rates(1.0, 1.5), Rates(1.2, 1.6), Rates(1.1, 1.8), Rates(3.0, 4.0), Rates(9.0, 1.0)]
    rates, count = fitted([Anchor(r, r.low) for r in allowing], arithmetic)
    assert (rates.low, count) == (1.2, 3)
    assert 1.2 < rates.high <= 1.5
    assert fitted([], arithmetic) == (ANY, 0)
    assert fitted([Anchor(Rates(2.0, 1.0), 2.0)], arithmetic) == (ANY, 0)


def test_a_rate_that_rounding_hides_is_not_fitted_low() -> None:
    """The largest size may have been larger than it was seen, as it may have been smaller."""
    arithmetic = DIALECTS["moonlight"].arithmetic
    rule, high = rules(arithmetic)[0], band(arithmetic, 64).high
    size = rule.size((64, 64), (64, 64))
    most = 0.02 * high * size
    seen = Sized(64, 64, 1, 0, most, most, 0.0199 * high * size)
    [clear, hidden] = [
        fitted([anchored([s], rule, (64, 64), 1)], arithmetic)[0]
        for s in (seen._replace(hidden=0.0), seen)
    ]
    assert clear.low == pytest.approx(0.02)
    assert hidden.low == pytest.approx(0.0001)
    assert hidden.high == pytest.approx(0.0399 * clear.high / clear.low)


@pytest.mark.parametrize("name", ["moonlight", "dion", "heavyball-3.2.1", "deepseek-v4"])
@pytest.mark.parametrize("seed", range(5))
def test_the_fitted_rate_holds_the_true_one(seed: int, name: str) -> None:
    arithmetic = replace(DIALECTS[name].arithmetic, scale="none", extra_scale=1.0)
    rule = rules(arithmetic)[0]
    source = torch.Generator().manual_seed(seed)
    anchors: list[Anchor] = []
    for _ in range(6):
        S = 10 ** (-2.5 * torch.rand(1, 48, generator=source).double())
        change = 0.03 * newton_schulz(with_spectra(S, 48, 96, source), arithmetic)[0].float()
        anchors.append(anchored(sized(change, None, None), rule, (48, 96), 1))
    rates, count = fitted(anchors, arithmetic)
    assert count == 6
    assert rates.low <= 0.03 <= rates.high


# The largest singular value.


@pytest.mark.parametrize("shape", [(1, 5), (7, 1), (16, 64), (64, 16), (70, 90), (90, 70)], ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e25], ids="{:g}".format)
def test_the_largest_of_small_blocks(size: float, shape: tuple[int, int]) -> None:
    blocks = torch.randn(5, *shape, generator=torch.Generator().manual_seed(1)) * size
    blocks[1] = 0
    found = largest(blocks)
    assert found.dtype == torch.float64
    assert found[1] == 0
    assert torch.allclose(found, norm(blocks), rtol=1e-5, atol=0)


def test_all_singular_values_ascend() -> None:
    blocks = torch.randn(3, 12, 30, generator=torch.Generator().manual_seed(2))
    expected = torch.linalg.svdvals(blocks.double()).flip(1)
    assert torch.allclose(values(blocks), expected, rtol=1e-5)
    assert torch.allclose(values(blocks.mT), expected, rtol=1e-5)


SIDE = 530
SPECTRA = {
    "equal": torch.ones(SIDE),
    "even": torch.linspace(0.7, 1.2, SIDE),
    "crowded at the top": 1.2 - 0.5 * torch.linspace(0, 1, SIDE) ** 4,
    "a pair": torch.tensor([1.2, 1.1999, *[0.01] * (SIDE - 2)]),
    "falling": torch.logspace(0, -6, SIDE),
    "one direction": torch.tensor([3.0]),
    "three directions": torch.tensor([3.0, 3.0, 2.9]),
}


def factored(S: Tensor, rows: int, cols: int) -> Tensor:
    source = torch.Generator().manual_seed(len(S))
    U, V = (
        torch.linalg.qr(torch.randn(side, len(S), generator=source, dtype=torch.float64))[0]
        for side in (rows, cols)
    )
    return ((U * S) @ V.mT).float()


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("shape", [(SIDE, 700), (700, SIDE)], ids=str)
def test_the_largest_of_a_large_block_is_known(shape: tuple[int, int], kind: str) -> None:
    block = factored(SPECTRA[kind].double(), *shape)
    expected = float(SPECTRA[kind].max())
    assert float(largest(block.unsqueeze(0))[0]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("size", [1.0, 1e-25, 1e25], ids="{:g}".format)
def test_large_blocks_of_any_size_beside_blocks_of_zeros(size: float) -> None:
    blocks = torch.stack(
        [
            torch.zeros(SIDE, 600),
            factored(SPECTRA["one direction"].double(), SIDE, 600),
            torch.eye(SIDE, 600),
            torch.randn(SIDE, 600, generator=torch.Generator().manual_seed(3)),
        ]
    )
    found = largest(blocks * size)
    assert found[0] == 0
    assert torch.allclose(found / size, norm(blocks), rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", ["even", "falling"])
def test_the_largest_of_a_block_whose_gram_matrix_fits_no_cache(kind: str) -> None:
    block = factored(SPECTRA[kind].double(), 1030, 1100)
    expected = float(SPECTRA[kind].max())
    assert float(largest(block.unsqueeze(0))[0]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("side", [100, 400])
def test_a_batch_has_the_sizes_of_its_blocks_alone(side: int) -> None:
    blocks = torch.randn(4, side, side + 30, generator=torch.Generator().manual_seed(4))
    alone = torch.cat([largest(block.unsqueeze(0)) for block in blocks])
    assert torch.allclose(largest(blocks), alone, rtol=1e-6)


def test_sizes_of_a_layout_of_unequal_blocks_on_either_axis() -> None:
    change = torch.randn(40, 24, generator=torch.Generator().manual_seed(5))
    change[8:16] = 0
    layout = Layout((Segment("q", 3, 8), Segment("k", 2, 4), Segment("v", 1, 8)))
    starts = {8: (0, 16, 32), 4: (24, 28)}
    tops = {n: norm(torch.stack([change[a : a + n] for a in at])) for n, at in starts.items()}
    for given, cut in ((change, layout), (change.T, replace(layout, axis=1))):
        found = {s.rows: s for s in sized(given, cut, None)}
        assert set(found) == {4, 8}
        assert (found[4].cols, found[4].blocks, found[4].still) == (24, 2, 0)
        assert (found[8].cols, found[8].blocks, found[8].still) == (24, 4, 1)
        for rows, s in found.items():
            assert (s.least, s.most) == pytest.approx(
                (float(tops[rows].min()), float(tops[rows].max())), rel=1e-5
            )


def test_sizes_of_a_stack_are_those_of_its_matrices() -> None:
    stack = torch.randn(3, 10, 12, generator=torch.Generator().manual_seed(6))
    (found,) = sized(stack, None, torch.full_like(stack, 1e-3))
    assert (found.rows, found.cols, found.blocks) == (10, 12, 3)
    assert (found.least, found.most) == pytest.approx(
        (float(norm(stack).min()), float(norm(stack).max())), rel=1e-5
    )
    assert found.hidden == rounding(torch.full((1, 10, 12), 1e-3))


# Rounding.


def deviations(kind: str, rows: int, cols: int) -> Tensor:
    source = torch.Generator().manual_seed(7)
    drawn = {
        "equal": torch.ones(rows, cols),
        "falling by rows": torch.logspace(0, -2, rows).unsqueeze(1).expand(rows, cols),
        "powers of two": torch.exp2(torch.randint(-6, 1, (rows, cols), generator=source).float()),
        "one row": torch.full((rows, cols), 1e-3).index_fill_(0, torch.tensor([3]), 1.0),
    }
    return drawn[kind] * 1e-3


@pytest.mark.parametrize("kind", ["equal", "falling by rows", "powers of two", "one row"])
@pytest.mark.parametrize("shape", [(16, 64), (128, 96), (48, 1024)], ids=str)
def test_noise_stays_below_the_bound_which_is_not_far_off(
    shape: tuple[int, int], kind: str
) -> None:
    each = deviations(kind, *shape)
    source = torch.Generator().manual_seed(8)
    noise = (torch.rand(40, *shape, generator=source) - 0.5) * 12**0.5 * each
    most = float(norm(noise).max())
    assert most < rounding(each.unsqueeze(0)) < 3 * most


def pair(dtype: torch.dtype, size: float, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """Before and after in a dtype, and the error of their difference."""
    source = torch.Generator().manual_seed(9)
    before = torch.randn(300, 200, generator=source, dtype=torch.float64) * size
    after = before + torch.randn(before.shape, generator=source).double() * size * step
    kept = before.to(dtype), after.to(dtype)
    return *kept, (kept[0].double() - kept[1].double()) - (before - after)


@pytest.mark.parametrize(
    ("dtype", "share"),
    # Of float32 it is told that the change is formed in float32 as well: twice as many errors.
    [(torch.bfloat16, 1.0), (torch.float16, 1.0), (torch.float32, 0.5**0.5)],
    ids=str,
)
@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4])
def test_errors_are_as_large_as_is_said(size: float, dtype: torch.dtype, share: float) -> None:
    def found(step: float) -> float:
        _, after, error = pair(dtype, size, step)
        return float(error.norm() / unsure(after).double().norm())

    assert found(0.1) == pytest.approx(share, rel=0.03)
    # Of a step below the unit in the last place both sides err alike, which takes some off.
    assert 0.6 * share < found(1e-3) < 1.02 * share


def test_what_is_subnormal_is_no_more_sure() -> None:
    _, after, error = pair(torch.float16, torch.finfo(torch.float16).tiny / 8, 0.1)
    assert float(error.abs().max()) < 6**0.5 * 1.01 * float(unsure(after).min())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_zero_hides_nothing(dtype: torch.dtype) -> None:
    assert float(unsure(torch.zeros(4, 4, dtype=dtype)).max()) < torch.finfo(dtype).tiny


HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtypes", "step"),
    [
        ((HALF, HALF), 1e-3),
        ((HALF, SINGLE), 1e-3),
        ((SINGLE, HALF), 1e-3),
        ((torch.float16, torch.float16), 1e-4),
        ((SINGLE, SINGLE), 1e-6),
        ((DOUBLE, DOUBLE), 1e-6),
        ((DOUBLE, SINGLE), 1e-6),
    ],
    ids=str,
)
def test_the_error_of_a_change_is_below_what_is_hidden(
    tmp_path: Path, dtypes: tuple[torch.dtype, torch.dtype], step: float, shape: tuple[int, int]
) -> None:
    source = torch.Generator().manual_seed(10)
    before = torch.randn(shape, generator=source, dtype=DOUBLE) * 0.02
    moved = step * torch.randn(shape, generator=source).double()
    later = 0.9 * before - moved
    found = changed(tmp_path, before.to(dtypes[0]), later.to(dtypes[1]), 0.1)
    assert found.values.dtype == torch.float32
    error = norm(found.values.double() - moved)
    (hidden,) = (s.hidden for s in sized(found.values, None, found.unsure))
    assert error < hidden < 7 * error


@pytest.mark.parametrize("dtype", [HALF, torch.float16], ids=str)
def test_a_half_precision_is_known_where_it_was_stored_as_float32(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    source = torch.Generator().manual_seed(12)
    before = (torch.randn(200, 96, generator=source) * 0.02).to(dtype)
    after = (before.float() - 1e-3 * torch.randn(200, 96, generator=source)).to(dtype)
    kept = {"half": (before, after), "single": (before.float(), after.float())}
    found = {name: changed(tmp_path, *pair) for name, pair in kept.items()}
    assert torch.equal(found["half"].values, found["single"].values)
    half, single = found["half"].unsure, found["single"].unsure
    assert half is not None
    assert single is not None
    assert torch.equal(half, single)


def test_a_float32_run_may_begin_with_a_half_precision(tmp_path: Path) -> None:
    source = torch.Generator().manual_seed(13)
    before = (torch.randn(64, 64, generator=source) * 0.02).to(HALF).float()
    assert changed(tmp_path, before, before - 1e-2).unsure is None


def changed(folder: Path, before: Tensor, after: Tensor, decay: float = 0.0) -> Change:
    for name, kept in (("b", before), ("a", after)):
        save_file({"w": kept}, folder / f"{name}.safetensors")
    saved = [opened(folder / f"{name}.safetensors") for name in "ba"]
    return change(saved[0], saved[1], "w", decay)


def test_what_rounding_hides_is_left_out_where_it_is_nothing(tmp_path: Path) -> None:
    source = torch.Generator().manual_seed(11)
    before = torch.randn(64, 64, generator=source) * 0.02
    assert changed(tmp_path, before, before - 1e-2).unsure is None
