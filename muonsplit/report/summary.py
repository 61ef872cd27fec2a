"""What a certificate comes to, in the words that every report uses."""

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from muonsplit.certificate.run import Certificate
from muonsplit.certificate.verdict import CheckResult, ModelResult, Status, Verdict
from muonsplit.checks import CHECKS, Finding
from muonsplit.dialect import dialect_named
from muonsplit.errors import UsageError
from muonsplit.report.text import collapsed, counted, one_line

STATUSES: tuple[Status, ...] = ("passed", "failed", "undecided", "skipped")


@dataclass(frozen=True, slots=True)
class Alike:
    """Findings of one check that say the same of several weights.

    Attributes:
        check: Id of the check.
        weights: Names of the weights, those that differ only by layer as one.
        count: How many findings there are.
        first: The first of them.
        again: Command that runs this check alone, or an empty string after the first of a check.
    """

    check: str
    weights: str
    count: int
    first: Finding
    again: str

    @property
    def said(self) -> str:
        """What is wrong, in one line; of a failed process also the last line that it wrote."""
        tail = self.first.tail.strip()
        last = f": {tail.splitlines()[-1]}" if tail else ""
        return one_line(self.first.message + last)

    @property
    def proof(self) -> list[tuple[str, str]]:
        """The numbers behind the first of them, to three digits."""
        return [(name, f"{float(value):.3g}") for name, value in self.first.numbers.items()]


def cause(certificate: Certificate) -> str:
    """The verdict and what decided it, in one line."""
    why = {
        Verdict.VIOLATES: _violation,
        Verdict.INCONCLUSIVE: open_question,
        Verdict.CONFORMS: _conformity,
    }[certificate.verdict]
    return one_line(f"{certificate.verdict}: {why(certificate)}")


def _violation(certificate: Certificate) -> str:
    failed = [(m, r) for m in certificate.models for r in m.results if r.status == "failed"]
    model, result = failed[0]
    weights = len({f.weight for f in result.findings if f.weight})
    where = f" on {counted(weights, 'weight')}" if weights else ""
    where += f" of {model.label}" if len(certificate.models) > 1 else ""
    said = result.findings[0].message if result.findings else "nothing is recorded of what it found"
    more = f" (and {counted(len(failed) - 1, 'more failed check')})" if len(failed) > 1 else ""
    return f"{result.check}{where}: {said}{more}"


def open_question(certificate: Certificate) -> str:
    """What keeps a certificate in which nothing failed from conforming."""
    for model in certificate.models:
        for result in model.results:
            if result.status == "undecided":
                where = f" on {model.label}" if len(certificate.models) > 1 else ""
                return f"{result.check}{where}: {result.reason}"
    missing = set(CHECKS) - {r.check for m in certificate.models for r in m.results}
    if missing and certificate.models:
        return f"only {len(CHECKS) - len(missing)} of {len(CHECKS)} checks were asked for"
    return "no check passed"


def _conformity(certificate: Certificate) -> str:
    counts = status_counts(chain.from_iterable(m.results for m in certificate.models))
    weights = sum(len(m.weights) for m in certificate.models)
    skipped = f", {counts['skipped']} did not apply" if "skipped" in counts else ""
    return (
        f"{counted(counts['passed'], 'check')} passed on {counted(weights, 'weight')} of "
        f"{', '.join(m.label for m in certificate.models)}{skipped}"
    )


def status_counts(results: Iterable[CheckResult]) -> dict[Status, int]:
    """How many results there are of each status that occurs."""
    counts = Counter(result.status for result in results)
    return {status: counts[status] for status in STATUSES if counts[status]}


def facts(certificate: Certificate) -> list[tuple[str, str]]:
    """What was certified, and under what."""
    described = certificate.described
    return [
        ("subject", certificate.subject),
        ("version", f"{described.get('distribution')} {described.get('version')}"),
        ("sha256 of its files", str(described.get("digest"))),
        ("dialect", certificate.dialect.name),
        ("profile", certificate.profile),
        ("seed", str(certificate.seed)),
        ("device", "cpu"),
        *([("ranks", str(certificate.world))] if certificate.world > 1 else []),
        ("isolated", "in a process of its own" if certificate.isolated else "no: in this process"),
    ]


