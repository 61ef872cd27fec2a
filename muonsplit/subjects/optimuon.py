"""Subject for optimuon 0.1.1: told by functions that split and join a weight."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from muonsplit.errors import SubjectError
from muonsplit.layout import Layout
from muonsplit.subjects.beside import MuonAndAdamW, Weight, by_expert, by_layout
from muonsplit.subjects.protocol import Hyper, Stepper, subject
from muonsplit.subjects.told import SWITCH, Cut, imported, read_options, same

_PLAIN: dict[str, Any] = {"normuon": False, "cautious_wd": False}
_JORDAN = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_norm_scale": 1.0}
_CHOICES = {
    "gram_ns": SWITCH,
    "nesterov": SWITCH,
    "adjust_lr": same("original", "match_rms_adamw", "none"),
    "coefficients": {"polar_express": {}, "jordan": _JORDAN},
    "normuon": SWITCH,
    "cautious_wd": SWITCH,
}

_KEYS = ("ns_split_fn", "ns_recombine_fn")


@subject(
    dialect="optimuon-0.1.1",
    recognises=False,
    options={
        "gram_ns": ("true", "false"),
        "nesterov": ("true", "false"),
        "adjust_lr": ("original", "match_rms_adamw"),
    },
)
def build(
    model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper, **options: str
) -> Stepper:
    """Builds its ``Muon`` on the named weights and torch's AdamW on the others.

    It takes a stack for one flattened matrix, so experts are given to it one by one. NorMuon and
    cautious decay, which are on by default, are off here: they are no plain Muon.

    Args:
        model: The model.
        layouts: How each weight that Muon trains is cut into rows, by a pair of functions.
        hyper: Learning rate and decay of both, and momentum.
        **options: ``gram_ns``, ``nesterov``, ``adjust_lr``, ``normuon`` and ``cautious_wd``, as it
            calls them; ``coefficients``, polar_express or jordan, with the safety factor of each.

    Raises:
        SubjectError: If it is not installed, an option is unknown or has an unusable value, or a
            layout cuts columns.
    """
    settings = {**_PLAIN, **read_options("optimuon", options, _CHOICES)}
    settings |= settings.pop("coefficients", {})
    package = imported("optimuon", "optimuon==0.1.1")

    def make(weights: list[Weight]) -> torch.optim.Optimizer:
        return package.Muon(
            [{"params": params, **_told(layout)} for layout, params in by_layout(weights)],
            lr=hyper.lr,
            momentum=hyper.momentum,
            weight_decay=hyper.weight_decay,
            **settings,
        )

    return MuonAndAdamW(model, layouts, hyper, make, by_expert, _KEYS)


def _told(layout: Layout | None) -> dict[str, Any]:
    if layout is None:
        return {}
    if layout.axis:
        raise SubjectError(
            f"optimuon scales by the shape of a weight as it is stored, and {layout} cuts columns.",
            "Store the weight output by input, or certify gram-newton-schulz: it scales blocks.",
        )
    cut = Cut(layout)
    return dict(zip(_KEYS, (cut.split, cut.join), strict=True))
