"""JUnit XML, as continuous integration reads it: a suite a model, a case a check.

What could not be decided is an error there, never a pass; so is a model that does not conform
although no check failed.
"""

from dataclasses import replace
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from muonsplit.certificate.run import Certificate
from muonsplit.certificate.verdict import CheckResult, ModelResult, Verdict
from muonsplit.checks import Finding
from muonsplit.report.summary import cause, facts, status_counts
from muonsplit.report.text import clipped, counted, one_line, plain

# JUnit knows no verdict besides these.
_KIND = {"failed": "failure", "undecided": "error", "skipped": "skipped"}


def render(certificate: Certificate) -> str:
    """Writes a certificate as JUnit XML."""
    root = Element("testsuites", name="muonsplit")
    for model in certificate.models:
        _suite(root, certificate, model)
    if not certificate.models:
        nothing = SubElement(root, "testsuite", name="muonsplit", tests="1", errors="1")
        _inconclusive(nothing, "muonsplit", certificate)
    for count in ("tests", "failures", "errors", "skipped"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
    indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{tostring(root, encoding="unicode")}\n'


def _suite(root: Element, certificate: Certificate, model: ModelResult) -> None:
    counts = status_counts(model.results)
    open_left = model.verdict is Verdict.INCONCLUSIVE and "undecided" not in counts
    suite = SubElement(root, "testsuite", name=one_line(model.label))
    suite.set("tests", str(len(model.results) + open_left))
    suite.set("failures", str(counts.get("failed", 0)))
    suite.set("errors", str(counts.get("undecided", 0) + open_left))
    suite.set("skipped", str(counts.get("skipped", 0)))
    properties = SubElement(suite, "properties")
    for name, value in [*facts(certificate), ("verdict", str(certificate.verdict))]:
        SubElement(properties, "property", name=name, value=one_line(value))
    for result in model.results:
        _case(suite, model, result)
    if open_left:
        _inconclusive(suite, _class(model), replace(certificate, models=(model,)))


def _case(suite: Element, model: ModelResult, result: CheckResult) -> None:
    case = SubElement(suite, "testcase", classname=_class(model), name=one_line(result.check))
    if result.status == "passed":
        return
    said = SubElement(case, _KIND[result.status], type=result.status)
    said.set("message", _message(result))
    if result.findings:
        said.text = plain(clipped("\n\n".join(map(_finding, result.findings))))
    if tails := list(dict.fromkeys(f.tail for f in result.findings if f.tail)):
        SubElement(case, "system-out").text = plain(clipped("\n\n".join(tails)))


def _inconclusive(suite: Element, name: str, certificate: Certificate) -> None:
    case = SubElement(suite, "testcase", classname=name, name="verdict")
    SubElement(case, "error", type="inconclusive", message=cause(certificate))


def _class(model: ModelResult) -> str:
    return one_line(f"muonsplit.{model.label}")


def _message(result: CheckResult) -> str:
    if result.status == "undecided":
        return one_line(f"undecided: {result.reason}")
    if not result.findings:
        return one_line(result.reason)
    return one_line(f"{counted(len(result.findings), 'finding')}: {result.findings[0].message}")


def _finding(finding: Finding) -> str:
    parts = [
        ("planned", finding.planned),
        ("observed", finding.observed),
        *((name, f"{float(value):.3g}") for name, value in finding.numbers.items()),
    ]
    lines = [f"{finding.weight or 'the whole run'}: {finding.message}"]
    return "\n".join(lines + [f"  {name}: {value}" for name, value in parts if value])
