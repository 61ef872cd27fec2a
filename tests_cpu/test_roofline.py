"""The model of the kernel's time, against counts by hand; it prints the docs' tables when run."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muonsplit.dialect import DIALECTS, Arithmetic
from muonsplit.kernels import Kind, Op, Program
from muonsplit.kernels import launch as launching
from muonsplit.kernels.named import NAMED, Matrix
from muonsplit.kernels.roofline import H200, Prediction, loop, predict
from muonsplit.kernels.tiles import LARGEST, classes, tile
from muonsplit.newton_schulz.gram import gram_pays
from muonsplit.newton_schulz.program import program

ROOT = Path(__file__).parents[1]
HALF = torch.float16
STANDARD = Arithmetic(form="addmm")
GRAM = Arithmetic(
    form="addmm", iteration="gram", restarts=(2,), compute_dtype="float16", cpu_dtype="float16"
)


def made(rows: int, cols: int, arithmetic: Arithmetic = STANDARD) -> Program:
    return program(arithmetic, rows, cols, HALF)


def found(blocks: int, rows: int, cols: int, arithmetic: Arithmetic = STANDARD) -> Prediction:
    return predict(blocks, rows, cols, made(rows, cols, arithmetic), HALF)


def named(model: str, weight: str) -> Matrix:
    return next(m for m in NAMED if (m.model, m.weight) == (model, weight))


# What is counted.


def test_operations_of_glm_q_b_are_those_of_the_formulas() -> None:
    # 64 · (20·256²·2048 + 10·256³) and 64 · (8·256²·2048 + 28·256³)
    assert found(64, 256, 2048).flop == 182_536_110_080
    assert found(64, 256, 2048, GRAM).flop == 98_784_247_808


@pytest.mark.parametrize(("rows", "cols"), [(16, 64), (128, 7168), (512, 448), (17, 1000)])
def test_a_program_has_the_operations_of_its_iteration(rows: int, cols: int) -> None:
    d, n = min(rows, cols), max(rows, cols)
    assert made(rows, cols).operations(d, n) == 20 * d * d * n + 10 * d**3
    assert made(rows, cols, GRAM).operations(d, n) == 8 * d * d * n + 28 * d**3
    unrestarted = replace(GRAM, restarts=(), compute_dtype="float32", cpu_dtype="float32")
    assert made(rows, cols, unrestarted).operations(d, n) == 4 * d * d * n + 34 * d**3


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_has_those_of_five_steps_of_one_of_the_two(name: str) -> None:
    arithmetic = DIALECTS[name].arithmetic
    standard, gram = 182_536_110_080 // 64, 98_784_247_808 // 64
    wanted = standard * arithmetic.steps / 5 if arithmetic.iteration == "standard" else gram
    assert made(256, 2048, arithmetic).operations(256, 2048) == wanted


def test_bytes_of_a_small_program_are_those_counted_by_hand() -> None:
    # 128 × 256 in tiles of 64 × 128: a Gram matrix of 2 tiles, a panel of 4.
    ops = Program((Op(Kind.GRAM), Op(Kind.APPLY)), 1)
    seen = predict(1, 128, 256, ops, HALF)
    ends = 2 * 131072 + 65536
    gram = 2 * (64 + 128) * 256 * 2 + 32768
    apply = 4 * (64 + 128) * 128 * 2 + 65536
    assert (seen.hbm_bytes, seen.l2_bytes) == (ends, ends + gram + apply)
    assert seen.executed == seen.flop == 2 * (2 * 128 * 128 * 256)
    assert seen.launches == 1


def counted(op: Op, d: int, n: int, entry: Any) -> tuple[int, int]:
    """Multiplications and additions, and elements moved, by walking the kernel's loops."""
    flop = moved = 0
    columns = n if op.kind is Kind.APPLY else d
    for _ in range(0, d, entry.rows):
        for _ in range(0, columns, entry.cols):
            tiled = entry.rows * entry.cols
            moved += tiled
            if op.kind is Kind.ELEMENT:
                moved += tiled
                continue
            moved += tiled if op.beta else 0
            for _ in range(0, n if op.kind is Kind.GRAM else d, entry.inner):
                moved += entry.inner * (entry.rows + entry.cols)
                flop += 2 * tiled * entry.inner
    return flop, moved


