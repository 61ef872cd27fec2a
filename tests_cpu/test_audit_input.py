"""What `muonsplit audit` is given: each wrong thing gets one message, an exit code, no file."""

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor

import muonsplit
from muonsplit.cli import main
from muonsplit.models.load import build

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 64,
}
FIRST = "model.layers.0.self_attn.q_proj.weight"
Weights = dict[str, Tensor]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A config, and two checkpoints of one step per head, on gradients with much in common."""
    torch.manual_seed(0)
    model = build(dict(CONFIG), "cpu")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    layouts = muonsplit.plan(model, "moonlight+per-head").layouts()
    named = [(n, p) for n, p in model.named_parameters() if n in layouts]
    optimizer = muonsplit.PerHeadMuon(
        named, layouts, dialect="moonlight+per-head", lr=0.02, weight_decay=0.0
    )
    save(tmp_path / "before.safetensors", weights(model), step=7)
    for _, p in named:
        p.grad = torch.randn_like(p) + 3 * torch.randn(p.shape[0], 1) @ torch.randn(1, p.shape[1])
    optimizer.step()
    save(tmp_path / "after.safetensors", weights(model), step=8)
    return tmp_path


def weights(model: torch.nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def save(path: Path, tensors: Mapping[str, Tensor], step: int | None = None) -> None:
    save_file(dict(tensors), path, metadata={} if step is None else {"step": str(step)})


def audited(run: Path, *arguments: str | Path) -> tuple[int, str]:
    """Exit code and what is said, of the command as a user runs it."""
    runner = CliRunner()

    def called() -> None:
        main(["audit", *map(str, arguments), "--report", str(run / "out")])

    with runner.isolation() as streams:
        try:
            called()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, "".join(stream.getvalue().decode() for stream in streams[:2])


def pair(run: Path) -> list[str | Path]:
    known = ["--dialect", "moonlight+per-head", "--lr", "0.02", "--weight-decay", "0"]
    both: list[str | Path] = [run / "before.safetensors", run / "after.safetensors"]
    return [*both, "--model", run, *known]


def changed(run: Path, name: str, change: Callable[[Weights], Weights], step: int | None) -> None:
    from safetensors.torch import load_file

    save(run / f"{name}.safetensors", change(load_file(run / f"{name}.safetensors")), step)


def test_a_sound_run_is_read_and_its_certificate_verifies(run: Path) -> None:
    code, said = audited(run, *pair(run))
    assert code in (0, 2), said
    rows = json.loads((run / "out" / "certificate.json").read_text())
    found = rows["predicate"]["muonsplit"]["audit"]["weights"]
    assert {w["outcome"] for w in found} <= {"as planned", "undecided"}
    split = {w["weight"].split(".")[-2] for w in found if w["observed"] == w["planned"] != "whole"}
    assert {"q_proj", "v_proj"} & split
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(run / "out" / "certificate.json")])
    assert ended.value.code == 0


def test_a_certificate_cut_short_is_refused(run: Path) -> None:
    audited(run, *pair(run))
    path = run / "out" / "certificate.json"
    text = path.read_text()
    for length in (0, 1, len(text) // 2, len(text) - 2):
        path.write_text(text[:length])
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(path)])
        assert ended.value.code == 65


def refused(run: Path, said: tuple[int, str], *expected: str, code: int = 65) -> None:
    assert said[0] == code, said[1]
    assert "Traceback" not in said[1]
    assert [text for text in expected if text not in said[1]] == [], said[1]
    assert not list((run / "out").glob("*.json"))


def test_swapped(run: Path) -> None:
    asked = pair(run)
    said = audited(run, asked[1], asked[0], *asked[2:])
    refused(run, said, "step 8", "step 7", "wrong order")


def test_swapped_without_steps_but_with_gradients(run: Path) -> None:
    torch.manual_seed(1)
    model = build(dict(CONFIG), "cpu")
    before = weights(model)
    gradients = {n: torch.randn_like(w) for n, w in before.items() if w.ndim == 2}
    after = {n: w - 0.01 * gradients[n] if n in gradients else w for n, w in before.items()}
    for name, tensors in (("before", after), ("after", before), ("g", gradients)):
        save(run / f"{name}.safetensors", tensors)
    refused(run, audited(run, *pair(run), "--gradients", run / "g.safetensors"), "wrong order")


def test_equal(run: Path) -> None:
    changed(run, "before", lambda w: w, None)
    (run / "after.safetensors").write_bytes((run / "before.safetensors").read_bytes())
    refused(run, audited(run, *pair(run)), "equal", "no step was taken")


def test_not_consecutive(run: Path) -> None:
    changed(run, "after", lambda w: w, 10)
    refused(run, audited(run, *pair(run)), "3 steps apart", "--steps 3")


def test_another_config(run: Path) -> None:
    (run / "config.json").write_text(json.dumps({**CONFIG, "head_dim": 32}))
    refused(run, audited(run, *pair(run)), "the config says", "(256, 256)", "(128, 256)")


def test_another_model(run: Path) -> None:
    changed(run, "after", lambda w: {**w, FIRST: torch.randn(32, 64)}, 8)
    refused(run, audited(run, *pair(run)), "different models", FIRST, "(256, 256)", "(32, 64)")


def test_none_of_the_model(run: Path) -> None:
    save(run / "before.safetensors", {"x": torch.zeros(2, 2)})
    refused(run, audited(run, *pair(run)), "None of the model's")


def test_missing_shard(run: Path) -> None:
    folder = run / "sharded"
    folder.mkdir()
    index = {"metadata": {}, "weight_map": {FIRST: "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(run, audited(run, folder, *pair(run)[1:]), "model-1.safetensors")


class _Trap:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self._path,))


def test_a_pickle_is_refused_and_not_loaded(run: Path) -> None:
    (run / "model.pt").write_bytes(pickle.dumps(_Trap(run / "loaded")))
    refused(run, audited(run, run / "model.pt", *pair(run)[1:]), "model.pt")
    assert not (run / "loaded").exists()
    pickle.loads((run / "model.pt").read_bytes())
    assert (run / "loaded").exists()  # so it would have shown


def test_one_weight_of_nan_costs_its_own_row(run: Path) -> None:
    changed(run, "after", lambda w: {**w, FIRST: w[FIRST] * float("nan")}, 8)
    code, said = audited(run, *pair(run))
    assert code == 2
    rows = json.loads((run / "out" / "certificate.json").read_text())
    found = rows["predicate"]["muonsplit"]["audit"]["weights"]
    assert [w["weight"] for w in found if w["outcome"] == "unread"] == [FIRST]
    assert "NaN" in said
    assert sum(w["outcome"] == "as planned" for w in found) >= 2


def test_all_of_nan_is_inconclusive(run: Path) -> None:
    changed(run, "after", lambda w: {n: x * float("nan") for n, x in w.items()}, 8)
    assert audited(run, *pair(run))[0] == 2


def test_one_checkpoint_alone(run: Path) -> None:
    asked = pair(run)
    refused(run, audited(run, asked[0], *asked[2:]), "no capture", "next step", code=64)


def test_no_checkpoint(run: Path) -> None:
    refused(run, audited(run, run / "nowhere", *pair(run)[1:]), "nowhere")


@pytest.mark.parametrize("option", ["--lr=-1", "--lr=nan", "--weight-decay=inf", "--steps=0"])
def test_absurd_numbers(run: Path, option: str) -> None:
    refused(run, audited(run, *pair(run), option), option.split("=", maxsplit=1)[0], code=64)


def test_no_weight_named_so(run: Path) -> None:
    refused(run, audited(run, *pair(run), "--weights", "x*"), "'x*'", FIRST, code=64)


def test_a_capture_needs_nothing_beside_it(run: Path) -> None:
    p = torch.nn.Parameter(torch.randn(8, 8))
    optimizer = torch.optim.SGD([(FIRST, p)], lr=0.1)
    p.grad = torch.randn(8, 8)
    with muonsplit.capture(optimizer, run / "captured"):
        optimizer.step()
    refused(run, audited(run, run / "captured", *pair(run)[1:]), "is a capture", code=64)


def test_a_state_goes_on_and_another_question_is_refused(run: Path) -> None:
    state = run / "state.jsonl"
    first = audited(run, *pair(run), "--state", state)
    whole = (run / "out" / "certificate.json").read_bytes()
    lines = state.read_text().splitlines(keepends=True)
    for kept in (1, len(lines) // 2, len(lines)):
        state.write_text("".join(lines[:kept])[:-1] + ("\n" if kept == len(lines) else ""))
        if kept == 1:
            state.write_text(lines[0])
        again = audited(run, *pair(run), "--state", state)
        assert again[0] == first[0]
        assert (run / "out" / "certificate.json").read_bytes() == whole
    for path in (run / "out").iterdir():
        path.unlink()
    said = audited(run, *pair(run), "--steps", "1", "--weights", "*q_proj*", "--state", state)
    refused(run, said, "not the state of this audit")


def test_a_state_of_files_that_changed_since_is_refused(run: Path) -> None:
    state = run / "state.jsonl"
    assert audited(run, *pair(run), "--state", state)[0] in (0, 2)
    for path in (run / "out").iterdir():
        path.unlink()
    changed(run, "after", lambda w: {**w, FIRST: w[FIRST] + 1}, 8)
    refused(run, audited(run, *pair(run), "--state", state), "not the state of this audit")
