"""Sources: where each field of a dialect was read, one text for many fields."""

from dataclasses import fields

from muonsplit.dialect.arithmetic import Arithmetic
from muonsplit.dialect.rules import SplitRule

MOMENTUM = ("momentum", "nesterov", "beta", "buffer_dtype", "step_dtype")
SCALE = ("scale", "extra_scale", "scale_on", "scale_per")
ARITHMETIC = tuple(f.name for f in fields(Arithmetic) if f.name != "halves")
SPLIT = tuple(f.name for f in fields(SplitRule))

WHOLE = SplitRule(heads_per_block=None)

_HALVES = "how this harness computes half precision on a CPU; no choice of the framework's"


def cite(*texts: tuple[tuple[str, ...] | str, str]) -> dict[str, str]:
    """Fields, or a field, with the text that says where they were read; later texts come first."""
    sources = {"halves": _HALVES}
    for names, text in texts:
        sources |= dict.fromkeys((names,) if isinstance(names, str) else names, text)
    return sources
