"""Dividing a model among ranks, by the engines people use: DDP, DTensor, FSDP2."""

import os
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.sharding.members import on_mesh
from muonsplit.sharding.ways import Sharding

# In the environment of a worker that is one of several: where they meet.
MEETING = "MUONSPLIT_MEETING"


def rank() -> int:
    """The rank of this process, as its launcher or ours says."""
    return int(os.environ["RANK"])


def enter_group() -> None:
    """Joins the gloo group of the ranks that are run together, where it is not joined yet."""
    distributed: Any = import_module("torch.distributed")
    if distributed.is_initialized():
        return
    world = int(os.environ["WORLD_SIZE"])
    store = _met(os.environ[MEETING], world)
    # Who waits too long is ended from outside, and says so better.
    distributed.init_process_group(
        "gloo", store=store, rank=rank(), world_size=world, timeout=timedelta(days=1)
    )


def _met(meeting: str, world: int) -> Any:
    """The store at which ranks meet: a file, or ``host:port/prefix`` of a server."""
    distributed: Any = import_module("torch.distributed")
    if os.path.isabs(meeting):
        # A file needs no port, so that runs side by side cannot collide.
        return distributed.FileStore(meeting, world)
    address, _, prefix = meeting.partition("/")
    host, _, port = address.rpartition(":")
    server = distributed.TCPStore(host, int(port), world, is_master=False)
    return distributed.PrefixStore(prefix, server)


@lru_cache
def _mesh(names: tuple[str, ...], sizes: tuple[int, ...]) -> Any:
    device_mesh: Any = import_module("torch.distributed.device_mesh")
    return device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=names)


def distribute(model: nn.Module, sharding: Sharding) -> nn.Module:
    """Divides a model among the ranks of the group, in place.

    Args:
        model: The same on every rank.
        sharding: How.

    Returns:
        What is called for the loss: the model, or what DDP wraps around it.
    """
    if sharding.way == "engine":
        return model
    if sharding.way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = _mesh(tuple(sharding.mesh), tuple(sharding.mesh.values()))
    if "tp" in sharding.mesh:
        _tensor_parallel(model, mesh["tp"], sharding.axes)
    if "dp" in sharding.mesh:
        fsdp: Any = import_module("torch.distributed.fsdp")
        fsdp.fully_shard(model, mesh=mesh["dp"] if "tp" in sharding.mesh else mesh)
    return model


def _tensor_parallel(model: nn.Module, mesh: Any, axes: Mapping[str, int]) -> None:
    """Divides the named parameters and repeats all others, as ``distribute_module`` does."""
    tensor: Any = import_module("torch.distributed.tensor")

    def divide(prefix: str, module: nn.Module, _: Any) -> None:
        for key, p in list(module.named_parameters(recurse=False)):
            axis = axes.get(f"{prefix}.{key}" if prefix else key)
            where = tensor.Replicate() if axis is None else tensor.Shard(axis)
            # Every rank has all of it: nothing has to be sent.
            held = tensor.distribute_tensor(p.detach(), mesh, [where], src_data_rank=None)
            module.register_parameter(key, nn.Parameter(held))

    tensor.distribute_module(model, mesh, divide)


def like(full: Tensor, placed: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of another of its shape."""
    if not on_mesh(placed):
        return full
    tensor: Any = import_module("torch.distributed.tensor")
    where: Any = placed
    held = tensor.distribute_tensor(full, where.device_mesh, where.placements, src_data_rank=None)
    return held.to_local()


def whole(x: Tensor) -> Tensor:
    """All of a tensor, on every rank; a copy, row by row."""
    gather = getattr(x, "full_tensor", None)
    found = x if gather is None else gather()
    return found.detach().clone(memory_format=torch.contiguous_format)


def state_of(value: Any, parameter: Tensor) -> Tensor | None:
    """All of what an optimizer keeps for a parameter, if it is a tensor of its size."""
    if not isinstance(value, Tensor):
        return None
    if value.shape == parameter.shape:
        return whole(value)
    held: Any = parameter
    if on_mesh(parameter) and value.shape == held.to_local().shape:
        tensor: Any = import_module("torch.distributed.tensor")
        placed = tensor.DTensor.from_local(
            value, held.device_mesh, held.placements, shape=held.shape, stride=held.stride()
        )
        return whole(placed)
    return None
