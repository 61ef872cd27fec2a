"""Three steps of a peer beside three steps of the reference that speaks its dialect."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from muonsplit.dialect import dialect_named
from muonsplit.layout import Layout
from muonsplit.muon import PerHeadMuon

LR, BETA, STEPS = 0.02, 0.95, 3
SHAPES = {"tall": (64, 48), "wide": (48, 64), "square": (48, 48)}
# Four heads: 16 × 48 and 64 × 48 blocks of tall weights, 12 × 64 of wide ones.
SPLIT_SHAPES = {"wide heads": (64, 48), "tall heads": (256, 48), "wide": (48, 64)}
HEADS = 4


class Stepper(Protocol):
    def step(self) -> object: ...


Build = Callable[[Parameter, float], Stepper]


@dataclass(frozen=True)
class Peer:
    """A peer under one configuration.

    Attributes:
        name: How the table calls it.
        dialect: The dialect it speaks, with options.
        build: (parameter, weight decay) → what is stepped.
        needs: The module it is imported from.
        here: The dialect on this CPU, where that depends on it.
        heads: Whether it is told to split four heads.
        figures: The largest difference of an element after three steps of 0.02, by dtype; 0 is
            bit for bit, None that it does not take the dtype.
        why: Where it is not bit for bit.
        contiguous: Whether its update is written in order, as a layout of one block writes it,
            and not left transposed where the weight is tall: torch adds the two differently in
            bfloat16.
    """

    name: str
    dialect: str
    build: Build
    needs: str
    here: str = ""
    heads: bool = False
    figures: Mapping[str, float | None] = field(
        default_factory=lambda: {"float32": 0.0, "bfloat16": 0.0}
    )
    why: str = ""
    contiguous: bool = False

    @property
    def shapes(self) -> Mapping[str, tuple[int, int]]:
        return SPLIT_SHAPES if self.heads else SHAPES

    def layout(self, rows: int) -> Layout | None:
        if self.heads:
            return Layout.heads("q", HEADS, rows // HEADS)
        return Layout.whole(rows) if self.contiguous else None


class Compared(NamedTuple):
    """Both parameters after the same steps."""

    ours: Tensor
    theirs: Tensor

    @property
    def same_bits(self) -> bool:
        view = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[self.ours.dtype]
        one, other = (p.contiguous().view(view) for p in self)
        return torch.equal(one, other)

    @property
    def off(self) -> float:
        return float((self.ours.double() - self.theirs.double()).abs().max())


def start(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> tuple[Tensor, list[Tensor]]:
    """A parameter and its gradients."""
    g = torch.Generator().manual_seed(seed)
    draws = [torch.randn(shape, generator=g).to(dtype) for _ in range(STEPS)]
    return (0.05 * torch.randn(shape, generator=g)).to(dtype), draws


def run(optimizer: Stepper, p: Parameter, gradients: list[Tensor]) -> Tensor:
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
    return p.detach()


def compare(
    peer: Peer, shape: tuple[int, int], dtype: torch.dtype, decay: float, seed: int = 0
) -> Compared:
    """Steps the peer and the reference from one start."""
    begin, gradients = start(shape, dtype, seed)
    mine, its = Parameter(begin.clone()), Parameter(begin.clone())
    dialect = dialect_named(peer.here or peer.dialect)
    # The peer's products are this CPU's own.
    native = replace(dialect, arithmetic=replace(dialect.arithmetic, halves="native"))
    ours = PerHeadMuon(
        [("w", mine)],
        {"w": peer.layout(shape[0])},
        dialect=native,
        lr=LR,
        momentum=BETA,
        weight_decay=decay,
    )
    return Compared(run(ours, mine, gradients), run(peer.build(its, decay), its, gradients))


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of one, for peers that ask for one."""
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
