"""Subject for ``torch.optim.Muon``: whole matrices, AdamW beside it for the rest."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from muonsplit.layout import Layout
from muonsplit.subjects.protocol import Hyper, Stepper, subject


@subject(dialect="torch-2.13", recognises=False)
def build(model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper) -> Stepper:
    """Builds ``torch.optim.Muon`` on the named weights and AdamW on the others."""
    return _MuonAndAdamW(model, layouts, hyper)


class _MuonAndAdamW:
    """torch's Muon takes matrices only, so a stack of experts is given to it slice by slice."""

    def __init__(
        self, model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper
    ) -> None:
        named = dict(model.named_parameters())
        weights = {name: p for name, p in named.items() if name in layouts}
        others = [p for name, p in named.items() if name not in layouts]
        self._slices = [
            (p, [nn.Parameter(matrix) for matrix in p.detach().unbind()])
            for p in weights.values()
            if p.ndim == 3
        ]
        matrices = [p for p in weights.values() if p.ndim == 2]
        matrices += [matrix for _, slices in self._slices for matrix in slices]
        lr, weight_decay = hyper.lr, hyper.weight_decay
        self._muon = torch.optim.Muon(matrices, lr, weight_decay, hyper.momentum)
        self._adamw = torch.optim.AdamW(others, lr, weight_decay=weight_decay)

    def step(self) -> None:
        """Steps both."""
        for stack, slices in self._slices:
            gradients: tuple[Tensor | None, ...] = (None,) * len(slices)
            if stack.grad is not None:
                gradients = stack.grad.unbind()
            for matrix, gradient in zip(slices, gradients, strict=True):
                matrix.grad = gradient
        self._muon.step()
        self._adamw.step()
