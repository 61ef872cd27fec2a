"""Subjects that misbehave while they are driven."""

import os
import sys
import time
from typing import Any

import torch
from torch import nn

import muonsplit

_declared = muonsplit.subject(dialect="jordan", recognises=True)


class _SGD:
    def __init__(self, model: nn.Module, then: Any) -> None:
        self.model, self.then = model, then

    def step(self) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p.sub_(0.02 * p.grad)
        self.then(self.model)


@_declared
def raises(model: nn.Module) -> _SGD:
    print("about to go wrong")
    raise RuntimeError("no heads here")


@_declared
def hangs(model: nn.Module) -> _SGD:
    print("thinking", flush=True)
    return _SGD(model, lambda model: time.sleep(600))


@_declared
def exits(model: nn.Module) -> _SGD:
    def leave(model: nn.Module) -> None:
        print("\x1b[31mgoodbye\x1b[0m [red]", file=sys.stderr, flush=True)
        os._exit(7)

    return _SGD(model, leave)


@_declared
def reshapes(model: nn.Module) -> _SGD:
    def transpose(model: nn.Module) -> None:
        p = next(iter(model.parameters()))
        p.data = p.data.T.contiguous()

    return _SGD(model, transpose)


@_declared
def poisons(model: nn.Module) -> _SGD:
    def poison(model: nn.Module) -> None:
        next(iter(model.parameters())).data[0] = float("nan")

    return _SGD(model, poison)


@_declared
def drops(model: nn.Module) -> _SGD:
    def drop(model: nn.Module) -> None:
        del model.model.embed_tokens.weight

    return _SGD(model, drop)


@_declared
def sgd(model: nn.Module) -> _SGD:
    return _SGD(model, lambda model: None)


def undeclared(model: nn.Module) -> _SGD:
    return _SGD(model, lambda model: None)
