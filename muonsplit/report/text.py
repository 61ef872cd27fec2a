"""Strings that somebody else wrote, made fit to show."""

import re
from collections.abc import Sequence

# Control characters, what reverses or hides text, and what XML and UTF-8 cannot hold.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ufe00-\ufe0f\ufeff\ufff9-\ufffb\ud800-\udfff\ufffe\uffff\U000e0000-\U000e007f]"
)
_LAYER = re.compile(r"\.(\d+)\.")
_LONGEST = 20_000


def plain(text: str) -> str:
    """Text in which nothing acts on a terminal, hides, or reads from the right."""
    return _HARMFUL.sub("�", text.replace("\r\n", "\n"))


def clipped(text: str, longest: int = _LONGEST) -> str:
    """Text of a length that can be shown; what is left out is counted."""
    left_out = len(text) - longest
    return text if left_out <= 0 else f"{text[:longest]}… ({left_out} more characters)"


def one_line(text: str, longest: int = 1000) -> str:
    """Plain text without a line break, no longer than can be read."""
    return plain(clipped(" ".join(text.split()), longest))


def shown_shape(shape: Sequence[int]) -> str:
    """A shape as a reader writes it: ``(64, 32)``."""
    return "(" + ", ".join(map(str, shape)) + ")"


def counted(count: int, noun: str) -> str:
    """A count and its noun: ``1 weight``, ``6 weights``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def collapsed(names: Sequence[str]) -> str:
    """Names that differ only by layer number, as one: ``layers.{0,1}.q_proj.weight``."""
    layers: dict[str, list[str]] = {}
    for name in names:
        found = _LAYER.search(name)
        key = _LAYER.sub(".{}.", name, count=1)
        layers.setdefault(key, []).append(found[1] if found else "")
    return ", ".join(
        key.replace("{}", numbers[0] if len(numbers) == 1 else "{" + ",".join(numbers) + "}")
        for key, numbers in layers.items()
    )
