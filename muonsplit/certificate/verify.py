"""Verifying a certificate: is it whole, what does it vouch for, and does it happen again?"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from muonsplit.certificate.canonical import printable
from muonsplit.certificate.differences import differences
from muonsplit.certificate.made import made
from muonsplit.certificate.read import Document, load, problems
from muonsplit.certificate.run import Certificate, Progress, Question, certify
from muonsplit.certificate.schema import DIGEST
from muonsplit.certificate.statement import statement
from muonsplit.dialect import dialect_named
from muonsplit.errors import CertificateError, UsageError
from muonsplit.subjects.ranks import driver_for


def verify(path: Path) -> list[str]:
    """Judges whether a certificate is what was written, and says what its results come to.

    Returns:
        A line for each problem; nothing if it is sound.
    """
    try:
        return problems(load(path))
    except CertificateError as error:
        return [error.message]


def vouched(document: Document) -> list[tuple[str, str]]:
    """What a sound certificate vouches for, as rows of a name and a value."""
    certificate, ours = document.certificate, document.raw["predicate"]["muonsplit"]
    version = f"{certificate.described['distribution']} {certificate.described['version']}".strip()
    isolated = "in its own process" if certificate.isolated else "inside the harness's process"
    if certificate.world > 1:
        isolated = f"on {certificate.world} ranks, each in its own process"
    rows = [
        ("subject", f"{certificate.subject} ({version or 'of no distribution'}), {isolated}"),
        ("dialect", certificate.dialect.name),
        ("verdict", ours["verdict"]),
        ("asked", f"profile {certificate.profile}, seed {certificate.seed}"),
    ]
    for model, counts in zip(certificate.models, ours["summary"], strict=True):
        ended = ", ".join(f"{counts[x]} {x}" for x in ("passed", "failed", "undecided", "skipped"))
        ran = f"{counts['ran']} of {counts['checks']} checks ran ({ended})"
        split = f"{model.split} of {model.full} Muon weights split"
        rows.append((model.label, f"{counts['verdict']}: {ran}; {split}"))
    return rows


def notes(document: Document) -> list[str]:
    """In what a certificate was made otherwise than it would be here; no reason to refuse it."""
    said = ["It is unsigned: it vouches for its content, not for its author."]
    here, certificate = made(document.certificate), document.certificate
    digests = asdict(here.digests)
    other = [
        name for name, there in asdict(document.made.digests).items() if there != digests[name]
    ]
    if other:
        named = ", ".join(name.replace("_", " ") for name in other)
        said.append(f"Made with what differs from this installation's: {named}.")
    try:
        known = dialect_named(certificate.dialect.name) == certificate.dialect
    except UsageError:
        known = False
    if not known:
        said.append(f"This installation has no dialect {certificate.dialect.name} like that one.")
    there = asdict(document.made.environment)
    said += [
        f"Made elsewhere: {pointer[1:]} was {one}, is {other} here."
        for pointer, one, other in differences(there, asdict(here.environment))
    ]
    return [printable(line) for line in said]


def replayed(document: Document, progress: Progress) -> Iterator[str]:
    """Certifies again as a certificate says, and compares.

    On the same software and processor every byte must come out again; elsewhere the fields that
    the certificate lists as volatile may differ.

    Returns:
        A line for each difference; nothing if it happens again.

    Raises:
        MuonsplitError: If the subject, a model, the dialect or a check is not found.
    """
    certificate = document.certificate
    in_process = not certificate.isolated
    with driver_for(certificate.subject, certificate.world, in_process=in_process) as driver:
        now, then = driver.describe()["digest"], certificate.described["digest"]
        if now != then:
            yield f"The subject's file has changed since: its digest was {then}, is {now}."
        again = statement(certify(driver, _question(certificate, progress)))
    ours = document.raw["predicate"]["muonsplit"]
    elsewhere = again["predicate"]["muonsplit"]["environment"] != ours["environment"]
    # The digest differs where anything does.
    volatile = ours["volatile"] if elsewhere else [DIGEST]
    for pointer, then, now in differences(document.raw, again):
        if not any(pointer == v or pointer.startswith(f"{v}/") for v in volatile):
            yield printable(f"{pointer}: was {then}, is {now}")


def _question(certificate: Certificate, progress: Progress) -> Question:
    return Question(
        models=[model.model for model in certificate.models],
        ways=list(dict.fromkeys(model.way for model in certificate.models if model.way)),
        dialect=certificate.dialect.name,
        profile=certificate.profile,
        seed=certificate.seed,
        only=certificate.checks,
        progress=progress,
    )
