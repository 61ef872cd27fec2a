"""Subject for HeavyBall 3.2.1: whole matrices, torch's AdamW beside it.

It rounds to bfloat16 at random, so two equal steps differ and nothing that compares bits can judge
it. With ``seed=0`` the numbers it draws are the same in every step.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from muonsplit.errors import SubjectError
from muonsplit.layout import Layout
from muonsplit.subjects.beside import MuonAndAdamW, Weight, by_expert
from muonsplit.subjects.protocol import Hyper, Stepper, subject
from muonsplit.subjects.told import SWITCH, imported, read_options


@subject(dialect="heavyball-3.2.1", recognises=False)
def build(
    model: nn.Module,
    layouts: Mapping[str, Layout | None],
    hyper: Hyper,
    seed: str = "",
    **options: str,
) -> Stepper:
    """Builds its ``Muon`` on the named weights and torch's AdamW on the others.

    It takes a stack for one merged matrix, so experts are given to it one by one.

    Args:
        model: The model.
        layouts: The weights that Muon trains; it has no way to be told how to cut them.
        hyper: Learning rate and decay of both, and momentum.
        seed: Seed of torch's own generator in each step, or empty to leave it as it is.
        **options: ``nesterov``, as it calls it.

    Raises:
        SubjectError: If it is not installed, or an option is unknown or has an unusable value.
    """
    settings = read_options("heavyball", options, {"nesterov": SWITCH})
    package = imported("heavyball", "heavyball==3.2.1")
    if seed and not (seed.isascii() and seed.isdecimal() and len(seed) < 10):
        raise SubjectError(f"Option 'seed' of the heavyball subject takes a number; got {seed!r}.")

    def make(weights: list[Weight]) -> torch.optim.Optimizer:
        return package.Muon(
            [weight.parameter for weight in weights],
            lr=hyper.lr,
            betas=(hyper.momentum, 0.99),
            weight_decay=hyper.weight_decay,
            compile_step=False,
            **settings,
        )

    both = MuonAndAdamW(model, layouts, hyper, make, by_expert)
    return _Seeded(both, int(seed)) if seed else both


class _Seeded:
    def __init__(self, both: MuonAndAdamW, seed: int) -> None:
        self._both, self._seed = both, seed

    def step(self) -> None:
        torch.manual_seed(self._seed)
        self._both.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._both, name)
