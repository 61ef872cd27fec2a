"""The command line as a person and a script meet it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from muonsplit.cli import main

SUBJECTS = Path(__file__).parent / "subjects"
MODELS = Path(__file__).parents[1] / "golden" / "models"


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> Said:
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        said = capsys.readouterr()
        return Said(int(left.value.code or 0), said.out, said.err)

    return call


def test_plan_prints_one_json_object(run) -> None:  # type: ignore[no-untyped-def]
    said = run("plan", "kimi-k3-0.40b", "--format", "json")
    assert said.code == 0
    found = json.loads(said.out)
    assert found["model"] == "kimi-k3-0.40b"
    split = [d for d in found["decisions"] if d["layout"] is not None]
    assert len(split) == 22
    assert set(found["decisions"][0]) == {
        *("name", "shape", "owner", "leaf", "kind", "layout", "heads", "width", "source", "reason")
    }
    assert sum((d["heads"], d["width"]) == (8, 32) for d in split) == 18


def test_plan_counts_are_said(run) -> None:  # type: ignore[no-untyped-def]
    said = run("plan", "glm-5.2-0.8b")
    assert said.code == 0
    assert "69 Muon weights, 12 split" in said.out
    assert "×6" in said.out
    assert "16×256" in said.out


def test_nothing_recognised_is_an_error_that_lists_every_leaf(run) -> None:  # type: ignore[no-untyped-def]
    said = run("plan", "gpt-neox-20b")
    assert said.code == 65
    assert "query_key_value (18432, 6144) ×44" in said.err
    assert "0 split" in said.out
    assert run("plan", "gpt-neox-20b", "--dialect", "torch-2.13").code == 0


@pytest.mark.parametrize("form", ["table", "markdown"])
def test_plan_in_other_forms(run, form: str) -> None:  # type: ignore[no-untyped-def]
    said = run("plan", "llama", "--format", form)
    assert said.code == 0
    assert "LlamaAttention.q_proj" in said.out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("plan", "nosuch"), 64, "golden name"),
        (("plan", "/nowhere/config.json"), 65, "no config"),
        (("plan", "transformers:nosuch"), 65, "nosuch"),
        (("plan", "llama", "--dialect", "nosuch"), 64, "Known"),
        (("plan",), 64, "Missing argument"),
        (("nosuch",), 64, "No such command"),
        (("certify", "nosuch.module:x", "--in-process"), 64, "cannot be imported"),
        (("certify", "--only", "nosuch"), 64, "Known"),
        (("explain", "nosuch"), 64, "nothing called"),
        (("golden", "accept", "plan/llama"), 65, "no new value"),
        (("golden", "check", "nosuch"), 64, "Known"),
        (("list", "nosuch"), 64, "nosuch"),
        (("certify", "--timeout", "nan"), 64, "--timeout"),
        (("certify", "--timeout", "0"), 64, "--timeout"),
        (("certify", "--timeout", "inf"), 64, "--timeout"),
        (("certify", "--report", "/dev/null"), 64, "--report"),
        (("plan", "llama", "--dialect", "dion:heads_per_block=0"), 64, "heads_per_block cannot be"),
    ],
)
def test_bad_input_ends_in_one_line_and_a_code(run, arguments, code, said) -> None:  # type: ignore[no-untyped-def]
    found = run(*arguments)
    assert found.code == code
    assert said in found.err
    assert "Traceback" not in found.err


def test_certify_writes_a_certificate_and_says_how_to_go_on(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    said = run("certify", "torch", "--model", "llama", "--in-process", "--report", str(tmp_path))
    assert said.code == 1
    assert "whole matrix observed where 8 heads planned, of 8 rows each" in said.out
    assert "--dialect torch-2.13 holds it to that" in said.out
    assert (
        json.loads((tmp_path / "certificate.json").read_text())["predicate"]["result"] == "FAILED"
    )
    again = next(line for line in said.out.splitlines() if line.startswith("Again"))
    repeated = run(*again.split("muonsplit ")[1].split(), "--in-process")
    assert repeated.code == 1


def test_a_subject_cannot_draw_on_the_terminal(run) -> None:  # type: ignore[no-untyped-def]
    said = run("certify", f"file:{SUBJECTS / 'bad.py'}:exits", "--model", "llama")
    assert said.code == 1
    assert "goodbye" in said.out
    assert "\x1b" not in said.out
    assert "[red]" in said.out


def test_undecided_is_code_two(run) -> None:  # type: ignore[no-untyped-def]
    said = run("certify", "faulty:rounded-at-random", "--in-process")
    assert said.code == 2
    assert "inconclusive" in said.out


def test_json_certificate_on_standard_output(run) -> None:  # type: ignore[no-untyped-def]
    said = run("certify", "--model", "llama", "--in-process", "--format", "json")
    assert said.code == 0
    assert json.loads(said.out)["predicate"]["muonsplit"]["verdict"] == "conforms"


@pytest.mark.parametrize("id", ["cut.rows", "indexer-split", "glm-5"])
def test_explain(run, id: str) -> None:  # type: ignore[no-untyped-def]
    said = run("explain", id)
    assert said.code == 0
    assert said.out.startswith(id)


@pytest.mark.parametrize("what", ["checks", "dialects", "models", "subjects"])
def test_lists(run, what: str) -> None:  # type: ignore[no-untyped-def]
    assert len(json.loads(run("list", what, "--format", "json").out)) >= 5


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from muonsplit.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "False"
    assert "certify" in done.stdout


def test_the_core_imports_torch_alone() -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import torch\n"
        "torches = set(sys.modules)\n"
        "import muonsplit.muon, muonsplit.geometry, muonsplit.newton_schulz, muonsplit.layout\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - torches}\n"
        "print(sorted(new - {'muonsplit'} - set(sys.stdlib_module_names)))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "[]"


def test_a_subject_does_not_outlive_its_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    (tmp_path / "sleeps.py").write_text(
        "import os, time, pathlib, muonsplit\n"
        "@muonsplit.subject(dialect='jordan', recognises=True)\n"
        "def build(model):\n"
        f"    pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "muonsplit", "certify", f"file:{tmp_path / 'sleeps.py'}:build"]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not pid_file.exists() or not pid_file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    parent.kill()  # not even a handler runs
    parent.wait()
    while time.monotonic() < deadline and Path(f"/proc/{pid_file.read_text()}").exists():
        time.sleep(0.1)
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


def test_truth_stands_beside_the_plan(run) -> None:  # type: ignore[no-untyped-def]
    said = run("truth", "glm-5.2-0.8b", "--format", "json")
    assert said.code == 0
    weights = {w["name"]: w for w in json.loads(said.out)["weights"]}
    query = weights["model.layers.0.self_attn.q_b_proj.weight"]
    assert (query["layout"], query["truth"]["layout"]) == ("q 16×256", "head 16×256")
    # The model's own indexer has 8 heads of 64 rows; the rules leave them whole on purpose.
    indexer = weights["model.layers.0.self_attn.indexer.wq_b.weight"]
    assert indexer["truth"]["layout"] == "head 8×64"
    assert (indexer["layout"], indexer["outcome"], indexer["differs"]) == (None, "declined", False)


def test_truth_exits_1_where_the_plan_differs(run, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Rules that confirm half the heads are found out by the model's own computation."""
    from muonsplit.geometry import candidates, decide

    def halved(*arguments: object) -> list[candidates.HeadGeometry]:
        return [
            c._replace(heads=c.heads // 2, width=2 * c.width, parts=c.parts, groups=c.groups)
            for c in candidates.candidates(*arguments)  # type: ignore[arg-type]
        ]

    monkeypatch.setattr(decide, "candidates", halved)
    said = run("truth", "llama")
    assert said.code == 1
    assert "DIFFERS" in said.out
    assert "rows of more than one head" in said.out


def test_truth_of_a_model_without_answers_is_inconclusive(run) -> None:  # type: ignore[no-untyped-def]
    assert run("truth", "transformers:no_such_type").code == 65


def test_plan_in_a_frameworks_form(run) -> None:  # type: ignore[no-untyped-def]
    said = run("plan", "llama", "--export", "dion")
    assert said.code == 0
    groups = json.loads(said.out)["param_groups"]
    assert {group.get("num_heads") for group in groups} >= {8, 32}
    assert run("plan", "llama", "--export", "no-such").code == 64


def test_an_arbiter_settles_what_the_rules_leave_open(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Delta attention's 8 × 32 values are 4 × 64 by the latent attention beside it."""
    config = json.loads((MODELS / "kimi-k3-0.40b" / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"num_attention_heads": 4}))
    spec = ("plan", str(path), "--format", "json")
    alone, settled = (json.loads(run(*spec, *more).out) for more in ((), ("--arbiter", "views")))
    name = "model.layers.0.self_attn.v_proj.weight"
    by_rules, by_truth = (
        next(d for d in found["decisions"] if d["name"] == name) for found in (alone, settled)
    )
    assert by_rules["layout"] is None
    assert (by_truth["layout"], by_truth["source"]) == ("v 8×32", "arbiter")


def test_a_sweep_of_one_type_reports(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    said = run("sweep", "llama", "--report", str(tmp_path))
    assert said.code == 0
    assert "0 wrong" in said.out
    assert (tmp_path / "sweep.md").is_file()
    assert run("sweep", "no_such_type").code == 64
