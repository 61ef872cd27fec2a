"""Subject for pytorch-optimizer 4.1.0: whole matrices, torch's AdamW beside it."""

from collections.abc import Mapping

import torch
from torch import nn

from muonsplit.layout import Layout
from muonsplit.subjects.beside import MuonAndAdamW, Weight, by_expert
from muonsplit.subjects.protocol import DTENSOR_WAYS, Hyper, Stepper, subject
from muonsplit.subjects.told import SWITCH, imported, read_options, same

_METHODS = ("newton_schulz", "gram_newton_schulz")
_CHOICES = {
    "ns_method": same(*_METHODS),
    "nesterov": SWITCH,
    "use_adjusted_lr": SWITCH,
    "foreach": SWITCH,
}


@subject(
    dialect="pytorch-optimizer-4.1.0",
    recognises=False,
    options={
        "ns_method": _METHODS,
        "nesterov": ("true", "false"),
        "use_adjusted_lr": ("true", "false"),
    },
    ways=DTENSOR_WAYS,
)
def build(
    model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper, **options: str
) -> Stepper:
    """Builds its ``Muon`` on the named weights and torch's AdamW on the others.

    It takes a stack for one flattened matrix, so experts are given to it one by one.

    Args:
        model: The model.
        layouts: The weights that Muon trains; it has no way to be told how to cut them.
        hyper: Learning rate and decay of both, and momentum.
        **options: ``ns_method``, ``nesterov``, ``use_adjusted_lr`` and ``foreach``, as it calls
            them.

    Raises:
        SubjectError: If it is not installed, or an option is unknown or has an unusable value.
    """
    settings = read_options("pytorch-optimizer", options, _CHOICES)
    package = imported("pytorch_optimizer", "pytorch-optimizer==4.1.0")

    def make(weights: list[Weight]) -> torch.optim.Optimizer:
        return package.Muon(
            [{"params": [weight.parameter for weight in weights], "use_muon": True}],
            lr=hyper.lr,
            momentum=hyper.momentum,
            weight_decay=hyper.weight_decay,
            **settings,
        )

    return MuonAndAdamW(model, layouts, hyper, make, by_expert)
