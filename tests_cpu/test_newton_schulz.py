"""Newton–Schulz against singular values, hand-worked numbers and torch's own bfloat16."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from muonsplit.dialect import (
    DEFAULT_DIALECT,
    DIALECTS,
    Arithmetic,
    Dialect,
    SplitRule,
    dialect_named,
)
from muonsplit.errors import InputError, LayoutError, UsageError
from muonsplit.layout import Layout
from muonsplit.muon import PerHeadMuon, orthogonalize
from muonsplit.newton_schulz import (
    COEFFICIENTS,
    newton_schulz,
    scale_factor,
    schedule,
    singular_value_oracle,
)
from muonsplit.observe.tolerance import rounding_bound

SHAPES = {
    "wide": (3, 6, 20),
    "tall": (3, 20, 6),
    "square": (3, 9, 9),
    "row": (2, 1, 7),
    "column": (2, 7, 1),
    "entry": (2, 1, 1),
}
GRAM = replace(
    DIALECTS["deepspeed-0.19.8"].arithmetic, compute_dtype="float64", cpu_dtype="float64"
)

shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
dialects = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("arithmetic", "denominator"),
    [
        (Arithmetic(), 5.0 + 1e-7),
        (Arithmetic(normalize="clamp"), 5.0),
        (Arithmetic(normalize="clamp", epsilon=8.0), 8.0),
        (Arithmetic(norm_factor=1.02, epsilon=0.5), 5.1 + 0.5),
        (Arithmetic(coefficients="you"), 5.0 + 1e-7),
        (Arithmetic(coefficients="you", steps=2), 5.0 + 1e-7),
        (Arithmetic(coefficients="deepseek-v4", steps=10), 5.0 + 1e-7),
    ],
    ids=["add", "clamp", "clamp-to-epsilon", "factor", "you", "two-steps", "ten-steps"],
)
@pytest.mark.parametrize("road", ["oracle", "iteration"])
def test_a_diagonal_block_is_the_polynomial_of_its_entries(
    arithmetic: Arithmetic, denominator: float, road: str
) -> None:
    block = torch.tensor([[[3.0, 0.0, 0.0], [0.0, -4.0, 0.0]]], dtype=torch.float64)
    sets = COEFFICIENTS[arithmetic.coefficients]
    expected = []
    for x in (3.0 / denominator, 4.0 / denominator):
        for step in range(arithmetic.steps):
            a, b, c = sets[step % len(sets)]
            x = a * x + b * x**3 + c * x**5
        expected.append(x)
    road_taken = singular_value_oracle if road == "oracle" else newton_schulz
    found = road_taken(block, arithmetic.exact())
    assert found[0].flatten().tolist() == pytest.approx(
        [expected[0], 0, 0, 0, -expected[1], 0], rel=1e-12, abs=1e-14
    )


@dialects
@shapes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_exact_arithmetic_is_the_oracle(
    dialect: Dialect, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    blocks = normal(*shape, dtype=dtype)
    found = newton_schulz(blocks, dialect.arithmetic.exact())
    assert found.dtype == torch.float64
    # Sums of up to 20 terms round by 20·2⁻⁵³, and the slopes at zero multiply it by up to 1000.
    assert distance(found, singular_value_oracle(blocks, dialect.arithmetic)) < 2e-12


@shapes
@pytest.mark.parametrize("restarts", [(), (2,), (1, 3), (0,), (4,), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("coefficients", COEFFICIENTS)
def test_gram_is_standard_in_float64(
    shape: tuple[int, ...], restarts: tuple[int, ...], coefficients: str
) -> None:
    gram = replace(GRAM, restarts=restarts, coefficients=coefficients)
    blocks = normal(*shape)
    standard = newton_schulz(blocks, replace(gram, iteration="standard"))
    # The Gram form squares singular values: its small ones lose more than the standard's.
    assert distance(newton_schulz(blocks, gram), standard) < 1e-10


@shapes
@pytest.mark.parametrize(
    ("iteration", "form"),
    [
        *(("standard", form) for form in ("matmul", "paren", "addmm", "paren_gram", "factored")),
        *(("gram", form) for form in ("matmul", "addmm", "addmm_diagonal", "paren_gram")),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("tall", ["transpose", "right"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("norm_dtype", ["input", "compute", "float32"])
def test_every_form_stays_within_its_rounding(
    shape: tuple[int, ...], iteration: Any, form: Any, tall: Any, dtype: Any, norm_dtype: Any
) -> None:
    arithmetic = Arithmetic(
        iteration=iteration,
        restarts=(2,) if dtype != "bfloat16" else (1, 3),
        form=form,
        tall=tall,
        compute_dtype="float32",
        cpu_dtype=dtype,
        norm_dtype=norm_dtype,
    )
    blocks = normal(*shape, seed=1)
    found = newton_schulz(blocks, arithmetic)
    exact = singular_value_oracle(blocks, arithmetic)
    for block, got, want in zip(blocks, found, exact, strict=True):
        assert distance(got, want) <= rounding_bound(block, arithmetic)


@dialects
@shapes
def test_every_dialect_stays_within_its_rounding(dialect: Dialect, shape: tuple[int, ...]) -> None:
    blocks = normal(*shape, seed=2, dtype=torch.float32)
    found = newton_schulz(blocks, dialect.arithmetic)
    assert found.dtype == torch.float32
    exact = singular_value_oracle(blocks, dialect.arithmetic)
    for block, got, want in zip(blocks, found, exact, strict=True):
        assert distance(got, want) <= rounding_bound(block, dialect.arithmetic)


def native(G: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Each form as its framework writes it, on torch's own bfloat16 tensors."""
    X = G.bfloat16()
    flipped = arithmetic.tall == "transpose" and G.size(0) > G.size(1)
    right = arithmetic.tall == "right" and G.size(0) > G.size(1)
    X = X.mT if flipped else X
    if arithmetic.normalize == "clamp":
        X = X / X.norm().clamp(min=arithmetic.epsilon)
    elif arithmetic.norm_factor == 1.0:
        X = X / (X.norm() + arithmetic.epsilon)
    else:
        X = X / (X.norm() * arithmetic.norm_factor + arithmetic.epsilon)
    for a, b, c in schedule(arithmetic):
        A = X.mT @ X if right else X @ X.mT
        if arithmetic.form == "matmul":
            B = b * A + c * A @ A
            X = a * X + (X @ B if right else B @ X)
        elif arithmetic.form == "paren":
            B = b * A + c * (A @ A)
            X = a * X + (X @ B if right else B @ X)
        else:
            B = torch.addmm(A, A, A, beta=b, alpha=c)
            X = torch.addmm(X, B, X, beta=a)
    return (X.mT if flipped else X).float()


