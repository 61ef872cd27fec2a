"""The two truths of a miniature, held against each other."""

import inspect
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

from muonsplit.errors import MuonsplitError
from muonsplit.models.load import build
from muonsplit.models.miniature import miniature
from muonsplit.truth import Truth
from muonsplit.truth.gradients import gradients
from muonsplit.truth.inputs import text
from muonsplit.truth.views import views

# A weight, or a model, larger than this would cost minutes to build and to differentiate.
_LARGEST, _MOST = 1 << 22, 1 << 25
# Positions that gradients are taken over. Each costs as much as all others, and eight are more
# than a short convolution spans: what is remembered can still be told from what is not.
_POSITIONS = 8
# Some four seconds of one core; recurrences may take twice that.
_BUDGET = 5e8


def witnesses(
    config: Mapping[str, Any], task: str | None = None
) -> tuple[dict[str, Truth], dict[str, Truth]]:
    """The truth of every weight of a config's miniature, by views and by gradients.

    Args:
        config: Of the full model; ``{"model_type": …}`` stands for a type's defaults.
        task: As :func:`muonsplit.models.load.build` takes it.

    Raises:
        MuonsplitError: If there is no miniature that builds and runs.
    """
    small = miniature(dict(config), task)
    meta = build(small, task=task)
    sizes = [p.numel() for p in meta.parameters()]
    if max(sizes) > _LARGEST or sum(sizes) > _MOST:
        raise MuonsplitError(
            f"its miniature is too large: {sum(sizes)} elements, {max(sizes)} of them in one weight"
        )
    torch.manual_seed(0)
    real = build(small, device="cpu", task=task)
    given = {
        name: value[:, :_POSITIONS] if isinstance(value, torch.Tensor) else value
        for name, value in text(real, "cpu").items()
    }
    with short_chunks(real):
        return views(meta), gradients(real, lambda model: model(**given), budget=_BUDGET)


@contextmanager
def short_chunks(model: nn.Module) -> Generator[None]:
    """Lets recurrences that pad time to whole chunks take a chunk as long as the text.

    What they compute is the same for any length of a chunk; the padding is most of their cost.
    """
    before = [(function, function.__defaults__) for function in _chunked(model)]
    try:
        for function, defaults in before:
            names = function.__code__.co_varnames[: function.__code__.co_argcount]
            given = zip(names[len(names) - len(defaults or ()) :], defaults or (), strict=True)
            function.__defaults__ = tuple(
                _POSITIONS if name == "chunk_size" else value for name, value in given
            )
        yield
    finally:
        for function, defaults in before:
            function.__defaults__ = defaults


def _chunked(model: nn.Module) -> Iterator[FunctionType]:
    """Functions beside a model's modules that have a length of a chunk as their default."""
    for place in {type(module).__module__ for module in model.modules()}:
        for found in list(vars(sys.modules[place]).values()):
            function = inspect.unwrap(found) if inspect.isfunction(found) else None
            if isinstance(function, FunctionType) and function.__module__ == place:
                code, defaults = function.__code__, function.__defaults__ or ()
                names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
                if "chunk_size" in names:
                    yield function
