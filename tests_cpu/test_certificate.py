"""The certificate as an artefact: written, read again, attacked, replayed."""

import copy
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muonsplit.certificate import made as made_module
from muonsplit.certificate import read as read_module
from muonsplit.certificate.canonical import printable
from muonsplit.certificate.differences import Difference, differences
from muonsplit.certificate.read import load, read, sound
from muonsplit.certificate.run import Certificate, Question, certify
from muonsplit.certificate.schema import schema
from muonsplit.certificate.statement import built_with, statement, write
from muonsplit.certificate.verdict import CheckResult, Verdict, verdict_of
from muonsplit.certificate.verify import notes, replayed, verify, vouched
from muonsplit.checks import CHECKS, Finding
from muonsplit.cli import main
from muonsplit.errors import CertificateError
from muonsplit.models.load import golden_root
from muonsplit.subjects.process import InProcess

SUBJECTS = Path(__file__).parent / "subjects"
PUBLISHED = Path(__file__).parents[1] / "golden" / "schema" / "certificate.schema.json"

# A few checks are enough to be attacked, and leave this file quick when there are more.
GATES = 3
ASKED = (
    "model.recognised",
    "independence.weights",
    "routing.muon",
    "recognition.split",
    "cut.rows",
    "independence.heads",
    "arithmetic.direction",
    "arithmetic.scale",
)

# What two machines measure differently, of each model.
MEASURED = ("spectra", "floor")

Json = dict[str, Any]
Path_ = tuple[str | int, ...]


def run(subject: str, *models: str, only: tuple[str, ...] = ()) -> Certificate:
    return certify(InProcess(subject), Question(models=models, only=only))


@pytest.fixture(scope="session")
def conforming() -> Certificate:
    """Every check, so only for slow tests."""
    return run("builtin:reference", "llama")


@pytest.fixture(scope="session")
def partial() -> Certificate:
    """Nothing found, and not all was asked."""
    return run("builtin:reference", "llama", only=ASKED)


@pytest.fixture(scope="session")
def violating() -> Certificate:
    """torch keeps every weight whole: findings on six weights, and no heads to ask about."""
    return run("torch", "llama", only=ASKED)


@pytest.fixture(scope="session")
def of_two() -> Certificate:
    return run("builtin:reference", "llama", "pythia-70m", only=("recognition.split",))


@pytest.fixture(scope="session")
def written(partial: Certificate, violating: Certificate, of_two: Certificate) -> dict[str, str]:
    """The text of each, by name."""
    named = {"partial": partial, "violating": violating, "of two": of_two}
    return {name: canonical(statement(found)) for name, found in named.items()}


