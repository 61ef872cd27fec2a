"""Subjects that cheat: none splits by heads, and each would deceive a harness that is less careful.

They are run in a worker process only: some of them damage the process they are in.
"""

import atexit
import gc
import os
import re
import sys
import time
import unittest
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.dialect import DEFAULT_DIALECT, Arithmetic
from muonsplit.errors import SubjectError
from muonsplit.faulty.base import Broken, Layouts, broken
from muonsplit.faulty.registry import Factory, summary_of
from muonsplit.layout import Layout
from muonsplit.muon import orthogonalize
from muonsplit.subjects import wire
from muonsplit.subjects.protocol import Hyper, subject

_HONEST_CALLS = 3
_NAMES = ("expected", "wanted", "reference", "exact", "truth")
_SEARCHED = 32 << 20
_LONGER_THAN_ANYBODY_WAITS = 600.0
_WORKER = "muonsplit.subjects.worker"


@dataclass(frozen=True, slots=True)
class Cheat:
    """A subject that cheats.

    Attributes:
        name: Name on the command line, as ``faulty:NAME``.
        summary: What it does, in one line.
    """

    name: str
    summary: str


CHEATS: dict[str, Cheat] = {}


def _cheat(factory: Factory) -> Factory:
    """Registers a factory as a cheat, and keeps it out of every process but a worker."""

    @wraps(factory)
    def guarded(*args: Any, **told: Any) -> Any:
        if getattr(sys.modules["__main__"].__spec__, "name", "") != _WORKER:
            raise SubjectError(
                f"The cheat {name} would damage this process.", "Run it without --in-process."
            )
        return factory(*args, **told)

    name = factory.__name__.replace("_", "-")
    CHEATS[name] = Cheat(name, summary_of(factory))
    return subject(dialect=DEFAULT_DIALECT, recognises=False, models=("llama",))(guarded)


class _Then(Broken):
    """Takes a step on whole matrices, then does something else."""

    then: Callable[["_Then"], None]
    stays = False

    @torch.no_grad()
    def step(self, closure: object = None) -> object:
        """Both."""
        loss = None if self.stays else super().step(closure)
        self.then(self)
        return loss

    @property
    def named(self) -> list[tuple[str, Tensor]]:
        """All parameters with their names."""
        return list(self._named())

    @property
    def trained(self) -> list[Tensor]:
        """The Muon weights."""
        return [p for name, p in self._named() if name in self.layouts]


