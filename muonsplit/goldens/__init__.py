"""Goldens: what was once reviewed, and the step that reviews a change.

``plan/MODEL`` is what the rules say of a golden model at full size; ``truth/MODEL`` is what every
model of ``cases.json`` says of its own attention, beside the plan. ``numeric/DIALECT`` and
``update/MODEL`` hold inputs of small integers, exact in every dtype, and outputs of the float64
singular-value oracle: blocks under every dialect, and weights of a miniature cut by its plan.
A value that differs is written beside the old one as ``*.new`` and refused until it is accepted.
"""

from muonsplit.goldens.golden import Golden
from muonsplit.goldens.recognised import cases
from muonsplit.goldens.review import accept, check, diff, goldens

__all__ = ["Golden", "accept", "cases", "check", "diff", "goldens"]
