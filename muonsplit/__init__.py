"""muonsplit: is each attention head really orthogonalised on its own?

The names here need torch alone. Certifying, models and the command line need the extras
``check`` and ``hf``.
"""

from muonsplit.dialect import DIALECTS, Arithmetic, Dialect, SplitRule
from muonsplit.geometry import Decision, Plan, plan
from muonsplit.layout import Block, Layout, Segment
from muonsplit.muon import PerHeadMuon, orthogonalize
from muonsplit.newton_schulz import newton_schulz
from muonsplit.subjects.protocol import Hyper, Stepper, subject

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
    "newton_schulz",
    "orthogonalize",
    "plan",
    "subject",
]
