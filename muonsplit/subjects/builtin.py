"""The subjects that come with muonsplit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from muonsplit.dialect import DEFAULT_DIALECT
from muonsplit.errors import MuonsplitError, SubjectError
from muonsplit.kernels import architecture
from muonsplit.layout import Layout
from muonsplit.muon import PerHeadMuon
from muonsplit.subjects.protocol import Hyper, subject

GOLDEN = ("llama", "glm-5.2", "kimi-k3", "deepseek-v2-lite", "gpt-neox-20b")


@subject(dialect=DEFAULT_DIALECT, recognises=False, models=GOLDEN)
def reference(model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper) -> PerHeadMuon:
    """The reference optimizer under the default dialect."""
    return _built(model, layouts, hyper)


@subject(dialect=DEFAULT_DIALECT, recognises=False, models=GOLDEN)
def fast(model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper) -> PerHeadMuon:
    """The reference optimizer in its fast form."""
    return _built(model, layouts, hyper, fast=True)


@subject(dialect=DEFAULT_DIALECT, recognises=False, models=("llama",))
def triton(model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper) -> PerHeadMuon:
    """The reference optimizer on the Triton kernel, in Triton's interpreter.

    Raises:
        SubjectError: If triton is missing, or its interpreter is not asked for.
    """
    try:
        architecture(torch.device("cpu"))
    except MuonsplitError as error:
        raise SubjectError(f"builtin:triton cannot run here: {error.message}", error.hint) from None
    return _built(model, layouts, hyper, backend="triton")


def _built(
    model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper, **how: Any
) -> PerHeadMuon:
    return PerHeadMuon(
        model.named_parameters(),
        layouts,
        lr=hyper.lr,
        momentum=hyper.momentum,
        weight_decay=hyper.weight_decay,
        **how,
    )