def alone(model: ModelResult, weights: Sequence[str]) -> str:
    """How the sharded updates of weights are beside those of one process, in words."""
    off = [model.alone[name] for name in weights if name in model.alone]
    if not off:
        return "not looked at"
    same = sum(x == 0 for x in off)
    if same == len(off):
        return "same bits"
    most = f"off by up to {max(off):.1g}"
    return f"{most}, {same} with the same bits" if same else most


def same_bits(certificate: Certificate) -> tuple[int, int]:
    """Weights whose sharded update has the bits of one process, of those that were compared."""
    found = [off for m in certificate.models for off in m.alone.values()]
    return sum(off == 0 for off in found), len(found)


def denominators(certificate: Certificate) -> list[tuple[str, str]]:
    """Of how much the verdict speaks."""
    weights = [w for m in certificate.models for w in m.weights]
    results = [r for m in certificate.models for r in m.results]
    counts = status_counts(results)
    looked = sum(bool(w.observed) for w in weights)
    beside = same_bits(certificate)
    return [
        ("models", str(len(certificate.models))),
        ("Muon weights at full size", str(sum(m.full for m in certificate.models))),
        ("of them split by the plan", str(sum(m.split for m in certificate.models))),
        ("probed in miniature", str(len(weights))),
        ("cut observed", f"{looked} of {len(weights)}"),
        *([("with the bits of one process", f"{beside[0]} of {beside[1]}")] if beside[1] else []),
        ("checks asked for", f"{len(certificate.checks)} of {len(CHECKS)}"),
        *((status, f"{counts.get(status, 0)} of {len(results)}") for status in STATUSES),
    ]


def alike(certificate: Certificate, model: ModelResult) -> list[Alike]:
    """The findings on a model, those that say the same as one."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for result in model.results:
        for f in result.findings:
            key = (result.check, f.message, f.tail, f.planned, f.observed)
            groups.setdefault(key, []).append(f)
    found: list[Alike] = []
    for (check, *_), findings in groups.items():
        known = any(before.check == check for before in found)
        again = "" if known else again_alone(certificate, model, check)
        weights = collapsed([f.weight for f in findings])
        found.append(Alike(check, weights, len(findings), findings[0], again))
    return found


def first_failed(model: ModelResult) -> CheckResult | None:
    """The check that found something first, or None."""
    return next((r for r in model.results if r.status == "failed"), None)


def title_of(check: str) -> str:
    """What holds if a check passes; empty for one that this version does not know."""
    return CHECKS[check].title if check in CHECKS else ""


def again_alone(certificate: Certificate, model: ModelResult, check: str) -> str:
    """The command that runs one check on one model again."""
    words = [certificate.subject, "--model", model.model, "--dialect", certificate.dialect.name]
    words += ["--seed", str(certificate.seed), "--only", check]
    if model.way:
        words += ["--world-size", str(certificate.world), "--sharding", model.way]
    words += [] if certificate.isolated else ["--in-process"]
    return "muonsplit certify " + shlex.join(map(one_line, words))


def remarks(certificate: Certificate) -> list[str]:
    """What a reader should know before the verdict is taken further."""
    said: list[str] = []
    own, asked = str(certificate.described.get("dialect")), certificate.dialect.name
    with suppress(UsageError):
        if asked != own and not dialect_named(own).per_head:
            said.append(f"{own} itself keeps every weight whole; --dialect {own} holds it to that.")
    if len(certificate.checks) < len(CHECKS):
        said.append(f"Only {len(certificate.checks)} of {len(CHECKS)} checks were asked for.")
    return list(map(one_line, said))


def notes(certificate: Certificate, details: bool = False) -> list[str]:
    """What a reader should know or do next.

    Args:
        certificate: What to speak of.
        details: Whether to say how to run every failed check again, or the first.
    """
    said = remarks(certificate)
    failed = [(m, r.check) for m in certificate.models for r in m.results if r.findings]
    for model, check in failed if details else failed[:1]:
        said.append(f"Again, alone: {again_alone(certificate, model, check)}")
        said.append(one_line(f"What it means: muonsplit explain {check}"))
    return said
