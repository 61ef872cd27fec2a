"""Subject for gram-newton-schulz 0.1.6: told by functions that split and join a weight."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from muonsplit.layout import Layout
from muonsplit.subjects.beside import MuonAndAdamW, Weight, by_layout
from muonsplit.subjects.protocol import Hyper, Stepper, subject
from muonsplit.subjects.told import SWITCH, Cut, imported, read_options, same

_ALGORITHMS = ("gram_newton_schulz", "standard_newton_schulz")
_CHOICES = {
    "ns_algorithm": same(*_ALGORITHMS),
    "nesterov": SWITCH,
    "adjust_lr": {**same("rms_norm", "spectral_norm"), "none": None},
}

_KEYS = ("param_split_fn", "param_recombine_fn")


@subject(
    dialect="gram-newton-schulz-0.1.6",
    recognises=False,
    options={
        "ns_algorithm": _ALGORITHMS,
        "nesterov": ("true", "false"),
        "adjust_lr": ("rms_norm", "spectral_norm"),
    },
)
def build(
    model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper, **options: str
) -> Stepper:
    """Builds its ``Muon``, to which a stack of matrices is a batch, and torch's AdamW.

    Its kernels need CUDA and are off. It restarts once, before the second step, as it finds best
    for its own coefficients.

    Args:
        model: The model.
        layouts: How each weight that Muon trains is cut: any layout is a pair of functions.
        hyper: Learning rate and decay of both, and momentum.
        **options: ``ns_algorithm``, ``nesterov`` and ``adjust_lr``, as it calls them.

    Raises:
        SubjectError: If it is not installed, or an option is unknown or has an unusable value.
    """
    settings = read_options("gram-newton-schulz", options, _CHOICES)
    package = imported("gram_newton_schulz.muon.muon", "gram-newton-schulz==0.1.6 --no-deps")

    def make(weights: list[Weight]) -> torch.optim.Optimizer:
        return package.Muon(
            [{"params": params, **_told(layout)} for layout, params in by_layout(weights)],
            lr=hyper.lr,
            momentum=hyper.momentum,
            weight_decay=hyper.weight_decay,
            ns_use_kernels=False,
            gram_newton_schulz_restart_iterations=[2],
            **settings,
        )

    return MuonAndAdamW(model, layouts, hyper, make, told=_KEYS)


def _told(layout: Layout | None) -> dict[str, Any]:
    if layout is None:
        return {}
    cut = Cut(layout)
    return dict(zip(_KEYS, (cut.split, cut.join), strict=True))
