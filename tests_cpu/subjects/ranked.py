"""Subjects that go wrong on one of several ranks."""

import os
import time
from collections.abc import Mapping

from torch import nn

from muonsplit import Hyper, Layout, PerHeadMuon, subject

RANK = int(os.environ.get("RANK", "0"))
GATHERING = "deepspeed-0.19.8:cut_heads=gather"

Layouts = Mapping[str, Layout | None]


class Struck(PerHeadMuon):
    """Something happens to rank 1 in its step."""

    def step(self, closure: object = None) -> None:
        if RANK == 1:
            self.strike()
        super().step()

    def strike(self) -> None:
        raise NotImplementedError


class Dying(Struck):
    def strike(self) -> None:
        os._exit(7)


class Raising(Struck):
    def strike(self) -> None:
        raise RuntimeError("not on this rank")


class Hanging(Struck):
    def strike(self) -> None:
        time.sleep(3600)


def built(kind: type[PerHeadMuon], model: nn.Module, layouts: Layouts, hyper: Hyper) -> PerHeadMuon:
    named = model.named_parameters()
    return kind(named, layouts, lr=hyper.lr, momentum=hyper.momentum)


@subject(dialect=GATHERING, recognises=False, models=("llama",), ways=("ddp", "fsdp"))
def dies(model: nn.Module, layouts: Layouts, hyper: Hyper) -> PerHeadMuon:
    return built(Dying, model, layouts, hyper)


@subject(dialect=GATHERING, recognises=False, models=("llama",), ways=("ddp", "fsdp"))
def raises(model: nn.Module, layouts: Layouts, hyper: Hyper) -> PerHeadMuon:
    return built(Raising, model, layouts, hyper)


@subject(dialect=GATHERING, recognises=False, models=("llama",), ways=("ddp", "fsdp"))
def hangs(model: nn.Module, layouts: Layouts, hyper: Hyper) -> PerHeadMuon:
    return built(Hanging, model, layouts, hyper)


@subject(dialect=GATHERING if RANK == 0 else "jordan", recognises=False, models=("llama",))
def differs(model: nn.Module, layouts: Layouts, hyper: Hyper) -> PerHeadMuon:
    return built(PerHeadMuon, model, layouts, hyper)
