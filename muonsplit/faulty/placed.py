"""Faults on DTensors: what a rank holds of a weight is taken for something else."""

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.faulty.base import Layouts
from muonsplit.faulty.gathering import GATHER, Gathering, LocalShards, ranks
from muonsplit.faulty.registry import fault
from muonsplit.newton_schulz import scale_factor
from muonsplit.sharding import local_of, on_mesh
from muonsplit.subjects.distribute import whole
from muonsplit.subjects.protocol import Hyper


class _RowsOfWhole(LocalShards):
    def taken(self, name: str) -> bool:
        p = self.named[name]
        return name in self.layouts and self.layouts[name] is None and p.ndim == 2


@fault(
    check="recognition.whole",
    model="llama",
    dialect=GATHER,
    kind="any Muon",
    origin="AReaL #1270; Moonlight #27",
    world=2,
    way="fsdp",
)
def rows_of_fsdp(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Gathering:
    """The rows that a rank holds of a whole matrix are taken for a matrix."""
    return _RowsOfWhole(model, layouts, hyper)


class _ColumnsOfOutput(LocalShards):
    def taken(self, name: str) -> bool:
        p = self.named[name]
        return p.ndim == 2 and local_of(p).shape[1] < p.shape[1]


@fault(
    check="cut.columns",
    model="llama",
    dialect=GATHER,
    kind="any Muon",
    origin="Megatron-LM #6380",
    world=2,
    way="tp",
)
def columns_of_tp(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Gathering:
    """The columns that a rank holds of an output projection are taken for a matrix."""
    return _ColumnsOfOutput(model, layouts, hyper)


class _OtherScale(Gathering):
    """Scales whole matrices as if they had another number of rows."""

    def rows(self, name: str) -> int:
        raise NotImplementedError

    def direction(self, name: str, update: Tensor) -> Tensor:
        right = super().direction(name, update)
        if self.layouts[name] is not None or update.ndim != 2:
            return right
        rows, cols = update.shape
        factors = [scale_factor(self.inner.arithmetic, r, cols) for r in (self.rows(name), rows)]
        return right * (factors[0] / factors[1])


class _ShardScale(_OtherScale):
    def rows(self, name: str) -> int:
        return local_of(self.named[name]).shape[0]


@fault(
    check="arithmetic.scale",
    model="llama",
    dialect=GATHER,
    kind="any Muon",
    origin="dion, split_sizes with NorMuon: sizes by shard, not by block",
    world=2,
    way="fsdp",
)
def scale_of_the_shard(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Gathering:
    """A whole matrix is scaled by the shape of what the rank holds of it."""
    return _ShardScale(model, layouts, hyper)


class _PaddedScale(_OtherScale):
    def rows(self, name: str) -> int:
        return -(-self.named[name].shape[0] // ranks()) * ranks()


@fault(
    check="sharding.uneven",
    model="llama",
    dialect=GATHER,
    kind="any Muon",
    origin="Megatron-LM #6740",
    world=2,
    way="fsdp",
)
def padded_rows_in_the_scale(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Gathering:
    """Rows that pad shards to one size are counted where a matrix is scaled."""
    return _PaddedScale(model, layouts, hyper)


@lru_cache
def _beside() -> Any:
    """Another group of all ranks, whose collectives meet no others."""
    distributed: Any = import_module("torch.distributed")
    return distributed.new_group() if ranks() > 1 else None


class _Skipping(Gathering):
    def __init__(self, model: nn.Module, layouts: Layouts, hyper: Hyper) -> None:
        self._group = _beside()
        super().__init__(model, layouts, hyper)

    def piece(self, name: str, x: Tensor) -> Tensor:
        distributed: Any = import_module("torch.distributed")
        sizes = torch.zeros(ranks(), dtype=torch.int64)
        if self._group is not None and local_of(x).numel():
            distributed.all_reduce(sizes, group=self._group)
        return super().piece(name, x)


@fault(
    check="sharding.uneven",
    model="llama",
    dialect=GATHER,
    kind="any Muon",
    origin="dion #74",
    world=2,
    way="fsdp",
)
def empty_rank_skips_a_collective(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Gathering:
    """A rank that holds no rows takes no part in a collective, and the others wait for it."""
    return _Skipping(model, layouts, hyper)


class _Crashing(Gathering):
    def piece(self, name: str, x: Tensor) -> Tensor:
        local_of(x.detach()).abs().max()
        return super().piece(name, x)


@fault(
    check="sharding.uneven",
    model="llama",
    dialect=GATHER,
    kind="any Muon",
    origin="dion #83; Megatron-LM #4486",
    world=2,
    way="fsdp",
)
def crash_on_an_empty_shard(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Gathering:
    """The largest element of what a rank holds is looked for where it holds none."""
    return _Crashing(model, layouts, hyper)


class _OneShape(Gathering):
    def step(self) -> None:
        torch.stack([local_of(p.grad) for p in self.named.values() if p.grad is not None])
        super().step()


@fault(
    check="subject.answers",
    model="llama",
    dialect=GATHER,
    origin="DeepSpeed #8628",
    world=2,
    way="fsdp",
)
def gather_of_one_shape(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Gathering:
    """What is gathered at once is taken to have one shape, and queries and keys have two."""
    return _OneShape(model, layouts, hyper)


class _TrustRatio(LocalShards):
    def taken(self, name: str) -> bool:
        return name not in self.layouts

    def kept(self, name: str, piece: Tensor) -> Tensor:
        if not self.taken(name):
            return super().kept(name, piece)
        before = local_of(self.named[name].detach())
        moved = piece - before
        ratio = before.norm() / moved.norm().clamp(min=1e-12)
        return piece.copy_(before + moved * ratio)


class _OthersUndecayed(Gathering):
    def kept(self, name: str, piece: Tensor) -> Tensor:
        if name not in self.layouts and on_mesh(self.named[name]):
            settings = self.inner.defaults
            shrunk = settings["adamw_lr"] * settings["weight_decay"]
            piece = piece + shrunk * whole(self.named[name].detach())
        return super().kept(name, piece)


@fault(
    check="sharding.invariance", model="llama", dialect=GATHER, kind="any Muon", world=2, way="fsdp"
)
def others_not_decayed(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Gathering:
    """What Muon does not train is decayed in one process, and not as DTensors."""
    return _OthersUndecayed(model, layouts, hyper)


@fault(
    check="sharding.invariance", model="llama", dialect=GATHER, kind="any Muon", world=2, way="fsdp"
)
def norm_of_the_shard(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Gathering:
    """What Muon does not train is stepped in proportion to the norm of what the rank holds."""
    return _TrustRatio(model, layouts, hyper)
