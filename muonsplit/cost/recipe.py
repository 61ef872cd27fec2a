"""How N ranks usually divide a model: pipeline stages of tensor-parallel × FSDP2 meshes.

    split by heads, query … value   tensor parallel along the heads
    output projection               tensor parallel along its columns
    gate, up | down of an MLP       rows | columns, by leaf name
    stack of experts                experts
    everything else                 the same on every tensor-parallel rank

Then FSDP2 divides the rows of each shard. Axes are those of ``nn.Linear``, output × input.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from torch.distributed.tensor.placement_types import (
    Placement,
    Replicate,
    Shard,
    _StridedShard,  # pyright: ignore[reportPrivateUsage]
)

from muonsplit.errors import UsageError
from muonsplit.geometry import Decision
from muonsplit.geometry.leaf import SPLITTABLE

MOST_RANKS = 1 << 20

_LAYER = re.compile(r"(?:^|.*?\.)\d+(?=\.)")
_ROWS = frozenset(
    {"gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "w13", "fc1", "fc_in"}
    | {"dense_h_to_4h", "linear_fc1"}
)
_COLUMNS = frozenset({"down_proj", "w2", "fc2", "fc_out", "dense_4h_to_h", "linear_fc2"})


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranks as pipeline stages × FSDP × tensor parallelism; the last is fastest.

    Attributes:
        ranks: How many.
        tp: Ranks of a tensor-parallel group.
        pp: Pipeline stages.

    Raises:
        UsageError: If a number is no count, or tensor parallelism times stages does not divide
            the ranks.
    """

    ranks: int
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name, value in (("ranks", self.ranks), ("tp", self.tp), ("pp", self.pp)):
            if type(value) is not int or not 1 <= value <= MOST_RANKS:
                raise UsageError(f"{name} must be from 1 to {MOST_RANKS}, got {value!r}.")
        if self.ranks % (self.tp * self.pp):
            raise UsageError(
                f"{self.ranks} ranks are no multiple of tp={self.tp} × pp={self.pp}; FSDP has the "
                "rest, which must be whole."
            )

    @property
    def dp(self) -> int:
        """Ranks of an FSDP group."""
        return self.ranks // (self.tp * self.pp)

    @property
    def mesh(self) -> tuple[int, int]:
        """The mesh of one stage: FSDP × tensor parallelism."""
        return self.dp, self.tp

    def __str__(self) -> str:
        return f"tp {self.tp} × fsdp {self.dp} × pp {self.pp}"


def placed(decision: Decision, tp: int) -> tuple[Placement, Placement]:
    """The placements of a weight on FSDP × tensor parallelism, as FSDP2 states them.

    Args:
        decision: What is known of it.
        tp: Ranks of a tensor-parallel group; of one, nothing is divided.
    """
    axis = _tensor_axis(decision) if tp > 1 else None
    if axis is None:
        return Shard(0), Replicate()
    return (_StridedShard(0, split_factor=tp) if axis == 0 else Shard(0)), Shard(axis)


def _tensor_axis(decision: Decision) -> int | None:
    if decision.layout is not None:
        return decision.layout.axis
    if decision.kind in SPLITTABLE:
        return 0
    if decision.kind == "output":
        return 1
    if len(decision.shape) == 3:
        return 0
    if decision.kind != "other":
        return None
    return 0 if decision.leaf in _ROWS else 1 if decision.leaf in _COLUMNS else None


def stages(decisions: Sequence[Decision], pp: int) -> list[list[Decision]]:
    """The weights of each pipeline stage: as many consecutive layers each as can be.

    A layer is what a name has up to its first number. What is in none goes with the layer before.

    Raises:
        UsageError: If there are fewer layers than stages.
    """
    layers: list[list[Decision]] = []
    last = ""
    for decision in decisions:
        found = _LAYER.match(decision.name)
        if not layers or (found and last and found[0] != last):
            layers.append([])
        last = found[0] if found else last
        layers[-1].append(decision)
    if len(layers) < pp:
        raise UsageError(f"{len(layers)} layers with Muon weights do not fill pp={pp} stages.")
    bounds = [stage * len(layers) // pp for stage in range(pp + 1)]
    return [list(chain(*layers[a:b])) for a, b in pairwise(bounds)]