@pytest.mark.parametrize(("rows", "cols"), [(192, 512), (200, 300), (448, 512), (7, 9), (575, 576)])
@pytest.mark.parametrize("arithmetic", [STANDARD, GRAM, DIALECTS["deepspeed-0.19.8"].arithmetic])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_padding_is_multiplied_and_read(
    rows: int, cols: int, arithmetic: Arithmetic, dtype: torch.dtype
) -> None:
    ops = made(rows, cols, arithmetic)
    entry = tile(rows, cols, dtype, "sm_90")
    each = [counted(op, rows, cols, entry) for op in ops.ops]
    seen = predict(1, rows, cols, ops, dtype)
    size = dtype.itemsize
    assert seen.executed == sum(flop for flop, _ in each)
    assert seen.l2_bytes == rows * cols * (8 + size) + size * sum(moved for _, moved in each)
    assert seen.flop <= seen.executed


def test_a_short_side_within_a_tile_costs_the_whole_tile() -> None:
    assert found(1, 200, 2048).executed == found(1, 256, 2048).executed
    assert found(1, 200, 2048).flop < found(1, 256, 2048).flop


def test_a_tall_block_moves_its_last_panel_twice_more() -> None:
    wide, tall = found(132, 128, 512), found(132, 512, 128)
    assert tall.flop == wide.flop
    assert tall.l2_bytes - wide.l2_bytes == 132 * 2 * 128 * 512 * 2


def test_scratch_that_does_not_fit_the_cache_goes_through_memory() -> None:
    # 132 programs of 128 × 512 hold 5 matrices of 32 KiB and 2 panels of 128 KiB each: 55 MB.
    ends = 132 * 128 * 512 * (8 + 2)
    ops = made(128, 512, GRAM)
    assert predict(132, 128, 512, ops, HALF).hbm_bytes == ends
    # A panel enters, is read by two Gram matrices and two products, and the first product writes
    # another; the second writes the result.
    small = replace(H200, cache_bytes=30_000_000)
    panels = 132 * 6 * 131072
    assert predict(132, 128, 512, ops, HALF, small).hbm_bytes == ends + panels
    smaller = replace(H200, cache_bytes=20_000_000)
    # Matrices too: two Gram matrices, two diagonals read and written, five squares of one matrix,
    # nine products of two that one of them is added to, two products read one.
    matrices = 132 * (2 + 2 * 2 + 5 * 2 + 9 * 3 + 2) * 32768
    assert predict(132, 128, 512, ops, HALF, smaller).hbm_bytes == ends + panels + matrices


# What is made of it.


def test_the_slowest_rate_decides() -> None:
    ops = made(256, 2048)
    seen = predict(132, 256, 2048, ops, HALF)
    assert seen.bound == "cache"
    assert seen.seconds == pytest.approx(seen.l2_bytes / 5.5e12)
    free = replace(H200, cache_bandwidth=1e18)
    fast = predict(132, 256, 2048, ops, HALF, free)
    assert fast.bound == "memory"
    assert fast.seconds == pytest.approx(seen.hbm_bytes / 4.3e12)
    held = replace(free, memory_bandwidth=1e18)
    assert predict(132, 256, 2048, ops, HALF, held).bound == "products"
    assert predict(132, 256, 2048, ops, HALF, held).seconds == pytest.approx(seen.executed / 790e12)
    # Programs of four warps are two a multiprocessor.
    assert predict(264, 256, 2048, ops, torch.float32, held).seconds == pytest.approx(
        2 * seen.executed / 60e12
    )


@pytest.mark.parametrize(
    ("blocks", "waves", "factor"),
    [(64, 1, 132 / 64), (132, 1, 1.0), (133, 2, 264 / 133), (264, 2, 1.0), (4992, 38, 5016 / 4992)],
)
def test_a_wave_that_is_not_full_takes_as_long(blocks: int, waves: int, factor: float) -> None:
    seen = found(blocks, 256, 2048)
    assert (seen.programs, seen.waves) == (132, waves)
    assert seen.quantisation == pytest.approx(factor)


@pytest.mark.parametrize("rows", [d for d, dtype in classes("sm_90") if dtype is HALF])
def test_as_many_programs_are_held_as_are_launched(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(multi_processor_count=132)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    entry = tile(rows, 4 * rows, HALF, "sm_90")
    held = launching._held(torch.device("cuda"), entry)  # pyright: ignore[reportPrivateUsage]
    assert found(1, rows, 4 * rows).programs == held


@pytest.mark.parametrize("shape", [(64, 256), (128, 7168), (192, 512), (448, 512)])
def test_more_work_takes_no_less_time(shape: tuple[int, int]) -> None:
    times = [found(blocks, *shape).seconds for blocks in (1, 8, 64, 132, 133, 264, 500, 5000)]
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(times))
    assert times[-1] > 5 * times[0]
    steps = [found(640, *shape, replace(STANDARD, steps=n)).seconds for n in (1, 3, 5, 9)]
    assert steps == sorted(set(steps))
    assert found(640, *shape).seconds < found(640, shape[0], 2 * shape[1]).seconds


