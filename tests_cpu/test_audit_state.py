"""What an audit keeps: its state, its certificate, and how it brings checkpoints together."""

import copy
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import muonsplit
from muonsplit.audit.matched import match
from muonsplit.audit.result import (
    Audit,
    AuditedWeight,
    Evidence,
    Explained,
    Picture,
    Settings,
    Tried,
)
from muonsplit.audit.spectra import Sized
from muonsplit.audit.state import State
from muonsplit.audit.statement import AuditStatement, is_audit, sound, statement, write
from muonsplit.certificate.canonical import canonical, digest
from muonsplit.certificate.schema import schema
from muonsplit.certificate.statement import text
from muonsplit.certificate.verdict import Verdict
from muonsplit.cli import main
from muonsplit.dialect import DIALECTS, Dialect, dialect_named
from muonsplit.errors import CertificateError, EvidenceError, MuonsplitError, UsageError
from muonsplit.evidence.opened import opened
from muonsplit.evidence.saved import Saved
from muonsplit.models.load import build

PUBLISHED = Path(__file__).parents[1] / "golden" / "schema" / "audit.schema.json"

# State.


class Answer(NamedTuple):
    sizes: tuple[Sized, ...]
    off: float


ANSWERS: dict[tuple[str, str], Answer] = {
    ("measured", "first"): Answer((Sized(4, 8, 2, 1, 0.25, 0.5, 0.0),), 1.0),
    ("measured", 'a "name",\n[with] all – signs\u2028\x0b'): Answer((), 1.5),
    ("decided", "first"): Answer((Sized(2, 2, 2, 0, 1e-30, 1e30, 3.0),) * 2, 2.0),
}


def answered(path: Path, key: str = "question") -> tuple[dict[tuple[str, str], Answer], int]:
    """What a state says to the same questions, and how many it had to be told."""
    told = 0

    def make(name: tuple[str, str]) -> Answer:
        nonlocal told
        told += 1
        return ANSWERS[name]

    state = State(path, key)
    found = {k: state.once(*k, Answer, lambda k=k: make(k)) for k in ANSWERS}
    return found, told


def test_what_is_known_is_not_asked_again(tmp_path: Path) -> None:
    assert answered(tmp_path / "deep" / "state") == (ANSWERS, 3)
    assert answered(tmp_path / "deep" / "state") == (ANSWERS, 0)


def test_without_a_file_everything_is_made_each_time() -> None:
    made = iter(range(9))
    state = State()
    assert [state.once("k", "n", int, lambda: next(made)) for _ in range(3)] == [0, 1, 2]


def test_a_state_cut_at_any_byte_goes_on_or_is_refused(tmp_path: Path) -> None:
    """And then holds everything, as if it had not been cut."""
    path = tmp_path / "state"
    answered(path)
    whole = path.read_bytes()
    first = whole.index(b"\n")
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        if length <= first:
            with pytest.raises(EvidenceError, match="not the state of this audit"):
                answered(path)
            assert path.read_bytes() == whole[:length]
            continue
        kept = whole[:length].count(b"\n") - 1
        assert answered(path) == (ANSWERS, 3 - kept)
        assert path.read_bytes() == whole
        assert answered(path) == (ANSWERS, 0)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"{}\n", b"[]\n", b'"x"\n', b"\xff\xfe\0", b"null\n", b'{"muonsplit audit": 3}\n'],
    ids=str,
)
def test_what_is_no_state_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state"
    path.write_bytes(content)
    with pytest.raises(EvidenceError, match="not the state of this audit"):
        State(path, "question")
    assert path.read_bytes() == content


def test_the_state_of_another_question_is_refused(tmp_path: Path) -> None:
    answered(tmp_path / "state", "one")
    with pytest.raises(EvidenceError, match="not the state of this audit"):
        answered(tmp_path / "state", "other")


