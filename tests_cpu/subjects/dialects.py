"""The reference speaking each dialect: legal variants, which must not be accused."""

from collections.abc import Callable, Mapping

from torch import nn

import muonsplit


def _speaking(name: str) -> Callable[..., muonsplit.PerHeadMuon]:
    @muonsplit.subject(dialect=name, recognises=False)
    def build(
        model: nn.Module,
        layouts: Mapping[str, muonsplit.Layout | None],
        hyper: muonsplit.Hyper,
    ) -> muonsplit.PerHeadMuon:
        return muonsplit.PerHeadMuon(
            model.named_parameters(),
            layouts,
            dialect=name,
            lr=hyper.lr,
            momentum=hyper.momentum,
            weight_decay=hyper.weight_decay,
        )

    return build


for _name in muonsplit.DIALECTS:
    globals()[_name.replace("-", "_").replace(".", "_")] = _speaking(_name)