@pytest.mark.parametrize("matrix", NAMED, ids=lambda m: f"{m.model} {m.weight}")
def test_a_block_is_never_cheaper_than_on_a_full_device(matrix: Matrix) -> None:
    ops = made(matrix.rows, matrix.cols)
    some, full = (
        predict(blocks, matrix.rows, matrix.cols, ops, HALF)
        for blocks in (matrix.blocks, matrix.blocks * matrix.layers)
    )
    assert some.seconds / matrix.blocks >= full.seconds / (matrix.blocks * matrix.layers)
    assert full.seconds >= full.flop / H200.half_flops


@pytest.mark.parametrize("matrix", NAMED, ids=lambda m: f"{m.model} {m.weight}")
def test_the_cache_decides_for_every_named_weight(matrix: Matrix) -> None:
    # docs/kernels.md says so.
    for _, arithmetic in forms(matrix):
        for blocks in (matrix.blocks, matrix.blocks * matrix.layers):
            assert of(matrix, arithmetic, blocks).bound == "cache"


def test_nothing_is_quicker_than_a_launch() -> None:
    assert found(1, 1, 1).seconds == 5e-6


def test_the_loop_form_launches_seventeen_kernels_a_block() -> None:
    # A product, a product and a sum, five times; the norm and the division.
    seen = loop(128, 256, 2048, made(256, 2048), HALF)
    assert seen.launches == 128 * 17
    assert seen.seconds == pytest.approx(10.88e-3)
    assert loop(256, 256, 2048, made(256, 2048), HALF).seconds == pytest.approx(2 * seen.seconds)
    huge = loop(1, 576, 1 << 20, made(576, 1 << 20), HALF)
    assert huge.seconds > 20 * 576**2 * 2**20 / 790e12 > 17 * 5e-6


# The table of weights.