@pytest.mark.parametrize("name", ["jordan", "torch-2.13", "dion"])
@pytest.mark.parametrize("shape", [(4, 4), (4, 8), (8, 4)], ids=["square", "wide", "tall"])
def test_emulated_bfloat16_rounds_where_torch_does(name: str, shape: tuple[int, int]) -> None:
    arithmetic = DIALECTS[name].arithmetic
    draws = [normal(*shape, seed=seed, dtype=torch.float32) for seed in range(20)]
    same = 0
    for G in draws:
        found, torch_own = newton_schulz(G[None], arithmetic)[0], native(G, arithmetic)
        same += torch.equal(found, torch_own)
        # Each may be off by the bound.
        assert distance(found, torch_own.double()) <= 2 * rounding_bound(G, arithmetic)
    # float32 sums in another order flip one of the ~500 roundings now and then (each about
    # 8·2⁻¹⁵); a rounding too many or too few changes every draw.
    assert same >= 10


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_emulated_results_are_on_the_grid(dtype: Any) -> None:
    found = newton_schulz(normal(2, 4, 8, dtype=torch.float32), Arithmetic(cpu_dtype=dtype))
    assert found.dtype == torch.float32
    assert torch.equal(found, found.to(getattr(torch, dtype)).float())


@dialects
@shapes
def test_a_zero_block_gives_exactly_zero(dialect: Dialect, shape: tuple[int, ...]) -> None:
    blocks = normal(*shape, dtype=torch.float32)
    blocks[0] = 0
    found = newton_schulz(blocks, dialect.arithmetic)
    assert bool((found[0] == 0).all())
    assert bool((found[1] != 0).any())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@dialects
