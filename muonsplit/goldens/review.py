"""The step that reviews a change: goldens computed anew, what differs, what is accepted."""

import os
from collections.abc import Sequence

from muonsplit.errors import GoldenError, UsageError
from muonsplit.files import write_whole
from muonsplit.goldens.golden import Golden
from muonsplit.goldens.numeric import numerics, updates
from muonsplit.goldens.recognised import plans, truths


def goldens() -> dict[str, Golden]:
    """Every golden by name."""
    return {golden.name: golden for golden in (*plans(), *truths(), *numerics(), *updates())}


def check(names: Sequence[str] = ()) -> list[str]:
    """Computes goldens anew and writes what differs beside the old.

    Args:
        names: Which; all by default.

    Returns:
        A line for each that differs, is missing, or waits for review; nothing if all is well.
    """
    problems: list[str] = []
    for golden in _chosen(names):
        try:
            new = golden.make()
        except GoldenError as error:
            problems.append(f"{golden.name}: {error}")
            continue
        old = golden.path.read_bytes() if golden.path.is_file() else None
        if old is not None and not golden.differences(old, new):
            if golden.waiting.exists():
                problems.append(f"{golden.name}: {golden.waiting.name} waits for review")
            continue
        write_whole(golden.waiting, new)
        what = "is missing" if old is None else "differs"
        problems.append(f"{golden.name}: {what}; the new value is in {golden.waiting}")
    return problems


def diff(names: Sequence[str] = ()) -> list[str]:
    """What the values that wait for review would change, line by line."""
    lines: list[str] = []
    for golden in _chosen(names):
        if golden.waiting.is_file():
            old = golden.path.read_bytes() if golden.path.is_file() else b""
            changed = golden.differences(old, golden.waiting.read_bytes())
            lines += [f"{golden.name}:", *changed]
    return lines


def accept(names: Sequence[str]) -> list[str]:
    """Puts reviewed values in place of the old.

    Returns:
        The names that were accepted.

    Raises:
        GoldenError: If nothing waits under a name.
    """
    accepted: list[str] = []
    for golden in _chosen(names):
        if not golden.waiting.is_file():
            raise GoldenError(f"{golden.name} has no new value.", "Run muonsplit golden check.")
        os.replace(golden.waiting, golden.path)
        accepted.append(golden.name)
    return accepted


def _chosen(names: Sequence[str]) -> list[Golden]:
    known = goldens()
    for name in names:
        if name not in known:
            raise UsageError(f"There is no golden {name!r}.", f"Known: {', '.join(known)}.")
    return [known[name] for name in names or known]
