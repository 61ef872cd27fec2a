"""The checks, in the order in which an optimizer goes wrong.

A weight is reported once, at the first stage where it diverges.
"""

# They run in the order in which they are registered here.
# isort: off
from muonsplit.checks import cut_heads
from muonsplit.checks import gates
from muonsplit.checks import ranks
from muonsplit.checks import routing
from muonsplit.checks import cut
from muonsplit.checks import arithmetic
from muonsplit.checks import bias
from muonsplit.checks import state
from muonsplit.checks import options
from muonsplit.checks import inputs
from muonsplit.checks import kept
from muonsplit.checks import shards

# isort: on
from muonsplit.checks.registry import CHECKS, Check, Finding

__all__ = [
    "CHECKS",
    "Check",
    "Finding",
    "arithmetic",
    "bias",
    "cut",
    "cut_heads",
    "gates",
    "inputs",
    "kept",
    "options",
    "ranks",
    "routing",
    "shards",
    "state",
]