def test_the_input_is_left_alone(dialect: Dialect, dtype: torch.dtype) -> None:
    blocks = normal(2, 4, 8).to(dtype)
    before = blocks.clone()
    assert newton_schulz(blocks, dialect.arithmetic).shape == blocks.shape
    assert torch.equal(blocks, before)


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(4, 4),
        torch.zeros(1, 2, 4, 4),
        torch.zeros(0, 4, 4),
        torch.zeros(2, 0, 4),
        torch.zeros(2, 4, 0),
        torch.zeros(2, 4, 4, dtype=torch.int64),
        torch.zeros(2, 4, 4, dtype=torch.bool),
        torch.zeros(2, 4, 4, dtype=torch.complex64),
    ],
    ids=["2-D", "4-D", "no-blocks", "no-rows", "no-columns", "int", "bool", "complex"],
)
def test_newton_schulz_refuses(batch: Tensor) -> None:
    with pytest.raises(InputError, match="floating-point batch"):
        newton_schulz(batch, Arithmetic())


@pytest.mark.parametrize(
    "update",
    [torch.zeros(4), torch.zeros(1, 2, 3, 4), torch.zeros(4, 4, dtype=torch.int32)],
    ids=["1-D", "4-D", "int"],
)
def test_orthogonalize_refuses(update: Tensor) -> None:
    with pytest.raises(InputError):
        orthogonalize(update, None, Arithmetic())


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 4)], ids=str)
def test_an_empty_shard_has_an_empty_update(shape: tuple[int, ...]) -> None:
    assert orthogonalize(torch.zeros(shape), None, Arithmetic()).shape == shape


@pytest.mark.parametrize("shape", [(5, 4), (2, 6, 4)], ids=["rows", "3-D"])
def test_orthogonalize_refuses_a_layout_that_does_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError):
        orthogonalize(torch.zeros(shape), Layout.heads("q", 3, 2), Arithmetic())


@pytest.mark.parametrize(
    ("rule", "rows", "cols", "expected"),
    [
        ("jordan", 320, 128, 1.5811388300841898),  # √2.5
        ("jordan", 5120, 128, 6.324555320336759),  # √40
        ("jordan", 64, 256, 1.0),
        ("jordan", 64, 64, 1.0),
        ("moonlight", 64, 256, 3.2),
        ("moonlight", 256, 64, 3.2),
        ("spectral", 64, 256, 16.0),
        ("spectral", 256, 64, 16.0),
        ("bernstein", 64, 256, 0.5),
        ("bernstein", 256, 64, 2.0),
        ("none", 256, 64, 1.0),
    ],
)
def test_scale_factors(rule: Any, rows: int, cols: int, expected: float) -> None:
    assert scale_factor(Arithmetic(scale=rule), rows, cols) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("layout", "factor"),
    [
        (Layout.heads("q", 16, 320), 1.5811388300841898),
        (Layout.heads("q", 16, 320).per_block(2), 2.23606797749979),  # √5
        (Layout.whole(5120), 6.324555320336759),
        (None, 6.324555320336759),
    ],
    ids=["heads", "two-heads", "whole", "none"],
)
def test_the_scale_is_of_the_block_not_of_the_weight(layout: Layout | None, factor: float) -> None:
    update = normal(5120, 128, dtype=torch.float32)
    arithmetic = replace(DIALECTS["deepspeed-0.19.8"].arithmetic, steps=1)
    scaled = orthogonalize(update, layout, arithmetic)
    plain = orthogonalize(update, layout, replace(arithmetic, scale="none"))
    assert float(scaled.norm() / plain.norm()) == pytest.approx(factor, rel=1e-5)


