"""PATH → checkpoint: which format it is, and under which prefix the model's names are in it."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from muonsplit.errors import EvidenceError
from muonsplit.evidence import distcp, tensors, zero
from muonsplit.evidence.saved import Entry, Saved

_PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_EXPECTED = (
    "Give a .safetensors file, a folder of them, or a folder that torch.distributed.checkpoint or "
    "DeepSpeed wrote."
)
# Where a parameter's name may begin inside a longer one.
_BOUNDARY = re.compile(r"\W")


def opened(path: Path, *, trust_pickles: bool = False) -> Saved:
    """Opens a checkpoint, reading only what describes it.

    Args:
        path: A safetensors file or its index, or a folder of safetensors files, of
            ``torch.distributed.checkpoint`` or of DeepSpeed.
        trust_pickles: Whether whoever made it may run code here. Only DeepSpeed's own converter
            needs that; a folder that holds both then counts as DeepSpeed's, whose weights are the
            master copies in float32.

    Raises:
        EvidenceError: If it is missing, no checkpoint, damaged, or pickled.
    """
    try:
        if path.is_dir():
            return _folder(path, trust_pickles)
        if path.is_file():
            return _file(path)
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{path} cannot be read: {error}.") from error
    raise EvidenceError(f"There is no checkpoint at {path}.", _EXPECTED)


def prefix_of(names: Iterable[str], wanted: Iterable[str]) -> str:
    """What stands before the model's names in a checkpoint.

    Args:
        names: All names in the checkpoint.
        wanted: Names of the model's parameters.

    Returns:
        The prefix under which most of ``wanted`` are found, such as ``""`` or ``"app.model."``.

    Raises:
        EvidenceError: If none is found, or as many under several prefixes.
    """
    asked = set(wanted)
    found: Counter[str] = Counter()
    for name in set(names):
        starts = (0, *(match.end() for match in _BOUNDARY.finditer(name)))
        found.update(name[:start] for start in starts if name[start:] in asked)
    if not found:
        shown = ", ".join(sorted(asked)[:3])
        raise EvidenceError(
            f"None of the model's {len(asked)} parameters is in the checkpoint: {shown}, …",
            "Give the config of the model that was trained.",
        )
    most = max(found.values())
    best = sorted(prefix for prefix, count in found.items() if count == most)
    if len(best) > 1:
        raise EvidenceError(
            f"{most} of the model's {len(asked)} parameters are in the checkpoint under each of "
            f"{', '.join(map(repr, best[:5]))}.",
            "Say which of them was trained.",
        )
    return best[0]


def under(saved: Saved, prefix: str) -> Saved:
    """The part of a checkpoint whose names begin with a prefix, without it."""
    return _Under(saved, prefix) if prefix else saved


class _Under:
    def __init__(self, saved: Saved, prefix: str) -> None:
        self._saved = saved
        self._prefix = prefix
        self.path = saved.path
        self.step = saved.step
        self.entries: Mapping[str, Entry] = {
            name.removeprefix(prefix): entry
            for name, entry in saved.entries.items()
            if name.startswith(prefix)
        }

    def read(self, name: str) -> Tensor:
        tensors.entry_of(self, name)
        return self._saved.read(self._prefix + name)


def _folder(path: Path, trust_pickles: bool) -> Saved:
    names = sorted(entry.name for entry in path.iterdir())
    _refuse_capture(path)
    if trust_pickles and (states := zero.states(path)):
        return zero.Zero(path, states)
    indices = [name for name in names if name.endswith(tensors.INDEX)]
    if len(indices) > 1:
        raise EvidenceError(
            f"{path} has several indices: {', '.join(indices[:5])}.",
            "Give the one that is meant as the path.",
        )
    if indices:
        return tensors.from_index(path / indices[0])
    if distcp.INDEX in names:
        return distcp.Distributed(path)
    files = [path / name for name in names if name.endswith(tensors.SUFFIX)]
    if files:
        return tensors.Safetensors(path, files)
    raise _nothing(path, names)


def _file(path: Path) -> Saved:
    if path.name.endswith(tensors.INDEX):
        return tensors.from_index(path)
    if path.suffix == tensors.SUFFIX:
        return tensors.Safetensors(path, [path])
    if path.suffix in _PICKLED:
        raise _pickled(path)
    if path.suffix == ".distcp" or path.name == distcp.INDEX:
        raise EvidenceError(
            f"{path} is one file of a distributed checkpoint.", f"Give its folder, {path.parent}."
        )
    raise EvidenceError(f"{path} is no checkpoint that can be read here.", _EXPECTED)


def _refuse_capture(path: Path) -> None:
    if any(path.glob("rank-*-of-*.json")):
        raise EvidenceError(
            f"{path} is a capture, which holds a step's before and after together.",
            f"Give it alone: muonsplit audit {path}.",
        )


def _nothing(path: Path, names: list[str]) -> EvidenceError:
    if states := zero.states(path):
        return zero.refusal(path, states)
    if any(name.endswith(".distcp") or re.fullmatch(r"__\d+\.metadata", name) for name in names):
        return EvidenceError(
            f"{path} has files of a distributed checkpoint, but no {distcp.INDEX}, which is "
            "written last.",
            "The save did not end, or was not copied whole; give another step.",
        )
    pickled = [name for name in names if Path(name).suffix in _PICKLED]
    if pickled:
        return _pickled(path / pickled[0])
    shown = f"has {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else "is empty"
    return EvidenceError(f"There is no checkpoint in {path}, which {shown}.", _EXPECTED)


def _pickled(path: Path) -> EvidenceError:
    return EvidenceError(
        f"{path} is a pickled file; loading one runs what its author wrote, so it was not loaded.",
        "Where the run was made, save the weights by safetensors.torch.save_file, and give that.",
    )
