"""Momentum, orthogonalisation by layout, the step, and the reference optimizer."""

from muonsplit.muon.blocks import Direction, directions, orthogonalize
from muonsplit.muon.momentum import advance_momentum
from muonsplit.muon.optimizer import PerHeadMuon
from muonsplit.muon.step import apply_

__all__ = [
    "Direction",
    "PerHeadMuon",
    "advance_momentum",
    "apply_",
    "directions",
    "orthogonalize",
]
