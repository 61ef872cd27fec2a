"""Subject for microsoft/dion, commit 0a059a4: told ``num_heads`` or ``split_sizes`` by param group.

It is in no registry: ``pip install`` its repository, or name a checkout in ``PYTHONPATH``.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from muonsplit.layout import Layout
from muonsplit.subjects.beside import MuonAndAdamW, Weight, by_layout
from muonsplit.subjects.protocol import Hyper, Stepper, subject
from muonsplit.subjects.told import SWITCH, imported, read_options, same, sizes

_ADJUST = {**same("spectral_norm", "rms_norm"), "none": None}
_CHOICES = {"nesterov": SWITCH, "adjust_lr": _ADJUST, "use_polar_express": SWITCH}

_KEYS = ("num_heads", "split_sizes")


@subject(
    dialect="dion",
    recognises=False,
    options={
        "nesterov": ("true", "false"),
        "adjust_lr": ("spectral_norm", "rms_norm"),
        "use_polar_express": ("true", "false"),
    },
)
def build(
    model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper, **options: str
) -> Stepper:
    """Builds its ``Muon``, to which a stack of matrices is a batch, and torch's AdamW.

    Args:
        model: The model.
        layouts: How each weight that Muon trains is cut: equal blocks become ``num_heads``, others
            ``split_sizes``.
        hyper: Learning rate and decay of both, and momentum.
        **options: ``nesterov``, ``adjust_lr`` and ``use_polar_express``, as it calls them.

    Raises:
        SubjectError: If it is not installed, an option is unknown or has an unusable value, or a
            layout cuts anything but consecutive rows.
    """
    settings = read_options("dion", options, _CHOICES)
    package = imported("dion", "git+https://github.com/microsoft/dion")

    def make(weights: list[Weight]) -> torch.optim.Optimizer:
        return package.Muon(
            [{"params": params, **_told(layout)} for layout, params in by_layout(weights)],
            lr=hyper.lr,
            mu=hyper.momentum,
            weight_decay=hyper.weight_decay,
            **settings,
        )

    return MuonAndAdamW(model, layouts, hyper, make, told=_KEYS)


def _told(layout: Layout | None) -> dict[str, Any]:
    if layout is None:
        return {}
    rows = sizes("dion", layout)
    equal = len(set(rows)) == 1
    return {"num_heads": len(rows)} if equal else {"split_sizes": rows}
