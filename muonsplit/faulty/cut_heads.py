"""Faults on heads that shards cut, or that a rank counts as the whole weight has them."""

from torch import nn

from muonsplit.faulty.base import Layouts
from muonsplit.faulty.gathering import GATHER, RAISE, Gathering, LocalShards
from muonsplit.faulty.registry import fault
from muonsplit.layout import Layout
from muonsplit.sharding import local_of, on_mesh
from muonsplit.subjects.protocol import Hyper


class _StaleCount(LocalShards):
    def taken(self, name: str) -> bool:
        return self.layouts.get(name) is not None

    def layout(self, name: str) -> Layout | None:
        told = self.layouts[name]
        if told is None:
            return None
        heads = len(told.blocks())
        return Layout.heads("q", heads, local_of(self.named[name]).shape[0] // heads)


@fault(
    check="cut.rows",
    model="llama",
    dialect=GATHER,
    origin="DeepSpeed #8384, tensor parallelism",
    world=2,
    way="tp",
)
def stale_head_count_under_tp(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Gathering:
    """Each rank cuts its rows into as many heads as the whole weight has: half heads."""
    return _StaleCount(model, layouts, hyper)


def _cut_by_shards(sharded: Gathering, name: str) -> bool:
    """Whether a rank's rows of a weight are no whole number of its heads."""
    told, p = sharded.layouts.get(name), sharded.named[name]
    if told is None:
        return False
    width = told.rows // len(told.blocks())
    return local_of(p).shape[0] % width != 0


class _PartsOfHeads(LocalShards):
    def taken(self, name: str) -> bool:
        return _cut_by_shards(self, name)


@fault(
    check="sharding.cut_heads",
    model="llama",
    dialect=GATHER,
    origin="torchtitan #4078",
    world=4,
    way="fsdp",
)
def part_of_a_head(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Gathering:
    """A head that reaches over two ranks is orthogonalised as two blocks."""
    return _PartsOfHeads(model, layouts, hyper)


class _ShardsOfHeads(LocalShards):
    def taken(self, name: str) -> bool:
        return self.layouts.get(name) is not None


@fault(
    check="sharding.cut_heads",
    model="llama",
    dialect=GATHER,
    origin="AReaL #1270; Moonlight #27",
    world=4,
    way="fsdp",
)
def shard_as_one_matrix(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Gathering:
    """What a rank holds of a weight that is split is orthogonalised as one matrix."""
    return _ShardsOfHeads(model, layouts, hyper)


class _Dropped(Gathering):
    def layout(self, name: str) -> Layout | None:
        return None if _cut_by_shards(self, name) else super().layout(name)


@fault(
    check="sharding.cut_heads",
    model="llama",
    dialect=GATHER,
    origin="Megatron-LM, QKV of a tensor-parallel shard",
    world=4,
    way="fsdp",
)
def split_dropped_in_silence(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Gathering:
    """A weight whose heads are cut is whole, though they are said to be gathered."""
    return _Dropped(model, layouts, hyper)


@fault(check="sharding.cut_heads", model="llama", dialect=RAISE, world=4, way="fsdp")
def cut_heads_not_refused(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Gathering:
    """Shards that cut heads are said to be refused, and a step is taken."""
    return Gathering(model, layouts, hyper)


@fault(check="subject.answers", model="llama", dialect=RAISE, world=4, way="fsdp")
def crash_taken_for_a_refusal(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Gathering:
    """It is said to refuse shards that cut heads, and raises on all of them."""
    if any(map(on_mesh, model.parameters())):
        raise TypeError("unsupported operand: a DTensor")
    return Gathering(model, layouts, hyper)


@fault(check="sharding.cut_heads", model="llama", world=4, way="fsdp")
def heads_gathered_where_dropped(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Gathering:
    """Heads are put together where the dialect leaves a weight whole that shards cut."""
    return Gathering(model, layouts, hyper)
