"""The checks, in the order in which an optimizer goes wrong.

A weight is reported once, at the first stage where it diverges.
"""

from muonsplit.checks import routing, cut, arithmetic, bias, state  # isort: skip - order of registration
from muonsplit.checks.registry import CHECKS, Check, Finding

__all__ = ["CHECKS", "Check", "Finding", "arithmetic", "bias", "cut", "routing", "state"]