def test_each_width_of_a_layout_has_its_own_scale() -> None:
    layout = Layout.parse("2 × (k 4 | v 9)")
    update = normal(26, 1)
    # A block of one column has one singular value, which becomes the same number everywhere.
    arithmetic = Arithmetic(scale="bernstein").exact()
    result = orthogonalize(update, layout, arithmetic)
    norms = [float(result[a:b].norm()) for a, b in ((0, 4), (4, 13), (13, 17), (17, 26))]
    assert [n / norms[0] for n in norms] == pytest.approx([1.0, 1.5, 1.0, 1.5], rel=1e-6)


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
def test_each_block_is_its_own_oracle(axis: int) -> None:
    layout = Layout.parse("2 × (q 2×3 | k 3 | v 5)" + ", axis 1" * axis)
    matrix = normal(28, 4)
    arithmetic = Arithmetic(scale="none").exact()
    result = orthogonalize(matrix.T.contiguous() if axis else matrix, layout, arithmetic)
    result = result.T if axis else result
    for start, stop in ((0, 3), (3, 6), (6, 9), (9, 14), (14, 17), (17, 20), (20, 23), (23, 28)):
        exact = singular_value_oracle(matrix[None, start:stop], arithmetic)[0]
        assert distance(result[start:stop], exact) < 1e-12


def test_a_joined_role_is_one_matrix_of_its_rows() -> None:
    layout = Layout.parse("3 × (gate 1 | up 1), joined")
    matrix = normal(6, 5)
    arithmetic = Arithmetic(scale="none").exact()
    result = orthogonalize(matrix, layout, arithmetic)
    for first in (0, 1):
        exact = singular_value_oracle(matrix[None, first::2], arithmetic)[0]
        assert distance(result[first::2], exact) < 1e-12


@pytest.mark.parametrize(
    ("steps", "picked"), [(1, [0]), (5, [0, 1, 2, 3, 4]), (7, [0, 1, 2, 3, 4, 0, 1])]
)
def test_a_short_coefficient_set_is_cycled(steps: int, picked: list[int]) -> None:
    found = schedule(Arithmetic(coefficients="you", steps=steps))
    assert found == tuple(COEFFICIENTS["you"][i] for i in picked)


def test_unknown_coefficients_are_refused() -> None:
    arithmetic = Arithmetic(coefficients="nobody")
    for road in (schedule, lambda a: newton_schulz(torch.ones(1, 2, 2), a)):
        with pytest.raises(UsageError, match="nobody"):
            road(arithmetic)


@pytest.mark.parametrize(
    ("arithmetic", "roundoff"),
    [
        (Arithmetic(cpu_dtype="float64"), 2.0**-53),
        (Arithmetic(cpu_dtype="float32"), 2.0**-24),
        (Arithmetic(cpu_dtype="float16"), 2.0**-11),
        (Arithmetic(), 2.0**-8),
        (Arithmetic(cpu_dtype="float32", pre_cast="bfloat16"), 2.0**-8),
        (Arithmetic(pre_cast="float32"), 2.0**-8),
    ],
    ids=["float64", "float32", "float16", "bfloat16", "pre-cast", "finer-pre-cast"],
)
def test_roundoff_is_the_coarsest_dtype_met(arithmetic: Arithmetic, roundoff: float) -> None:
    assert arithmetic.roundoff == roundoff


