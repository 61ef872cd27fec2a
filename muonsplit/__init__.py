"""muonsplit: is each attention head really orthogonalised on its own?

The names here need torch alone, and import it when they are first used. Certifying, models and
the command line need the extras ``check`` and ``hf``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muonsplit.api import certify
    from muonsplit.dialect import DIALECTS, Arithmetic, Dialect, SplitRule
    from muonsplit.evidence.capture import capture
    from muonsplit.geometry import Decision, Plan, plan
    from muonsplit.layout import Block, Layout, Segment
    from muonsplit.muon import PerHeadMuon, orthogonalize
    from muonsplit.pytest_plugin import parametrize_with_checks
    from muonsplit.recognition import planned
    from muonsplit.subjects.protocol import Hyper, Stepper, subject
    from muonsplit.truth.views import views

__version__ = "0.1.0"

__all__ = [
    "DIALECTS",
    "Arithmetic",
    "Block",
    "Decision",
    "Dialect",
    "Hyper",
    "Layout",
    "PerHeadMuon",
    "Plan",
    "Segment",
    "SplitRule",
    "Stepper",
    "capture",
    "certify",
    "orthogonalize",
    "parametrize_with_checks",
    "plan",
    "planned",
    "subject",
    "views",
]

_HOMES = {
    "api": ("certify",),
    "pytest_plugin": ("parametrize_with_checks",),
    "dialect": ("DIALECTS", "Arithmetic", "Dialect", "SplitRule"),
    "geometry": ("Decision", "Plan", "plan"),
    "evidence.capture": ("capture",),
    "layout": ("Block", "Layout", "Segment"),
    "muon": ("PerHeadMuon", "orthogonalize"),
    "recognition": ("planned",),
    "truth.views": ("views",),
    "subjects.protocol": ("Hyper", "Stepper", "subject"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"muonsplit.{home}"), name)
    raise AttributeError(f"module 'muonsplit' has no attribute {name!r}")