@pytest.mark.parametrize("inside", ["folder", "file"])
def test_a_state_that_cannot_be_written_is_said(tmp_path: Path, inside: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    path = tmp_path / "folder" if inside == "folder" else tmp_path / "file" / "state"
    with pytest.raises(MuonsplitError, match="state"):
        State(path, "question")


@pytest.mark.parametrize(
    "line",
    [
        '["measured","first",{"sizes":"many"}]',
        '["measured","first"]',
        '["measured","first",1,2]',
        '{"measured":"first"}',
        '[["measured"],"first",1]',
        "nonsense",
        "3",
    ],
)
def test_a_line_that_is_no_answer_is_made_again(tmp_path: Path, line: str) -> None:
    path = tmp_path / "state"
    path.write_text(json.dumps({"muonsplit audit": "question"}) + "\n" + line + "\n")
    assert answered(path) == (ANSWERS, 3)


def test_numbers_that_json_lacks_are_kept_or_made_again(tmp_path: Path) -> None:
    for _ in range(2):
        state = State(tmp_path / "state", "question")
        for number in (math.inf, -math.inf, math.nan):
            found = state.once("k", str(number), float, lambda n=number: n)
            assert found == number or (math.isnan(found) and math.isnan(number))


# The certificate.


def row(name: str, **changed: Any) -> AuditedWeight:
    fields: dict[str, Any] = {
        "weight": name,
        "leaf": "Attention.q_proj",
        "shape": (64, 64),
        "planned": "q 4×16",
        "observed": "q 4×16",
        "outcome": "as planned",
        "reason": "",
        "margin": 1.5,
        "sigma": 7.25,
        "next": "whole matrix",
        "scale": "moonlight, of the block",
        "tried": (
            Tried("as planned", "q 4×16", "moonlight", 4, 0.9, 1.1, 0.67, 1.2, 1.0, ""),
            Tried("whole matrix", "whole", "moonlight", 1, 2.0, 2.0, 0.67, 1.2, math.inf, "x"),
        ),
        "explained": (Explained("as planned", "gradient", "jordan, 5 steps", 0.01, 1.0),),
        "picture": Picture(((0, 2),), 0, "/wAA/w==", (0,), (1.0, 0.5), (1.5,)),
    }
    return AuditedWeight(**{**fields, **changed})


def audit(*rows: AuditedWeight, findings: tuple[str, ...] = ()) -> Audit:
    return Audit(
        "model",
        digest({}),
        DIALECTS["moonlight"],
        Evidence("checkpoints", digest(1), digest(2), ("gradients",), 3, ("x",)),
        Settings(1, (0.01, 0.02), False, 0.0, True, ("moonlight, of the block",), "float32"),
        rows or (row("a"), row("b")),
        findings,
    )


def unread(name: str) -> AuditedWeight:
    return row(name, outcome="unread", observed="", reason="it holds NaN", tried=(), picture=None)


AUDITS = {
    "conforms": (audit(), Verdict.CONFORMS),
    "inconclusive": (audit(row("a"), unread("b")), Verdict.INCONCLUSIVE),
    "violates": (audit(row("a", outcome="otherwise"), unread("b")), Verdict.VIOLATES),
    "a finding": (audit(findings=("no rate explains it",)), Verdict.VIOLATES),
}


def verified(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main(["verify", str(path)])
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out + said.err


@pytest.mark.parametrize("name", AUDITS)
def test_what_is_written_reads_back(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, verdict = AUDITS[name]
    assert made.verdict is verdict
    path = write(made, tmp_path)
    assert is_audit(path)
    found = sound(path)
    assert canonical(statement(found)) == canonical(statement(made))
    assert (found.verdict, found.weights, found.settings) == (verdict, made.weights, made.settings)
    assert list(tmp_path.iterdir()) == [path]
    code, said = verified(path, capsys)
    assert code == 0
    assert "It is sound" in said


def test_the_published_schema_is_the_one_that_is_read_by() -> None:
    assert PUBLISHED.read_text() == schema(AuditStatement, "muonsplit audit") + "\n", (
        "muonsplit schema --audit > golden/schema/audit.schema.json"
    )


@pytest.mark.parametrize("name", AUDITS)
def test_audits_validate(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    made, _ = AUDITS[name]
    jsonschema.validate(json.loads(text(statement(made))), json.loads(PUBLISHED.read_text()))


def test_an_audit_of_nothing_is_inconclusive() -> None:
    assert replace(audit(), weights=()).verdict is Verdict.INCONCLUSIVE


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict | list) and value:
        pairs: Any = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            yield from leaves(item, (*path, key))
    else:
        yield path, value


def another(value: Any) -> Any:
    """A value of the same type."""
    words = {"conforms": "violates", "PASSED": "FAILED", "as planned": "otherwise"}
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return words.get(value, ("f" if value[:1] != "f" else "e") + value[1:])
        case list():
            return ["x"]
        case _:
            return "x" if value is None else None


WRITTEN = json.loads(json.dumps(statement(audit())))
PLACES = [path for path, _ in leaves(WRITTEN)]


def edited(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    said = copy.deepcopy(WRITTEN)
    *above, last = path
    at: Any = said
    for key in above:
        at = at[key]
    at[last] = value
    return said


def refused(path: Path) -> str:
    with pytest.raises(CertificateError) as caught:
        sound(path)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_every_edited_leaf_is_refused(tmp_path: Path) -> None:
    assert len(PLACES) > 150
    path = tmp_path / "certificate.json"
    for place, value in leaves(WRITTEN):
        path.write_text(canonical(edited(place, another(value))) + "\n")
        assert "is refused" in (said := refused(path)) or "is no audit" in said


@pytest.mark.parametrize(
    "place",
    [
        ("predicate", "result"),
        ("predicate", "muonsplit", "verdict"),
        ("predicate", "muonsplit", "footer", "digest"),
        ("predicate", "muonsplit", "audit", "weights", 0, "outcome"),
        ("predicate", "muonsplit", "audit", "weights", 0, "margin"),
        ("predicate", "muonsplit", "audit", "weights", 1, "tried", 0, "most"),
    ],
    ids=str,
)
def test_an_edit_is_one_line_on_the_command_line(
    place: tuple[Any, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = dict(leaves(WRITTEN))[place]
    path = tmp_path / "certificate.json"
    path.write_text(canonical(edited(place, another(value))) + "\n")
    code, said = verified(path, capsys)
    assert code == 65
    assert said.startswith("error: ")
    assert "Traceback" not in said
    assert str(path) in said


def test_a_verdict_made_to_agree_with_itself_still_does_not_follow(tmp_path: Path) -> None:
    """Result, verdict and digest are all changed, as who wants to deceive would."""
    said = copy.deepcopy(WRITTEN)
    ours = said["predicate"]["muonsplit"]
    said["predicate"]["result"], ours["verdict"] = "FAILED", "violates"
    footer = ours.pop("footer")
    ours["footer"] = {**footer, "digest": digest(said)}
    path = tmp_path / "certificate.json"
    path.write_text(canonical(said) + "\n")
    assert "is refused" in refused(path)


def test_a_field_more_or_less_or_twice_is_refused(tmp_path: Path) -> None:
    path = write(audit(), tmp_path)
    text = path.read_text()
    for other in (
        text.replace('"audit":{', '"audit":{"more":1,', 1),
        text.replace('"margin":1.5,', "", 1),
        text.replace('"margin":1.5,', '"margin":1.5,"margin":1.5,', 1),
        text.replace('"margin":1.5', '"margin":1.50', 1),
        text.replace('"margin":1.5', '"margin":"1.5"', 1),
        text.replace(",", ", ", 1),
        text + "\n",
        text + text,
    ):
        assert other != text
        path.write_text(other)
        refused(path)


def test_a_file_cut_short_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(audit(), tmp_path)
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 997), len(whole) - 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(path)
        code, said = verified(path, capsys)
        assert code == 65
        assert said.startswith("error: ")
        assert "Traceback" not in said


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b"null"], ids=len)
def test_what_is_no_audit_is_not_taken_for_one(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "certificate.json"
    path.write_bytes(content)
    assert not is_audit(path)
    refused(path)
    assert verified(path, capsys)[0] == 65
    assert not is_audit(tmp_path / "nowhere")


def test_an_audit_is_not_replayed(tmp_path: Path) -> None:
    path = write(audit(), tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["verify", "--replay", str(path)])
    assert left.value.code == 64


# Checkpoints, a config and a plan.


CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 32,
}
QUERY = "model.layers.0.self_attn.q_proj.weight"
Weights = dict[str, Tensor]


def weights() -> Weights:
    model = build(dict(CONFIG), "cpu")
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def saved(path: Path, tensors: Mapping[str, Tensor], step: int | None = None) -> Saved:
    metadata = None if step is None else {"step": str(step)}
    save_file(dict(tensors), path, metadata=metadata)
    return opened(path)


def matched(
    tmp_path: Path,
    before: Weights,
    after: Weights,
    steps: tuple[int | None, int | None] = (None, None),
    dialect: Dialect | None = None,
    only: str = "*",
) -> Any:
    pair = (
        saved(tmp_path / f"{name}.safetensors", tensors, step)
        for name, tensors, step in zip(("b", "a"), (before, after), steps, strict=True)
    )
    one, other = pair
    chosen = dialect or dialect_named("deepspeed-0.19.8")
    return match("model", "0" * 64, build(dict(CONFIG)), chosen, one, other, only)


def test_weights_are_found_under_any_prefix(tmp_path: Path) -> None:
    plain = weights()
    wrapped = {f"module.app.{name}": x for name, x in plain.items()} | {"extra": torch.zeros(2)}
    found = matched(tmp_path, wrapped, plain)
    planned = muonsplit.plan(build(dict(CONFIG)), "deepspeed-0.19.8")
    assert [d.name for d in found.decisions] == list(planned.layouts())
    assert (found.unknown, found.missing, found.dtype) == (0, (), "float32")
    assert torch.equal(found.before.read(QUERY), plain[QUERY])
    assert set(found.heads) == {4, 2}


def test_what_is_missing_or_unknown_is_counted(tmp_path: Path) -> None:
    before = weights() | {"more": torch.zeros(3)}
    after = {n: x.bfloat16() for n, x in before.items() if n != QUERY}
    found = matched(tmp_path, before, after)
    assert (found.unknown, found.missing, found.dtype) == (1, (QUERY,), "bfloat16")


def test_only_some_weights(tmp_path: Path) -> None:
    found = matched(tmp_path, weights(), weights(), only="*.0.*q_proj*")
    assert [d.name for d in found.decisions] == [QUERY]
    with pytest.raises(UsageError, match="named like 'x'"):
        matched(tmp_path, weights(), weights(), only="x")


@pytest.mark.parametrize(
    ("steps", "said"),
    [((5, 4), "wrong order"), ((4, 4), "both of step 4"), ((5, 5), "both of step 5")],
)
def test_steps_in_the_wrong_order(tmp_path: Path, steps: tuple[int, int], said: str) -> None:
    with pytest.raises(EvidenceError, match=said):
        matched(tmp_path, weights(), weights(), steps)


def test_checkpoints_of_other_models(tmp_path: Path) -> None:
    plain = weights()
    other = plain | {QUERY: torch.zeros(32, 64)}
    with pytest.raises(EvidenceError, match="the config says"):
        matched(tmp_path, other, plain)
    with pytest.raises(EvidenceError, match="different models"):
        matched(tmp_path, plain, other)
    few = dict(list(plain.items())[:4])
    for pair in ((few, plain), (plain, few)):
        with pytest.raises(EvidenceError, match="it lacks"):
            matched(tmp_path, *pair)


def test_the_checkpoint_that_lacks_weights_is_the_one_that_is_named(tmp_path: Path) -> None:
    few = dict(list(weights().items())[:4])
    with pytest.raises(EvidenceError) as caught:
        matched(tmp_path, weights(), few)
    assert str(tmp_path / "a.safetensors") in caught.value.message


# Captures, through the command line.


def captured(folder: Path) -> None:
    torch.manual_seed(0)
    model = build(dict(CONFIG), "cpu")
    layouts = muonsplit.plan(model, "moonlight+per-head").layouts()
    named = [(n, p) for n, p in model.named_parameters() if n in layouts]
    optimizer = muonsplit.PerHeadMuon(named, layouts, dialect="moonlight+per-head", lr=0.02)
    for _, p in named:
        p.grad = torch.randn(p.shape)
    with muonsplit.capture(optimizer, folder):
        optimizer.step()


def asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[int, str]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = ["--model", tmp_path, "--dialect", "moonlight+per-head", "--report", tmp_path / "out"]
    with pytest.raises(SystemExit) as left:
        main(["audit", *map(str, (*arguments, *options))])
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out + said.err


def test_a_capture_is_as_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    captured(tmp_path / "step")
    code, said = asked(tmp_path, capsys, tmp_path / "step")
    assert code == 0, said
    found = sound(tmp_path / "out" / "certificate.json")
    assert found.verdict is Verdict.CONFORMS
    assert {w.observed for w in found.weights if "q_proj" in w.weight} == {"q 4×16"}
    assert {w.observed for w in found.weights if "o_proj" in w.weight} == {"whole"}


def test_a_capture_with_a_file_cut_short_or_missing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captured(tmp_path / "whole")
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert len(files) > 3
    for name in files:
        for keep in (None, 0, 0.5):
            shutil.rmtree(tmp_path / "step", ignore_errors=True)
            shutil.copytree(tmp_path / "whole", tmp_path / "step")
            file = tmp_path / "step" / name
            content = file.read_bytes()
            if keep is None:
                file.unlink()
            else:
                file.write_bytes(content[: int(keep * len(content))])
            code, said = asked(tmp_path, capsys, tmp_path / "step")
            assert code in (64, 65), (name, keep, said)
            assert "error: " in said
            assert "Traceback" not in said
            assert list((tmp_path / "out").iterdir()) == []