@pytest.mark.parametrize(
    "dialect",
    [*DIALECTS.values(), *(d.asked_per_head() for d in DIALECTS.values() if not d.per_head)],
    ids=lambda d: d.name,
)
def test_sources_cover_exactly_the_fields(dialect: Dialect) -> None:
    expected = {f.name for f in (*fields(SplitRule), *fields(Arithmetic))}
    assert set(dialect.sources) == expected
    assert all(source.strip() for source in dialect.sources.values())


def test_torchs_dialect_is_what_torch_defaults_to() -> None:
    defaults = torch.optim.Muon([torch.nn.Parameter(torch.zeros(2, 2))]).defaults
    arithmetic = DIALECTS["torch-2.13"].arithmetic
    assert schedule(arithmetic) == (tuple(defaults["ns_coefficients"]),) * defaults["ns_steps"]
    assert arithmetic.epsilon == defaults["eps"]
    assert arithmetic.beta == defaults["momentum"]
    assert arithmetic.nesterov == defaults["nesterov"]


@pytest.mark.parametrize(
    ("name", "heads_per_block", "cut_heads", "scale"),
    [
        ("jordan", None, "drop", "jordan"),
        ("torch-2.13", None, "drop", "jordan"),
        ("moonlight", None, "drop", "moonlight"),
        ("deepspeed-0.19.8", 1, "drop", "jordan"),
        ("dion", 1, "raise", "bernstein"),
        ("prime-rl", 1, "gather", "moonlight"),
        ("glm-5", 1, "gather", "moonlight"),
        ("kimi-k3", 1, "gather", "moonlight"),
        ("dion:heads_per_block=4", 4, "raise", "bernstein"),
        ("jordan:heads_per_block=2", 2, "drop", "jordan"),
        ("dion:heads_per_block=99999", 99999, "raise", "bernstein"),
    ],
)
def test_dialects_by_name(
    name: str, heads_per_block: int | None, cut_heads: str, scale: str
) -> None:
    dialect = dialect_named(name)
    assert dialect.name == name
    assert dialect.split.heads_per_block == heads_per_block
    assert dialect.per_head == (heads_per_block is not None)
    assert (dialect.split.cut_heads, dialect.arithmetic.scale) == (cut_heads, scale)
    assert dialect.arithmetic == DIALECTS[name.partition(":")[0]].arithmetic


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ("fused_qkv=heads", SplitRule(fused_qkv="heads")),
        ("fused_qkv=projections", SplitRule(fused_qkv="projections")),
        ("mla_key_value=apart", SplitRule(mla_key_value="apart")),
        ("gated_query=apart", SplitRule(gated_query="apart")),
        ("cut_heads=gather", SplitRule(cut_heads="gather")),
        ("fused_qkv=heads,heads_per_block=2", SplitRule(fused_qkv="heads", heads_per_block=2)),
        ("heads_per_block=2,fused_qkv=heads", SplitRule(fused_qkv="heads", heads_per_block=2)),
    ],
)
def test_options_set_fields_of_the_split_rule(options: str, rule: SplitRule) -> None:
    dialect = dialect_named(f"deepspeed-0.19.8:{options}")
    assert dialect.split == rule
    before = DIALECTS["deepspeed-0.19.8"].sources
    named = {item.partition("=")[0] for item in options.split(",")}
    assert {f for f in before if dialect.sources[f] != before[f]} == named
    assert dialect.sources.keys() == before.keys()


def test_the_option_leaves_the_registry_alone() -> None:
    dialect_named("deepspeed-0.19.8:heads_per_block=4")
    assert DIALECTS["deepspeed-0.19.8"].split == SplitRule()
    assert DEFAULT_DIALECT in DIALECTS
    assert all(name == dialect.name for name, dialect in DIALECTS.items())


