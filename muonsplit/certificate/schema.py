"""The form of a certificate: an in-toto Statement, field by field.

Plain dataclasses say what it holds; :func:`strict` makes of them the types that msgspec decodes
with and that the published JSON Schema is generated from, so there is one source for all three.
"""

import json
from dataclasses import dataclass, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from muonsplit.certificate.run import Profile
from muonsplit.certificate.verdict import ModelResult
from muonsplit.dialect import Dialect

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"
# Where our part of the predicate is, as a JSON Pointer.
OURS = "/predicate/muonsplit"
DIGEST = f"{OURS}/footer/digest"

# Infinity and not-a-number, which JSON has no numbers for, as Python spells them.
_Number = float | Literal["inf", "-inf", "nan"]
_Count = Annotated[int, Meta(ge=0)]
# Empty where a subject has no file of its own.
_Sha256 = Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]


@dataclass(frozen=True, slots=True)
class DigestSet:
    """Digests of one content by algorithm."""

    sha256: _Sha256


@dataclass(frozen=True, slots=True)
class Resource:
    """Something by name and digest; in-toto's ResourceDescriptor."""

    name: str
    digest: DigestSet


@dataclass(frozen=True, slots=True)
class Described:
    """What a subject declares of itself, its version, and digests of its files."""

    dialect: str
    recognises: bool
    models: tuple[str, ...]
    given: dict[str, str]
    off: dict[str, str]
    options: dict[str, tuple[str, ...]]
    ways: tuple[str, ...]
    takes: tuple[str, ...]
    distribution: str
    version: str
    digest: _Sha256
    files: dict[str, _Sha256]


@dataclass(frozen=True, slots=True)
class Environment:
    """What a certificate was made with: distributions by version, and the processor."""

    versions: dict[str, str]
    device: str
    machine: str
    cpu_capability: str
    threads: _Count


@dataclass(frozen=True, slots=True)
class Summary:
    """How many of all checks ran on one model, and what they came to."""

    model: str
    verdict: Literal["conforms", "violates", "inconclusive"]
    checks: _Count
    ran: _Count
    passed: _Count
    failed: _Count
    undecided: _Count
    skipped: _Count


@dataclass(frozen=True, slots=True)
class Footer:
    """How much a certificate holds, and the digest of all of it but this footer."""

    models: _Count
    results: _Count
    findings: _Count
    digest: _Sha256


@dataclass(frozen=True, slots=True)
class Ours:
    """The part of the predicate that in-toto does not define."""

    format: Literal[1]
    verdict: Literal["conforms", "violates", "inconclusive"]
    described: Described
    dialect: Dialect
    profile: Profile
    seed: int
    isolated: bool
    world: Annotated[int, Meta(ge=1)]
    check_set: tuple[str, ...]
    checks: tuple[str, ...]
    environment: Environment
    summary: tuple[Summary, ...]
    models: tuple[ModelResult, ...]
    volatile: tuple[str, ...]
    footer: Footer


@dataclass(frozen=True, slots=True)
class TestResult:
    """What in-toto defines of a test result's predicate."""

    result: Literal["PASSED", "WARNED", "FAILED"]
    configuration: tuple[Resource, ...]
    passedTests: tuple[str, ...]  # noqa: N815 - in-toto's name
    warnedTests: tuple[str, ...]  # noqa: N815
    failedTests: tuple[str, ...]  # noqa: N815


@dataclass(frozen=True, slots=True)
class OfTestResult:
    """What in-toto defines of a Statement whose predicate is a test result."""

    _type: Literal["https://in-toto.io/Statement/v1"]
    subject: Annotated[tuple[Resource, ...], Meta(min_length=1)]
    predicateType: Literal["https://in-toto.io/attestation/test-result/v0.1"]  # noqa: N815


@dataclass(frozen=True, slots=True)
class Predicate(TestResult):
    """A test result as in-toto defines it."""

    muonsplit: Ours


@dataclass(frozen=True, slots=True)
class Statement(OfTestResult):
    """A certificate: an in-toto Statement about a subject of muonsplit."""

    predicate: Predicate


@cache
def strict(kind: Any) -> Any:
    """The type that msgspec decodes a type's JSON with.

    Args:
        kind: A dataclass, or the type of one's field.

    Returns:
        For a dataclass a Struct of its fields, all of them required and no other known. A float
        may be one of the words that stand for infinity and not-a-number.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True).items()
        known = [(name, strict(hint)) for name, hint in hints]
        said = {"__doc__": (kind.__doc__ or "").partition("\n")[0]}
        return msgspec.defstruct(
            kind.__name__, known, namespace=said, frozen=True, forbid_unknown_fields=True
        )
    if kind is float:
        return _Number
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return Annotated[strict(parts[0]), *parts[1:]]
    if origin in (None, Literal):
        return kind
    inner = tuple(map(strict, parts))
    return Union[inner] if origin in (Union, UnionType) else origin[inner]  # noqa: UP007


def schema(of: Any = Statement, title: str = "muonsplit certificate") -> str:
    """The JSON Schema (2020-12) of a certificate, as it is published.

    Args:
        of: The dataclass of the form.
        title: What it is called.
    """
    made = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **msgspec.json.schema(strict(of)),
    }
    return json.dumps(made, indent=1, sort_keys=True)
