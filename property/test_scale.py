"""Heads of any size: the update does not know by what each head was multiplied.

In float32 entries are squared before a norm is taken, so a norm below 10⁻¹⁹ or above 10¹⁹ needs
``normalize="scaled"``. With the ε that frameworks have, 10⁻⁷, bits are kept while it is lost in the
rounding of the norm and the squares do not overflow; the edges are pinned here. The fast form does
not overflow, but adds ε in float64, where it is not lost.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from muonsplit.dialect import DIALECTS, Arithmetic, Dialect, SplitRule
from muonsplit.layout import Layout
from muonsplit.muon import PerHeadMuon, directions, orthogonalize
from muonsplit.newton_schulz import newton_schulz
from muonsplit.observe.tolerance import rounding_bound
from property.strategies import Heads, bits, projections, same_bits, threads

JORDAN = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7
_GRAM = DIALECTS["deepspeed-0.19.8"].arithmetic

FORMS = {
    "gram-fp32": _GRAM,
    "standard-fp32": Arithmetic(cpu_dtype="float32"),
    "addmm-fp32": replace(
        DIALECTS["torch-2.13"].arithmetic, cpu_dtype="float32", scale_on="update"
    ),
    "fast-fp32": _GRAM.fastest(),
    "standard-bf16": Arithmetic(),
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
ORDERED = {name: form for name, form in FORMS.items() if form.form != "fast"}
ordered = pytest.mark.parametrize("form", ORDERED.values(), ids=ORDERED)


def normalized_by(form: Arithmetic, rule: Any) -> Arithmetic:
    return replace(form, normalize=rule, epsilon=EPSILON)


def without_tiny(p: Heads) -> Tensor:
    """A projection whose entries, times 2⁻¹⁰⁰, are not subnormal and so keep all their digits."""
    update = p.update()
    return torch.where(update.abs() < 2.0**-20, 0.0, update)


def multiplied(p: Heads, update: Tensor, factors: list[float]) -> Tensor:
    """Each head times its own factor."""
    blocks = update.view(p.heads, p.width, p.cols)
    return (blocks * torch.tensor(factors, dtype=update.dtype).view(-1, 1, 1)).view_as(update)


def exact(block: Tensor) -> Tensor:
    """Five of Jordan's steps on the singular values, times max(1, rows / columns)^½."""
    U, S, Vh = torch.linalg.svd(block.double(), full_matrices=False)
    S = S / S.square().sum().sqrt()
    for _ in range(5):
        S = JORDAN[0] * S + JORDAN[1] * S**3 + JORDAN[2] * S**5
    return math.sqrt(max(1.0, block.shape[0] / block.shape[1])) * (U * S) @ Vh


def powers(p: Heads, data: st.DataObject, low: int, high: int) -> list[float]:
    exponents = data.draw(st.lists(st.integers(low, high), min_size=p.heads, max_size=p.heads))
    return [2.0**e for e in exponents]


@forms
@given(p=projections(), data=st.data())
def test_powers_of_two_do_not_move_a_bit(form: Arithmetic, p: Heads, data: st.DataObject) -> None:
    arithmetic = normalized_by(form, "scaled")
    update = without_tiny(p)
    # 10⁻³⁰ to 10³⁰, a head each.
    scaled = multiplied(p, update, powers(p, data, -100, 100))
    expected = orthogonalize(update, p.layout, arithmetic)
    assert bool((expected != 0).any())
    assert same_bits(orthogonalize(scaled, p.layout, arithmetic), expected)


@forms
@given(p=projections(), data=st.data())
def test_any_factor_moves_a_head_within_its_rounding(
    form: Arithmetic, p: Heads, data: st.DataObject
) -> None:
    arithmetic = normalized_by(form, "scaled")
    update = p.update()
    tens = data.draw(st.lists(st.floats(-30, 30), min_size=p.heads, max_size=p.heads))
    scaled = multiplied(p, update, [10**e for e in tens])
    found = orthogonalize(scaled, p.layout, arithmetic)
    for head in range(p.heads):
        wanted = exact(update[p.rows(head)])
        # The bound allows a cast of the entries; the product with the factor is one, of float32.
        # The rounding of the scale comes on top.
        allowed = rounding_bound(update[p.rows(head)], arithmetic) + arithmetic.roundoff
        assert float((found[p.rows(head)].double() - wanted).norm()) <= allowed * wanted.norm()


