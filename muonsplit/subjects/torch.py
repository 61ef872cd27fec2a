"""Subject for ``torch.optim.Muon``: whole matrices, AdamW beside it for the rest."""

from collections.abc import Mapping

import torch
from torch import nn

from muonsplit.layout import Layout
from muonsplit.subjects.beside import MuonAndAdamW, Weight, by_expert
from muonsplit.subjects.protocol import DTENSOR_WAYS, Hyper, Stepper, subject
from muonsplit.subjects.told import SWITCH, read_options, same

_CHOICES = {"nesterov": SWITCH, "adjust_lr_fn": same("original", "match_rms_adamw")}


@subject(
    dialect="torch-2.13",
    recognises=False,
    options={"nesterov": ("true", "false"), "adjust_lr_fn": ("original", "match_rms_adamw")},
    ways=DTENSOR_WAYS,
)
def build(
    model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper, **options: str
) -> Stepper:
    """Builds ``torch.optim.Muon`` on the named weights and AdamW on the others.

    It takes matrices only, so a stack of experts is given to it one by one.

    Args:
        model: The model.
        layouts: The weights that Muon trains; it has no way to be told how to cut them.
        hyper: Learning rate and decay of both, and momentum.
        **options: ``nesterov`` and ``adjust_lr_fn``, as torch calls them.

    Raises:
        SubjectError: If an option is unknown or has an unusable value.
    """
    settings = read_options("torch", options, _CHOICES)

    def make(weights: list[Weight]) -> torch.optim.Optimizer:
        parameters = [weight.parameter for weight in weights]
        given = (hyper.lr, hyper.weight_decay, hyper.momentum)
        return torch.optim.Muon(parameters, *given, **settings)

    return MuonAndAdamW(model, layouts, hyper, make, by_expert)