def test_named_weights_are_those_of_the_configs() -> None:
    glm, kimi, deepseek = (
        json.loads((ROOT / "golden" / "models" / name / "config.json").read_text())
        for name in ("glm-5.2", "kimi-k3", "deepseek-v2-lite")
    )
    glm, kimi, deepseek = (config.get("text_config", config) for config in (glm, kimi, deepseek))
    heads, layers = glm["num_attention_heads"], glm["num_hidden_layers"]
    nope, rope, value = (glm[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    kda = kimi["linear_attn_config"]
    latent = kimi["kv_lora_rank"]
    own = kimi["qk_nope_head_dim"]
    wanted = {
        ("GLM-5.2", "q_b"): (heads, nope + rope, glm["q_lora_rank"], layers),
        ("GLM-5.2", "kv_b, k"): (heads, nope, glm["kv_lora_rank"], layers),
        ("GLM-5.2", "kv_b, v"): (heads, value, glm["kv_lora_rank"], layers),
        ("GLM-5.2", "kv_b, joint"): (heads, nope + value, glm["kv_lora_rank"], layers),
        ("Kimi-K3", "KDA q, k, v"): (
            kda["num_heads"],
            kda["head_dim"],
            kimi["hidden_size"],
            3 * len(kda["kda_layers"]),
        ),
        ("Kimi-K3", "MLA q_b"): (
            kimi["num_attention_heads"],
            own + kimi["qk_rope_head_dim"],
            kimi["q_lora_rank"],
            len(kda["full_attn_layers"]),
        ),
        ("Kimi-K3", "MLA kv_b"): (
            kimi["num_attention_heads"],
            own + kimi["v_head_dim"],
            latent,
            len(kda["full_attn_layers"]),
        ),
        ("DeepSeek-V2-Lite", "q"): (16, 128 + 64, 2048, deepseek["num_hidden_layers"]),
        ("DeepSeek-V2-Lite", "kv_b"): (16, 128 + 128, deepseek["kv_lora_rank"], 27),
        ("Llama-3-70B", "q"): (64, 128, 8192, 80),
        ("Llama-3-70B", "k, v"): (8, 128, 8192, 160),
    }
    assert {(m.model, m.weight): m[2:] for m in NAMED} == wanted
    assert all(min(m.rows, m.cols) <= LARGEST for m in NAMED)


# The docs.


def forms(matrix: Matrix) -> Iterator[tuple[str, Arithmetic]]:
    yield "standard", STANDARD
    if gram_pays(matrix.rows, matrix.cols):
        yield "Gram", GRAM


def of(matrix: Matrix, arithmetic: Arithmetic, blocks: int) -> Prediction:
    return found(blocks, matrix.rows, matrix.cols, arithmetic)


def floor(seen: Prediction) -> float:
    """Seconds if the cache had no limit."""
    took = max(seen.executed / H200.half_flops, seen.hbm_bytes / H200.memory_bandwidth)
    return took * seen.quantisation


def table() -> str:
    lines = [
        "| weight | blocks | weights | iteration | GFLOP | alone, µs | all, µs | floor, µs "
        "| loop: launches | loop, ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for m in NAMED:
        for name, arithmetic in forms(m):
            alone, every = (of(m, arithmetic, n) for n in (m.blocks, m.blocks * m.layers))
            form = loop(m.blocks, m.rows, m.cols, made(m.rows, m.cols, arithmetic), HALF)
            cells = (
                f"{m.model} {m.weight}",
                f"{m.blocks} × ({m.rows} × {m.cols})",
                m.layers,
                name,
                f"{alone.flop / 1e9:.0f}",
                f"{alone.seconds * 1e6:.0f}",
                f"{every.seconds / m.layers * 1e6:.0f}",
                f"{floor(every) / m.layers * 1e6:.0f}",
                form.launches,
                f"{form.seconds * 1e3:.1f}",
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


# Launches of a layer: weight, iteration, and how many weights of that kind a layer has.
Layer = tuple[tuple[Matrix, Arithmetic, int], ...]
Q_B = (named("GLM-5.2", "q_b"), GRAM, 1)
KDA = named("Kimi-K3", "KDA q, k, v")
LAYERS: dict[str, tuple[Layer, int, str]] = {
    "GLM-5.2, q_b and joint kv_b": (
        (Q_B, (named("GLM-5.2", "kv_b, joint"), STANDARD, 1)),
        78,
        "≤ 1.2, ≤ 60",
    ),
    "GLM-5.2, q_b and kv_b as k and v": (
        (Q_B, *((named("GLM-5.2", f"kv_b, {kind}"), GRAM, 1) for kind in "kv")),
        78,
        "≤ 1.2, ≤ 60",
    ),
    "Kimi-K3 KDA, one of q, k, v": (((KDA, GRAM, 1),), 69, "≤ 1.2"),
    "Kimi-K3 KDA, q, k and v": (((KDA, GRAM, 3),), 69, "≤ 1.2"),
}


def predicted(layer: Layer, layers: int) -> tuple[float, float, float]:
    """Milliseconds: of a layer alone, of one among all layers, of one without the cache's limit."""
    alone = sum(of(m, how, m.blocks * n).seconds for m, how, n in layer)
    every = [of(m, how, m.blocks * n * layers) for m, how, n in layer]
    among = sum(seen.seconds for seen in every) / layers
    return alone * 1e3, among * 1e3, sum(map(floor, every)) / layers * 1e3


def targets() -> str:
    lines = [
        "| a layer's | alone, ms | among all, ms | model, ms | floor, ms | loop, ms | targets, ms "
        "| met alone | met among all | met by the model |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, (layer, layers, target) in LAYERS.items():
        alone, among, least = predicted(layer, layers)
        looped = sum(
            loop(m.blocks * n, m.rows, m.cols, made(m.rows, m.cols), HALF).seconds
            for m, _, n in layer
        )
        figures = (alone, among, layers * among, least, looped * 1e3)
        cells = [name, *(f"{figure:.2f}" for figure in figures), target]
        cells += ["yes" if t <= 1.2 else "**no**" for t in (alone, among)]
        whole = "yes" if layers * among <= 60 else "**no**"
        cells.append(whole if "60" in target else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@pytest.mark.parametrize("made_anew", [table, targets], ids=lambda f: f.__name__)
def test_the_docs_have_what_the_model_gives(made_anew: Any) -> None:
    assert f"\n\n{made_anew()}\n\n" in (ROOT / "docs" / "kernels.md").read_text()


if __name__ == "__main__":
    print(f"{table()}\n\n{targets()}")
