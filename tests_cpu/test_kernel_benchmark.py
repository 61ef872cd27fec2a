"""The kernel's benchmark, as far as no GPU is needed: its matrices, floors and report.

Operations and floors are those of a roofline that was worked out by hand, at 790 TFLOP/s and
4.3 TB/s, from 20·d²·n + 10·d³ operations a block for the standard iteration and 8·d²·n + 28·d³ for
a Gram iteration with one restart.
"""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from muonsplit.benchmark import (
    GRAM,
    STANDARD,
    WAYS,
    Measured,
    batched,
    document,
    floor,
    layers_that_fit,
    loop,
    moved,
    name_of,
    operations,
    reference,
    table,
    whole,
)
from muonsplit.dialect import Arithmetic
from muonsplit.kernels.named import NAMED, Matrix
from muonsplit.newton_schulz import singular_value_oracle

NAMES = {name_of(matrix): matrix for matrix in NAMED}


@pytest.mark.parametrize(
    ("name", "arithmetic", "giga"),
    [
        ("GLM-5.2 q_b", STANDARD, 182),
        ("GLM-5.2 q_b", GRAM, 99),
        ("GLM-5.2 kv_b, joint", STANDARD, 189),
        ("GLM-5.2 kv_b, joint", GRAM, 214),
        ("Kimi-K3 KDA q, k, v", STANDARD, 228),
        ("Kimi-K3 KDA q, k, v", GRAM, 96),
    ],
)
def test_operations_of_a_layer_by_heads(name: str, arithmetic: Arithmetic, giga: int) -> None:
    # Within one of the last digit: some were rounded down.
    assert abs(operations(NAMES[name], arithmetic) / 1e9 - giga) < 1


@pytest.mark.parametrize(
    ("name", "giga", "microseconds"),
    [
        ("GLM-5.2 q_b", 1460, 1848),
        ("GLM-5.2 kv_b, joint", 152, 192),
        ("Kimi-K3 KDA q, k, v", 16310, 20646),
    ],
)
def test_operations_and_floor_of_the_full_matrix(name: str, giga: int, microseconds: int) -> None:
    one = whole(NAMES[name])
    assert abs(operations(one, STANDARD) / 1e9 - giga) < 1
    assert abs(floor(one, STANDARD) * 1e6 - microseconds) < 1


@pytest.mark.parametrize(
    ("name", "microseconds"),
    [
        ("GLM-5.2 q_b", 31),
        ("GLM-5.2 kv_b, joint", 14),
        ("Kimi-K3 KDA q, k, v", 82),
        ("Kimi-K3 MLA q_b", 26),
        ("DeepSeek-V2-Lite q", 6),
        ("Llama-3-70B q", 62),
        ("Llama-3-70B k, v", 8),
    ],
)
def test_one_read_and_one_write_in_two_bytes_an_element(name: str, microseconds: int) -> None:
    assert round(moved(NAMES[name]) / 4.3e12 * 1e6) == microseconds


def test_the_floor_is_of_operations_or_of_bytes() -> None:
    assert round(floor(NAMES["GLM-5.2 q_b"], GRAM) * 1e6) == 125
    # Two rows: 20·2²·n + 10·2³ operations on 2·n elements are nothing beside their bytes.
    thin = Matrix("thin", "w", 1, 2, 1 << 20, 1)
    assert floor(thin, STANDARD) == pytest.approx(2 * 2 * 2 * (1 << 20) / 4.3e12)


def test_layers_of_the_models() -> None:
    layers = {name: matrix.layers for name, matrix in NAMES.items()}
    assert layers["GLM-5.2 q_b"] == layers["GLM-5.2 kv_b, joint"] == 78
    assert (layers["Kimi-K3 KDA q, k, v"], layers["Kimi-K3 MLA q_b"]) == (207, 24)
    assert layers["DeepSeek-V2-Lite q"] == 27
    assert (layers["Llama-3-70B q"], layers["Llama-3-70B k, v"]) == (80, 160)
    key, value, joint = (NAMES[f"GLM-5.2 kv_b, {part}"].rows for part in ("k", "v", "joint"))
    assert key + value == joint


@pytest.mark.parametrize(("free", "layers"), [(0, 1), (999, 1), (1000, 2), (5000, 10), (1e9, 10)])
def test_a_fifth_of_the_memory_stays_free(free: float, layers: int) -> None:
    # 4 bytes for each of 100 elements; 1000 bytes have 800 to fill.
    assert layers_that_fit(Matrix("small", "w", 1, 10, 10, 10), int(free)) == layers


@pytest.mark.parametrize("arithmetic", [GRAM, STANDARD], ids=["gram", "standard"])
@pytest.mark.parametrize("shape", [(3, 12, 40), (3, 40, 12)])
def test_all_that_is_timed_computes_the_same(
    arithmetic: Arithmetic, shape: tuple[int, int, int]
) -> None:
    single = replace(arithmetic, cpu_dtype="float32", compute_dtype="float32")
    X = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    exact = singular_value_oracle(X, single).float()
    for made in (batched(X, single), reference(X, single), torch.cat(loop(X, single))):
        torch.testing.assert_close(made, exact, rtol=0, atol=1e-4)


def test_ways_have_names_of_their_own() -> None:
    assert len({way.name for way in WAYS}) == len(WAYS)
    assert [way.name for way in WAYS if way.whole] == ["full matrix, standard"]


ROWS = [
    Measured("a", "kernel", "float16", 78, 0.0005, 99_000_000_000, 0.000125),
    Measured("a longer one", "loop", "bfloat16", 1, 0.0123, 182_000_000_000, 0.00025),
]


def test_the_table_is_aligned() -> None:
    assert table(ROWS).splitlines() == [
        "matrix        way     dtype     layers  ms a layer  TFLOP/s  floor ms  × floor",
        "a             kernel  float16       78      0.5000    198.0    0.1250      4.0",
        "a longer one  loop    bfloat16       1     12.3000     14.8    0.2500     49.2",
    ]


def test_figures_are_kept_as_json() -> None:
    pytest.importorskip("triton")
    kept = json.loads(json.dumps(document(ROWS, ["Llama-3-70B q"], "a card")))
    assert (kept["card"], kept["left_out"]) == ("a card", ["Llama-3-70B q"])
    assert kept["torch"] == torch.__version__
    assert {"date", "triton", "cuda"} <= kept.keys()
    first = kept["results"][0]
    assert (first["way"], first["layers"], first["seconds"]) == ("kernel", 78, 0.0005)
    assert first["teraflops"] == pytest.approx(198)


def test_without_a_device_it_says_so_in_one_line() -> None:
    command = [sys.executable, "-m", "muonsplit.benchmark"]
    ended = subprocess.run(
        command, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": ""}, timeout=120
    )
    assert ended.returncode == 69
    assert ended.stdout == ""
    assert ended.stderr == "error: the benchmark needs a CUDA device, and torch sees none\n"
