"""Pictures: what is drawn is what the certificate says."""

import math
from itertools import pairwise

import pytest

from muonsplit.certificate.verdict import Spectrum, WeightResult
from muonsplit.report.picture import Cut, cut, values
from tests_cpu.certificates import HOSTILE, Stretches, equal

NAMES = ["truth", "plan", "observed"]


def drawn(
    truth: str,
    planned: str,
    blocks: Stretches,
    shape: tuple[int, ...] = (32, 16),
    observed: str = "seen",
) -> Cut:
    return cut(WeightResult("w", "Owner.leaf", shape, truth, planned, observed, blocks, ""))


def marked(found: Cut, band: int) -> list[tuple[float, bool]]:
    rows = found.rows / found.height
    return [(round(mark.at * rows, 1), mark.extra) for mark in found.bands[band].marks]


@pytest.mark.parametrize(
    ("said", "count"),
    [("whole", 1), ("none", 1), ("q 4×8", 4), ("2 × (k 6 | v 10)", 4), ("q 2×8 | k 16", 3)],
)
def test_a_band_covers_every_row_once(said: str, count: int) -> None:
    found = drawn(said, said, equal(4, 8))
    for band in found.bands[:2]:
        assert len(band.stretches) == count
        bottom = 0.0
        for stretch in band.stretches:
            assert stretch.top == pytest.approx(bottom, abs=0.01)
            bottom = stretch.top + stretch.height
        assert bottom == pytest.approx(found.height, abs=0.02)
        shades = [stretch.shade for stretch in band.stretches]
        assert all(a != b for a, b in pairwise(shades))


def test_three_equal_answers_have_no_marks() -> None:
    found = drawn("head 4×8", "q 4×8", equal(4, 8))
    assert [band.name for band in found.bands] == NAMES
    assert [band.said for band in found.bands] == ["head 4×8", "q 4×8", "seen"]
    assert all(not band.marks for band in found.bands)
    assert [tick.row for tick in found.ticks] == ["0", "8", "16", "24", "32"]


def test_a_boundary_off_by_one_is_marked_where_it_is_and_where_it_should_be() -> None:
    found = drawn("head 4×8", "q 4×8", (((0, 9),), ((9, 16),), ((16, 24),), ((24, 32),)))
    assert marked(found, 2) == [(8.0, False), (9.0, True)]
    # There is no room for both numbers; the one that nobody expects is written.
    assert [mark.row for mark in found.bands[2].marks] == ["", "9"]


def test_a_whole_matrix_lacks_every_planned_boundary() -> None:
    found = drawn("head 4×8", "q 4×8", (((0, 32),),))
    assert marked(found, 2) == [(8.0, False), (16.0, False), (24.0, False)]
    assert marked(found, 0) == []


def test_rows_that_are_joined_share_a_shade() -> None:
    found = drawn("none", "2 × (q 8 | k 8), joined", (((0, 8), (16, 24)), ((8, 16), (24, 32))))
    for band in found.bands[1:]:
        by_top = sorted(band.stretches, key=lambda stretch: stretch.top)
        assert [stretch.shade for stretch in by_top] == [0, 1, 0, 1]


def test_experts_are_blocks() -> None:
    found = drawn("unknown", "4 experts, each whole", equal(4, 8), (4, 8, 16))
    assert found.rows == 32
    assert [len(band.stretches) for band in found.bands] == [0, 4, 4]
    assert all(not band.marks for band in found.bands)


@pytest.mark.parametrize(
    "said", ["unknown", HOSTILE, "q 3×8", "q 999999999999×1", "999999999 × (q 1 | k 1)", ""]
)
def test_what_cannot_be_drawn_is_an_empty_band(said: str) -> None:
    found = drawn(said, said, ())
    assert [band.stretches for band in found.bands] == [(), (), ()]
    assert found.height < 1000


def test_columns_are_not_drawn_as_rows() -> None:
    found = drawn("head 4×4, axis 1", "q 4×4, axis 1", (((0, 32),),))
    assert [len(band.stretches) for band in found.bands] == [1, 1, 1]
    assert all(not band.marks for band in found.bands)


def test_an_empty_weight_does_not_break_the_picture() -> None:
    assert drawn("none", "whole", (), (0, 16)).rows == 1


def spectrum(block: int, after: tuple[float, ...]) -> Spectrum:
    return Spectrum("w", block, 0.123456, 2.0, (0.5, 0.25), after)


def test_singular_values_stand_at_their_height() -> None:
    found = values([spectrum(0, (1.5, 0.75)), spectrum(1, (1.0, 0.0))])
    assert found is not None
    top, bottom = found.ticks[-1], found.ticks[0]
    assert (bottom, top[0]) == ((found.height, "0"), 0.0)
    largest = float(top[1])
    assert largest >= 1.5
    expected = [found.height * (1 - value / largest) for value in (1.5, 0.75)]
    assert found.columns[0].after == pytest.approx(expected, abs=0.01)
    assert found.columns[1].after[1] == found.height
    assert (found.columns[0].norm_before, found.columns[0].norm_after) == ("0.123", "2")
    assert len(found.ticks) <= 6


@pytest.mark.parametrize("size", [1e-30, 1e-3, 0.2, 0.7, 1.0, 4.231, 99.0, 1e12])
def test_ticks_are_few_whatever_the_size(size: float) -> None:
    found = values([spectrum(0, (size,))])
    assert found is not None
    assert 2 <= len(found.ticks) <= 6
    assert all(0 <= at <= found.height for at in found.columns[0].after)


def test_blocks_that_find_no_room_are_counted() -> None:
    found = values([spectrum(i, (1.0,)) for i in range(40)])
    assert found is not None
    assert len(found.columns) + found.left_out == 40
    assert found.left_out > 0


def test_of_many_values_the_ends_are_kept() -> None:
    many = tuple(1 - i / 1000 for i in range(1000))
    found = values([spectrum(0, many)])
    assert found is not None
    shown = found.columns[0].after
    assert len(shown) < 200
    largest = float(found.ticks[-1][1])
    ends = [found.height * (1 - value / largest) for value in (many[0], many[-1])]
    assert [shown[0], shown[-1]] == pytest.approx(ends, abs=0.01)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_not_finite_is_not_drawn(odd: float) -> None:
    assert values([spectrum(0, (odd,))]) is None
    assert values([]) is None
