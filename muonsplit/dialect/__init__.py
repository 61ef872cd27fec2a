"""Dialects: the named, sourced choices on what frameworks do not agree about.

There is no single per-head Muon. Which rows make one block (`SplitRule`) and what is computed
on a block (`Arithmetic`) differ from framework to framework; a certificate therefore names a
dialect. Every field of a registered dialect says where it was read.
"""

from muonsplit.dialect.arithmetic import Arithmetic
from muonsplit.dialect.named import DEFAULT_DIALECT, DIALECTS, dialect_named
from muonsplit.dialect.rules import Dialect, SplitRule

__all__ = [
    "DEFAULT_DIALECT",
    "DIALECTS",
    "Arithmetic",
    "Dialect",
    "SplitRule",
    "dialect_named",
]
