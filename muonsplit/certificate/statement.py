"""The certificate as an in-toto Statement, in canonical form.

Predicate https://in-toto.io/attestation/test-result/v0.1, with what is ours under ``muonsplit``.
It holds no time and no host, so two runs with one seed are equal byte by byte. Unsigned: it
vouches for its content, not for its author.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from muonsplit.certificate.canonical import canonical, digest, sayable
from muonsplit.certificate.made import Made, made
from muonsplit.certificate.run import Certificate
from muonsplit.certificate.schema import (
    DIGEST,
    OURS,
    PREDICATE,
    STATEMENT,
    Footer,
    Statement,
    Summary,
    strict,
)
from muonsplit.certificate.verdict import CheckResult, ModelResult, Verdict, verdict_of
from muonsplit.errors import CertificateError
from muonsplit.files import write_whole

RESULTS = {
    Verdict.CONFORMS: "PASSED",
    Verdict.VIOLATES: "FAILED",
    Verdict.INCONCLUSIVE: "WARNED",
}


def statement(certificate: Certificate) -> dict[str, Any]:
    """Builds the statement of a certificate that was made here and now.

    Raises:
        CertificateError: If it holds what no certificate may, such as a description that a subject
            forged.
    """
    return built_with(certificate, made(certificate))


def built_with(certificate: Certificate, made: Made) -> dict[str, Any]:
    """Builds the statement of a certificate that was made somewhere.

    Args:
        certificate: The certificate.
        made: What it was made with.

    Raises:
        CertificateError: If it holds what no certificate may.
    """
    results = [result for model in certificate.models for result in model.results]
    tests = [(f"{m.label}/{r.check}", r.status) for m in certificate.models for r in m.results]
    said = {
        "_type": STATEMENT,
        "subject": _subjects(certificate),
        "predicateType": PREDICATE,
        "predicate": {
            "result": RESULTS[verdict_of(results, made.check_set)],
            "configuration": _configuration(certificate, made),
            "passedTests": [name for name, status in tests if status == "passed"],
            "warnedTests": [name for name, status in tests if status == "undecided"],
            "failedTests": [name for name, status in tests if status == "failed"],
            "muonsplit": _ours(certificate, made, results),
        },
    }
    return sealed(said)


def sealed(said: dict[str, Any], kind: type = Statement) -> dict[str, Any]:
    """Brings every value to the type the schema gives it, and writes the digest of them all.

    Raises:
        CertificateError: If a value has another type.
    """
    try:
        typed = msgspec.convert(sayable(said), strict(kind))
    except msgspec.ValidationError as error:
        raise CertificateError(f"This run comes to no certificate: {error}.") from None
    built = msgspec.json.decode(msgspec.json.encode(typed))
    footer = built["predicate"]["muonsplit"].pop("footer")
    built["predicate"]["muonsplit"]["footer"] = {**footer, "digest": digest(built)}
    return built


def write(certificate: Certificate, directory: Path) -> Path:
    """Writes ``certificate.json``, whole or not at all.

    Returns:
        Where it was written.
    """
    target = directory / "certificate.json"
    write_whole(target, text(statement(certificate)).encode())
    return target


def text(statement: dict[str, Any]) -> str:
    """The only text that a file of a statement may hold."""
    return canonical(statement) + "\n"


def _subjects(certificate: Certificate) -> list[dict[str, Any]]:
    described = certificate.described
    files = [(certificate.subject, described["digest"]), *_files(described).items()]
    return [_resource(name, found) for name, found in files]


def _files(described: dict[str, Any]) -> dict[str, str]:
    return dict(sorted(described.get("files", {}).items()))


def _configuration(certificate: Certificate, made: Made) -> list[dict[str, Any]]:
    dialect = asdict(certificate.dialect)
    of_dialect = digest({"split": dialect["split"], "arithmetic": dialect["arithmetic"]})
    parts = {name.replace("_", " "): found for name, found in asdict(made.digests).items()}
    parts[f"dialect {certificate.dialect.name}"] = of_dialect
    return [_resource(name, found) for name, found in parts.items()]


def _resource(name: str, sha256: str) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": sha256}}


def _ours(certificate: Certificate, made: Made, results: Sequence[CheckResult]) -> dict[str, Any]:
    return {
        "format": 1,
        "verdict": str(verdict_of(results, made.check_set)),
        "described": {**certificate.described, "files": _files(certificate.described)},
        "dialect": asdict(certificate.dialect),
        "profile": certificate.profile,
        "seed": certificate.seed,
        "isolated": certificate.isolated,
        "world": certificate.world,
        "check_set": made.check_set,
        "checks": certificate.checks,
        "environment": asdict(made.environment),
        "summary": [asdict(_summary(model, made.check_set)) for model in certificate.models],
        "models": [asdict(model) for model in certificate.models],
        "volatile": _volatile(certificate.models),
        "footer": asdict(_footer(certificate, results)),
    }


def _summary(model: ModelResult, check_set: Sequence[str]) -> Summary:
    counts = Counter(result.status for result in model.results)
    return Summary(
        model=model.label,
        verdict=str(verdict_of(model.results, check_set)),  # pyright: ignore[reportArgumentType]
        checks=len(check_set),
        ran=counts["passed"] + counts["failed"] + counts["undecided"],
        passed=counts["passed"],
        failed=counts["failed"],
        undecided=counts["undecided"],
        skipped=counts["skipped"],
    )


def _volatile(models: Sequence[ModelResult]) -> list[str]:
    """What two runs with one seed may differ in on two machines: what was measured, and on what."""
    found = [f"{OURS}/environment", DIGEST]
    for m, model in enumerate(models):
        found += [f"{OURS}/models/{m}/spectra", f"{OURS}/models/{m}/floor"]
        found += [f"{OURS}/models/{m}/alone"] if model.alone else []
        found += [
            f"{OURS}/models/{m}/results/{r}/findings/{f}/numbers"
            for r, result in enumerate(model.results)
            for f, finding in enumerate(result.findings)
            if finding.numbers
        ]
    return found


def _footer(certificate: Certificate, results: Sequence[CheckResult]) -> Footer:
    findings = sum(len(result.findings) for result in results)
    return Footer(len(certificate.models), len(results), findings, digest="")
