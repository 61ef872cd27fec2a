"""The registry of dialects, and how one is named on a command line."""

from collections.abc import Mapping
from dataclasses import fields, replace

from muonsplit.dialect.frameworks import FRAMEWORKS
from muonsplit.dialect.options import parse
from muonsplit.dialect.plain import PLAIN
from muonsplit.dialect.reports import REPORTS
from muonsplit.dialect.rules import PER_HEAD, Dialect, SplitRule
from muonsplit.errors import UsageError

DIALECTS: Mapping[str, Dialect] = {d.name: d for d in (*PLAIN, *FRAMEWORKS, *REPORTS)}

DEFAULT_DIALECT = "deepspeed-0.19.8"


def dialect_named(name: str) -> Dialect:
    """Looks a dialect up.

    ``NAME:heads_per_block=2,nesterov=false`` sets fields of its split rule and its arithmetic, and
    ``NAME+per-head`` asks a whole-matrix dialect's arithmetic per head.

    Raises:
        UsageError: If there is no such dialect, no such option, or it has no such value.
    """
    if name.endswith(PER_HEAD):
        return dialect_named(name.removesuffix(PER_HEAD)).asked_per_head()
    base, colon, option = name.partition(":")
    if base not in DIALECTS:
        raise UsageError(f"There is no dialect {base!r}.", f"Known: {', '.join(DIALECTS)}.")
    dialect = DIALECTS[base]
    if not colon:
        return dialect
    asked = parse(option)
    split = {f.name: asked[f.name] for f in fields(SplitRule) if f.name in asked}
    rest = {name: value for name, value in asked.items() if name not in split}
    return Dialect(
        name,
        replace(dialect.split, **split),
        replace(dialect.arithmetic, **rest),
        {**dialect.sources, **dict.fromkeys(asked, f"asked for as {option}")},
    )
