"""What an audit that was stopped knows already."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from muonsplit.errors import EvidenceError
from muonsplit.files import write_whole

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
        try:
            if path.exists():
                self._load(path, key)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({"muonsplit audit": key}) + "\n")
        except OSError as error:
            raise EvidenceError(
                f"No state can be kept at {path}: {error.strerror}.", "Give another file."
            ) from None

    def _load(self, path: Path, key: str) -> None:
        *lines, rest = path.read_bytes().split(b"\n")
        if not lines or _parsed(lines[0]) != {"muonsplit audit": key}:
            raise EvidenceError(
                f"{path} is not the state of this audit.", "Give another file, or delete it."
            )
        for line in lines[1:]:
            match _parsed(line):
                case [str(kind), str(name), value]:
                    self._known[kind, name] = json.dumps(value)
                case _:
                    pass
        if rest:  # cut short: what is written next must not be joined to it
            write_whole(path, b"\n".join([*lines, b""]))

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


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
