"""Subjects that must fail. A fault counts only if its named check is the first to catch it."""

from muonsplit.faulty.blocks import *  # noqa: F403 - factories are found here by name
from muonsplit.faulty.recognition import *  # noqa: F403
from muonsplit.faulty.registry import FAULTS, Fault
from muonsplit.faulty.steps import *  # noqa: F403

__all__ = ["FAULTS", "Fault"]  # pyright: ignore[reportUnsupportedDunderAll]
