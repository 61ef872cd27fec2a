"""A model of nothing but named weights, for subjects that are told where the heads are."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import torch
from torch import nn

# The model type of a config ``{"model_type": "bare", "weights": {name: shape}}``.
BARE = "bare"


def bare(weights: Mapping[str, Sequence[int]]) -> nn.Module:
    """Builds it; ``a.b.weight`` is the parameter ``weight`` of the module ``b`` of ``a``.

    Args:
        weights: Shape of each parameter, by dotted name.
    """
    root = nn.Module()
    # As transformers' models carry theirs; a module takes any attribute, its annotation does not.
    object.__setattr__(root, "config", SimpleNamespace(model_type=BARE))
    for name, shape in weights.items():
        *owners, leaf = name.split(".")
        module = root
        for owner in owners:
            if not hasattr(module, owner):
                module.add_module(owner, nn.Module())
            module = getattr(module, owner)
        module.register_parameter(leaf, nn.Parameter(torch.zeros(*shape)))
    return root
