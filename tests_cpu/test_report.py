"""What a reader sees: reviewed as text, and harmless whatever a subject writes."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt
from syrupy.assertion import SnapshotAssertion

from muonsplit.certificate.run import Certificate, Question, certify
from muonsplit.certificate.statement import write
from muonsplit.certificate.verdict import CheckResult, ModelResult
from muonsplit.checks import CHECKS, Finding
from muonsplit.cli import main
from muonsplit.geometry import plan
from muonsplit.models.load import build, resolve
from muonsplit.report import junit, markdown, matrix
from muonsplit.report.files import write_reports
from muonsplit.report.summary import alike, cause, notes
from muonsplit.report.tables import certificate_tables, plan_summary, plan_tables, table
from muonsplit.report.terminal import show
from muonsplit.report.text import clipped, collapsed, plain
from muonsplit.subjects.process import InProcess
from tests_cpu.certificates import DIGEST, LONG, certificate, conforming, hostile, violating

_KEPT = ("subject.answers", "cut.rows", "independence.heads", "arithmetic.bias")
# What no report may hold: control characters, bidirectional overrides, what UTF-8 cannot say.
_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe]")


@pytest.fixture(autouse=True)
def as_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of pytest-xdist says how wide its terminal is; a log does not."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def four_checks() -> Iterator[None]:
    """What is shown, without depending on how many checks there are."""
    every = dict(CHECKS)
    for id in every.keys() - set(_KEPT):
        del CHECKS[id]
    yield
    # Put back one by one they would run in another order.
    CHECKS.clear()
    CHECKS.update(every)


@pytest.fixture(scope="module")
def real() -> Certificate:
    return certify(InProcess("faulty:query-count-for-key-value"), Question(only=["cut.rows"]))


def shown(
    capsys: pytest.CaptureFixture[str], certificate: Certificate, details: bool = False
) -> str:
    show(certificate_tables(certificate, details))
    return capsys.readouterr().out + "\n".join(notes(certificate, details))


def test_plan_in_markdown(snapshot: SnapshotAssertion) -> None:
    made = plan(build(resolve("glm-5.2-0.8b").config))
    assert markdown.render(plan_tables("glm-5.2-0.8b", made)) + plan_summary(made) == snapshot


@pytest.mark.usefixtures("four_checks")
@pytest.mark.parametrize("made", [conforming, violating])
def test_certificate_on_a_terminal(
    capsys: pytest.CaptureFixture[str], made: Callable[[], Certificate], snapshot: SnapshotAssertion
) -> None:
    assert shown(capsys, made()) == snapshot


@pytest.mark.usefixtures("four_checks")
def test_details_on_a_terminal(
    capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    assert shown(capsys, violating(), details=True) == snapshot


@pytest.mark.usefixtures("four_checks")
@pytest.mark.parametrize("made", [conforming, violating])
def test_certificate_in_markdown(
    made: Callable[[], Certificate], snapshot: SnapshotAssertion
) -> None:
    assert markdown.page(made()) == snapshot


def test_the_cause_is_the_line_under_the_title(
    capsys: pytest.CaptureFixture[str], real: Certificate
) -> None:
    said = "violates: cut.rows on 4 weights: cut into 8 blocks of 2; planned k 2×8"
    assert shown(capsys, real).splitlines()[1] == said
    assert f"**{said}**" in markdown.page(real).splitlines()


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ([], "inconclusive: only 0 of"),
        ([CheckResult("cut.rows", "undecided", "noise")], "inconclusive: cut.rows: noise"),
        ([CheckResult(id, "skipped", "no") for id in CHECKS], "inconclusive: no check passed"),
        ([CheckResult("cut.rows", "failed")], "violates: cut.rows: nothing is recorded"),
        (
            [CheckResult(id, "failed", "", (Finding("", "odd"),)) for id in ("cut.rows", "x")],
            "violates: cut.rows: odd (and 1 more failed check)",
        ),
    ],
)
def test_the_cause_of_every_verdict(results: list[CheckResult], said: str) -> None:
    model = ModelResult("llama", DIGEST, 1, 1, (), (), {}, tuple(results))
    assert cause(certificate("x", [model])).startswith(said)


def test_no_model_is_no_pass() -> None:
    empty = certificate("x", [])
    assert cause(empty) == "inconclusive: no check passed"
    assert "inconclusive" in markdown.page(empty)


def test_a_failing_process_is_quoted_in_one_line() -> None:
    finding = Finding("", "the process ended", tail="Traceback\n  deep\nValueError: odd\n\n")
    result = CheckResult("subject.answers", "failed", "", (finding,), 1)
    model = ModelResult("llama", DIGEST, 1, 1, (), (), {}, (result,))
    found = alike(certificate("x", [model]), model)
    assert [f.said for f in found] == ["the process ended: ValueError: odd"]


@pytest.mark.parametrize("made", [conforming, violating, hostile, None])
def test_junit_counts_what_the_certificate_counts(
    made: Callable[[], Certificate] | None, real: Certificate
) -> None:
    found = real if made is None else made()
    root = ElementTree.fromstring(junit.render(found))
    for suite, model in zip(root.findall("testsuite"), found.models, strict=True):
        counts = Counter(result.status for result in model.results)
        assert suite.attrib["tests"] == str(len(model.results))
        assert suite.attrib["failures"] == str(counts["failed"]) == count(suite, "failure")
        assert suite.attrib["errors"] == str(counts["undecided"]) == count(suite, "error")
        assert suite.attrib["skipped"] == str(counts["skipped"]) == count(suite, "skipped")
        named = {p.attrib["name"]: p.attrib["value"] for p in suite.iter("property")}
        assert named["verdict"] == str(found.verdict)
        assert named["seed"] == str(found.seed)


def count(suite: ElementTree.Element, tag: str) -> str:
    return str(len(suite.findall(f"testcase/{tag}")))


def test_junit_says_what_was_found_and_what_was_written() -> None:
    finding = Finding("w", "it <fell> ]]> over", "up", "down", {"off": 0.25}, "a tail\x1b & \x00")
    result = CheckResult("cut.rows", "failed", "", (finding,), 1)
    made = certificate("x", [ModelResult("llama", DIGEST, 1, 1, (), (), {}, (result,))])
    case = ElementTree.fromstring(junit.render(made)).find("testsuite/testcase")
    assert case is not None
    assert case.attrib == {"classname": "muonsplit.llama", "name": "cut.rows"}
    said = "w: it <fell> ]]> over\n  planned: up\n  observed: down\n  off: 0.25"
    assert case.findtext("failure") == said
    assert case.findtext("system-out") == "a tail� & �"


@pytest.mark.parametrize(
    ("models", "tests", "said"),
    [
        ([], 1, "inconclusive: no check passed"),
        ([[CheckResult("cut.rows", "passed")]], 2, f"inconclusive: only 1 of {len(CHECKS)}"),
        (
            [[CheckResult(id, "skipped", "no") for id in CHECKS]],
            len(CHECKS) + 1,
            "inconclusive: no check passed",
        ),
    ],
)
def test_what_is_inconclusive_is_no_green_junit(
    models: list[list[CheckResult]], tests: int, said: str
) -> None:
    made = [ModelResult("llama", DIGEST, 1, 1, (), (), {}, tuple(results)) for results in models]
    root = ElementTree.fromstring(junit.render(certificate("x", made)))
    assert (root.attrib["tests"], root.attrib["errors"]) == (str(tests), "1")
    error = root.find("testsuite/testcase/error")
    assert error is not None
    assert error.attrib["message"].startswith(said)


def test_nothing_a_subject_says_acts_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for details in (False, True):
        said = shown(capsys, hostile(), details)
        assert not _ACTING.search(said)
        assert "[red]markup[/red]" in re.sub(r"\s+", "", said)
    show([matrix.matrix([hostile()])])
    assert not _ACTING.search(capsys.readouterr().out)


def test_markup_of_the_terminal_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    show([table("[red]title[/red]", ("[b]column[/b]",), [("[i]cell[/i]",)], "[u]note[/u]")])
    printed = capsys.readouterr().out
    for said in ("[red]title[/red]", "[b]column[/b]", "[i]cell[/i]", "[u]note[/u]"):
        assert said in printed


def test_details_say_how_to_run_every_failed_check_again() -> None:
    for details, count in ((False, 1), (True, 2)):
        said = notes(hostile(), details)
        assert sum(line.startswith("Again, alone: muonsplit certify") for line in said) == count


def test_nothing_a_subject_says_acts_in_xml() -> None:
    text = junit.render(hostile())
    assert not _ACTING.search(text)
    said = ElementTree.fromstring(text).findtext(".//failure")
    assert said is not None
    assert "<script>document.title='ran'</script>" in said


def test_nothing_a_subject_says_acts_in_markdown() -> None:
    text = markdown.page(hostile()) + markdown.render([matrix.matrix([hostile()])])
    assert not _ACTING.search(text)
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    assert {t.type for t in tokens}.isdisjoint({"html_block", "fence"})
    assert {child.content for child in inline if child.type == "html_inline"} == {"<br>"}
    assert {child.type for child in inline}.isdisjoint({"link_open", "image", "code_inline"})
    written = "".join(child.content for child in inline)
    for act in ("<script>document.title='ran'</script>", "| cell | \\| cell", "**bold**"):
        assert act in written


def test_a_command_to_run_again_is_one_word_a_word() -> None:
    again = notes(hostile())[-2]
    assert "\n" not in again
    assert "'\"'\"'quoted'\"'\"'" in again  # as a shell quotes a quote


def test_markdown_fits_a_job_summary_and_counts_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findings = tuple(Finding(f"w{i}", f"{i} " + LONG[:900]) for i in range(2000))
    result = CheckResult("cut.rows", "failed", "", findings, 1)
    made = certificate("x", [ModelResult("llama", DIGEST, 1, 1, (), (), {}, (result,))])
    text = markdown.page(made)
    assert len(text.encode()) < 2**20
    *kept, _, said, _ = text.split("\n")
    monkeypatch.setattr(markdown, "_LARGEST", 2**40)
    everything = markdown.page(made).split("\n")
    assert everything[: len(kept)] == kept
    left_out = len(everything) - len(kept)
    assert said == f"{left_out} more lines are left out; certificate.json holds everything."


def test_the_matrix_has_a_cell_for_every_check() -> None:
    found = matrix.matrix([conforming(), violating(), certificate("x", [])])
    assert found.columns == ("subject", "dialect", "model", "verdict", *CHECKS)
    assert [row[:4] for row in found.rows] == [
        ("example:good", "deepspeed-0.19.8", "llama", "conforms"),
        ("example:off", "deepspeed-0.19.8", "llama", "violates"),
    ]
    assert set(found.rows[0][4:]) == {"✓"}
    cells = dict(zip(CHECKS, found.rows[1][4:], strict=True))
    odd = {"cut.rows": "✗", "independence.heads": "–", "arithmetic.bias": "?"}
    assert cells == dict.fromkeys(CHECKS, "✓") | odd


def test_the_matrix_says_what_was_not_asked() -> None:
    few = certificate(
        "x",
        [ModelResult("llama", DIGEST, 1, 1, (), (), {}, (CheckResult("cut.rows", "passed"),))],
    )
    found = matrix.matrix([conforming(), few])
    cells = dict(zip(found.columns, found.rows[1], strict=True))
    assert cells["cut.rows"] == "✓"
    assert cells["cut.columns"] == "·"
    narrow, legend = matrix.numbered(found)
    assert narrow.rows == found.rows
    assert [check for _, check in legend.rows] == list(CHECKS)


@pytest.mark.parametrize(
    ("made", "message", "color"),
    [
        ([conforming()], "conforms to deepspeed-0.19.8", "brightgreen"),
        ([conforming(), violating()], "violates deepspeed-0.19.8", "red"),
        ([conforming(), certificate("x", [])], "inconclusive under deepspeed-0.19.8", "yellow"),
        ([certificate("x", []), violating()], "violates deepspeed-0.19.8", "red"),
    ],
)
def test_the_badge_says_the_worst(made: list[Certificate], message: str, color: str) -> None:
    # The schema that shields.io publishes for its endpoint badge.
    label = {"schemaVersion": 1, "label": "per-head Muon"}
    assert json.loads(matrix.badge(made)) == {**label, "message": message, "color": color}


def test_the_matrix_on_the_command_line(
    real: Certificate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read = write(real, tmp_path)
    badge = tmp_path / "badge.json"
    printed: dict[str, str] = {}
    for form in ("table", "markdown", "html"):
        with pytest.raises(SystemExit) as ended:
            main(["matrix", str(read), str(read), "--format", form, "--badge", str(badge)])
        assert ended.value.code == 0
        printed[form] = capsys.readouterr().out
    named = [
        line for line in printed["table"].splitlines() if "faulty:query-count-for-key-value" in line
    ]
    assert len(named) == 2
    assert all("✗" in line for line in named)
    assert "| cut.rows |" in printed["markdown"]
    assert printed["html"].startswith("<!DOCTYPE html>")
    assert json.loads(badge.read_text())["color"] == "red"


def test_certify_shows_details_and_writes_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["certify", "faulty:query-count-for-key-value", "--only", "cut.rows", "--in-process"]
    asked += ["--seed", "0"]
    with pytest.raises(SystemExit) as ended:
        main([*asked, "--details", "--report", str(tmp_path)])
    assert ended.value.code == 1
    assert "off if half heads: 0." in capsys.readouterr().out
    names = {"certificate.json", "junit.xml", "report.md", "report.html"}
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize(
    "arguments",
    [["/nosuch/certificate.json"], [__file__], ["CERTIFICATE", "--badge", "/dev/null/x"]],
)
def test_the_matrix_refuses_in_a_line(
    arguments: list[str], real: Certificate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read = str(write(real, tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["matrix", *(read if word == "CERTIFICATE" else word for word in arguments)])
    assert ended.value.code in (64, 65)
    assert "Traceback" not in capsys.readouterr().err


def test_the_same_certificate_gives_the_same_files(tmp_path: Path) -> None:
    once, again = (write_reports(violating(), tmp_path / name) for name in ("a", "b"))
    assert [path.name for path in once] == ["junit.xml", "report.md", "report.html"]
    assert [p.read_bytes() for p in once] == [p.read_bytes() for p in again]
    assert {path.name for path in (tmp_path / "a").iterdir()} == {path.name for path in once}


def test_names_collapse_over_layers() -> None:
    names = ["model.layers.0.a.weight", "model.layers.11.a.weight", "model.layers.0.b.weight"]
    assert collapsed(names) == "model.layers.{0,11}.a.weight, model.layers.0.b.weight"
    assert collapsed([""]) == ""


def test_control_characters_are_made_harmless() -> None:
    assert plain("a\x1b[31mb\x00\x9bc\r\nd\u202ee\n") == "a�[31mb��c\nd�e\n"


def test_what_is_too_long_is_counted() -> None:
    assert clipped("abcdef", 4) == "abcd… (2 more characters)"
    assert clipped("abcd", 4) == "abcd"


def test_markdown_escapes_cells() -> None:
    made = markdown.render([table("t", ("a",), [("<script>|\nx & __y__ q_proj",)])])
    assert "| &lt;script&gt;\\|<br>x &amp; \\_\\_y\\_\\_ q_proj |" in made