@pytest.mark.parametrize(
    "name",
    [
        "",
        "nobody",
        "DION",
        " dion",
        "dion ",
        "dion:",
        "dion:steps=x",
        "dion:steps=-3",
        "dion:epsilon=nan",
        "dion:nesterov=1",
        "dion:coefficients=nobody",
        "dion:restarts=2+",
        "dion:heads_per_block",
        "dion:heads_per_block=",
        "dion:heads_per_block=0",
        "dion:heads_per_block=-1",
        "dion:heads_per_block=+1",
        "dion:heads_per_block=1.0",
        "dion:heads_per_block= 1",
        "dion:heads_per_block=two",
        "dion:heads_per_block=²",
        "dion:heads_per_block=2:heads_per_block=3",
        "dion:heads_per_block=100000",
        pytest.param("dion:heads_per_block=" + "9" * 5000, id="5000-digits"),
        ":heads_per_block=2",
        "dion:fused_qkv",
        "dion:fused_qkv=",
        "dion:fused_qkv=all",
        "dion:fused_qkv=HEADS",
        "dion:gated_query=whole",
        "dion:mla_key_value=apart,",
        "dion:,mla_key_value=apart",
        "dion:mla_key_value=apart, cut_heads=drop",
        "dion:scale=nobody",
        "dion:cut_heads=apart",
    ],
)
def test_dialect_names_that_are_none(name: str) -> None:
    with pytest.raises(UsageError):
        dialect_named(name)


@pytest.mark.parametrize(("digits", "value"), [("0000020", 20), ("02", 2), ("00000000003", 3)])
def test_leading_zeros_are_refused_or_read_right(digits: str, value: int) -> None:
    try:
        dialect = dialect_named(f"dion:heads_per_block={digits}")
    except UsageError:
        return
    assert dialect.split.heads_per_block == value


def test_a_whole_matrix_dialect_can_be_asked_per_head() -> None:
    jordan, dion = DIALECTS["jordan"], DIALECTS["dion"]
    asked = jordan.asked_per_head()
    assert (asked.name, asked.split, asked.arithmetic) == (
        "jordan+per-head",
        SplitRule(),
        jordan.arithmetic,
    )
    assert asked.sources["heads_per_block"] != jordan.sources["heads_per_block"]
    assert asked.sources["form"] == jordan.sources["form"]
    assert dion.asked_per_head() is dion


@pytest.mark.parametrize("shape", [(4, 4), (4, 6), (6, 4)], ids=["square", "wide", "tall"])
def test_three_steps_are_those_of_torchs_muon(shape: tuple[int, int]) -> None:
    mine = {f"w{i}": Parameter(normal(*shape, seed=i, dtype=torch.float32)) for i in range(20)}
    theirs = [Parameter(p.detach().clone()) for p in mine.values()]
    hyper = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
    ours = PerHeadMuon(mine.items(), dict.fromkeys(mine), dialect="torch-2.13", **hyper)
    torchs = torch.optim.Muon(theirs, **hyper)
    for step in range(3):
        for i, (p, r) in enumerate(zip(mine.values(), theirs, strict=True)):
            p.grad = normal(*shape, seed=1000 + 20 * step + i, dtype=torch.float32)
            r.grad = p.grad.clone()
        ours.step()
        torchs.step()
    pairs = [(p.detach(), r.detach()) for p, r in zip(mine.values(), theirs, strict=True)]
    # Where no rounding of the iteration flipped, only the scale's does: torch folds √(r/c) into
    # the step size, here it is on the update. Three steps, three float32 roundings each.
    slack = 0.0 if shape[0] <= shape[1] else 9 * 2.0**-24
    within = sum(bool(((p - r).abs() <= slack * (r.abs() + 0.1)).all()) for p, r in pairs)
    assert within >= 10
    # Otherwise two updates of norm below 1.3·√rank are each within the bound of the exact one.
    bound = max(rounding_bound(p, DIALECTS["torch-2.13"].arithmetic) for p, _ in pairs)
    update = 1.3 * min(shape) ** 0.5 * max(1.0, shape[0] / shape[1]) ** 0.5
    assert all(float((p - r).norm()) <= 3 * 0.02 * 2 * bound * update for p, r in pairs)
