"""Reading a certificate: strictly, and only if it says what its own results come to."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from muonsplit.certificate.canonical import printable
from muonsplit.certificate.differences import differences
from muonsplit.certificate.made import Digests, Made
from muonsplit.certificate.rules import broken_rules
from muonsplit.certificate.run import Certificate
from muonsplit.certificate.schema import DIGEST, Statement, strict
from muonsplit.certificate.statement import built_with, text
from muonsplit.errors import CertificateError, MuonsplitError

_LARGEST_FILE = 64 << 20
_MOST_NAMED = 10
_AROUND = 30


@dataclass(frozen=True, slots=True)
class Document:
    """A certificate as it was found; its types are right, its content is not judged yet.

    Attributes:
        path: Where it was found.
        text: What the file holds.
        raw: The same as plain values.
        certificate: The certificate.
        made: What it says it was made with.
    """

    path: Path
    text: str
    raw: dict[str, Any]
    certificate: Certificate
    made: Made


def read(path: Path) -> Certificate:
    """Reads a certificate that is whole and unedited.

    Raises:
        CertificateError: If it is not, naming where.
    """
    return sound(path).certificate


def sound(path: Path) -> Document:
    """Reads a certificate, and refuses one that is not what was written.

    Raises:
        CertificateError: Naming every problem.
    """
    document = load(path)
    if found := problems(document):
        raise CertificateError("\n  ".join([f"{path} is refused:", *found]))
    return document


def load(path: Path) -> Document:
    """Reads a certificate without judging its content.

    Raises:
        CertificateError: If it is no file, too large, no JSON, or a value has another type than the
            schema says; names the JSON path.
    """
    said = contents(path)
    try:
        raw = msgspec.json.decode(said)
        msgspec.convert(raw, strict(Statement))
        # Only now leniently: words that stand for infinity become numbers again.
        found = msgspec.convert(raw, Statement, strict=False)
    except MuonsplitError as error:  # a field of the dialect with a value it cannot have
        reason = f"{printable(error.message)} - at `$.predicate.muonsplit.dialect`"
        raise CertificateError(f"{path} is no certificate: {reason}.", error.hint) from None
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        reason = printable(str(error)).rstrip(".")
        raise CertificateError(f"{path} is no certificate: {reason}.", _hint(error)) from None
    return Document(path, said, raw, _certificate(found), _made(found))


def problems(document: Document) -> list[str]:
    """What a certificate says that does not follow from the rest of it.

    The statement is built anew from the results alone, and compared leaf by leaf.

    Returns:
        A line for each problem; nothing if it is sound.
    """
    found = [*broken_rules(document.certificate, document.made), *_edits(document)]
    named, rest = [printable(line) for line in found[:_MOST_NAMED]], len(found) - _MOST_NAMED
    return [*named, f"and {rest} more"] if rest > 0 else named


def contents(path: Path) -> str:
    """What a file of a statement holds.

    Raises:
        CertificateError: If it is no file, too large, or no text.
    """
    try:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist or is no file"
            raise CertificateError(f"{path} {what}.", "Give the certificate.json of a run.")
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise CertificateError(f"{path} is larger than {_LARGEST_FILE} bytes.")
        return content.decode()
    except UnicodeDecodeError as error:
        raise CertificateError(
            f"{path} is no certificate: byte {error.start} is no UTF-8."
        ) from None
    except OSError as error:
        raise CertificateError(f"{path} cannot be read: {error.strerror}.") from None


def _hint(error: Exception) -> str:
    if isinstance(error, msgspec.ValidationError):
        return "`muonsplit schema` prints what a certificate holds."
    return "It was cut off, or is another kind of file."


def _certificate(found: Statement) -> Certificate:
    ours = found.predicate.muonsplit
    return Certificate(
        found.subject[0].name,
        msgspec.to_builtins(ours.described),
        ours.dialect,
        ours.profile,
        ours.seed,
        ours.isolated,
        ours.world,
        ours.checks,
        ours.models,
    )


def _made(found: Statement) -> Made:
    named = {part.name: part.digest.sha256 for part in found.predicate.configuration}
    digests = Digests(*(named.get(f.name.replace("_", " "), "") for f in fields(Digests)))
    ours = found.predicate.muonsplit
    return Made(ours.check_set, digests, ours.environment)


def _edits(document: Document) -> Iterator[str]:
    built = built_with(document.certificate, document.made)
    found = sorted(differences(document.raw, built), key=lambda d: d.pointer != DIGEST)
    for where, said, follows in found:
        why = "from the rest follows" if where != DIGEST else "it was changed since; now it is"
        yield f"{where}: says {said}, {why} {follows}"
    if not found and document.text != text(built):
        yield _misspelt(document.text, text(built))


def _misspelt(said: str, canonical: str) -> str:
    """Where a text that holds the right values first leaves the canonical form."""
    pairs = enumerate(zip(said, canonical, strict=False))
    at = next((i for i, (one, other) in pairs if one != other), min(len(said), len(canonical)))
    found, expected = (
        repr(x[max(0, at - _AROUND) : at + _AROUND]) if x[at:] else "its end"
        for x in (said, canonical)
    )
    return (
        f"character {at}: the canonical form (keys sorted and each once, no spaces, one line) has "
        f"{expected}, found {found}"
    )
