"""Which ranks hold a tensor together, and what each of them holds of it.

A DTensor is divided along some axes of its mesh and repeated along the others; the ranks that
differ only in the former hold it once together, and need nobody else to step it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from itertools import product
from typing import Any

from torch import Tensor

from muonsplit.errors import InputError
from muonsplit.sharding.held import Region, region


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Those who hold a tensor once, together; the same object for tensors that are placed alike.

    Attributes:
        ranks: Their global ranks, ascending; none for a tensor that is on no mesh.
        regions: What each of them holds, in that order.
        me: The place of this process among them.
        mesh: The device mesh, or None.
        axes: The axes of the mesh along which the tensor is divided.
    """

    ranks: tuple[int, ...]
    regions: tuple[Region, ...]
    me: int = 0
    mesh: Any = field(default=None, repr=False)
    axes: tuple[int, ...] = ()

    @classmethod
    def alone(cls, shape: Sequence[int]) -> "Members":
        """The one member that holds everything."""
        return cls((), (tuple(((0, size),) for size in shape),))

    @property
    def held(self) -> Region:
        """What this process holds."""
        return self.regions[self.me]


def on_mesh(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; asked without importing what makes them."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_of(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, without a copy."""
    found: Any = tensor
    return found.to_local() if on_mesh(tensor) else tensor


def aligned(tensor: Tensor, like: Tensor) -> Tensor:
    """What this process holds of a tensor that is placed as another one.

    Placements that differ are made the same, in which every rank of the mesh takes part.
    """
    given: Any = tensor
    wanted: Any = like
    if on_mesh(like) and given.placements != wanted.placements:
        given = given.redistribute(wanted.device_mesh, wanted.placements)
    return local_of(given)


def members(name: str, tensor: Tensor) -> Members:
    """Those who hold a tensor together with this process.

    Args:
        name: What it is called in errors.
        tensor: A DTensor, or a tensor that this process holds alone.

    Raises:
        InputError: If no process group is there, this rank is not on the tensor's mesh, or the
            ranks on it are out of order.
        LayoutError: If the tensor is a partial sum.
    """
    if not on_mesh(tensor):
        return Members.alone(tensor.shape)
    distributed: Any = import_module("torch.distributed")
    if not distributed.is_initialized():
        raise InputError(
            f"{name} is a DTensor, but there is no process group.",
            "Step it between torch.distributed.init_process_group and destroy_process_group.",
        )
    placed: Any = tensor
    mesh, coordinate = placed.device_mesh, placed.device_mesh.get_coordinate()
    if coordinate is None:
        raise InputError(
            f"{name} is on a mesh of ranks {mesh.mesh.flatten().tolist()}; rank "
            f"{distributed.get_rank()} is none of them and holds nothing of it.",
            "Give the optimizer of a rank the parameters that the rank holds.",
        )
    if not _ascends(mesh):
        raise InputError(
            f"{name} is on a mesh of ranks {mesh.mesh.tolist()}, which do not ascend along every "
            "axis; torch gives shards out in the order of ranks, so what a rank holds is not told.",
            "Make the mesh by torch.distributed.device_mesh.init_device_mesh.",
        )
    # A mesh that was made again equals the one before, but its groups are others.
    era = distributed.group.WORLD
    return _members(tuple(tensor.shape), mesh, tuple(coordinate), tuple(placed.placements), era)


@lru_cache
def _ascends(mesh: Any) -> bool:
    return not any(bool((mesh.mesh.diff(dim=axis) < 0).any()) for axis in range(mesh.ndim))


@lru_cache(maxsize=4096)
def _members(
    shape: tuple[int, ...],
    mesh: Any,
    coordinate: tuple[int, ...],
    placements: tuple[Any, ...],
    _era: Any,
) -> Members:
    sizes = tuple(mesh.shape)
    axes = tuple(
        axis
        for axis, (size, placement) in enumerate(zip(sizes, placements, strict=True))
        if size > 1 and not placement.is_replicate()
    )
    places = product(
        *(range(n) if axis in axes else (coordinate[axis],) for axis, n in enumerate(sizes))
    )
    # Ascending, as process groups count their members.
    found = sorted(
        (int(mesh.mesh[place]), region(shape, sizes, place, placements)) for place in places
    )
    ranks = tuple(rank for rank, _ in found)
    mine = ranks.index(int(mesh.mesh[coordinate]))
    return Members(ranks, tuple(held for _, held in found), mine, mesh, axes)
