"""Only attention is asked: which role the owner of a weight plays."""

import re
from functools import lru_cache
from typing import NamedTuple

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ATTENTION = frozenset({"attention", "attn", "mla", "mha", "selfattention", "crossattention"})
_REFUSED = frozenset({"indexer", "scorer", "compressor"})

# Owners with heads whose class does not say attention: how the class name ends, and the golden
# model whose truth admits it.
LINEAR_ATTENTION = {
    "GatedDeltaNet": "qwen3_next",
    "CCAProjection": "zaya",
    "xLSTMLayer": "xlstm",
}


class Role(NamedTuple):
    """Whether an owner may be asked for heads, and why.

    Attributes:
        attention: Whether it may.
        reason: Why, or why not.
        refused: Whether it stands inside attention, but selects, scores or compresses tokens.
    """

    attention: bool
    reason: str
    refused: bool = False


def class_name(module: object) -> str:
    """The class of a module, where FSDP2 or a parametrisation has made a subclass the class."""
    own = type(module).__name__
    for parent in type(module).__mro__[1:]:
        if own in (f"FSDP{parent.__name__}", f"Parametrized{parent.__name__}"):
            return parent.__name__
    return own


@lru_cache(maxsize=1024)
def _words(name: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORDS.findall(name))


def role_of(class_name: str, path: str) -> Role:
    """The role of an owner.

    A part that selects, scores or compresses tokens is refused even where its arithmetic would
    confirm: GLM-5.2's indexer has 32 × 128 rows, which is 64 × 64 by the config beside it.

    Args:
        class_name: Class of the owner.
        path: Its path in the model; a refused ancestor refuses it too.
    """
    words = _words(class_name)
    ancestors = {part.lower() for part in path.split(".")}
    for role in sorted(_REFUSED):
        if role in words or role in ancestors:
            return Role(
                False, f"{class_name} has the role of {role}, whatever its shape says", True
            )
    if words & _ATTENTION:
        return Role(True, f"{class_name} is an attention module")
    for ending, golden in LINEAR_ATTENTION.items():
        if class_name.endswith(ending):
            return Role(True, f"{class_name} has heads by the truth of {golden}")
    return Role(False, f"{class_name} is not known as an attention module")
