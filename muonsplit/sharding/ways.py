"""The ways in which a model is divided among ranks: each a name, a mesh and placements.

ddp       every rank holds the model, and data of its own      DistributedDataParallel
tp        heads, or what takes their place, are divided        DTensor, Shard(0) and Shard(1)
fsdp      the rows of every parameter are divided              fully_shard
hsdp      the same within halves that hold the same            fully_shard on a 2-D mesh
tp-fsdp   tensor parallel in pairs, rows divided among pairs   both
engine    the subject's own: every rank gives it a model       e.g. ZeRO
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from typing import Any

from muonsplit.errors import UsageError
from muonsplit.sharding.held import Region, region

# Axes of the mesh, and how many ranks there must be at least.
_LEAST = {"ddp": 2, "tp": 2, "fsdp": 2, "hsdp": 4, "tp-fsdp": 4, "engine": 2}
WAYS = tuple(_LEAST)
_MOST = 64


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one run is divided among ranks.

    Attributes:
        way: One of :data:`WAYS`.
        world: Number of ranks.
        axes: The axis along which tensor parallelism divides a parameter, by name; what is not
            named every rank of it holds.

    Raises:
        UsageError: If there is no such way, or it does not fit that many ranks.
    """

    way: str
    world: int
    axes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.way not in _LEAST:
            raise UsageError(
                f"There is no way of sharding {self.way!r}.", f"Known: {', '.join(WAYS)}."
            )
        check_world(self.world)
        if self.world < _LEAST[self.way]:
            raise UsageError(
                f"{self.way} needs a mesh of {_LEAST[self.way]} ranks or more, got {self.world}."
            )

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the mesh by the name of each axis."""
        match self.way:
            case "tp":
                return {"tp": self.world}
            case "hsdp":
                return {"replicate": 2, "dp": self.world // 2}
            case "tp-fsdp":
                return {"dp": self.world // 2, "tp": 2}
            case _:
                return {"dp": self.world}

    @property
    def holds_shards(self) -> bool:
        """Whether parameters are DTensors, whose placements say what a rank holds."""
        return self.way not in ("ddp", "engine")

    def data(self, rank: int) -> tuple[int, int]:
        """Which part of a step's data a rank has, and how many parts there are."""
        if "tp" not in self.mesh:
            return rank, self.world
        return rank // self.mesh["tp"], self.mesh.get("dp", 1)

    def placements(self, name: str) -> tuple[Any, ...]:
        """Where a parameter is on each axis of the mesh, as torch places it."""
        types: Any = import_module("torch.distributed.tensor.placement_types")
        axis = self.axes.get(name)
        rows, divided = types.Shard(0), types.Replicate() if axis is None else types.Shard(axis)
        match self.way:
            case "tp":
                return (divided,)
            case "fsdp":
                return (rows,)
            case "hsdp":
                return (types.Replicate(), rows)
            case "tp-fsdp":
                return fsdp_over_tp(axis, self.mesh["tp"])
            case _:
                return (types.Replicate(),)

    def regions(self, name: str, shape: Sequence[int]) -> list[Region]:
        """What each rank holds of a parameter.

        Args:
            name: The parameter.
            shape: Its whole shape.
        """
        sizes, placements = tuple(self.mesh.values()), self.placements(name)
        places = product(*map(range, sizes))
        return [region(shape, sizes, place, placements) for place in places]

    def __str__(self) -> str:
        return f"{self.way} on {self.world} ranks"


def fsdp_over_tp(axis: int | None, tp: int) -> tuple[Any, Any]:
    """The placements of a parameter on FSDP × tensor parallelism, as FSDP2 states them.

    Args:
        axis: Along which tensor parallelism divides it; None for not at all.
        tp: Ranks of a tensor-parallel group; of one, nothing is divided.
    """
    types: Any = import_module("torch.distributed.tensor.placement_types")
    if axis is None or tp == 1:
        return types.Shard(0), types.Replicate()
    rows = types._StridedShard(0, split_factor=tp) if axis == 0 else types.Shard(0)
    return rows, types.Shard(axis)


def fits(way: str, world: int) -> bool:
    """Whether a way of sharding is one, and there are ranks enough for its mesh."""
    return way in _LEAST and world >= _LEAST[way]


def check_world(world: int) -> None:
    """Refuses a number of ranks that a run cannot have.

    Raises:
        UsageError: If it is none: only for powers of two is the mean of what the ranks are given
            the gradient itself, to the last bit.
    """
    if not 1 <= world <= _MOST or world & (world - 1):
        raise UsageError(
            f"The world size must be 1 or a power of two up to {_MOST}, got {world}.",
            "Only then is the mean over ranks the chosen gradient to the last bit.",
        )
