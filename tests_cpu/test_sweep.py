"""The sweep: every architecture has its row, whatever happens to the others."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from muonsplit.recognition import sweep as module
from muonsplit.recognition.records import compared
from muonsplit.recognition.sweep import Architecture, architectures, sweep
from muonsplit.report.recognition import sweep_summary, write_sweep

WANTED = [Architecture("causal", name) for name in ("bert", "gpt2", "llama")]


def row(architecture: Architecture, **fields: Any) -> dict[str, Any]:
    return module._empty(architecture) | {"class": "Made"} | fields


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Rows are made by a function of the test, in the sweep's own processes."""

    def use(make: Any) -> Path:
        monkeypatch.setattr(module, "examined", make)
        return tmp_path / "rows"

    return use


def test_rows_are_in_order_and_on_disk(made) -> None:  # type: ignore[no-untyped-def]
    folder = made(row)
    told: list[tuple[int, int]] = []
    rows = sweep(WANTED, folder, progress=lambda done, of, name: told.append((done, of)))
    assert [r["model_type"] for r in rows] == ["bert", "gpt2", "llama"]
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert [json.loads((folder / a.file).read_text()) for a in WANTED] == rows


def test_a_crash_costs_its_own_row_only(made) -> None:  # type: ignore[no-untyped-def]
    def make(architecture: Architecture) -> dict[str, Any]:
        if architecture.model_type == "gpt2":
            os.kill(os.getpid(), signal.SIGKILL)
        return row(architecture)

    rows = sweep(WANTED, made(make))
    assert [r["error"] for r in rows] == [None, "its process ended by SIGKILL", None]


def test_one_that_hangs_is_ended(made, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    def make(architecture: Architecture) -> dict[str, Any]:
        if architecture.model_type == "bert":
            time.sleep(60)
        return row(architecture)

    monkeypatch.setattr(module, "_SECONDS", 1.0)
    rows = sweep(WANTED, made(make), processes=3)
    assert [r["error"] for r in rows] == ["its process ended by SIGKILL", None, None]


def test_rows_that_stand_are_not_made_again(made) -> None:  # type: ignore[no-untyped-def]
    folder = made(row)
    sweep(WANTED, folder)
    (folder / WANTED[0].file).write_text("{")  # a row that was being written
    old = json.loads((folder / WANTED[1].file).read_text())
    old["versions"]["transformers"] = "4.0.0"
    (folder / WANTED[1].file).write_text(json.dumps(old))
    folder = made(lambda architecture: row(architecture, **{"class": "Anew"}))
    assert [r["class"] for r in sweep(WANTED, folder)] == ["Anew", "Anew", "Made"]
    assert [r["class"] for r in sweep(WANTED, folder, fresh=True)] == ["Anew"] * 3


def test_architectures_are_those_of_three_mappings() -> None:
    found = architectures()
    assert len(found) > 300
    assert Architecture("causal", "glm_moe_dsa") in found
    assert Architecture("image-text", "mistral3") in found
    assert Architecture("seq2seq", "t5") in found
    assert architectures(["llama"]) == [Architecture("causal", "llama")]
    assert architectures(["no_such_type"]) == []


def test_real_rows_and_their_report(tmp_path: Path) -> None:
    wanted = [Architecture("causal", name) for name in ("gpt2", "llama", "bloom")]
    rows = sweep(wanted, tmp_path / "rows")
    assert [r["error"] for r in rows] == [None] * 3
    by_name = {(r["model_type"], w["leaf"]): w for r in rows for w in r["weights"]}
    # 32 heads of 128 rows: the defaults of LlamaConfig.
    query = by_name["llama", "q_proj"]
    assert (query["plan"], query["truth"], query["count"]) == ("q 32×128", "head 32×128", 32)
    # 12 heads of 64 columns; a Conv1D holds its weight transposed.
    fused = by_name["gpt2", "c_attn"]
    assert (fused["outcome"], fused["fused"]) == ("declined", "right")
    assert fused["by_heads"] == "q 12×64 | k 12×64 | v 12×64, axis 1"
    assert all(r["witnesses"]["counts"].get("differ", 0) == 0 for r in rows)
    assert by_name["bloom", "query_key_value"]["by_heads"] == "8 × (q 8 | k 8 | v 8)"
    lines, wrong = sweep_summary(rows)
    assert wrong == 0
    assert "3 of 3 architectures built" in lines[0]
    paths = write_sweep(rows, tmp_path)
    assert [path.name for path in paths] == ["sweep.json", "sweep.md"]
    assert json.loads(paths[0].read_text()) == rows
    assert "| llama (causal) | LlamaForCausalLM |" in paths[1].read_text()


def test_a_wrong_row_is_counted_as_wrong() -> None:
    weight = {
        "weight": "q",
        "owner": "A",
        "leaf": "q",
        "kind": "query",
        "shape": [8, 8],
        "plan": "q 2×4",
        "reason": "",
        "truth": "head 4×2",
        "evidence": "",
        "objection": "cut",
        "outcome": "wrong",
        "settled": "wrong",
        "settled_plan": "q 2×4",
        "fused": None,
        "by_heads": None,
        "counted": True,
        "count": 1,
    }
    lines, wrong = sweep_summary([row(WANTED[0], weights=[weight])])
    assert wrong == 1
    assert "1 wrong" in lines[0]
    assert "0 (0.00%)" in lines[1]


def test_a_weight_that_is_not_as_on_record_is_told() -> None:
    # On record: Llama's default q_proj, 4096 × 4096, is 32 heads of 128 rows.
    name = "model.layers.N.self_attn.q_proj.weight"
    weight = {"weight": name, "shape": [4096, 4096], "reason": "", "evidence": ""}
    llama = Architecture("causal", "llama")
    for planned, told in (("q 32×128", 0), ("q 64×64", 1), (None, 1)):
        found = compared([row(llama, weights=[weight | {"settled_plan": planned}])])
        assert (found.compared, len(found.apart)) == (1, told)
