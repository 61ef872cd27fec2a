"""What a black box is seen to do: cuts, inputs, bounds and fits, on probes written out here."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.layout import Layout
from muonsplit.newton_schulz import newton_schulz, singular_value_oracle
from muonsplit.observe.cut import Cut, Tensors, differing_lines, scan, stretches, turned_lines
from muonsplit.observe.families import FAMILIES, of_family
from muonsplit.observe.fit import Fit, compare, fit, hypotheses
from muonsplit.observe.gradients import conditioned, draw, draw_uneven, flip_column, flip_row
from muonsplit.observe.tolerance import rounding_bound

JORDAN = (3.4445, -4.7750, 2.0315)
ROWS, COLS = 16, 12


def iterate(x: Tensor, coefficients: tuple[float, float, float] = JORDAN) -> Tensor:
    """Five Newton–Schulz steps on one block, in its own dtype."""
    a, b, c = coefficients
    x = x / (x.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def by_rows(gradient: Tensor, blocks: list[list[int]]) -> Tensor:
    update = torch.empty_like(gradient)
    for rows in blocks:
        update[rows] = iterate(gradient[rows])
    return update


def runs(*lengths: int) -> list[list[int]]:
    ends = list(itertools.accumulate(lengths))
    return [list(range(end - n, end)) for n, end in zip(lengths, ends, strict=True)]


def strided(heads: int) -> list[list[int]]:
    return [list(range(head, ROWS, heads)) for head in range(heads)]


def shared_norm(gradient: Tensor) -> Tensor:
    # Divided by the norm of the whole matrix, and then again inside: the iteration of a block
    # starts elsewhere, and still only its own rows reach it.
    return (
        by_rows(gradient / (gradient * gradient).sum().sqrt(), runs(4, 4, 4, 4))
        * (gradient * gradient).sum().sqrt()
    )


def permuted(gradient: Tensor) -> Tensor:
    """Each of four heads gets the update of the next."""
    return by_rows(gradient, runs(4, 4, 4, 4)).roll(-4, 0)


Update = Callable[[Tensor], Tensor]


def observe(update: Update, axis: int = 0, shape: tuple[int, ...] = (ROWS, COLS)) -> Cut:
    return watched(update, axis, shape)[0]


def watched(update: Update, axis: int, shape: tuple[int, ...]) -> tuple[Cut, int]:
    """The cut that is seen, and after how many probes."""
    gradients = draw({"w": shape}, "observe")
    base = update(gradients["w"])
    probes = 0

    def probe(changed: Tensors) -> Tensors:
        nonlocal probes
        probes += 1
        return {"w": update(changed["w"])}

    def moved(name: str, after: Tensor, along: int) -> frozenset[int]:
        assert name == "w"
        return differing_lines(after, base, along)

    return scan(axis, gradients, probe, moved, "seed")["w"], probes


def sets(blocks: list[list[int]]) -> tuple[frozenset[int], ...]:
    return tuple(frozenset(rows) for rows in blocks)


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        (runs(4, 4, 4, 4), "4 blocks of 4"),
        (runs(2, 2, 2, 2, 2, 2, 2, 2), "8 blocks of 2"),
        (runs(16), "whole"),
        (runs(8, 8), "2 blocks of 8"),
        (runs(5, 4, 4, 3), "4 blocks of 5, 4, 4, 3"),
        (strided(4), "4 blocks of 4, strided"),
        (strided(2), "2 blocks of 8, strided"),
    ],
    ids=["per head", "half heads", "whole", "pairs", "off by one", "interleaved", "halves"],
)
def test_rows_that_move_together(blocks: list[list[int]], said: str) -> None:
    cut, probes = watched(lambda g: by_rows(g, blocks), 0, (ROWS, COLS))
    assert cut.blocks == sets(blocks)
    assert cut.complete
    assert cut.whole == (len(blocks) == 1)
    assert not cut.displaced
    assert str(cut) == said
    assert probes == len(blocks)


def test_a_shared_norm_is_not_taken_for_a_shared_block() -> None:
    assert observe(shared_norm).blocks == sets(runs(4, 4, 4, 4))


def test_a_norm_over_everything_and_nothing_else() -> None:
    cut = observe(lambda g: g / (g * g).sum().sqrt())
    assert str(cut) == "single lines: nothing is orthogonalised"


def test_permuted_heads_are_displaced() -> None:
    cut = observe(permuted)
    assert cut.blocks == sets(runs(4, 4, 4, 4))
    assert cut.displaced == (0, 4, 8, 12)
    # The head before gets the update of the one that was changed.
    assert cut.moved[4] == frozenset(range(4))
    assert cut.moved[0] == frozenset(range(12, 16))
    assert cut.complete


def test_columns_of_a_cut_by_rows_are_whole() -> None:
    assert observe(lambda g: by_rows(g, runs(4, 4, 4, 4)), axis=1).whole


def test_a_cut_by_columns() -> None:
    def update(g: Tensor) -> Tensor:
        return by_rows(g.mT.contiguous(), runs(3, 3, 3, 3)).mT.contiguous()

    assert observe(update, axis=1).blocks == sets(runs(3, 3, 3, 3))
    assert observe(update, axis=0).whole


@pytest.mark.parametrize("axis", [0, 1])
def test_elementwise_updates_say_so_after_three_probes(axis: int) -> None:
    cut, probes = watched(torch.sign, axis, (ROWS, COLS))
    assert probes == 3
    assert cut.blocks == sets([[0], [1], [2]])
    assert not cut.complete
    assert str(cut) == "single lines: nothing is orthogonalised"


def test_an_update_that_ignores_its_gradient() -> None:
    cut, probes = watched(torch.ones_like, 0, (ROWS, COLS))
    assert probes == 3
    assert not any(cut.blocks)
    assert not cut.complete
    assert not cut.whole


def test_lone_rows_beside_blocks_do_not_hide_them() -> None:
    blocks = runs(1, 1, 7, 7)
    assert observe(lambda g: by_rows(g, blocks)).blocks == sets(blocks)


def test_an_expert_of_a_stack_is_a_block() -> None:
    cut = observe(lambda g: torch.stack([iterate(x) for x in g]), shape=(3, 4, 6))
    assert cut.lines == 12
    assert cut.blocks == sets(runs(4, 4, 4))
    assert observe(torch.sign, axis=1, shape=(3, 4, 6)).lines == 6


def test_vectors_are_left_alone_and_weights_are_probed_at_once() -> None:
    gradients = draw({"a": (8, 6), "b": (12, 6), "v": (5,)}, 0)

    def update(g: Tensors) -> Tensors:
        return {
            "a": by_rows(g["a"], runs(4, 4)),
            "b": by_rows(g["b"], runs(3, 3, 3, 3)),
            "v": g["v"],
        }

    base, probes = update(gradients), 0

    def probe(changed: Tensors) -> Tensors:
        nonlocal probes
        probes += 1
        assert torch.equal(changed["v"], gradients["v"])
        return update(changed)

    cuts = scan(0, gradients, probe, lambda n, after, axis: differing_lines(after, base[n], axis))
    assert {name: cut.blocks for name, cut in cuts.items()} == {
        "a": sets(runs(4, 4)),
        "b": sets(runs(3, 3, 3, 3)),
    }
    assert probes == 4


def test_overlapping_sets_are_one_block() -> None:
    # Row 2 kept its bits when row 0 was changed, and moved when row 3 was.
    cut = Cut(6, {0: frozenset({0, 1, 3}), 2: frozenset({2, 3}), 4: frozenset({4, 5})})
    assert cut.blocks == sets([[0, 1, 2, 3], [4, 5]])
    assert cut.complete


def test_a_bridge_joins_blocks_seen_before_it() -> None:
    cut = Cut(6, {0: frozenset({0, 1}), 4: frozenset({4, 5}), 2: frozenset({1, 2, 3, 4})})
    assert cut.blocks == sets([[0, 1, 2, 3, 4, 5]])
    assert cut.whole


def test_the_next_line_is_the_first_that_is_not_accounted_for() -> None:
    cut = Cut(6)
    assert cut.next_line() == 0
    cut.moved[0] = frozenset({0, 1, 4})
    assert cut.next_line() == 2
    cut.moved[2] = frozenset({2, 3, 5})
    assert cut.next_line() is None


def test_single_lines_say_so_after_three_and_lines_that_move_none_are_passed() -> None:
    cut = Cut(6, {0: frozenset()})
    assert cut.next_line() == 1
    cut.moved[1] = frozenset({1})
    assert cut.next_line() == 2
    cut.moved[2] = frozenset({2})
    assert cut.next_line() is None
    assert watched(torch.sign, 0, (2, COLS))[1] == 2


def test_a_displaced_block_accounts_for_as_many_lines_as_it_has() -> None:
    cut = Cut(4, {0: frozenset({2, 3})})
    assert cut.next_line() == 2
    cut.moved[2] = frozenset({0, 1})
    assert cut.next_line() is None


def test_at_most_eight_sizes_are_spelled() -> None:
    eight, nine = (
        Cut(sum(range(n)), {rows[0]: frozenset(rows) for rows in runs(*range(1, n))})
        for n in (9, 10)
    )
    assert str(eight) == "8 blocks of 1, 2, 3, 4, 5, 6, 7, 8"
    assert str(nine) == "9 blocks of 1, 2, 3, 4, 5, 6, 7, 8, …"


def test_each_weight_axis_and_key_has_signs_of_its_own() -> None:
    ones = {name: torch.ones(24, 24) for name in ("a", "b")}
    seen: set[tuple[float, ...]] = set()

    def probe(changed: Tensors) -> Tensors:
        for name in ones:
            line = changed[name].amin(1 - axis).argmin()
            seen.add(tuple(changed[name].select(axis, int(line)).tolist()))
        return changed

    for axis, key in itertools.product((0, 1), ("one", "other")):
        # Everything moves, so there is one probe.
        scan(axis, ones, probe, lambda *_: frozenset(range(24)), key)
    assert len(seen) == 8
    assert all(set(signs) == {-1.0, 1.0} for signs in seen)


def test_stretches_are_from_start_to_stop() -> None:
    assert stretches(frozenset({7, 2, 0, 1, 5, 8})) == ((0, 3), (5, 6), (7, 9))
    assert stretches(frozenset()) == ()


def test_what_is_unfinished_says_at_least() -> None:
    assert str(Cut(6, {0: frozenset({0, 1})})) == "at least 1 blocks of 2"


def test_differing_lines_see_a_single_bit_and_the_sign_of_zero() -> None:
    base = torch.zeros(3, 4)
    after = base.clone()
    after[1, 2] = -0.0
    assert differing_lines(after, base, 0) == {1}
    assert differing_lines(after, base, 1) == {2}
    nan = torch.full((2, 2), float("nan"))
    assert differing_lines(nan, nan.clone(), 0) == set()


@pytest.mark.parametrize("factor", [0.37, 3.0, 1e-3])
def test_turned_lines_forgive_a_common_factor(factor: float) -> None:
    base = by_rows(draw({"w": (ROWS, COLS)}, 1)["w"], runs(4, 4, 4, 4))
    scaled = (base * factor).double()
    turned = scaled.clone()
    turned[4:8] = scaled[4:8].flip(0)
    roundoff = 2.0**-24
    for axis in (0, 1):
        assert turned_lines(scaled, base.double(), axis, roundoff) == set()
    assert turned_lines(turned, base.double(), 0, roundoff) == {4, 5, 6, 7}
    assert turned_lines(turned, base.double(), 1, roundoff) == set(range(COLS))


def test_turned_lines_at_the_edge_of_rounding() -> None:
    base = draw({"w": (4, 64)}, 2)["w"].double()
    off = torch.zeros_like(base)
    off[1], off[2] = base[1].roll(1) * 1e-5, base[2].roll(1) * 1e-7
    assert turned_lines(base + off, base, 0, 2.0**-24) == {1}


def test_a_small_line_that_turned_is_seen_beside_large_ones() -> None:
    base = draw({"w": (4, 64)}, 2)["w"].double()
    base[3] *= 1e-6
    turned = base.clone()
    turned[3] += base[3].roll(1) * 1e-3
    assert turned_lines(turned, base, 0, 2.0**-24) == {3}


def test_a_line_that_was_zero_and_stays_it_did_not_turn() -> None:
    base = torch.zeros(2, 3, dtype=torch.float64)
    base[0] = 1.0
    assert turned_lines(base, base, 0, 2.0**-24) == set()


SHAPES = {"a": (4, 6), "b": (3, 5, 2), "c": (7,)}


@pytest.mark.parametrize("drawn", [draw, draw_uneven])
def test_draws_are_seeded_by_name(drawn: Callable[..., dict[str, Tensor]]) -> None:
    once = drawn(SHAPES, 1, "x")
    again = drawn(dict(reversed(SHAPES.items())), 1, "x")
    alone = drawn({"b": SHAPES["b"]}, 1, "x")
    other = drawn(SHAPES, 2, "x")
    for name, shape in SHAPES.items():
        assert once[name].shape == shape
        assert once[name].dtype == torch.float32
        assert torch.equal(once[name], again[name])
        assert not torch.equal(once[name], other[name])
    assert torch.equal(alone["b"], once["b"])
    assert not torch.equal(draw({"a": (4,)}, 0)["a"], draw({"b": (4,)}, 0)["b"])


def test_draws_leave_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    flip_row(draw_uneven(SHAPES, 0)["a"], 0, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_are_standard_normal_times_a_size() -> None:
    big = draw({"w": (200, 200)}, 0, size=3.0)["w"]
    assert abs(float(big.mean())) < 0.1
    assert abs(float(big.std()) - 3.0) < 0.1
    assert torch.equal(big, draw({"w": (200, 200)}, 0)["w"] * 3.0)


def test_uneven_rows_come_in_stretches() -> None:
    even, uneven = (f({"w": (400, 8)}, 3)["w"] for f in (draw, draw_uneven))
    ratio = (uneven / even).median(1).values
    assert torch.allclose(uneven, even * ratio.unsqueeze(1), rtol=1e-5)
    assert 0.5 <= float(ratio.min()) < 0.75
    assert 1.4 < float(ratio.max()) <= 2.0
    lengths = [len(list(run)) for _, run in itertools.groupby(ratio.mul(1e4).round().tolist())]
    assert all(3 <= n <= 17 for n in lengths[:-1])
    assert len(set(lengths)) > 5


def test_stretches_of_rows_are_of_every_length_from_3_to_17() -> None:
    even, uneven = (f({"w": (2000, 8)}, 4)["w"] for f in (draw, draw_uneven))
    ratio = (uneven / even).median(1).values
    runs_of = [len(list(run)) for _, run in itertools.groupby(ratio.mul(1e5).round().tolist())]
    assert set(runs_of[:-1]) == set(range(3, 18))
    vector = {"v": (7,)}
    assert torch.equal(draw_uneven(vector, 0)["v"], draw(vector, 0)["v"])


def test_each_weight_and_key_has_stretches_of_its_own() -> None:
    shapes = {"a": (40, 8), "b": (40, 8)}
    ratios = [
        (draw_uneven(shapes, key)[name] / draw(shapes, key)[name]).median(1).values
        for key, name in itertools.product((0, 1), shapes)
    ]
    assert not any(torch.allclose(x, y) for x, y in itertools.combinations(ratios, 2))


def test_conditioned_blocks_keep_their_singular_vectors() -> None:
    blocks = draw({"w": (2, 6, 4)}, 9)["w"]
    made = conditioned(blocks)
    assert made.dtype == torch.float32
    U, _, Vh = torch.linalg.svd(blocks.double(), full_matrices=False)
    expected = torch.diag(torch.tensor([9.0, 7.0, 5.0, 3.0]).double() / 9)
    assert torch.allclose(U.mT @ made.double() @ Vh.mT, expected.expand(2, 4, 4), atol=1e-6)


def singular(made: Tensor) -> Tensor:
    return torch.linalg.svdvals(made.double())


def test_scales_reach_three_decades_either_way() -> None:
    made = of_family("head scales 1e±3", (400, 512), Layout.heads("q", 200, 2), 0)
    # The mean square of 1024 numbers is off by a hundredth of a decade.
    decades = made.view(200, 1024).double().square().mean(1).sqrt().log10()
    assert -3.03 < float(decades.min()) < -2.8
    assert 2.8 < float(decades.max()) < 3.03
    assert abs(float(decades.mean())) < 0.5


def test_tiny_is_a_millionth_and_iid_is_one() -> None:
    for family, size in (("iid", 1.0), ("tiny 1e-6", 1e-6)):
        made = of_family(family, (64, 64), Layout.heads("q", 8, 8), 0)
        assert made.dtype == torch.float32
        assert float(made.std()) == pytest.approx(size, rel=0.05)


def test_any_head_may_be_the_zero_one_but_not_the_only_one() -> None:
    layout = Layout.heads("q", 3, 2)
    zero = {
        tuple((of_family("one zero head", (6, 4), layout, key).view(3, 8) == 0).all(1).tolist())
        for key in range(30)
    }
    assert zero == {(True, False, False), (False, True, False), (False, False, True)}
    assert (of_family("one zero head", (6, 4), None, 0) != 0).all()


def test_rank_two_heads_have_both_directions() -> None:
    values = singular(
        of_family("rank-2 heads", (24, 16), Layout.heads("q", 4, 6), 0).view(4, 6, 16)
    )
    assert (values[:, 1] > 1e-2 * values[:, 0]).all()
    assert (values[:, 2] < 1e-6 * values[:, 0]).all()


def test_ill_conditioned_heads_span_four_decades_evenly() -> None:
    made = of_family("ill-conditioned", (24, 16), Layout.heads("q", 4, 6), 0)
    decades = singular(made.view(4, 6, 16)).log10()
    expected = -torch.linspace(0, 4, 6).double()
    assert torch.allclose(decades, expected.expand(4, 6), atol=1e-2)


def test_integers_are_rounded_normal_numbers_of_deviation_two() -> None:
    made = of_family("integers |x| ≤ 3", (64, 64), Layout.heads("q", 8, 8), 0)
    counts = {n: float((made == n).double().mean()) for n in range(-3, 4)}
    # P(|2z| ≥ 2.5) = 0.211 and P(|2z| < 0.5) = 0.197.
    assert counts[-3] + counts[3] == pytest.approx(0.211, abs=0.02)
    assert counts[0] == pytest.approx(0.197, abs=0.02)
    assert sum(counts.values()) == 1


def test_a_weight_without_a_layout_is_a_block_or_a_stack_of_them() -> None:
    for shape in ((6, 4), (3, 6, 4)):
        made = of_family("orthonormal heads", shape, None, 0)
        assert made.shape == shape
        assert torch.allclose(singular(made), torch.ones(4).double(), atol=1e-6)
    equal = of_family("equal heads", (3, 6, 4), None, 0)
    assert torch.equal(equal[0], equal[2])
    assert equal[0].norm() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_seeded_by_its_key_alone(family: str) -> None:
    for shape, layout in (((32, 8), Layout.heads("q", 8, 4)), ((8, 4, 8), None)):
        drawn: list[Tensor] = []
        for seed in range(4):
            torch.manual_seed(seed)
            drawn.append(of_family(family, shape, layout, 0))
        assert all(torch.equal(drawn[0], other) for other in drawn)


def test_families_and_keys_draw_apart() -> None:
    layout = Layout.heads("q", 4, 6)
    one, other = (of_family("iid", (24, 16), layout, key) for key in (0, 1))
    assert not torch.equal(one, other)
    assert not torch.allclose(one, of_family("tiny 1e-6", (24, 16), layout, 0) * 1e6)


matrices = st.tuples(st.integers(1, 9), st.integers(2, 9), st.integers(0, 10**6))


@given(matrices, st.data())
def test_a_flipped_row_keeps_the_norm_bit_for_bit(
    drawn: tuple[int, int, int], data: st.DataObject
) -> None:
    rows, cols, seed = drawn
    g = draw({"g": (rows, cols)}, seed)["g"]
    row = data.draw(st.integers(0, rows - 1))
    flipped = flip_row(g, row, seed)
    assert differing_lines(flipped, g, 0) == {row}
    assert torch.equal(flipped.abs(), g.abs())
    assert (flipped * flipped).sum().view(torch.int32) == (g * g).sum().view(torch.int32)
    assert flipped.norm().view(torch.int32) == g.norm().view(torch.int32)
    # Neither the row nor its negative: both would leave X Xᵀ or the block's row space alone.
    assert not torch.equal(flipped[row], g[row])
    assert not torch.equal(flipped[row], -g[row])
    assert torch.equal(flipped, flip_row(g, row, seed))


@given(matrices, st.data())
def test_a_flipped_column_is_a_flipped_row_of_the_transpose(
    drawn: tuple[int, int, int], data: st.DataObject
) -> None:
    cols, rows, seed = drawn
    g = draw({"g": (rows, cols)}, seed)["g"]
    column = data.draw(st.integers(0, cols - 1))
    flipped = flip_column(g, column, seed)
    assert differing_lines(flipped, g, 1) == {column}
    assert torch.equal(flipped, flip_row(g.mT.contiguous(), column, seed).mT)
    assert (flipped * flipped).sum().view(torch.int32) == (g * g).sum().view(torch.int32)


def test_rows_of_a_stack_are_counted_through() -> None:
    g = draw({"g": (3, 4, 6)}, 0)["g"]
    changed = (flip_row(g, 6, 0) != g).nonzero()[:, :2].unique(dim=0)
    assert changed.tolist() == [[1, 2]]
    changed = flip_column(g, 5, 0) != g
    assert changed[..., 5].any()
    assert not changed[..., :5].any()


def test_another_key_flips_other_signs() -> None:
    g = torch.ones(2, 40)
    assert not torch.equal(flip_row(g, 0, 0), flip_row(g, 0, 1))


def test_a_row_of_one_element_is_flipped_too() -> None:
    column = torch.ones(5, 1)
    assert all(not torch.equal(flip_row(column, 2, seed), column) for seed in range(8))
    assert all(not torch.equal(flip_column(column.mT, 2, seed), column.mT) for seed in range(8))


LEGAL = {
    f"{form} {coefficients} {dtype}": Arithmetic(
        form="matmul" if form == "gram" else form,
        iteration="gram" if form == "gram" else "standard",
        restarts=tuple(range(2, steps, 3)) if form == "gram" else (),
        compute_dtype="float32",
        coefficients=coefficients,
        steps=steps,
        cpu_dtype=dtype,
        norm_dtype=norm,
        normalize=normalize,
        tall=tall,
    )
    for form, normalize, tall, norm in [
        ("matmul", "add", "transpose", "compute"),
        ("paren", "add", "right", "compute"),
        ("addmm", "clamp", "transpose", "input"),
        ("gram", "add", "transpose", "input"),
    ]
    for coefficients, steps in [
        ("jordan", 5),
        ("you", 5),
        ("polar-express-5", 5),
        ("deepseek-v4", 10),
    ]
    for dtype in ("float32", "bfloat16", "float16")
    # The Gram form squares singular values before it rounds: too much for eight bits.
    if (form, dtype) != ("gram", "bfloat16")
}


def error(block: Tensor, arithmetic: Arithmetic) -> float:
    exact = singular_value_oracle(block.unsqueeze(0), arithmetic)[0]
    computed = newton_schulz(block.unsqueeze(0), arithmetic)[0].double()
    return float((computed - exact).norm() / exact.norm())


@given(
    st.sampled_from(sorted(LEGAL)),
    st.integers(2, 24),
    st.integers(2, 48),
    st.integers(0, 10**6),
    st.sampled_from([draw, draw_uneven]),
)
def test_legal_rounding_stays_inside_the_bound(
    name: str, rows: int, cols: int, seed: int, drawn: Callable[..., dict[str, Tensor]]
) -> None:
    block = drawn({"w": (rows, cols)}, seed)["w"]
    found = error(block, LEGAL[name])
    allowed = rounding_bound(block, LEGAL[name])
    assert found <= allowed
    assert found > 0


def plain(rows: int, cols: int, seed: int) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "rows", "cols", "seed"),
    [
        ("matmul jordan float32", 2, 18, 417760),
        ("matmul jordan bfloat16", 18, 2, 291106),
        ("addmm jordan float32", 8, 8, 20513),
        ("paren polar-express-5 float32", 9, 2, 1),
    ],
)
def test_the_bound_holds_on_blocks_that_were_hard(
    name: str, rows: int, cols: int, seed: int
) -> None:
    block = plain(rows, cols, seed)
    assert error(block, LEGAL[name]) <= rounding_bound(block, LEGAL[name])


def relative(wrong: Tensor, right: Tensor) -> float:
    return float((wrong.double() - right).norm() / right.norm())


TIGHT = [(8, 64), (16, 48), (32, 16), (16, 16)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", TIGHT, ids=str)
def test_a_whole_matrix_update_exceeds_the_bound(shape: tuple[int, int], dtype: str) -> None:
    arithmetic = Arithmetic(cpu_dtype=dtype)
    rows, cols = shape
    gradient = draw({"w": (4 * rows, cols)}, 0)["w"].double()
    whole = iterate(gradient)[:rows]
    assert relative(whole, iterate(gradient[:rows])) > rounding_bound(gradient[:rows], arithmetic)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", TIGHT, ids=str)
def test_a_wrong_scale_exceeds_the_bound(shape: tuple[int, int], dtype: str) -> None:
    # √2 is the factor that the shape of two heads would give.
    assert rounding_bound(plain(*shape, 0), Arithmetic(cpu_dtype=dtype)) < 2**0.5 - 1


@pytest.mark.parametrize("iteration", ["standard", "gram"])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("shape", TIGHT, ids=str)
def test_a_wrong_coefficient_exceeds_the_bound(
    shape: tuple[int, int], which: int, iteration: Any
) -> None:
    wrong = list(JORDAN)
    wrong[which] += 5e-4
    block = plain(*shape, 0).double()
    a, b, c = wrong
    found = relative(iterate(block, (a, b, c)), iterate(block))
    arithmetic = Arithmetic(
        compute_dtype="float32", cpu_dtype="float32", iteration=iteration, restarts=(2,)
    )
    assert found > rounding_bound(block, arithmetic)


def test_the_bound_grows_with_the_roundoff() -> None:
    block = plain(8, 32, 0)
    bounds = [
        rounding_bound(block, Arithmetic(cpu_dtype=dtype))
        for dtype in ("float64", "float32", "float16", "bfloat16")
    ]
    assert bounds == sorted(bounds)
    assert bounds[0] < 1e-13
    # A pre-cast to a coarser dtype rounds as coarsely, but once.
    pre_cast = Arithmetic(cpu_dtype="float32", pre_cast="bfloat16")
    allowed = rounding_bound(block, pre_cast)
    assert bounds[1] < error(block, pre_cast) <= allowed < bounds[3]


EXACT = Arithmetic(scale="none")
HEADS = Layout.heads("q", 8, 4)
WAYS: dict[str, list[list[int]]] = {
    "as planned": runs(*[4] * 8),
    "whole matrix": runs(32),
    "half heads": runs(*[2] * 16),
    "head pairs": runs(*[8] * 4),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_fit_ranks_what_was_done_first(way: str) -> None:
    direction = draw({"w": (32, 24)}, 5)["w"]
    update = 3.0 * by_rows(direction, WAYS[way])
    fits = fit(update, direction, hypotheses(HEADS, 32), EXACT)
    assert {f.hypothesis for f in fits} == set(WAYS)
    assert fits[0].hypothesis == way
    assert fits[0].residual < 1e-5
    assert fits[0].size == pytest.approx(3.0, rel=1e-5)
    assert fits[1].residual > 0.05
    assert [f.residual for f in fits] == sorted(f.residual for f in fits)


def test_three_projections_are_a_hypothesis_where_rows_allow() -> None:
    direction = draw({"w": (24, 20)}, 6)["w"]
    update = by_rows(direction, runs(8, 8, 8))
    found = fit(update, direction, hypotheses(Layout.heads("qkv", 6, 4), 24), EXACT)
    assert found[0].hypothesis == "Q | K | V"
    assert "Q | K | V" not in hypotheses(HEADS, 32)


def test_hypotheses_leave_out_what_cannot_be() -> None:
    assert set(hypotheses(Layout.heads("q", 3, 5), 15)) == {
        "as planned",
        "whole matrix",
        "Q | K | V",
    }
    assert set(hypotheses(None, 16)) == {"as planned", "whole matrix"}


def test_hypotheses_are_half_heads_pairs_and_thirds_of_what_is_planned() -> None:
    whole = {"as planned": HEADS, "whole matrix": None}
    assert hypotheses(HEADS, 32) == {
        **whole,
        "half heads": Layout.heads("q", 16, 2),
        "head pairs": Layout.heads("q", 4, 8),
    }
    # Two heads in a pair would be the whole matrix once more.
    assert set(hypotheses(Layout.heads("q", 2, 4), 8)) == {*whole, "half heads"}
    for planned in ("q 4×4 | k 2×4", "q 6×4, axis 1", "2 × (q 4×4)", "2 × (q 3×4 | k 4)"):
        layout = Layout.parse(planned)
        thirds = {"Q | K | V": Layout.heads("part", 3, layout.rows // 3)}
        expected = {"as planned": layout, "whole matrix": None}
        assert hypotheses(layout, layout.rows) == expected | (
            thirds if layout.rows % 3 == 0 else {}
        )


def test_an_update_that_points_away_fits_nothing() -> None:
    one = torch.ones(2, 2)
    assert compare("x", -2 * one, one) == Fit("x", float("inf"), -2.0)


def test_a_fit_is_said_in_one_line() -> None:
    assert str(Fit("as planned", 0.0123, 1.5)) == "as planned: direction off by 0.012, size × 1.5"


def test_direction_and_size_are_told_apart() -> None:
    wanted = draw({"w": (6, 5)}, 7)["w"]
    scaled = compare("x", 2.5 * wanted, wanted)
    assert scaled.size == pytest.approx(2.5)
    assert scaled.residual < 1e-6
    side = wanted.flip(0)
    side = side - wanted * ((side * wanted).sum() / wanted.square().sum())
    turned = compare("x", wanted + 0.1 * side * wanted.norm() / side.norm(), wanted)
    assert turned.size == pytest.approx(1.0, rel=1e-5)
    assert turned.residual == pytest.approx(0.1, rel=1e-4)


def test_a_fit_to_nothing() -> None:
    zero, one = torch.zeros(2, 2), torch.ones(2, 2)
    assert compare("x", zero, zero) == Fit("x", 0.0, 1.0)
    assert compare("x", one, zero) == Fit("x", float("inf"), 1.0)
    # An update of nothing points nowhere: it must not pass for one that points right.
    assert compare("x", zero, one).residual > 0.5


def test_the_fit_is_made_in_float64_whatever_the_dialect_computes_in() -> None:
    direction = draw({"w": (32, 24)}, 8)["w"]
    update = by_rows(direction.double(), WAYS["as planned"])
    coarse = dataclasses.replace(EXACT, cpu_dtype="bfloat16", pre_cast="bfloat16")
    assert fit(update, direction, hypotheses(HEADS, 32), coarse)[0].residual < 1e-10
