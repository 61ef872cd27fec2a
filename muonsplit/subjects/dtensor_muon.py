"""Subject for dtensor-muon 0.1.0: whole matrices, torch's AdamW beside it."""

from collections.abc import Mapping

import torch
from torch import nn

from muonsplit.layout import Layout
from muonsplit.subjects.beside import MuonAndAdamW, Weight
from muonsplit.subjects.protocol import DTENSOR_WAYS, Hyper, Stepper, subject
from muonsplit.subjects.told import SWITCH, read_options, same, without_triton

_STRATEGIES = ("newton_schulz", "polar_express")
_CHOICES = {
    "orthogonalization_strategy": same(*_STRATEGIES),
    "use_cautious_wd": SWITCH,
    "nesterov": SWITCH,
}


@subject(
    dialect="dtensor-muon-0.1.0",
    recognises=False,
    options={"orthogonalization_strategy": _STRATEGIES, "nesterov": ("true", "false")},
    ways=DTENSOR_WAYS,
)
def build(
    model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper, **options: str
) -> Stepper:
    """Builds its ``Muon``, with stacks as batches of matrices, and torch's AdamW.

    It iterates by Newton–Schulz with plain decay and leaves stacks unflattened here; by default it
    takes Polar Express and cautious decay, and makes one matrix of a stack.

    Args:
        model: The model.
        layouts: The weights that Muon trains; it has no way to be told how to cut them.
        hyper: Learning rate and decay of both, and momentum.
        **options: ``orthogonalization_strategy``, ``use_cautious_wd`` and ``nesterov``, as it
            calls them.

    Raises:
        SubjectError: If it is not installed, or an option is unknown or has an unusable value.
    """
    settings = {"orthogonalization_strategy": "newton_schulz", "use_cautious_wd": False}
    settings |= read_options("dtensor-muon", options, _CHOICES)
    package = without_triton("dtensor_muon", "dtensor-muon==0.1.0")

    def make(weights: list[Weight]) -> torch.optim.Optimizer:
        return package.Muon(
            [{"params": [weight.parameter for weight in weights], "flatten": False}],
            lr=hyper.lr,
            wd=hyper.weight_decay,
            momentum=hyper.momentum,
            **settings,
        )

    return MuonAndAdamW(model, layouts, hyper, make)
