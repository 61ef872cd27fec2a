"""What an audit that was stopped knows already."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from muonsplit.errors import EvidenceError

T = TypeVar("T")


class State:
    """Answers by kind and name, one line each in a file; nowhere without one.

    Args:
        path: The file; None keeps nothing.
        key: What the answers depend on. A file of another key is refused.

    Raises:
        EvidenceError: If the file is of another question, or none of this kind.
    """

    def __init__(self, path: Path | None = None, key: str = "") -> None:
        self._path = path
        self._known: dict[tuple[str, str], str] = {}
        if path is None:
            return
        if path.exists():
            self._load(path, key)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"muonsplit audit": key}) + "\n")

    def _load(self, path: Path, key: str) -> None:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        try:
            begun = json.loads(lines[0]).get("muonsplit audit") if lines else None
        except (ValueError, AttributeError):
            begun = None
        if begun != key:
            raise EvidenceError(
                f"{path} is not the state of this audit.", "Give another file, or delete it."
            )
        whole = [line for line in lines[1:] if line.endswith("\n")]  # the last may be cut short
        for line in whole:
            try:
                kind, name, value = json.loads(line)
            except ValueError:
                continue
            self._known[kind, name] = json.dumps(value)

    def once(self, kind: str, name: str, type_: type[T], make: Callable[[], T]) -> T:
        """What is known, or what is made now and then known.

        Args:
            kind: What sort of answer.
            name: The weight.
            type_: Its type, which msgspec reads and writes.
            make: Makes it.
        """
        if self._path is None:
            return make()
        import msgspec

        if (kind, name) in self._known:
            try:
                return msgspec.json.decode(self._known[kind, name], type=type_, strict=False)
            except msgspec.MsgspecError:
                pass  # written by another version: made again
        made = make()
        said = msgspec.json.encode(made).decode()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"[{json.dumps(kind)},{json.dumps(name)},{said}]\n")
        return made
