"""Subject for muon-optimizer 0.1.0, Keller Jordan's ``muon.py``: whole matrices."""

from collections.abc import Mapping

import torch
from torch import nn

from muonsplit.layout import Layout
from muonsplit.subjects.beside import MuonAndAdamW, Weight
from muonsplit.subjects.protocol import Hyper, Stepper, subject
from muonsplit.subjects.told import imported


@subject(dialect="jordan", recognises=False)
def build(model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper) -> Stepper:
    """Builds ``SingleDeviceMuon``, to which a stack of matrices is a batch, and AdamW.

    Args:
        model: The model.
        layouts: The weights that Muon trains; it has no way to be told how to cut them.
        hyper: Learning rate and decay of both, and momentum.

    Raises:
        SubjectError: If it is not installed.
    """
    muon = imported("muon", "muon-optimizer==0.1.0")

    def make(weights: list[Weight]) -> torch.optim.Optimizer:
        return muon.SingleDeviceMuon(
            [weight.parameter for weight in weights],
            lr=hyper.lr,
            momentum=hyper.momentum,
            weight_decay=hyper.weight_decay,
        )

    return MuonAndAdamW(model, layouts, hyper, make)
