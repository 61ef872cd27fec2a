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
from muonsplit.subjects.protocol import DTENSOR_WAYS, Hyper, subject

# What a shard cuts is gathered, whatever the dialect's own framework does.
DIALECT = f"{DEFAULT_DIALECT}:cut_heads=gather"
GOLDEN = ("llama", "glm-5.2", "kimi-k3", "deepseek-v2-lite", "gpt-neox-20b")


@subject(dialect=DIALECT, recognises=False, models=GOLDEN, ways=DTENSOR_WAYS)
def reference(model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper) -> PerHeadMuon:
    """The reference optimizer under the default dialect."""
    return _built(model, layouts, hyper)


@subject(dialect=DIALECT, recognises=False, models=GOLDEN, ways=DTENSOR_WAYS)
def fast(model: nn.Module, layouts: Mapping[str, Layout | None], hyper: Hyper) -> PerHeadMuon:
    """The reference optimizer in its fast form."""
    return _built(model, layouts, hyper, fast=True)


@subject(dialect=DIALECT, recognises=False, models=("llama",), ways=DTENSOR_WAYS)
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
