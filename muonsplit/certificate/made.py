"""What a certificate is made with: the checks, the goldens, the software and the processor."""

import hashlib
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

import muonsplit.checks
import muonsplit.observe
from muonsplit.certificate.canonical import digest
from muonsplit.certificate.run import Certificate
from muonsplit.certificate.schema import Environment
from muonsplit.checks import CHECKS
from muonsplit.models.load import golden_models, golden_root

_VERSIONS = ("muonsplit", "torch", "transformers", "safetensors", "triton")


@dataclass(frozen=True, slots=True)
class Digests:
    """What the verdict rests on besides the subject, each as one SHA-256.

    Attributes:
        check_set: Ids, titles and texts of all checks, and the source of what they run.
        golden_models: The list of golden models, and the configs of those that were used.
        goldens: Every golden file.
    """

    check_set: str
    golden_models: str
    goldens: str


@dataclass(frozen=True, slots=True)
class Made:
    """What a certificate is made with.

    Attributes:
        check_set: Ids of all checks there are, asked for or not.
        digests: What the verdict rests on.
        environment: Software and processor.
    """

    check_set: tuple[str, ...]
    digests: Digests
    environment: Environment


def made(certificate: Certificate) -> Made:
    """What a certificate that is made here and now is made with."""
    return Made(
        tuple(CHECKS),
        Digests(
            check_set_digest(),
            golden_models_digest(m.model for m in certificate.models),
            _goldens(),
        ),
        environment(certificate.described["distribution"]),
    )


def environment(distribution: str) -> Environment:
    """Software and processor, here and now.

    Args:
        distribution: The subject's; empty where there is none.
    """
    return Environment(
        _versions(distribution),
        "cpu",
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
    )


@cache  # a process runs the sources it started with
def check_set_digest() -> str:
    """SHA-256 of the ids, titles and texts of all checks, and of the source of what they run."""
    said = {check.id: [check.title, check.explain] for check in CHECKS.values()}
    folders = (Path(package.__path__[0]) for package in (muonsplit.checks, muonsplit.observe))
    sources = [_digests(folder.parent, folder.glob("*.py")) for folder in folders]
    return digest([list(said), said, *sources])


def golden_models_digest(models: Iterable[str]) -> str:
    """SHA-256 of the list of golden models, and of the configs of those that are named."""
    root, known = golden_root(), golden_models()
    used = [root / "models" / name / "config.json" for name in models if name in known]
    return digest(_digests(root, [root / "models.json", *used]))


def _goldens() -> str:
    root = golden_root()
    # What waits for review is no golden.
    known = (p for p in root.rglob("*") if p.suffix != ".new" and not p.name.startswith("."))
    return digest(_digests(root, known))


def _digests(root: Path, paths: Iterable[Path]) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if path.is_file()
    }


def _versions(distribution: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in filter(None, (*_VERSIONS, distribution)):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found
