"""Connection strings → factories.

``builtin:reference``, ``torch``, ``deepspeed:stage=1``, ``package.module:factory``,
``file:path.py:factory`` and ``faulty:NAME``.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from muonsplit.errors import SubjectError
from muonsplit.subjects.protocol import SubjectInfo, info_of

# Adapters by name, with the distribution whose version goes on the certificate.
ADAPTERS = {
    "builtin": ("muonsplit.subjects.builtin", "muonsplit"),
    "faulty": ("muonsplit.faulty", "muonsplit"),
    "torch": ("muonsplit.subjects.torch", "torch"),
    "deepspeed": ("muonsplit.subjects.deepspeed", "deepspeed"),
    "dion": ("muonsplit.subjects.dion", "dion"),
    "gram-newton-schulz": ("muonsplit.subjects.gram_newton_schulz", "gram-newton-schulz"),
    "emerging-optimizers": ("muonsplit.subjects.emerging_optimizers", "emerging-optimizers"),
    "optimuon": ("muonsplit.subjects.optimuon", "optimuon"),
    "muonium": ("muonsplit.subjects.muonium", "muonium"),
    "dtensor-muon": ("muonsplit.subjects.dtensor_muon", "dtensor-muon"),
    "muon-optimizer": ("muonsplit.subjects.muon_optimizer", "muon-optimizer"),
    "muon-fsdp2": ("muonsplit.subjects.muon_fsdp2", "muon-fsdp2"),
    "pytorch-optimizer": ("muonsplit.subjects.pytorch_optimizer", "pytorch-optimizer"),
    "heavyball": ("muonsplit.subjects.heavyball", "heavyball"),
}
_FORMS = (
    "builtin:reference, builtin:fast, builtin:triton, a name of muonsplit list subjects with "
    "[:option=value,…], package.module:factory or file:path.py:factory"
)


@dataclass(frozen=True, slots=True)
class Connection:
    """A factory that was found, and what it declares.

    Attributes:
        factory: Called with the model; see :func:`muonsplit.subjects.protocol.subject`.
        info: Its declaration.
        distribution: Distribution it comes from, or an empty string.
        options: Options of the connection string.
    """

    factory: Callable[..., Any]
    info: SubjectInfo
    distribution: str = ""
    options: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """SHA-256 of the file that defines the factory."""
        path = inspect.getsourcefile(inspect.unwrap(self.factory))
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


def connect(spec: str, root: Path) -> Connection:
    """Finds the factory that a connection string names.

    Args:
        spec: The connection string.
        root: Folder that files and modules are looked for in.

    Raises:
        SubjectError: If the string has no known form, or the factory cannot be imported, is
            missing, or declares nothing.
    """
    head, _, rest = spec.partition(":")
    if head in ADAPTERS:
        module, distribution = ADAPTERS[head]
        by_name = head in ("builtin", "faulty")
        if (by_name and not rest) or (spec.endswith(":") and not by_name):
            raise SubjectError(f"{spec!r} stops at its colon.", f"Use {_FORMS}.")
        name, options = (rest, {}) if by_name else ("build", _options(spec, rest))
        return _declared(_import(module, spec), name, spec, distribution, options)
    if head == "file":
        path, colon, name = rest.rpartition(":")
        if not colon:
            raise SubjectError(f"{spec!r} names no factory.", "Use file:path.py:factory.")
        return _declared(_load(root / path, spec), name, spec)
    if not rest or not all(part.isidentifier() for part in head.split(".")):
        raise SubjectError(f"{spec!r} names no subject.", f"Use {_FORMS}.")
    # Last, so that a module of yours is found but shadows no library.
    sys.path.append(str(root))
    return _declared(_import(head, spec), rest, spec, head.partition(".")[0])


def _options(spec: str, text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if not all(key and equals and value for key, equals, value in pairs):
        raise SubjectError(f"The options of {spec!r} are not of the form key=value,key=value.")
    return {key: value for key, _, value in pairs}


def _import(module: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise SubjectError(
            f"The subject {spec!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _load(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise SubjectError(f"The subject {spec!r} names no file: {path} does not exist.")
    # A name of our own: a file called torch.py must not become the module torch.
    loading = importlib.util.spec_from_file_location(f"muonsplit_subject_{path.stem}", path)
    if loading is None or loading.loader is None:
        raise SubjectError(f"The subject {spec!r} is no Python file.")
    module = importlib.util.module_from_spec(loading)
    sys.modules[loading.name] = module
    try:
        loading.loader.exec_module(module)
    except Exception as error:
        raise SubjectError(
            f"The subject {spec!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return module


def _declared(
    module: ModuleType,
    name: str,
    spec: str,
    distribution: str = "",
    options: dict[str, str] | None = None,
) -> Connection:
    factory = getattr(module, name.replace("-", "_"), None)
    if not callable(factory):
        raise SubjectError(f"The subject {spec!r}: {module.__name__} has no factory {name!r}.")
    info = info_of(factory)
    if info is None:
        raise SubjectError(
            f"The factory of {spec!r} declares nothing.",
            "Decorate it with @muonsplit.subject(dialect=…, recognises=…).",
        )
    _check_parameters(factory, info, spec, options or {})
    return Connection(factory, info, distribution, options or {})


def _check_parameters(
    factory: Callable[..., Any], info: SubjectInfo, spec: str, options: Mapping[str, str]
) -> None:
    parameters = inspect.signature(factory).parameters
    if info.recognises and "layouts" in parameters:
        raise SubjectError(
            f"The factory of {spec!r} is declared to find the heads itself, and takes layouts.",
            "Declare recognises=False, or drop the parameter.",
        )
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [] if takes_any else [name for name in options if name not in parameters]
    if unknown:
        raise SubjectError(f"The subject {spec!r} takes no option {unknown[0]!r}.")
