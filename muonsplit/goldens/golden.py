"""One golden file, and what differs between two contents of it."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load

# LAPACK builds differ in the last bits of float64.
_NUMERIC = 1e-11


@dataclass(frozen=True, slots=True)
class Golden:
    """One golden file.

    Attributes:
        name: ``plan/MODEL``, ``truth/MODEL``, ``numeric/DIALECT`` or ``update/MODEL``.
        path: Where it is.
        make: Computes its content anew.
        differences: What differs between two contents, line by line; nothing if they agree.
    """

    name: str
    path: Path
    make: Callable[[], bytes]
    differences: Callable[[bytes, bytes], list[str]]

    @property
    def waiting(self) -> Path:
        """Where a new content waits for review."""
        return self.path.with_name(self.path.name + ".new")


def text_differences(old: bytes, new: bytes) -> list[str]:
    """Lines that differ, as a unified diff without context."""
    before, after = old.decode().splitlines(), new.decode().splitlines()
    return list(difflib.unified_diff(before, after, "accepted", "new", lineterm="", n=0))


def tensor_differences(old: bytes, new: bytes) -> list[str]:
    """Tensors that differ by more than the last bits."""
    try:
        before, after = load(old), load(new)
    except Exception as error:
        return [f"unreadable: {error}"]
    found = [f"{key}: only on one side" for key in sorted(before.keys() ^ after.keys())]
    for key in sorted(before.keys() & after.keys()):
        one, other = before[key].double(), after[key].double()
        if one.shape != other.shape:
            found.append(f"{key}: shape {tuple(one.shape)} and {tuple(other.shape)}")
            continue
        off = float((one - other).norm() / one.norm())
        if not off <= _NUMERIC:
            found.append(f"{key}: relative difference {off:.3g}, {_NUMERIC:g} allowed")
    return found
