"""Subject for muon-fsdp2 0.3.0: whole matrices as DTensors, torch's AdamW beside it."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.layout import Layout
from muonsplit.subjects.beside import MuonAndAdamW, Weight
from muonsplit.subjects.protocol import Hyper, Stepper, subject
from muonsplit.subjects.told import SWITCH, imported, join_group, read_options

_CHOICES = {"rms_scale": SWITCH, "nesterov": SWITCH, "dtensor": SWITCH}


@subject(
    dialect="muon-fsdp2-0.3.0",
    recognises=False,
    options={"rms_scale": ("true", "false"), "nesterov": ("true", "false")},
    ways=("fsdp",),
)
def build(
    model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper, **options: str
) -> Stepper:
    """Builds its ``Muon`` on sharded weights, and torch's AdamW on the others.

    In a single process, weights are made shards of one.

    Args:
        model: The model.
        layouts: The weights that Muon trains; it has no way to be told how to cut them.
        hyper: Learning rate and decay of both, and momentum.
        **options: ``rms_scale`` and ``nesterov``, as it calls them; ``dtensor=false`` gives it the
            plain tensors that it says it takes too.

    Raises:
        SubjectError: If it is not installed, or an option is unknown or has an unusable value.
    """
    settings = read_options("muon-fsdp2", options, _CHOICES)
    sharded = settings.pop("dtensor", True)
    package = imported("muon_fsdp2", "muon-fsdp2==0.3.0")

    def make(weights: list[Weight]) -> torch.optim.Optimizer:
        group = {
            "params": [weight.parameter for weight in weights],
            "use_muon": True,
            "lr": hyper.lr,
            "momentum": hyper.momentum,
            "weight_decay": hyper.weight_decay,
        }
        return package.Muon([group | settings])

    if not sharded:
        return MuonAndAdamW(model, layouts, hyper, make)
    join_group()
    tensor: Any = import_module("torch.distributed.tensor")
    mesh = tensor.init_device_mesh("cpu", (1,))

    def shard(weight: Tensor) -> Sequence[Tensor] | None:
        if isinstance(weight, tensor.DTensor):
            return None
        return [tensor.DTensor.from_local(weight, mesh, [tensor.Shard(0)])]

    return MuonAndAdamW(model, layouts, hyper, make, shard)
