"""What every kind of checkpoint is to the audit: names, shapes, and one tensor at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Entry(NamedTuple):
    """One tensor of a checkpoint, as its index describes it.

    Attributes:
        shape: Shape of the whole tensor.
        dtype: Dtype it is stored in.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


class Saved(Protocol):
    """Tensors by name, whole, one at a time."""

    @property
    def path(self) -> Path:
        """Where they are."""
        ...

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Every tensor by name, without its values."""
        ...

    @property
    def step(self) -> int | None:
        """The training step that the checkpoint names, if it does."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor, put together from its shards, on the CPU, in the dtype it is stored in.

        Never holds more than that tensor and one shard of it.

        Raises:
            EvidenceError: If a shard is missing, damaged, or of another shape than the index says.
        """
        ...
