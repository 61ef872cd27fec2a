"""Subjects that misbehave while they are driven."""

import os
import shutil
import signal
import struct
import sys
import time
from contextlib import suppress
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


@_declared
def prints(model: nn.Module) -> _SGD:
    def shout(model: nn.Module) -> None:
        line = "x" * 99 + "\n"
        for _ in range(1024):
            sys.stdout.write(line * 10_486)
        print("the last line", flush=True)
        raise RuntimeError("hoarse")

    return _SGD(model, shout)


def _tell_number() -> None:
    """Writes down which process this is, for whoever asks what is left of it."""
    with open(os.environ["TOLD_NUMBERS"], "a") as file:
        file.write(f"{os.getpid()}\n")


def _sleeper(seconds: str) -> None:
    """A process of another session, whose parent is gone: no signal to the group reaches it."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _tell_number()
            os.close(writing)
            time.sleep(float(seconds))
        os._exit(0)
    os.wait()
    os.close(writing)
    os.read(reading, 1)  # the end of the pipe: it has said which process it is


@_declared
def forks(model: nn.Module) -> _SGD:
    return _SGD(model, lambda model: (_sleeper("4711"), time.sleep(600)))


@_declared
def forks_and_exits(model: nn.Module) -> _SGD:
    return _SGD(model, lambda model: (_sleeper("4711"), os._exit(3)))


@_declared
def ignores_sigterm(model: nn.Module) -> _SGD:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _tell_number()
    return _SGD(model, lambda model: time.sleep(600))


@_declared
def deletes_its_folder(model: nn.Module) -> _SGD:
    def delete(model: nn.Module) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(os.getcwd())

    return _SGD(model, delete)


@_declared
def eats(model: nn.Module) -> _SGD:
    return _SGD(model, lambda model: [torch.ones(1 << 26) for _ in range(64)])


def _answers(frame: bytes) -> Any:
    """Writes to whatever pipe it finds, as if it were the worker."""

    def forge(model: nn.Module) -> None:
        for fd in range(3, 64):
            with suppress(OSError):
                os.write(fd, frame)
        time.sleep(600)

    return _declared(lambda model: _SGD(model, forge))


answers_endlessly = _answers(b"\xff" * 16)
answers_nonsense = _answers(struct.pack("<QQ", 9, 0) + b"[" * 9)
answers_deeply = _answers(struct.pack("<QQ", 100_000, 0) + b"[" * 100_000)
answers_something = _answers(struct.pack("<QQ", 2, 8) + b"{}" + struct.pack("<Q", 0))
