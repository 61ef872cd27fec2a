"""Subject for Emerging-Optimizers 0.3.0: told by a subclass that overrides ``orthogonalize``."""

import typing
from collections.abc import Mapping
from typing import Any

import torch
import typing_extensions
from torch import Tensor, nn

from muonsplit.layout import Layout
from muonsplit.subjects.beside import MuonAndAdamW, Weight, by_expert
from muonsplit.subjects.protocol import Hyper, Stepper, subject
from muonsplit.subjects.told import SWITCH, Cut, imported, read_options, same

_CHOICES = {
    "scale_mode": same("spectral", "shape_scaling", "unit_rms_norm"),
    "coefficient_type": same("quintic", "simple", "polar_express", "cans", "aol", "deepseekv4"),
    "fp32_matmul_prec": same("medium", "high", "highest"),
    "nesterov": SWITCH,
}


@subject(
    dialect="emerging-optimizers-0.3.0",
    recognises=False,
    options={
        "scale_mode": ("spectral", "shape_scaling"),
        "coefficient_type": ("quintic", "simple"),
        "fp32_matmul_prec": ("medium", "highest"),
        "nesterov": ("true", "false"),
    },
)
def build(
    model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper, **options: str
) -> Stepper:
    """Builds its ``Muon`` on the named weights and torch's AdamW on the others.

    It takes matrices of float32 only, so a stack of experts is given to it one by one.

    Args:
        model: The model.
        layouts: How each weight that Muon trains is cut.
        hyper: Learning rate and decay of both, and momentum.
        **options: ``scale_mode``, ``coefficient_type``, ``fp32_matmul_prec`` and ``nesterov``, as
            it calls them.

    Raises:
        SubjectError: If it is not installed, or an option is unknown or has an unusable value.
    """
    settings = read_options("emerging-optimizers", options, _CHOICES)
    if not hasattr(typing, "override"):  # it is written for Python 3.12
        setattr(typing, "override", typing_extensions.override)  # noqa: B010
    install = "emerging-optimizers==0.3.0 --no-deps, absl-py and triton"
    package = imported("emerging_optimizers.orthogonalized_optimizers", install)

    def make(weights: list[Weight]) -> torch.optim.Optimizer:
        cuts = {weight.parameter: Cut(weight.layout) for weight in weights if weight.layout}
        return _per_head(package.Muon, cuts)(
            [weight.parameter for weight in weights],
            lr=hyper.lr,
            momentum=hyper.momentum,
            weight_decay=hyper.weight_decay,
            **settings,
        )

    return MuonAndAdamW(model, layouts, hyper, make, by_expert)


def _per_head(muon: Any, cuts: Mapping[nn.Parameter, Cut]) -> Any:
    class PerHead(muon):
        """As its documentation of ``OrthogonalizedOptimizer`` splits Q, K and V."""

        def orthogonalize(self, p: nn.Parameter, grad: Tensor, **group: Any) -> Tensor:
            """Orthogonalizes and scales each block of a weight on its own."""
            if p not in cuts:
                return super().orthogonalize(p, grad, **group)
            return cuts[p].join([self.scaled_orthogonalize_fn(b) for b in cuts[p].split(grad)])

    return PerHead
