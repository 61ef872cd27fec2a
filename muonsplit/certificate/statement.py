"""The certificate as an in-toto Statement, in canonical form.

Predicate https://in-toto.io/attestation/test-result/v0.1, with what is ours under ``muonsplit``.
It holds no time and no host, so two runs with one seed are equal byte by byte. Unsigned: it
vouches for its content, not for its author.
"""

import hashlib
import json
import math
import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from muonsplit.certificate.run import Certificate
from muonsplit.certificate.verdict import CheckResult, ModelResult, Verdict
from muonsplit.checks import CHECKS
from muonsplit.dialect import Dialect
from muonsplit.files import write_whole
from muonsplit.models.load import golden_root

_RESULT = {
    Verdict.CONFORMS: "PASSED",
    Verdict.VIOLATES: "FAILED",
    Verdict.INCONCLUSIVE: "WARNED",
}
_VERSIONS = ("muonsplit", "torch", "transformers", "safetensors")


def statement(certificate: Certificate) -> dict[str, Any]:
    """Builds the statement."""
    tests = [(m.model, r) for m in certificate.models for r in m.results]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {
                "name": certificate.subject,
                "digest": {"sha256": certificate.described["digest"]},
            }
        ],
        "predicateType": "https://in-toto.io/attestation/test-result/v0.1",
        "predicate": {
            "result": _RESULT[certificate.verdict],
            "configuration": _configuration(certificate),
            "passedTests": _named(tests, "passed"),
            "warnedTests": _named(tests, "undecided"),
            "failedTests": _named(tests, "failed"),
            "muonsplit": _ours(certificate),
        },
    }


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces; equal values give equal text."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest(value: Any) -> str:
    """SHA-256 of the canonical form."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def write(certificate: Certificate, directory: Path) -> Path:
    """Writes ``certificate.json``, whole or not at all.

    Returns:
        Where it was written.
    """
    target = directory / "certificate.json"
    write_whole(target, (canonical(statement(certificate)) + "\n").encode())
    return target


def _named(tests: list[tuple[str, CheckResult]], status: str) -> list[str]:
    return [f"{model}/{result.check}" for model, result in tests if result.status == status]


def _configuration(certificate: Certificate) -> list[dict[str, Any]]:
    explained = {check.id: check.explain for check in CHECKS.values()}
    parts = {
        "checks": digest(explained),
        f"dialect {certificate.dialect.name}": digest(_dialect(certificate.dialect)),
        "golden models": hashlib.sha256((golden_root() / "models.json").read_bytes()).hexdigest(),
    }
    return [{"name": name, "digest": {"sha256": value}} for name, value in parts.items()]


def _dialect(dialect: Dialect) -> dict[str, Any]:
    return {"split": asdict(dialect.split), "arithmetic": asdict(dialect.arithmetic)}


def _ours(certificate: Certificate) -> dict[str, Any]:
    return {
        "verdict": str(certificate.verdict),
        "dialect": {"name": certificate.dialect.name, **_dialect(certificate.dialect)},
        "described": certificate.described,
        "device": "cpu",
        "machine": platform.machine(),
        "versions": _versions(),
        "seed": certificate.seed,
        "isolated": certificate.isolated,
        "checks": list(certificate.checks),
        "models": [_model(model) for model in certificate.models],
    }


def _model(model: ModelResult) -> dict[str, Any]:
    counts = {
        status: sum(result.status == status for result in model.results)
        for status in ("passed", "failed", "skipped", "undecided")
    }
    results = [_result(result) for result in model.results]
    return {
        "name": model.model,
        "verdict": str(model.verdict),
        "full": model.full,
        "split": model.split,
        "weights": [asdict(weight) for weight in model.weights],
        "counts": counts,
        "results": results,
    }


def _result(result: CheckResult) -> dict[str, Any]:
    values = asdict(result)
    for finding in values["findings"]:
        # JSON has no infinity; an update that does not move is infinitely far off.
        finding["numbers"] = {
            name: number if math.isfinite(number) else str(number)
            for name, number in finding["numbers"].items()
        }
    return values


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch threads": str(torch.get_num_threads())}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found