def canonical(value: Any) -> str:
    """The form of design §10, apart from the package's own: sorted keys, no spaces, one line."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"


def refused(tmp_path: Path, content: str | bytes) -> str:
    """Why a file is refused; fails if it is not."""
    path = tmp_path / "certificate.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    found = verify(path)
    assert found
    return "\n".join(found)


def ours(document: Json) -> Json:
    return document["predicate"]["muonsplit"]


def sealed(document: Json) -> Json:
    """What a forger does who knows of the digest: computes it anew, after design §10."""
    rest = copy.deepcopy(document)
    del rest["predicate"]["muonsplit"]["footer"]
    text = canonical(rest).removesuffix("\n")
    ours(document)["footer"]["digest"] = hashlib.sha256(text.encode()).hexdigest()
    return document


def at(document: Any, path: Path_) -> Any:
    for key in path:
        document = document[key]
    return document


def leaves(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from leaves(item, (*path, key))
    else:
        yield path


def objects(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    if isinstance(value, dict):
        yield path
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from objects(item, (*path, key))


# Written and read again


@pytest.mark.parametrize(
    "name", [pytest.param("conforming", marks=pytest.mark.slow), "partial", "violating", "of_two"]
)
def test_what_is_read_is_what_was_written(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    certificate: Certificate = request.getfixturevalue(name)
    path = write(certificate, tmp_path / "one")
    assert path == tmp_path / "one" / "certificate.json"
    assert verify(path) == []
    found = read(path)
    assert found.models == certificate.models
    assert found.dialect == certificate.dialect
    assert found.verdict is certificate.verdict
    assert write(found, tmp_path / "two").read_bytes() == path.read_bytes()
    assert path.read_text() == canonical(statement(certificate))


@pytest.mark.slow
def test_two_runs_with_one_seed_are_equal_byte_by_byte(
    conforming: Certificate, written: dict[str, str]
) -> None:
    again = run("builtin:reference", "llama")
    assert canonical(statement(again)) == canonical(statement(conforming))
    assert canonical(statement(run("torch", "llama", only=ASKED))) == written["violating"]


def test_another_seed_is_another_certificate(tmp_path: Path) -> None:
    question = Question(models=["llama"], only=["cut.rows"], seed=1)
    found = statement(certify(InProcess("builtin:reference"), question))
    zero = statement(run("builtin:reference", "llama", only=("cut.rows",)))
    assert {"/predicate/muonsplit/seed"} < {d.pointer for d in differences(zero, found)}


def test_the_footer_counts_and_digests_everything_else(written: dict[str, str]) -> None:
    document = json.loads(written["violating"])
    footer = ours(document)["footer"]
    assert (footer["models"], footer["findings"]) == (1, 6)  # q, k and v of two layers
    assert footer["results"] == GATES + len(ASKED)
    assert sealed(copy.deepcopy(document)) == document


def test_the_statement_is_in_totos(written: dict[str, str]) -> None:
    document = json.loads(written["violating"])
    predicate = document["predicate"]
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert predicate["result"] == "FAILED"
    assert predicate["failedTests"] == ["llama/recognition.split"]
    asked = [f"llama/{name}" for name in ours(document)["checks"]]
    others = {"llama/recognition.split", "llama/independence.heads"}  # failed and skipped
    assert predicate["passedTests"] == [name for name in asked if name not in others]
    assert predicate["warnedTests"] == []
    names = [part["name"] for part in predicate["configuration"]]
    assert names == ["check set", "golden models", "goldens", "dialect torch-2.13+per-head"]
    assert all(len(part["digest"]["sha256"]) == 64 for part in predicate["configuration"])
    (subject,) = document["subject"]
    adapter = Path(made_module.__file__).parents[1] / "subjects" / "torch.py"
    assert subject == {
        "name": "torch",
        "digest": {"sha256": hashlib.sha256(adapter.read_bytes()).hexdigest()},
    }


def test_what_could_not_tell_is_a_warning(partial: Certificate, tmp_path: Path) -> None:
    # Nothing was found against it, but not all was asked.
    document = statement(partial)
    assert document["predicate"]["result"] == "WARNED"
    assert ours(document)["verdict"] == ours(document)["summary"][0]["verdict"] == "inconclusive"
    (model,) = partial.models
    first, *rest = model.results
    unsure = replace(first, status="undecided", reason="too coarse")
    certificate = replace(partial, models=(replace(model, results=(unsure, *rest)),))
    path = write(certificate, tmp_path)
    assert verify(path) == []
    predicate = json.loads(path.read_text())["predicate"]
    assert predicate["warnedTests"] == [f"llama/{first.check}"]
    assert predicate["passedTests"] == [f"llama/{r.check}" for r in rest if r.status == "passed"]
    (counts,) = predicate["muonsplit"]["summary"]
    assert (counts["undecided"], counts["ran"]) == (1, len(model.results))


def test_the_files_of_a_subject_are_subjects_of_the_statement(
    partial: Certificate, tmp_path: Path
) -> None:
    files = {"b.py": "b" * 64, "a.py": "a" * 64}
    certificate = replace(partial, described={**partial.described, "files": files})
    path = write(certificate, tmp_path)
    assert [s["name"] for s in json.loads(path.read_text())["subject"]] == [
        "builtin:reference",
        "a.py",
        "b.py",
    ]
    assert verify(path) == []


def test_counts_have_denominators(written: dict[str, str]) -> None:
    (counts,) = ours(json.loads(written["violating"]))["summary"]
    assert counts["checks"] == len(CHECKS)
    assert counts["failed"] == 1
    assert counts["ran"] == counts["passed"] + counts["failed"] + counts["undecided"]
    assert counts["ran"] + counts["skipped"] == GATES + len(ASKED) < counts["checks"]
    of_some = ours(json.loads(written["of two"]))["summary"]
    # Three gates and the one that was asked for; GPT-NeoX has one fused weight, and it stays whole.
    assert [(c["checks"], c["ran"]) for c in of_some] == [(len(CHECKS), 4), (len(CHECKS), 3)]
    assert [c["skipped"] for c in of_some] == [0, 1]
    assert {c["verdict"] for c in of_some} == {"inconclusive"}


def test_all_three_answers_and_the_floor_are_in_it(written: dict[str, str]) -> None:
    (model,) = ours(json.loads(written["violating"]))["models"]
    weight = next(w for w in model["weights"] if w["weight"].endswith("0.self_attn.q_proj.weight"))
    assert (weight["truth"], weight["planned"]) == ("head 8×8", "q 8×8")
    assert weight["diverged"] == "recognition.split"
    assert weight["observed"] != weight["planned"]
    assert "floor" in model


def test_there_is_no_time_and_no_host_in_it(written: dict[str, str]) -> None:
    import platform
    import time

    for text in written.values():
        assert time.strftime("%Y-") not in text
        assert platform.node() not in text
        assert str(Path.home()) not in text


def test_volatile_fields_exist(written: dict[str, str]) -> None:
    for text in written.values():
        document = json.loads(text)
        for pointer in ours(document)["volatile"]:
            keys = pointer.split("/")[1:]
            assert at(document, tuple(int(k) if k.isdigit() else k for k in keys)) is not None


def test_what_was_measured_and_on_what_is_volatile(of_two: Certificate) -> None:
    at_models = [f"/predicate/muonsplit/models/{m}/{part}" for m in (0, 1) for part in MEASURED]
    assert ours(statement(of_two))["volatile"] == [
        "/predicate/muonsplit/environment",
        "/predicate/muonsplit/footer/digest",
        *at_models,
    ]


def test_the_digest_of_a_dialect_is_that_of_its_split_and_its_arithmetic(
    violating: Certificate,
) -> None:
    document = statement(violating)
    dialect = ours(document)["dialect"]
    text = canonical({part: dialect[part] for part in ("arithmetic", "split")}).removesuffix("\n")
    (found,) = [p for p in document["predicate"]["configuration"] if "dialect" in p["name"]]
    assert found["digest"]["sha256"] == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ("passed passed", Verdict.CONFORMS),
        ("passed skipped", Verdict.CONFORMS),
        ("skipped skipped", Verdict.INCONCLUSIVE),
        ("passed undecided", Verdict.INCONCLUSIVE),
        ("undecided skipped", Verdict.INCONCLUSIVE),
        ("passed", Verdict.INCONCLUSIVE),
        ("", Verdict.INCONCLUSIVE),
        ("passed failed", Verdict.VIOLATES),
        ("undecided failed", Verdict.VIOLATES),
        ("failed", Verdict.VIOLATES),
    ],
)
def test_the_verdict_is_the_worst_of_two_checks_that_both_were_asked(
    statuses: Any, expected: Verdict
) -> None:
    results = [
        CheckResult(name, status) for name, status in zip("ab", statuses.split(), strict=False)
    ]
    assert verdict_of(results, ("a", "b")) is expected


def test_more_may_be_asked_than_has_to_be() -> None:
    results = [CheckResult("a", "passed"), CheckResult("b", "passed")]
    assert verdict_of(results) is verdict_of(results, ("a",)) is Verdict.CONFORMS
    assert str(Verdict.CONFORMS) == "conforms"


def with_finding(certificate: Certificate, finding: Finding) -> Certificate:
    """The certificate with one finding more, about the whole run."""
    (model,) = certificate.models
    results = tuple(
        replace(r, findings=(*r.findings, finding)) if r.findings else r for r in model.results
    )
    return replace(certificate, models=(replace(model, results=results),))


def test_infinity_is_a_word_in_json_and_a_number_again(
    violating: Certificate, tmp_path: Path
) -> None:
    numbers = {"up": math.inf, "down": -math.inf, "none": math.nan, "whole": 3, "small": 5e-324}
    certificate = with_finding(violating, Finding("", "far off", numbers=numbers))
    path = write(certificate, tmp_path)
    assert '"down":"-inf","none":"nan","small":5e-324,"up":"inf","whole":3.0' in path.read_text()
    found = [f for r in read(path).models[0].results for f in r.findings][-1].numbers
    document = json.loads(path.read_text())
    index = ours(document)["models"][0]["results"].index(failed_result(document))
    where = f"/predicate/muonsplit/models/0/results/{index}/findings/6/numbers"
    assert where in ours(document)["volatile"]
    assert math.isnan(found.pop("none"))
    assert found == {"up": math.inf, "down": -math.inf, "whole": 3, "small": 5e-324}
    assert verify(path) == []


@pytest.mark.parametrize(
    "said", ["\ud800 alone", "\x1b[31mred", "\x00", "\u202eabc", "a\nb", "é\u2028"]
)
def test_whatever_a_subject_says_can_be_written_and_read(
    said: str, violating: Certificate, tmp_path: Path
) -> None:
    certificate = with_finding(violating, Finding("", said, tail=said, numbers={said: 1.0}))
    path = write(certificate, tmp_path)
    assert verify(path) == []
    found = [f for r in read(path).models[0].results for f in r.findings][-1]
    assert found.message == said.replace("\ud800", "?")


def test_a_forged_description_comes_to_no_certificate(partial: Certificate, tmp_path: Path) -> None:
    described = {**partial.described, "verdict": "conforms"}
    with pytest.raises(CertificateError, match="unknown field `verdict`"):
        write(replace(partial, described=described), tmp_path)
    assert list(tmp_path.iterdir()) == []


# Schema


def test_the_published_schema_is_the_one_that_is_read_by() -> None:
    assert PUBLISHED.read_text() == schema() + "\n", (
        "muonsplit schema > golden/schema/certificate.schema.json"
    )


def test_the_schema_refuses_what_it_does_not_know() -> None:
    found = json.loads(schema())
    assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    closed = [d for d in found["$defs"].values() if d["type"] == "object"]
    assert len(closed) > 15
    assert all(d["additionalProperties"] is False for d in closed)
    assert all(sorted(d["required"]) == sorted(d["properties"]) for d in closed)
    assert all(d["description"] for d in closed)


def test_certificates_validate(written: dict[str, str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for text in written.values():
        jsonschema.validate(json.loads(text), json.loads(PUBLISHED.read_text()))


# Attacked by who knows nothing of the digest


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value}0"
    return 0 if value is None else value + 1


@pytest.mark.slow
def test_every_single_edit_is_refused(written: dict[str, str], tmp_path: Path) -> None:
    document = json.loads(written["violating"])
    found = list(leaves(document))
    assert len(found) > 500
    for *path, key in found:
        holder = at(document, tuple(path))
        before = holder[key]
        holder[key] = changed(before)
        said = refused(tmp_path, canonical(document))
        holder[key] = before
        assert "/predicate" in said or "/subject" in said or "`$." in said, (path, key, said)
    assert canonical(document) == written["violating"]


@pytest.mark.slow
def test_every_missing_and_every_added_key_is_refused(
    written: dict[str, str], tmp_path: Path
) -> None:
    document = json.loads(written["violating"])
    for path in objects(document):
        holder = at(document, path)
        for key in list(holder):
            value = holder.pop(key)
            refused(tmp_path, canonical(document))
            holder[key] = value
        holder["zzz"] = 1
        refused(tmp_path, canonical(document))
        del holder["zzz"]
    assert canonical(document) == written["violating"]


@pytest.mark.parametrize("name", ["partial", "violating", "of two"])
def test_a_truncated_certificate_is_refused(
    name: str, written: dict[str, str], tmp_path: Path
) -> None:
    content = written[name].encode()
    cuts = [*range(0, len(content), 211), *range(len(content) - 40, len(content))]
    for cut in cuts:
        said = refused(tmp_path, content[:cut])
        assert "truncated" in said or "UTF-8" in said or "its end" in said, (cut, said)


@settings(max_examples=200)
@given(data=st.data())
def test_no_byte_can_be_changed(
    data: st.DataObject, written: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(written["violating"].encode())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    refused(tmp_path_factory.mktemp("edited"), bytes(content))


@settings(max_examples=100)
@given(content=st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_no_other_file_is_a_certificate(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert "is no certificate" in refused(tmp_path_factory.mktemp("other"), content)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "truncated"),
        (b"{}", "missing required field `_type`"),
        (b"[]", "Expected `object`, got `array`"),
        (b"null", "got `null`"),
        (b"\xff\xfe{}", "byte 0 is no UTF-8"),
        (b"\xef\xbb\xbf{}", "byte 0"),
        (b"[" * 200_000, "recursion depth"),
        (b'{"a":' * 200_000, "recursion depth"),
        (b"NaN", "invalid character"),
        (b'{"_type": 1e999}', "out of range"),
        (b'{"_type": ' + b"9" * 10_000 + b"}", "is no certificate"),
        (b'{"_type": "\\ud800"}', "is no certificate"),
    ],
)
def test_what_is_no_certificate_is_refused_by_name(
    content: bytes, said: str, tmp_path: Path
) -> None:
    assert said in refused(tmp_path, content)


def test_a_folder_a_missing_file_and_a_huge_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "is a folder" in verify(tmp_path)[0]
    assert "does not exist" in verify(tmp_path / "nowhere.json")[0]
    assert "cannot be read" in verify(tmp_path / ("x" * 5000))[0]
    assert "no file" in verify(Path("/dev/zero"))[0]
    monkeypatch.setattr(read_module, "_LARGEST_FILE", 100)
    assert "larger than 100 bytes" in refused(tmp_path, b" " * 101)


def respelt(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert text.count(old) >= 1
        return text.replace(old, new, 1)

    return change


SPELLINGS: dict[str, Callable[[str], str]] = {
    "spaces": respelt('"seed":0', '"seed": 0'),
    "a line more": lambda text: text + "\n",
    "no line end": lambda text: text[:-1],
    "indented": lambda text: json.dumps(json.loads(text), sort_keys=True, indent=1),
    "keys in another order": respelt('"profile":"ci","seed":0', '"seed":0,"profile":"ci"'),
    "a key twice": respelt('"seed":0', '"seed":1,"seed":0'),
    "a key twice, equal": respelt('"seed":0', '"seed":0,"seed":0'),
    "escapes": respelt("×", "\\u00d7"),
    "a number spelt otherwise": respelt("0.95", "0.950"),
    "a carriage return": lambda text: text.replace("\n", "\r\n"),
}


@pytest.mark.parametrize("change", SPELLINGS.values(), ids=SPELLINGS)
def test_another_spelling_of_the_same_is_refused(
    change: Callable[[str], str], written: dict[str, str], tmp_path: Path
) -> None:
    text = change(written["violating"])
    assert json.loads(text) == json.loads(written["violating"])
    assert "the canonical form" in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("change", "ended"),
    [
        (respelt('"seed":0', '"seed": 0'), "neither"),
        (lambda text: " " + text, "neither"),
        (lambda text: text[:-1], "found"),
        (lambda text: text + " ", "canonical"),
    ],
    ids=["inside", "at the start", "too short", "too long"],
)
def test_another_spelling_is_shown_beside_the_canonical_one(
    change: Callable[[str], str], ended: str, written: dict[str, str], tmp_path: Path
) -> None:
    text = written["violating"]
    said = change(text)
    at = next((i for i in range(len(text)) if text[i] != said[i : i + 1]), len(text))
    # Thirty characters before the first that differs and thirty from there, or what there is.
    shown = {
        name: repr(whole[:at][-30:] + whole[at:][:30])
        for name, whole in (("canonical", text), ("found", said))
    }
    shown[ended] = "its end"
    assert refused(tmp_path, said) == (
        f"character {at}: the canonical form (keys sorted and each once, no spaces, one line) has "
        + printable(f"{shown['canonical']}, found {shown['found']}")
    )


def test_trailing_garbage_is_refused(written: dict[str, str], tmp_path: Path) -> None:
    assert "trailing characters" in refused(tmp_path, written["violating"] + "x")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("seed",), "0", "Expected `int`, got `str` - at `$.predicate.muonsplit.seed`"),
        (("seed",), 0.5, "Expected `int`"),
        (("isolated",), 1, "Expected `bool`, got `int` - at `$.predicate.muonsplit.isolated`"),
        (("models",), {}, "Expected `array`"),
        (("models", 0, "full"), None, "$.predicate.muonsplit.models[0].full"),
        (("models", 0, "results", 0, "status"), "PASSED", "Invalid enum value"),
        (("models", 0, "results", 0, "judged"), [], "$.predicate.muonsplit.models[0].results[0]"),
        (("models", 0, "weights", 0, "shape"), [8, "8"], "weights[0].shape[1]"),
        (("dialect", "arithmetic", "beta"), 1.5, "beta cannot be 1.5"),
        (("dialect", "arithmetic", "beta"), "inf", "beta cannot be inf"),
        (("dialect", "arithmetic", "steps"), -1, "steps cannot be -1"),
        (("described", "digest"), "0", "$.predicate.muonsplit.described.digest"),
        (("environment", "threads"), -1, "$.predicate.muonsplit.environment.threads"),
        (("format",), 2, "$.predicate.muonsplit.format"),
    ],
)
def test_a_wrong_type_is_refused_with_its_path(
    path: Path_, value: Any, said: str, written: dict[str, str], tmp_path: Path
) -> None:
    document = json.loads(written["violating"])
    at(ours(document), path[:-1])[path[-1]] = value
    assert said in refused(tmp_path, canonical(sealed(document)))


# Attacked by who computes the digest anew


def failed_result(document: Json) -> Json:
    return next(r for r in ours(document)["models"][0]["results"] if r["status"] == "failed")


def set_at(*path: str | int, to: Any) -> Callable[[Json], object]:
    return lambda document: at(document, path[:-1]).__setitem__(path[-1], to)


def says_passed(document: Json) -> None:
    failed_result(document)["status"] = "passed"


def acquits(document: Json) -> None:
    failed_result(document).update(status="passed", findings=[])


def drops_a_result(document: Json) -> None:
    ours(document)["models"][0]["results"].remove(failed_result(document))


def drops_a_check(document: Json) -> None:
    """The check that failed, wherever it stands but in the set of all."""
    drops_a_result(document)
    ours(document)["checks"].remove("recognition.split")
    document["predicate"].update(failedTests=[], result="WARNED")
    ours(document).update(verdict="inconclusive")
    ours(document)["footer"].update(results=GATES + len(ASKED) - 1, findings=0)


def drops_a_finding(document: Json) -> None:
    failed_result(document)["findings"].pop()


def swaps_results(document: Json) -> None:
    results = ours(document)["models"][0]["results"]
    results[3], results[4] = results[4], results[3]


def repeats_a_model(document: Json) -> None:
    ours(document)["models"] *= 2


def renames_the_subject(document: Json) -> None:
    document["subject"][0]["digest"]["sha256"] = "0" * 64


def spares_a_weight(document: Json) -> None:
    weights = ours(document)["models"][0]["weights"]
    next(w for w in weights if w["diverged"])["diverged"] = ""


def skips_without_reason(document: Json) -> None:
    next(r for r in ours(document)["models"][0]["results"] if r["reason"])["reason"] = ""


def reorders_the_checks(document: Json) -> None:
    swaps_results(document)
    checks = ours(document)["checks"]
    checks[3], checks[4] = checks[4], checks[3]


def shrinks_the_set(document: Json) -> None:
    drops_a_check(document)
    ours(document)["check_set"].remove("recognition.split")


FORGERIES: dict[str, tuple[Callable[[Json], object], str]] = {
    "result": (set_at("predicate", "result", to="PASSED"), "/predicate/result"),
    "verdict": (
        set_at("predicate", "muonsplit", "verdict", to="conforms"),
        "/predicate/muonsplit/verdict",
    ),
    "verdict of a model": (
        set_at("predicate", "muonsplit", "summary", 0, "verdict", to="conforms"),
        "/predicate/muonsplit/summary/0/verdict",
    ),
    "counts": (
        set_at("predicate", "muonsplit", "summary", 0, "failed", to=0),
        "/predicate/muonsplit/summary/0/failed",
    ),
    "denominator": (
        set_at("predicate", "muonsplit", "summary", 0, "checks", to=1),
        "/predicate/muonsplit/summary/0/checks",
    ),
    "list of tests": (set_at("predicate", "failedTests", to=[]), "/predicate/failedTests/0"),
    "status": (says_passed, "passed with 6 findings"),
    "acquittal": (acquits, "/predicate/failedTests/0"),
    "dropped result": (drops_a_result, "/predicate/muonsplit/models/0/results/"),
    "dropped check": (drops_a_check, "/predicate/muonsplit/summary/0/failed"),
    "dropped finding": (drops_a_finding, "/predicate/muonsplit/footer/findings"),
    "order of results": (swaps_results, "/predicate/muonsplit/models/0/results/3: expected"),
    "order of checks": (reorders_the_checks, "/predicate/muonsplit/checks/3: expected"),
    "set of checks": (shrinks_the_set, "/predicate/muonsplit/check_set/"),
    "model twice": (repeats_a_model, "a model occurs twice in llama, llama"),
    "digest of the subject": (renames_the_subject, "/subject/0/digest/sha256"),
    "name of the dialect": (
        set_at("predicate", "muonsplit", "dialect", "name", to="moonlight"),
        "/predicate/configuration/3/name",
    ),
    "dialect": (
        set_at("predicate", "muonsplit", "dialect", "arithmetic", "steps", to=6),
        "/predicate/configuration/3/digest/sha256",
    ),
    "configuration": (set_at("predicate", "configuration", to=[]), "/predicate/configuration/0"),
    "weight": (spares_a_weight, "/diverged: expected recognition.split"),
    "reason": (skips_without_reason, "skipped with the reason ''"),
    "volatile": (
        set_at("predicate", "muonsplit", "volatile", to=["/predicate"]),
        "/predicate/muonsplit/volatile/0",
    ),
    "more split than there are": (
        set_at("predicate", "muonsplit", "models", 0, "split", to=1000),
        "1000 of 224 are split",
    ),
    "count of models": (
        set_at("predicate", "muonsplit", "footer", "models", to=2),
        "/predicate/muonsplit/footer/models",
    ),
}


@pytest.mark.parametrize(("forge", "said"), FORGERIES.values(), ids=FORGERIES)
def test_a_forgery_with_a_new_digest_is_refused(
    forge: Callable[[Json], object], said: str, written: dict[str, str], tmp_path: Path
) -> None:
    document = json.loads(written["violating"])
    forge(document)
    assert canonical(document) != written["violating"]
    assert said in refused(tmp_path, canonical(sealed(document)))


def test_a_smoke_run_has_one_model(written: dict[str, str], tmp_path: Path) -> None:
    document = json.loads(written["of two"])
    ours(document)["profile"] = "smoke"
    assert "one model, found 2" in refused(tmp_path, canonical(sealed(document)))
    document = json.loads(written["violating"])
    ours(document)["profile"] = "smoke"
    path = tmp_path / "certificate.json"
    path.write_text(canonical(sealed(document)))
    assert verify(path) == []


def swaps_models(document: Json) -> None:
    ours(document)["models"].reverse()


@pytest.mark.parametrize(
    ("content", "said"), [("", "truncated"), (None, "/predicate/muonsplit/models/0/results/")]
)
def test_what_is_refused_cannot_be_read(
    content: str | None, said: str, written: dict[str, str], tmp_path: Path
) -> None:
    document = json.loads(written["violating"])
    swaps_results(document)
    path = tmp_path / "certificate.json"
    path.write_text(canonical(sealed(document)) if content is None else content)
    with pytest.raises(CertificateError, match=said) as error:
        read(path)
    assert error.value.exit_code == 65


@pytest.mark.parametrize("edit", [swaps_models, swaps_results, drops_a_result, says_passed])
def test_an_edit_without_a_new_digest_is_refused(
    edit: Callable[[Json], None], written: dict[str, str], tmp_path: Path
) -> None:
    document = json.loads(written["of two" if edit is swaps_models else "violating"])
    edit(document)
    assert "/predicate/muonsplit/footer" in refused(tmp_path, canonical(document))


@pytest.mark.parametrize("part", ["models", "described", "environment", "footer", "dialect"])
def test_parts_of_two_certificates_do_not_mix(
    part: str, written: dict[str, str], tmp_path: Path
) -> None:
    document, other = (json.loads(written[name]) for name in ("violating", "of two"))
    ours(other)["environment"]["machine"] = "another"
    ours(document)[part] = ours(other)[part]
    assert "/predicate/muonsplit/footer/digest" in refused(tmp_path, canonical(document))


def test_the_results_of_one_under_the_subject_of_another_are_refused(
    written: dict[str, str], tmp_path: Path
) -> None:
    document, other = (json.loads(written[name]) for name in ("violating", "partial"))
    document["subject"] = other["subject"]
    said = refused(tmp_path, canonical(document))
    assert "/predicate/muonsplit/footer/digest" in said
    assert "/subject/0/digest/sha256" in said


def problem_at(where: str, document: Json, tmp_path: Path) -> str:
    """What is said of one place, of a document that is sealed anew."""
    lines = refused(tmp_path, canonical(sealed(document))).splitlines()
    (said,) = [line for line in lines if line.startswith(f"{where}: ")]
    return said.removeprefix(f"{where}: ")


def test_results_too_few_and_too_many_are_told_apart(
    written: dict[str, str], tmp_path: Path
) -> None:
    where = f"/predicate/muonsplit/models/0/results/{GATES + len(ASKED)}"
    document = json.loads(written["violating"])
    results = ours(document)["models"][0]["results"]
    last = results[-1]
    results.append(last)
    said = problem_at(where, document, tmp_path)
    assert said == f"expected no more, found {last['check']}"
    del results[-2:]
    said = problem_at(f"{where[:-2]}{GATES + len(ASKED) - 1}", document, tmp_path)
    assert said == f"expected {last['check']}, found no more"


def test_a_rule_that_is_broken_says_where(written: dict[str, str], tmp_path: Path) -> None:
    document = json.loads(written["violating"])
    (model,) = ours(document)["models"]
    index = model["results"].index(failed_result(document))
    says_passed(document)
    where = f"/predicate/muonsplit/models/0/results/{index}"
    assert problem_at(where, document, tmp_path) == "recognition.split passed with 6 findings"
    document = json.loads(written["violating"])
    model = ours(document)["models"][0]
    index = next(i for i, weight in enumerate(model["weights"]) if weight["diverged"])
    model["weights"][index]["diverged"] = ""
    said = problem_at(f"/predicate/muonsplit/models/0/weights/{index}/diverged", document, tmp_path)
    assert said == "expected recognition.split, which first names it, found none"
    model["weights"][index]["diverged"] = "recognition.split"
    index = next(i for i, weight in enumerate(model["weights"]) if not weight["diverged"])
    model["weights"][index]["diverged"] = "cut.rows"
    said = problem_at(f"/predicate/muonsplit/models/0/weights/{index}/diverged", document, tmp_path)
    assert said == "expected no check, which first names it, found cut.rows"


def test_another_config_does_not_go_by_the_name_of_a_golden_model(
    violating: Certificate, tmp_path: Path
) -> None:
    true, own = violating.models[0].config, "0" * 64
    renamed = replace(violating, models=(replace(violating.models[0], config=own),))
    (said,) = verify(write(renamed, tmp_path))
    assert said == (
        f"/predicate/muonsplit/models/0/config: expected {true}, that of llama, found {own}"
    )
    # Where the golden models are others, theirs may be.
    made = made_module.made(renamed)
    there = replace(made, digests=replace(made.digests, golden_models="1" * 64))
    path = tmp_path / "elsewhere.json"
    path.write_text(canonical(built_with(renamed, there)))
    assert verify(path) == []


def test_a_refusal_names_the_file_and_a_problem_a_line(
    written: dict[str, str], tmp_path: Path
) -> None:
    document = json.loads(written["violating"])
    document["predicate"]["result"] = "PASSED"
    path = tmp_path / "certificate.json"
    path.write_text(canonical(sealed(document)))
    with pytest.raises(CertificateError) as raised:
        read(path)
    first, *rest = raised.value.message.split("\n  ")
    assert first == f"{path} is refused:"
    assert rest == verify(path)
    assert [line.split(": ")[0] for line in rest] == [
        "/predicate/muonsplit/footer/digest",
        "/predicate/result",
    ]


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("{}", "`muonsplit schema` prints what a certificate holds."),
        ("", "It was cut off, or is another kind of file."),
    ],
)
def test_a_hint_tells_another_type_from_another_file(
    content: str, hint: str, tmp_path: Path
) -> None:
    path = tmp_path / "certificate.json"
    path.write_text(content)
    with pytest.raises(CertificateError) as raised:
        load(path)
    assert raised.value.hint == hint


def test_the_last_of_eleven_problems_is_counted(written: dict[str, str], tmp_path: Path) -> None:
    for wrong in (10, 11):
        document = json.loads(written["violating"])
        for weight in ours(document)["models"][0]["weights"][:wrong]:
            weight["diverged"] = "cut.columns"
        lines = refused(tmp_path, canonical(sealed(document))).splitlines()
        assert all("/diverged: expected" in line for line in lines[:10])
        assert lines[10:] == ["and 1 more"] * (wrong - 10)


def test_a_changed_digest_is_named_first(written: dict[str, str], tmp_path: Path) -> None:
    document = json.loads(written["violating"])
    true = ours(document)["footer"]["digest"]
    ours(document)["footer"]["digest"] = "0" * 64
    document["predicate"]["failedTests"] = []
    first, second = refused(tmp_path, canonical(document)).splitlines()
    assert first == (
        f'/predicate/muonsplit/footer/digest: says "{"0" * 64}", it was changed since; now it is '
        f'"{true}"'
    )
    assert second.startswith("/predicate/failedTests/0: says nothing, from the rest follows")


def test_all_of_the_weights_may_be_split_but_no_more(
    written: dict[str, str], tmp_path: Path
) -> None:
    document = json.loads(written["violating"])
    (model,) = ours(document)["models"]
    model["split"] = model["full"]
    path = tmp_path / "certificate.json"
    path.write_text(canonical(sealed(document)))
    assert verify(path) == []
    assert load(path).path == path


def test_what_is_no_file_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    for path, said in (
        (tmp_path, "is a folder"),
        (tmp_path / "nowhere.json", "does not exist or is no file"),
    ):
        with pytest.raises(CertificateError) as raised:
            load(path)
        assert str(raised.value) == f"{path} {said}. Give the certificate.json of a run."


def test_a_file_may_be_as_large_as_the_largest(
    partial: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(partial, tmp_path)
    monkeypatch.setattr(read_module, "_LARGEST_FILE", path.stat().st_size)
    assert verify(path) == []


def test_a_dialect_that_cannot_be_is_refused_with_what_can(
    written: dict[str, str], tmp_path: Path
) -> None:
    document = json.loads(written["violating"])
    ours(document)["dialect"]["arithmetic"]["steps"] = -1
    path = tmp_path / "certificate.json"
    path.write_text(canonical(document))
    with pytest.raises(CertificateError, match="steps cannot be -1") as raised:
        load(path)
    assert raised.value.hint.startswith("Use ")


def test_at_most_ten_problems_are_named(written: dict[str, str], tmp_path: Path) -> None:
    document = json.loads(written["violating"])
    for weight in ours(document)["models"][0]["weights"]:
        weight["diverged"] = "cut.columns"
    lines = refused(tmp_path, canonical(document)).splitlines()
    assert len(lines) == 11
    assert lines[10].endswith("more")


# What it was made with


def test_goldens_and_configs_are_digested(
    partial: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "golden"
    shutil.copytree(golden_root(), root)
    monkeypatch.setattr(made_module, "golden_root", lambda: root)
    before = made_module.made(partial).digests
    (root / "models" / "glm-5.2" / "config.json").write_text("{}")
    other_model = made_module.made(partial).digests
    assert other_model == replace(before, goldens=other_model.goldens)
    assert other_model.goldens != before.goldens
    (root / "models" / "llama" / "config.json").write_text("{}")
    assert made_module.made(partial).digests.golden_models != before.golden_models
    waiting = made_module.made(partial).digests
    (root / "cases.json.new").write_text("{}")
    assert made_module.made(partial).digests == waiting


def test_the_text_and_the_source_of_checks_are_digested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed() -> str:
        made_module.check_set_digest.cache_clear()
        return made_module.check_set_digest()

    before = computed()
    for package in (made_module.muonsplit.checks, made_module.muonsplit.observe):
        folder = tmp_path / package.__name__
        shutil.copytree(package.__path__[0], folder)
        assert computed() == before
        (folder / "cut.py").write_text((folder / "cut.py").read_text() + "# softer\n")
        with monkeypatch.context() as patched:
            patched.setattr(package, "__path__", [str(folder)])
            assert computed() != before
    with monkeypatch.context() as patched:
        patched.setitem(CHECKS, "cut.rows", replace(CHECKS["cut.rows"], title="softer"))
        assert computed() != before
    assert computed() == before


def made_elsewhere(certificate: Certificate, tmp_path: Path) -> Path:
    """A sound certificate of another processor, with other checks and another torch."""
    made = made_module.made(certificate)
    versions = {**made.environment.versions, "torch": "2.9.0"}
    there = replace(
        made,
        digests=replace(made.digests, check_set="0" * 64),
        environment=replace(made.environment, versions=versions, machine="aarch64"),
    )
    path = tmp_path / "elsewhere.json"
    path.write_text(canonical(built_with(certificate, there)))
    return path


def test_what_differs_here_is_a_note_and_no_refusal(partial: Certificate, tmp_path: Path) -> None:
    said = "\n".join(notes(sound(made_elsewhere(partial, tmp_path))))
    assert "differs from this installation's: check set." in said
    assert 'versions/torch was "2.9.0"' in said
    assert 'machine was "aarch64"' in said
    (unsigned,) = notes(sound(write(partial, tmp_path)))
    assert unsigned == "It is unsigned: it vouches for its content, not for its author."
    made = made_module.made(partial)
    others = replace(made.digests, check_set="0" * 64, golden_models="0" * 64)
    path = tmp_path / "others.json"
    path.write_text(canonical(built_with(partial, replace(made, digests=others))))
    assert "differs from this installation's: check set, golden models." in notes(sound(path))[1]


@pytest.mark.slow
def test_other_checks_have_a_set_of_their_own(conforming: Certificate, tmp_path: Path) -> None:
    made = made_module.made(conforming)
    there = replace(
        made,
        check_set=(*made.check_set, "later.check"),
        digests=replace(made.digests, check_set="0" * 64),
    )
    path = tmp_path / "more.json"
    path.write_text(canonical(built_with(conforming, there)))
    document = sound(path)
    # It was asked fewer checks than there were: that conforms nowhere.
    assert document.raw["predicate"]["result"] == "WARNED"
    assert ("verdict", "inconclusive") in vouched(document)


def test_an_unknown_dialect_is_a_note(partial: Certificate, tmp_path: Path) -> None:
    renamed = replace(partial, dialect=replace(partial.dialect, name="mine"))
    assert any("no dialect mine" in said for said in notes(sound(write(renamed, tmp_path))))


def test_what_is_vouched_for_is_said_in_rows(violating: Certificate, tmp_path: Path) -> None:
    described = {**violating.described, "distribution": "example", "version": "1.2"}
    there = replace(violating, described=described, isolated=True)
    assert vouched(sound(write(there, tmp_path))) == [
        ("subject", "torch (example 1.2), in its own process"),
        ("dialect", "torch-2.13+per-head"),
        ("verdict", "violates"),
        ("asked", "profile ci, seed 0"),
        (
            "llama",
            # Of eleven, one has no heads to ask about.
            f"violates: 10 of {len(CHECKS)} checks ran (9 passed, 1 failed, 0 undecided, "
            "1 skipped); 96 of 224 Muon weights split",
        ),
    ]
    described.update(distribution="", version="")
    here = replace(there, isolated=False, described=described)
    (row, *_) = vouched(sound(write(here, tmp_path)))
    assert row == ("subject", "torch (of no distribution), inside the harness's process")


def test_what_steers_a_terminal_is_spelt_out_and_all_else_is_left() -> None:
    assert printable("é × 'a\\' \x1b[2J\n\u202e") == "é × 'a\\' \\x1b[2J\\n\\u202e"


def test_a_difference_shows_what_is_missing_and_shortens_what_is_long() -> None:
    assert list(differences({"a/b~": 1}, {})) == [Difference("/a~1b~0", "1", "nothing")]
    # Two of the eighty characters are quotes.
    whole, longer = "x" * 78, "y" * 79
    assert list(differences(whole, longer)) == [
        Difference("", f'"{whole}"', f'"{longer}…'),
    ]


def test_null_is_not_nothing_and_a_list_is_not_its_item() -> None:
    assert list(differences({}, {"a": None})) == [Difference("/a", "nothing", "null")]
    assert list(differences({"a": None}, {})) == [Difference("/a", "null", "nothing")]
    assert list(differences([None], [])) == [Difference("/0", "null", "nothing")]
    assert list(differences([1], 1)) == [Difference("", "[1]", "1")]


def test_lists_of_different_lengths_differ_once() -> None:
    first = Difference("/1", "2", "4")
    assert list(differences([1, 2, 3], [1, 4])) == [first]
    assert list(differences([1, 2, 3], [1, 4, 5])) == [first, Difference("/2", "3", "5")]


# Replayed


def said_again(path: Path) -> list[str]:
    return list(replayed(load(path), lambda model, check: None))


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, Path]:
    """A subject's file of one's own, and a certificate of it."""
    source = tmp_path / "mine.py"
    source.write_text((SUBJECTS / "good.py").read_text())
    certificate = run(f"file:{source}:build", "llama", only=("cut.rows",))
    return source, write(certificate, tmp_path)


def test_a_replay_comes_out_the_same(own: tuple[Path, Path]) -> None:
    assert said_again(own[1]) == []


def test_a_changed_subject_is_named_first(own: tuple[Path, Path]) -> None:
    source, path = own
    source.write_text(source.read_text().replace("moonlight", "jordan"))
    said = said_again(path)
    assert "has changed since" in said[0]
    assert any(line.startswith("/predicate/muonsplit/described/dialect: was") for line in said)
    assert hashlib.sha256(source.read_bytes()).hexdigest() in said[0]


def test_a_replay_finds_what_a_consistent_forger_wrote(own: tuple[Path, Path]) -> None:
    document = json.loads(own[1].read_text())
    ours(document)["models"][0]["full"] += 1
    own[1].write_text(canonical(sealed(document)))
    assert verify(own[1]) == []
    said = said_again(own[1])
    assert said == ["/predicate/muonsplit/models/0/full: was 225, is 224"]


def test_what_is_volatile_may_differ_elsewhere_and_only_there(
    own: tuple[Path, Path], tmp_path: Path
) -> None:
    certificate = read(own[1])
    model = replace(certificate.models[0], floor={"of the test": 0.5})
    edited = replace(certificate, models=(model,))
    here = said_again(write(edited, tmp_path / "here"))
    assert here[0].startswith(
        "/predicate/muonsplit/models/0/floor/of the test: was 0.5, is nothing"
    )
    made = made_module.made(edited)
    there = replace(made, environment=replace(made.environment, machine="another"))
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(canonical(built_with(edited, there)))
    assert said_again(elsewhere) == []


# On the command line


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


def test_verify_says_what_a_certificate_vouches_for(
    violating: Certificate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(violating, tmp_path)
    code, out, _ = called(capsys, "verify", str(path))
    assert code == 0  # sound, though the subject violates
    for said in ("torch-2.13+per-head", "violates", "seed 0", "96 of 224", "1 failed", "unsigned"):
        assert said in out


def test_verify_refuses_with_the_reason(
    written: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "certificate.json"
    path.write_text(written["violating"].replace('"FAILED"', '"PASSED"'))
    code, out, err = called(capsys, "verify", str(path))
    assert (code, out) == (65, "")
    assert '/predicate/result: says "PASSED", from the rest follows "FAILED"' in err


def test_verify_replays(own: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    source, path = own
    assert called(capsys, "verify", "--replay", str(path))[0] == 0
    source.write_text(source.read_text() + "\n")
    code, out, _ = called(capsys, "verify", "--replay", str(path))
    assert code == 1
    assert "has changed since" in out


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert called(capsys, "schema") == (0, PUBLISHED.read_text(), "")


@pytest.mark.parametrize("name", ["\x00", "../..", "x" * 5000, " ", "%s\n", "/etc"])
def test_no_name_in_a_certificate_breaks_the_notes(
    name: str, partial: Certificate, tmp_path: Path
) -> None:
    certificate = replace(
        partial,
        subject=name,
        described={**partial.described, "distribution": name, "dialect": name},
        dialect=replace(partial.dialect, name=name),
        models=(replace(partial.models[0], model=name),),
    )
    document = sound(write(certificate, tmp_path))
    assert any("has no dialect" in said for said in notes(document))
    assert vouched(document)[0][0] == "subject"


def test_hostile_names_are_harmless_on_a_terminal(
    partial: Certificate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = replace(partial, subject="\x1b[2J\nverdict   violates\u202e[red]")
    code, out, _ = called(capsys, "verify", str(write(hostile, tmp_path)))
    assert code == 0
    assert "\x1b" not in out
    assert "[red]" in out


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nsound", "\u202e"])
def test_hostile_names_are_harmless_in_reasons(
    name: str, written: dict[str, str], tmp_path: Path
) -> None:
    document = json.loads(written["violating"])
    ours(document)["models"][0]["model"] = name
    repeats_a_model(document)
    said = refused(tmp_path, canonical(sealed(document)))
    assert "occurs twice" in said
    ours(document)[name] = 1
    said += refused(tmp_path, canonical(document)).partition("is no certificate")[2]
    assert all(line.isprintable() for line in said.split("\n"))
    assert "unknown field" in said
    assert not said.count("\nsound")


@pytest.mark.slow
def test_fixtures_are_what_their_names_say(conforming: Certificate, violating: Certificate) -> None:
    assert conforming.verdict is Verdict.CONFORMS
    assert violating.verdict is Verdict.VIOLATES
