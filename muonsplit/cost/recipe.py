"""How N ranks usually divide a model: pipeline stages of tensor-parallel × FSDP2 meshes.

Tensor parallelism divides as :func:`muonsplit.geometry.shard.tensor_parallel_axes` says, then FSDP2
the rows of each shard.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from muonsplit.errors import UsageError
from muonsplit.geometry import Decision

MOST_RANKS = 1 << 20

_LAYER = re.compile(r"(?:^|.*?\.)\d+(?=\.)")


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