@pytest.mark.parametrize("rule", ["add", "clamp"])
@ordered
@given(p=projections(), data=st.data())
def test_epsilon_is_lost_in_the_rounding_of_a_larger_norm(
    form: Arithmetic, rule: str, p: Heads, data: st.DataObject
) -> None:
    arithmetic = normalized_by(form, rule)
    update = without_tiny(p)
    smallest = min(float(update[p.rows(h)].norm()) for h in range(p.heads))
    largest = max(float(update[p.rows(h)].norm()) for h in range(p.heads))
    # ‖X‖ + ε rounds to ‖X‖ where ε is less than half a unit in its last place, ‖X‖·2⁻²⁵ at least;
    # max(‖X‖, ε) is ‖X‖ from ε on. Half of either is left for the norm's own rounding.
    low = math.log2(2 * EPSILON * (2**25 if rule == "add" else 1) / smallest)
    # Squares end at 2¹²⁸.
    high = 63 - math.log2(largest)
    loud = multiplied(p, update, powers(p, data, math.ceil(low), math.floor(high)))
    plain = multiplied(p, update, [2.0 ** math.ceil(low)] * p.heads)
    expected = orthogonalize(plain, p.layout, arithmetic)
    assert same_bits(orthogonalize(loud, p.layout, arithmetic), expected)


@forms
@pytest.mark.parametrize("rule", ["add", "clamp"])
@pytest.mark.parametrize("over", [2.0**-3, 1.0, 2.0**3, 2.0**6])
def test_epsilon_shrinks_a_smaller_norm(form: Arithmetic, rule: Any, over: float) -> None:
    """Without a step the result is what Newton–Schulz is given: its norm is that share of one."""
    arithmetic = replace(normalized_by(form, rule), steps=0, iteration="standard", restarts=())
    block = Heads(1, 6, 20, seed=1).update()
    block = block / block.double().norm() * over * EPSILON
    found = newton_schulz(block.unsqueeze(0), arithmetic)[0].double()
    share = {"add": over / (over + 1), "clamp": min(over, 1.0)}[rule]
    # Rounded: the norm, the sum, the quotient, its cast, and the entries of the block.
    assert float(found.norm()) == pytest.approx(share, rel=5 * arithmetic.roundoff + 120 * 2**-24)


@ordered
@pytest.mark.parametrize("rule", ["add", "clamp"])
def test_squares_that_overflow_leave_nothing(form: Arithmetic, rule: Any) -> None:
    """The norm is infinite from 2⁶⁴ on; what frameworks do with such a gradient is not to move."""
    p = Heads(2, 16, 16, seed=5)
    update = p.update()
    # A norm of about 16, so that one head ends below 2⁶⁴ and one above.
    arithmetic = normalized_by(form, rule)
    found = orthogonalize(multiplied(p, update, [2.0**59, 2.0**61]), p.layout, arithmetic)
    expected = orthogonalize(update, p.layout, arithmetic)
    assert same_bits(found[:16], expected[:16])
    assert bool((found[16:] == 0).all())


@pytest.mark.parametrize("rule", ["add", "clamp"])
@given(p=projections(), data=st.data())
def test_the_fast_form_does_not_overflow(rule: str, p: Heads, data: st.DataObject) -> None:
    arithmetic = normalized_by(FORMS["fast-fp32"], rule)
    update = without_tiny(p)
    scaled = multiplied(p, update, powers(p, data, 10, 100))
    found = orthogonalize(scaled, p.layout, arithmetic)
    for head in range(p.heads):
        wanted = exact(update[p.rows(head)])
        # ε is less than one rounding of the norm, of which the bound allows three.
        assert float(scaled[p.rows(head)].double().norm()) > EPSILON * 2**24
        allowed = rounding_bound(update[p.rows(head)], arithmetic) + arithmetic.roundoff
        assert float((found[p.rows(head)].double() - wanted).norm()) <= allowed * wanted.norm()
    if rule == "clamp":
        assert same_bits(found, orthogonalize(1024 * update, p.layout, arithmetic))


# Blocks that share a batch, blocks that no vector unit divides, tall ones, and long ones.
SIZES = {"batched": (16, 16), "unaligned": (7, 9), "tall": (20, 6), "long": (8, 300)}
sizes = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
rules = pytest.mark.parametrize("rule", ["add", "clamp", "scaled"])


