"""Subject for muonium 0.2.0: told ``split_sizes`` by param group."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from muonsplit.layout import Layout
from muonsplit.subjects.beside import MuonAndAdamW, Weight, by_layout
from muonsplit.subjects.protocol import DTENSOR_WAYS, Hyper, Stepper, subject
from muonsplit.subjects.told import SWITCH, read_options, same, sizes, without_triton

_STRATEGIES = ("newton_schulz", "polar_express")
_CHOICES = {
    "orthogonalization_strategy": same(*_STRATEGIES),
    "use_cautious_wd": SWITCH,
    "nesterov": SWITCH,
}

_KEYS = ("split_sizes",)


@subject(
    dialect="muonium-0.2.0",
    recognises=False,
    options={"orthogonalization_strategy": _STRATEGIES, "nesterov": ("true", "false")},
    ways=DTENSOR_WAYS,
)
def build(
    model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper, **options: str
) -> Stepper:
    """Builds its ``Muon``, to which a stack of matrices is a batch, and torch's AdamW.

    It iterates by Newton–Schulz with plain decay here; by default it takes Polar Express and
    cautious decay.

    Args:
        model: The model.
        layouts: How each weight that Muon trains is cut: blocks become ``split_sizes``.
        hyper: Learning rate and decay of both, and momentum.
        **options: ``orthogonalization_strategy``, ``use_cautious_wd`` and ``nesterov``, as it
            calls them.

    Raises:
        SubjectError: If it is not installed, an option is unknown or has an unusable value, or a
            layout cuts anything but consecutive rows.
    """
    settings = {"orthogonalization_strategy": "newton_schulz", "use_cautious_wd": False}
    settings |= read_options("muonium", options, _CHOICES)
    package = without_triton("muonium", "muonium==0.2.0")

    def make(weights: list[Weight]) -> torch.optim.Optimizer:
        return package.Muon(
            [{"params": params, **_told(layout)} for layout, params in by_layout(weights)],
            lr=hyper.lr,
            wd=hyper.weight_decay,
            momentum=hyper.momentum,
            **settings,
        )

    return MuonAndAdamW(model, layouts, hyper, make, told=_KEYS)


def _told(layout: Layout | None) -> dict[str, Any]:
    # It takes two sizes at least.
    return {} if layout is None or layout.is_whole else {"split_sizes": sizes("muonium", layout)}
