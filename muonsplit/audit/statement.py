"""An audit as an in-toto Statement: the same form as a certificate, and marked as another kind."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from muonsplit.audit.result import Audit
from muonsplit.certificate.canonical import digest, printable
from muonsplit.certificate.made import environment
from muonsplit.certificate.read import contents
from muonsplit.certificate.schema import (
    PREDICATE,
    STATEMENT,
    DigestSet,
    Environment,
    OfTestResult,
    Resource,
    TestResult,
    strict,
)
from muonsplit.certificate.statement import RESULTS, sealed, text
from muonsplit.errors import CertificateError, MuonsplitError
from muonsplit.files import write_whole


@dataclass(frozen=True, slots=True)
class Footer:
    """How much an audit holds, and the digest of all of it but this footer."""

    weights: int
    digest: str


@dataclass(frozen=True, slots=True)
class Ours:
    """The part of the predicate that in-toto does not define."""

    format: Literal[1]
    kind: Literal["evidence from a run"]
    verdict: Literal["conforms", "violates", "inconclusive"]
    audit: Audit
    environment: Environment
    footer: Footer


@dataclass(frozen=True, slots=True)
class Predicate(TestResult):
    """A test result as in-toto defines it."""

    muonsplit: Ours


@dataclass(frozen=True, slots=True)
class AuditStatement(OfTestResult):
    """An audit: an in-toto Statement about two checkpoints of a run."""

    predicate: Predicate


def statement(audit: Audit) -> dict[str, Any]:
    """Builds the statement of an audit that was made here and now."""
    return _built(audit, environment(""))


def write(audit: Audit, directory: Path) -> Path:
    """Writes ``certificate.json``, whole or not at all.

    Returns:
        Where it was written.
    """
    target = directory / "certificate.json"
    write_whole(target, text(statement(audit)).encode())
    return target


def is_audit(path: Path) -> bool:
    """Whether a file looks like an audit, as opposed to a certificate or anything else."""
    try:
        said = msgspec.json.decode(contents(path))
        return said["predicate"]["muonsplit"]["kind"] == "evidence from a run"
    except (
        MuonsplitError,
        msgspec.MsgspecError,
        RecursionError,
        LookupError,
        TypeError,
        ValueError,
    ):
        return False


def sound(path: Path) -> Audit:
    """Reads an audit, and refuses one that is not what was written.

    Raises:
        CertificateError: If it is no audit, or does not say what its own weights come to.
    """
    said = contents(path)
    try:
        raw = msgspec.json.decode(said)
        msgspec.convert(raw, strict(AuditStatement))
        found = msgspec.convert(raw, AuditStatement, strict=False).predicate.muonsplit
    except MuonsplitError as error:
        raise CertificateError(f"{path} is no audit: {printable(error.message)}.") from None
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise CertificateError(f"{path} is no audit: {printable(str(error))}.") from None
    if text(_built(found.audit, found.environment)) != said:
        raise CertificateError(
            f"{path} is refused: it does not say what its own weights come to, or was edited."
        )
    return found.audit


def _built(audit: Audit, made_with: Environment) -> dict[str, Any]:
    named = {
        outcome: [w.weight for w in audit.weights if w.outcome in outcomes]
        for outcome, outcomes in {
            "passedTests": ("as planned",),
            "warnedTests": ("undecided", "unread"),
            "failedTests": ("otherwise",),
        }.items()
    }
    dialect = asdict(audit.dialect)
    of_dialect = digest({"split": dialect["split"], "arithmetic": dialect["arithmetic"]})
    configuration = {f"model {audit.model}": audit.config, audit.dialect.name: of_dialect}
    subjects = {"before": audit.evidence.before, "after": audit.evidence.after}
    said = {
        "_type": STATEMENT,
        "subject": _resources(subjects),
        "predicateType": PREDICATE,
        "predicate": {
            "result": RESULTS[audit.verdict],
            "configuration": _resources(configuration),
            **named,
            "muonsplit": {
                "format": 1,
                "kind": "evidence from a run",
                "verdict": str(audit.verdict),
                "audit": asdict(audit),
                "environment": asdict(made_with),
                "footer": asdict(Footer(len(audit.weights), "")),
            },
        },
    }
    return sealed(said, AuditStatement)


def _resources(digests: dict[str, str]) -> list[dict[str, Any]]:
    return [asdict(Resource(name, DigestSet(found))) for name, found in digests.items()]