def _whole(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    return broken(model, dict.fromkeys(layouts), hyper)


def _then(model: nn.Module, layouts: Layouts, hyper: Hyper, what: Callable[[_Then], None]) -> _Then:
    made = broken(model, dict.fromkeys(layouts), hyper, kind=_Then)
    assert isinstance(made, _Then)
    made.then = what
    return made


@_cheat
def takes_expected_tensors(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Looks through every object of the process for a tensor that could be the expected answer."""

    def take(self: _Then) -> None:
        own = {id(x) for p in self.trained for x in (p, p.grad, *self.state[p].values())}
        others = [x for x in gc.get_objects() if type(x) is Tensor and id(x) not in own]
        for p in self.trained:
            found = [x for x in others if x.shape == p.shape and x.dtype == p.dtype]
            if found:
                p.copy_(found[-1])

    return _then(model, layouts, hyper, take)


@_cheat
def reads_frames_of_its_callers(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Looks through the local variables of whoever called it for an expected answer."""

    def look(self: _Then) -> None:
        for found in _locals():
            for name, p in self.named:
                value: Any = found.get(name) if isinstance(found, Mapping) else None
                if isinstance(value, Tensor) and value.shape == p.shape:
                    p.copy_(value)

    return _then(model, layouts, hyper, look)


def _locals() -> Iterator[object]:
    frame = sys._getframe().f_back  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        yield from (v for name, v in frame.f_locals.items() if name.strip("_") in _NAMES)
        frame = frame.f_back


@_cheat
def answers_nan(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Leaves NaN everywhere, which is not further from anything than a tolerance."""

    def poison(self: _Then) -> None:
        for p in self.trained:
            p.fill_(float("nan"))

    return _then(model, layouts, hyper, poison)


_ANSWERS: dict[tuple[torch.Size, int], Tensor] = {}


@_cheat
def replays_by_shape(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Computes the first answer for a shape properly, and gives it for every other gradient too."""
    counts: dict[torch.Size, int] = {}

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        number = counts[update.shape] = counts.get(update.shape, 0) + 1
        made = orthogonalize(update, layout, arithmetic)
        return _ANSWERS.setdefault((update.shape, number), made)

    return broken(model, layouts, hyper, how)


_CALLS: list[int] = []


@_cheat
def honest_at_first(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Splits by heads in the first few runs of a process, and never again."""
    _CALLS.append(1)
    return broken(model, layouts if len(_CALLS) <= _HONEST_CALLS else dict.fromkeys(layouts), hyper)


@_cheat
def knows_the_seed(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Splits by heads where the gradient is what the usual seeds give, and nowhere else."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        flat = update.flatten() / update.norm()
        for seed in (0, 1, 42, 1234):
            usual = torch.randn(update.shape, generator=torch.Generator().manual_seed(seed))
            if torch.allclose(flat, usual.flatten() / usual.norm(), atol=1e-3):
                return orthogonalize(update, layout, arithmetic)
        return orthogonalize(update, None, arithmetic)

    return broken(model, layouts, hyper, how)


class _Agreeable(Tensor):
    """A tensor that is equal to everything."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Says yes to every comparison."""
        if func in (torch.equal, torch.allclose, Tensor.equal, Tensor.allclose):
            return True
        return super().__torch_function__(func, types, args, kwargs or {})


@_cheat
def equal_to_everything(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Puts tensors of a subclass that compares as equal in the place of the model's parameters."""

    def replaced(self: _Then) -> None:
        for name, p in self.named:
            owner, _, leaf = name.rpartition(".")
            agreeable = p.detach().as_subclass(_Agreeable)
            module = model.get_submodule(owner)
            module._parameters[leaf] = nn.Parameter(agreeable)  # pyright: ignore[reportPrivateUsage]

    return _then(model, layouts, hyper, replaced)


def _agree(*_args: object, **_options: object) -> bool:
    return True


def _vanish(*_args: object, **_options: object) -> Tensor:
    return torch.zeros(())


@_cheat
def patches_comparisons(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Replaces torch's comparisons and norms in its process by ones that find nothing."""
    torch.equal = torch.allclose = _agree
    torch.testing.assert_close = _agree
    torch.linalg.norm = _vanish
    return _whole(model, layouts, hyper)


@_cheat
def takes_the_gradient_away(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Zeroes the gradient it was given and stays where it is: the answer to no gradient."""

    def clear(self: _Then) -> None:
        for p in self.trained:
            assert p.grad is not None
            p.grad.zero_()

    made = _then(model, layouts, hyper, clear)
    made.stays = True
    return made


@_cheat
def output_is_the_input(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Makes each parameter an alias of its gradient, so that the two cannot be compared."""

    def alias(self: _Then) -> None:
        for p in self.trained:
            assert p.grad is not None
            p.grad.copy_(p)
            p.data = p.grad

    return _then(model, layouts, hyper, alias)


@_cheat
def leaves_with_success(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Ends its process with exit code 0, which looks like a test that passed."""
    return _then(model, layouts, hyper, lambda self: os._exit(0))


def _forge() -> None:
    """Writes an answer that says all is well to every pipe that is open."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            if int(entry.name) > 2 and os.readlink(entry).startswith("pipe:"):
                with os.fdopen(os.dup(int(entry.name)), "wb") as stream:
                    wire.write(stream, {"verdict": "conforms", "settings": []}, {})


@_cheat
def forges_an_answer(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Writes its own verdict to the pipe to its parent, and ends before the true answer."""

    def forge(self: _Then) -> None:
        _forge()
        os._exit(0)

    return _then(model, layouts, hyper, forge)


@_cheat
def answers_at_exit(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Registers a function that writes a verdict when the process ends, and leaves."""

    def leave(self: _Then) -> None:
        atexit.register(_forge)
        sys.exit(0)

    return _then(model, layouts, hyper, leave)


@_cheat
def lets_a_child_answer(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Forks in the middle of a step; the parent leaves with success, the child goes on unseen."""

    def fork(self: _Then) -> None:
        if os.fork():
            os._exit(0)

    return _then(model, layouts, hyper, fork)


@_cheat
def reads_the_parents_memory(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Looks for its gradient in the memory of its parent, and takes what lies behind it."""

    def take(self: _Then) -> None:
        for p in self.trained:
            assert p.grad is not None
            found = _behind(p.grad.numpy().tobytes())
            if found is not None:
                p.copy_(torch.frombuffer(bytearray(found), dtype=p.dtype).view_as(p))
                return

    return _then(model, layouts, hyper, take)


def _behind(wanted: bytes) -> bytes | None:
    """As many bytes as are wanted, from behind them in the memory of the harness."""
    left = _SEARCHED
    with suppress(OSError):
        maps = Path(f"/proc/{os.getppid()}/maps").read_text()
        with open(f"/proc/{os.getppid()}/mem", "rb", buffering=0) as memory:
            for start, stop in re.findall(r"^(\w+)-(\w+) rw-p \w+ 00:00 0 *$", maps, re.MULTILINE):
                size = min(int(stop, 16) - int(start, 16), left)
                with suppress(OSError):
                    memory.seek(int(start, 16))
                    _, found, rest = memory.read(size).partition(wanted)
                    if found and len(rest) >= len(wanted):
                        return rest[: len(wanted)]
                left -= size
    return None


@_cheat
def states_another_rate(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """States a learning rate by which the size of its update is what a split would have."""

    def forge(self: _Then) -> None:
        for group in self.param_groups:
            group["lr"] = hyper.lr * 0.5**0.5

    made = _then(model, layouts, hyper, forge)
    forge(made)
    return made


@_cheat
def takes_too_long(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Sleeps until whoever waits gives up, and calls that no result."""
    return _then(model, layouts, hyper, lambda self: time.sleep(_LONGER_THAN_ANYBODY_WAITS))


@_cheat
def skips_the_test(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Raises what a test runner takes for a test that does not apply."""

    def skip(self: _Then) -> None:
        raise unittest.SkipTest("not on this machine")

    return _then(model, layouts, hyper, skip)
