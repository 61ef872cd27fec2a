"""The truth of views: a full-size model's forward pass on meta, followed row by row."""

import functools
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.errors import InputError
from muonsplit.truth import inputs
from muonsplit.truth.answer import Truth
from muonsplit.truth.follow import Follower
from muonsplit.truth.mixing import Mixings
from muonsplit.truth.tape import Tape


def views(model: nn.Module) -> dict[str, Truth]:
    """Where the heads are, by the views the model's forward pass takes.

    Runs the model on ``meta`` and replays every view, split, transpose and slice on row numbers;
    rows that no product ever adds up belong to different heads. Neither names nor configs are
    read. Parts that a text-only pass does not reach are called on inputs of their own.

    Args:
        model: Any model whose parameters are on ``meta``.

    Returns:
        A truth for every parameter of two dimensions or more, by name. What could not be followed
        is ``unknown``.

    Raises:
        InputError: If a parameter is not on ``meta``.
    """
    weights = {name: p for name, p in model.named_parameters() if p.ndim >= 2}
    for name, weight in weights.items():
        if not weight.is_meta:
            raise InputError(
                f"{name} is on {weight.device}; views are followed on meta.",
                "Build the model under torch.device('meta').",
            )
    mixings = Mixings({name: tuple(p.shape) for name, p in weights.items()})
    follower = Follower(Tape(weights, mixings))
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            with _lenient(model):
                _call(model, inputs.text(model), follower)
            for part in _unreached(model, weights, mixings):
                for given in inputs.guesses(part):
                    if _call(part, given, follower):
                        break
    finally:
        model.train(training)
    return {name: mixings.truth(name) for name in weights}


@contextmanager
def _lenient(model: nn.Module) -> Generator[None]:
    """Lets a pass go on where a part of the model fails: its input stands for its output.

    Nothing is followed through such a part, so what it would have told is unknown.
    """
    parts = [part for part in model.modules() if part is not model]
    own = {part: part.__dict__.get("forward") for part in parts}
    for part in parts:
        part.forward = _forgiving(part.forward)
    try:
        yield
    finally:
        for part, forward in own.items():
            if forward is None:
                part.__dict__.pop("forward", None)
            else:
                part.forward = forward


def _forgiving(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception:
            given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            if given is None:
                raise
            return torch.empty_like(given)

    return called


def _call(module: nn.Module, given: Mapping[str, Any], follower: Follower) -> bool:
    """Whether a call went through; what it showed before it failed stands all the same."""
    try:
        with follower:
            module(**given)
    except Exception:
        return False
    return True


def _unreached(
    model: nn.Module, weights: Mapping[str, nn.Parameter], mixings: Mixings
) -> Iterator[nn.Module]:
    """The parts no pass has reached, outermost first; their parts only where they fail."""
    names = {id(weight): name for name, weight in weights.items()}
    for module in model.modules():
        own = [names[id(p)] for p in module.parameters() if id(p) in names]
        if own and not any(map(mixings.reached, own)):
            yield module
