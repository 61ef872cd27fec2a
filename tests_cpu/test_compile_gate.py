"""Every entry of the tile table as a binary, without a GPU: `tox -e aot`."""

import json
import os
import warnings
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from muonsplit.errors import UsageError
from muonsplit.kernels.tiles import ARCHITECTURES, Tile, classes

pytest.importorskip("triton", reason="run with tox -e aot")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter makes no binaries", allow_module_level=True)

from muonsplit.kernels import compile_gate
from muonsplit.kernels.compile_gate import Compiled, Shape, compiled, digests, shapes

LOCK = Path(__file__).parent.parent / "golden" / "kernels" / "binaries.json"
CASES = [(architecture, shape) for architecture in ARCHITECTURES for shape in shapes(architecture)]


@pytest.mark.aot
@pytest.mark.parametrize(("architecture", "shape"), CASES, ids=lambda x: getattr(x, "name", x))
def test_the_binary_is_what_it_should_be(architecture: str, shape: Shape) -> None:
    found = compiled(shape, architecture)
    assert found.problems == []
    known = json.loads(LOCK.read_text()).get(metadata.version("triton"), {})
    if changed := [key for key, digest in digests([found]).items() if known.get(key) != digest]:
        warnings.warn(
            f"test on a device again, other binaries than before: {changed}", stacklevel=1
        )


def test_every_class_is_compiled_wide_and_tall() -> None:
    for architecture in ARCHITECTURES:
        wide = {(s.rows, s.dtype) for s in shapes(architecture) if s.rows < s.cols}
        tall = {(s.cols + 1, s.dtype) for s in shapes(architecture) if s.rows > s.cols}
        assert wide >= set(classes(architecture))
        assert tall == set(classes(architecture))


@pytest.mark.aot
def test_a_tile_that_is_too_large_is_seen_to_spill() -> None:
    found = compiled(Shape(256, 512, torch.float16), "sm_90", Tile(128, 256, 64, 8, 3))
    assert any("spills" in problem for problem in found.problems)


@pytest.mark.aot
def test_too_many_loads_in_flight_do_not_fit() -> None:
    found = compiled(Shape(128, 512, torch.float16), "sm_80", Tile(128, 128, 64, 8, 7))
    assert any("shared memory" in problem for problem in found.problems)


@pytest.mark.aot
def test_the_same_source_gives_the_same_bytes() -> None:
    shape = Shape(16, 64, torch.float16)
    assert compiled(shape, "sm_90").digest == compiled(shape, "sm_90").digest


def test_each_limit_is_a_problem_of_its_own() -> None:
    shape, tile = Shape(64, 64, torch.float16), Tile(64, 64, 64, 8, 3)
    sound = Compiled("sm_90", shape, tile, 255, 0, 227 << 10, 1, False, "")
    assert sound.problems == []
    wrong = {
        "registers": replace(sound, registers=257),
        "spills": replace(sound, spills=1),
        "shared memory": replace(sound, shared=(227 << 10) + 1),
        "tensor-core": replace(sound, matrix=0),
        "trap": replace(sound, trap=True),
    }
    for said, each in wrong.items():
        assert len(each.problems) == 1
        assert said in each.problems[0]
    # Float32 products are exact there, and tensor cores take half precision.
    assert replace(sound, shape=Shape(64, 64, torch.float32), matrix=0).problems == []


def test_without_triton_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> str:
        raise UsageError("backend='triton' needs triton, which is not installed.")

    monkeypatch.setattr(compile_gate, "installed", missing)
    with pytest.raises(SystemExit) as caught:
        compile_gate.main()
    assert caught.value.code == UsageError.exit_code
    assert capsys.readouterr().err.startswith("error: backend='triton' needs triton")


def test_a_line_a_binary() -> None:
    shape, tile = Shape(64, 128, torch.bfloat16), Tile(64, 64, 64, 4, 3)
    found = Compiled("sm_80", shape, tile, 128, 2, 4096, 96, False, "")
    line = compile_gate.table([found]).splitlines()[-1]
    assert line == "| sm_80 | 64x128 bf16 | 64x64x64 w4 s3 | 128 | 2 | 4 | 96 | 2 spills |"
