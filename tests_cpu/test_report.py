"""What a reader sees: reviewed as text, and harmless whatever a subject writes."""

from typing import Any

from syrupy.assertion import SnapshotAssertion

from muonsplit.certificate.run import Question, certify
from muonsplit.geometry import plan
from muonsplit.models.load import build, resolve
from muonsplit.report.markdown import render
from muonsplit.report.tables import (
    certificate_tables,
    collapsed,
    notes,
    plain,
    plan_summary,
    plan_tables,
    table,
)
from muonsplit.subjects.process import InProcess


def test_plan_in_markdown(snapshot: SnapshotAssertion) -> None:
    made = plan(build(resolve("glm-5.2-0.8b").config))
    assert render(plan_tables("glm-5.2-0.8b", made)) + plan_summary(made) == snapshot


def test_violating_certificate_in_markdown(snapshot: SnapshotAssertion) -> None:
    found = certify(InProcess("faulty:query-count-for-key-value"), Question())
    shown: list[Any] = [t for t in certificate_tables(found) if "findings" not in t.title]
    assert render(shown) == snapshot
    # Numbers differ in the last digits between machines; what is said does not.
    findings = [t for t in certificate_tables(found) if "findings" in t.title]
    assert [row[:5] for row in findings[0].rows] == snapshot
    assert notes(found) == snapshot


def test_names_collapse_over_layers() -> None:
    names = ["model.layers.0.a.weight", "model.layers.11.a.weight", "model.layers.0.b.weight"]
    assert collapsed(names) == "model.layers.{0,11}.a.weight, model.layers.0.b.weight"
    assert collapsed([""]) == ""


def test_control_characters_are_made_harmless() -> None:
    assert plain("a\x1b[31mb\x00\x9bc\n") == "a�[31mb��c\n"


def test_markdown_escapes_cells() -> None:
    made = render([table("t", ("a",), [("<script>|\nx & y",)])])
    assert "| &lt;script>\\|<br>x &amp; y |" in made