@sizes
@rules
@forms
@pytest.mark.parametrize("head", [0, 1, 3])
def test_a_zero_head_has_a_zero_update(
    form: Arithmetic, rule: Any, size: tuple[int, int], head: int
) -> None:
    arithmetic, p = normalized_by(form, rule), Heads(4, *size, seed=7)
    update = p.update()
    expected = orthogonalize(update, p.layout, arithmetic)
    update[p.rows(head)] = 0
    expected[p.rows(head)] = 0
    found = orthogonalize(update, p.layout, arithmetic)
    # −0 is as good a zero; of the other heads it is the bits.
    assert bool((found[p.rows(head)] == 0).all())
    found[p.rows(head)] = 0
    assert same_bits(found, expected)


@rules
@pytest.mark.parametrize("epsilon", [0.0, 1e-8, 1e-30])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_zero_head_has_a_zero_update_whatever_epsilon_rounds_to(
    rule: Any, epsilon: float, dtype: Any
) -> None:
    """10⁻⁸ is zero in float16, and zero over zero would be NaN."""
    arithmetic = Arithmetic(normalize=rule, epsilon=epsilon, cpu_dtype=dtype)
    found = orthogonalize(torch.zeros(8, 6), Layout.heads("q", 2, 4), arithmetic)
    assert bool((found == 0).all())


def test_the_rows_of_a_zero_head_are_not_moved() -> None:
    weight = Parameter(Heads(4, 8, 12, seed=2).update())
    before = weight.detach().clone()
    layout = Layout.heads("q", 4, 8)
    dialect = Dialect("gram", SplitRule(), _GRAM, {})
    optimizer = PerHeadMuon([("w", weight)], {"w": layout}, dialect=dialect, lr=0.1)
    for seed in (3, 4):
        weight.grad = Heads(4, 8, 12, seed=seed).update()
        weight.grad[8:16] = 0
        optimizer.step()
    moved = (weight.detach() != before).view(4, 8, 12)
    assert same_bits(weight.detach()[8:16], before[8:16])
    assert bool(moved[[0, 2, 3]].all())


def spoilt(block: Tensor, how: str) -> Tensor:
    """One entry, or all of them, not finite."""
    if how.startswith("all"):
        return torch.full_like(block, math.nan if "nan" in how else math.inf)
    found = block.clone()
    found[-1, 0] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[how]
    return found


spoilers = pytest.mark.parametrize("how", ["nan", "inf", "-inf", "all nan", "all inf"])


@spoilers
@sizes
@rules
@forms
def test_a_head_that_is_not_finite_leaves_its_neighbours_bits(
    form: Arithmetic, rule: Any, size: tuple[int, int], how: str
) -> None:
    arithmetic, p = normalized_by(form, rule), Heads(4, *size, seed=9)
    update = p.update()
    expected = orthogonalize(update, p.layout, arithmetic)
    for head in (0, 2):
        bad = update.clone()
        bad[p.rows(head)] = spoilt(bad[p.rows(head)], how)
        found = orthogonalize(bad, p.layout, arithmetic)
        assert not bool(found[p.rows(head)].isfinite().all())
        found[p.rows(head)] = expected[p.rows(head)]
        assert same_bits(found, expected)


@pytest.mark.parametrize("count", [1, 2])
@spoilers
@sizes
@forms
def test_a_weight_that_is_not_finite_leaves_its_batch_mates_bits(
    form: Arithmetic, size: tuple[int, int], how: str, count: int
) -> None:
    weights = [Heads(heads, *size, seed=heads) for heads in (1, 3, 2)]
    layouts = [p.layout for p in weights]
    with threads(count):
        expected = [bits(orthogonalize(p.update(), p.layout, form)) for p in weights]
        for bad, p in enumerate(weights):
            updates = [q.update() for q in weights]
            updates[bad][p.rows(0)] = spoilt(updates[bad][p.rows(0)], how)
            found = [bits(d.scaled) for d in directions(updates, layouts, form)]
            assert not torch.equal(found[bad][p.rows(0)], expected[bad][p.rows(0)])
            found[bad][p.rows(0)] = expected[bad][p.rows(0)]
            assert all(map(torch.equal, found, expected))
