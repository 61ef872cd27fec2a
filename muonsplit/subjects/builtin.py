"""The subjects that come with muonsplit."""

from collections.abc import Mapping

from torch import nn

from muonsplit.dialect import DEFAULT_DIALECT
from muonsplit.layout import Layout
from muonsplit.muon import PerHeadMuon
from muonsplit.subjects.protocol import Hyper, subject

GOLDEN = ("llama", "glm-5.2", "kimi-k3", "deepseek-v2-lite", "gpt-neox-20b")


@subject(dialect=DEFAULT_DIALECT, recognises=False, models=GOLDEN)
def reference(model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper) -> PerHeadMuon:
    """The reference optimizer under the default dialect."""
    return _built(model, layouts, hyper, fast=False)


@subject(dialect=DEFAULT_DIALECT, recognises=False, models=GOLDEN)
def fast(model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper) -> PerHeadMuon:
    """The reference optimizer in its fast form."""
    return _built(model, layouts, hyper, fast=True)


def _built(
    model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper, *, fast: bool
) -> PerHeadMuon:
    return PerHeadMuon(
        model.named_parameters(),
        layouts,
        fast=fast,
        lr=hyper.lr,
        momentum=hyper.momentum,
        weight_decay=hyper.weight_decay,
    )
