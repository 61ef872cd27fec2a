"""What one step of per-head Muon costs on a grid of ranks: the whole model, leaf by leaf."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor.placement_types import Placement, Shard

from muonsplit.cost.count import (
    ACCELERATOR,
    AT_ONCE,
    Counter,
    Divided,
    Load,
    Weight,
    batched,
)
from muonsplit.cost.recipe import Grid, stages
from muonsplit.dialect import Arithmetic
from muonsplit.errors import UsageError
from muonsplit.geometry import Decision, Plan
from muonsplit.geometry.shard import tensor_parallel_axes
from muonsplit.sharding import region
from muonsplit.sharding.pieces import shares
from muonsplit.sharding.ways import fsdp_over_tp


class Spread(NamedTuple):
    """How a number spreads over ranks.

    Attributes:
        total: Of all ranks.
        most: Of the rank that has most.
        mean: Of all ranks.
        balance: The mean over the most; None where there is nothing.
    """

    total: int
    most: int
    mean: float
    balance: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """Weights that differ only by layer, all stages together.

    Attributes:
        owner: Class of the module that holds the leaf.
        leaf: Its name.
        shape: Shape of one weight.
        layout: How it is cut, as it is written; None for whole.
        placements: On FSDP × tensor parallelism, as they are written.
        count: Weights.
        blocks: Blocks.
        cut: Blocks that no rank holds whole.
        cut_by_tp: Heads that tensor parallelism alone cuts.
        flop: Operations, each block once.
        redundant: Operations of replicas beyond the first.
        there: Bytes to owners, those of all replicas.
        back: Bytes of results.
    """

    owner: str
    leaf: str
    shape: tuple[int, ...]
    layout: str | None
    placements: str
    count: int
    blocks: int
    cut: int
    cut_by_tp: int
    flop: int
    redundant: int
    there: int
    back: int


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage.

    Attributes:
        weights: How many it has.
        owned: Blocks with one owner, which holds some of them.
        batches: Batches of weights.
        load: Of each of its ranks.
    """

    weights: int
    owned: int
    batches: int
    load: Load


@dataclass(frozen=True, slots=True)
class Cost:
    """What one step costs.

    Attributes:
        grid: The ranks.
        rows: By leaf, in model order.
        stages: By stage.
    """

    grid: Grid
    rows: tuple[Row, ...]
    stages: tuple[Stage, ...]

    @property
    def flop(self) -> list[int]:
        """Operations of each rank."""
        return [value for stage in self.stages for value in stage.load.flop]

    @property
    def there(self) -> list[int]:
        """Bytes that each rank sends to owners."""
        return [value for stage in self.stages for value in stage.load.there]

    @property
    def back(self) -> list[int]:
        """Bytes of results that each rank sends."""
        return [value for stage in self.stages for value in stage.load.back]

    @property
    def sent(self) -> int:
        """Bytes that all ranks send."""
        return sum(self.there) + sum(self.back)

    @property
    def blocks(self) -> int:
        """Blocks of all weights."""
        return sum(row.blocks for row in self.rows)

    @property
    def owned(self) -> int:
        """Those that have one owner, which holds some of them."""
        return sum(stage.owned for stage in self.stages)

    @property
    def least(self) -> int:
        """The fewest bytes that put every cut block together once and take its result back.

        Whoever puts it together lacks at least what is outside the largest piece, and as much has
        to leave again.
        """
        return sum(row.there + row.back for row in self.rows)

    @property
    def idle(self) -> int:
        """Ranks that orthogonalise nothing."""
        return self.flop.count(0)

    def to_json(self) -> dict[str, Any]:
        """The cost as plain values."""
        fields = Row.__slots__
        return {
            "ranks": self.grid.ranks,
            "tp": self.grid.tp,
            "fsdp": self.grid.dp,
            "pp": self.grid.pp,
            "blocks": {
                "all": self.blocks,
                "with_one_owner": self.owned,
                "whole_on_a_rank": self.blocks - sum(row.cut for row in self.rows),
                "cut": sum(row.cut for row in self.rows),
            },
            "flop": {
                **spread(self.flop)._asdict(),
                "redundant": sum(row.redundant for row in self.rows),
            },
            "bytes_there": spread(self.there)._asdict(),
            "bytes_back": spread(self.back)._asdict(),
            "bytes": self.sent,
            "least_bytes": self.least,
            "idle_ranks": self.idle,
            "calls": max(stage.load.calls for stage in self.stages),
            "stages": [
                {
                    "weights": stage.weights,
                    "batches": stage.batches,
                    "calls": stage.load.calls,
                    "flop": spread(stage.load.flop)._asdict(),
                    "bytes_there": spread(stage.load.there)._asdict(),
                    "bytes_back": spread(stage.load.back)._asdict(),
                }
                for stage in self.stages
            ],
            "leaves": [{field: getattr(row, field) for field in fields} for row in self.rows],
        }


def spread(values: Sequence[int]) -> Spread:
    """How numbers spread over ranks."""
    total, most = sum(values), max(values)
    mean = total / len(values)
    return Spread(total, most, mean, mean / most if most else None)


def cost(
    plan: Plan,
    grid: Grid,
    arithmetic: Arithmetic,
    *,
    dtype: torch.dtype = torch.float32,
    at_once: int = AT_ONCE["torch"],
    device: torch.device = ACCELERATOR,
) -> Cost:
    """What one step costs.

    Args:
        plan: The weights and how they are cut.
        grid: The ranks.
        arithmetic: What is computed on a block.
        dtype: Of the updates that are sent.
        at_once: Elements of whole weights that are stepped at once.
        device: Its type decides the dtype of the iteration.

    Raises:
        UsageError: If there are no Muon weights, or fewer layers than stages.
    """
    if not plan.decisions:
        raise UsageError("The model has no weights that Muon trains.")
    counter, axes = Counter(grid.mesh, arithmetic, device), tensor_parallel_axes(plan)

    def weight(d: Decision) -> Weight:
        return Weight(d.name, d.shape, d.layout, fsdp_over_tp(axes.get(d.name), grid.tp), dtype)

    made: list[Stage] = []
    for decisions in stages(plan.decisions, grid.pp):
        batches = list(batched(map(weight, decisions), at_once))
        found, owned = counter.count(batches)
        made.append(Stage(len(decisions), owned, len(batches), found))
    rows = [
        _row(d, count, weight(d).placements, counter.divided(weight(d)), grid.tp)
        for d, count in plan.table()
    ]
    return Cost(grid, tuple(rows), tuple(made))


def _row(d: Decision, count: int, placements: Sequence[Placement], found: Divided, tp: int) -> Row:
    lacking = count * found.replicas * found.lacking
    flop = count * sum(block.flop for block in found.blocks)
    return Row(
        owner=d.owner,
        leaf=d.leaf,
        shape=d.shape,
        layout=None if d.layout is None else str(d.layout),
        placements=", ".join(map(str, placements)),
        count=count,
        blocks=count * len(found.blocks),
        cut=count * found.cut,
        cut_by_tp=count * _cut_by_tp(d, tp),
        flop=flop,
        redundant=flop * (found.replicas - 1),
        there=lacking * found.there,
        back=lacking * found.back,
    )


def _cut_by_tp(d: Decision, tp: int) -> int:
    if d.layout is None:
        return 0
    along = [Shard(d.layout.axis)]
    regions = [region(d.shape, (tp,), (rank,), along) for rank in range(tp)]
    return sum(len(share.pieces) > 1 for share in shares(d.shape, d.layout, regions))
