"""What local data a process holds of the matrices that an optimizer steps.

Nothing is gathered and nothing is sent: a DTensor's placements, DeepSpeed's partitions and the
rank tell where a piece belongs. A piece that several ranks hold is left to the first of them.
"""

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from muonsplit.errors import EvidenceError, InputError, LayoutError
from muonsplit.evidence.description import Held
from muonsplit.sharding.held import Region, Shard, length
from muonsplit.sharding.members import local_of, members, on_mesh

# State keys that optimizers keep momentum under; Adam's first moment last.
MOMENTUM_KEYS = ("momentum_buffer", "momentum", "momentum_buf", "mom", "buf", "m", "exp_avg")


# What is held, None where another rank writes it, or why it cannot be had.
Found = Held | None | str


class Placed(Protocol):
    """An optimizer's matrices on this process, by name."""

    @property
    def names(self) -> Iterable[str]:
        """What the matrices are called."""
        ...

    def weight(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape of the whole parameter, and its dtype."""
        ...

    def settings(self, name: str) -> dict[str, float]:
        """The numbers in its param group."""
        ...

    def value(self, name: str) -> Found:
        """The parameter, or the master that is stepped for it."""
        ...

    def gradient(self, name: str) -> Found:
        """What the step is given."""
        ...

    def momentum(self, name: str) -> Found:
        """What the optimizer's state has of it now."""
        ...


def group_of_ranks() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    distributed: Any = import_module("torch.distributed")
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


class Plain:
    """Parameters that are stepped as they are: plain tensors and DTensors.

    Args:
        state: The optimizer's state by parameter.
        matrices: Parameters and their param groups, by name.
        placements: What this process holds of plain tensors that are shards.
    """

    def __init__(
        self,
        state: Mapping[Any, Any],
        matrices: Mapping[str, tuple[Tensor, Mapping[str, Any]]],
        placements: Mapping[str, Shard],
    ) -> None:
        self._state, self._matrices, self._placements = state, matrices, placements
        self._first = group_of_ranks()[0] == 0
        for name in placements:
            if name not in matrices:
                raise EvidenceError(
                    f"A placement is given for {name!r}, which is no matrix of the optimizer."
                )

    @property
    def names(self) -> Iterable[str]:
        """What the matrices are called."""
        return self._matrices

    def weight(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape of the whole parameter, and its dtype."""
        p, shard = self._matrices[name][0], self._placements.get(name)
        return _whole(tuple(p.shape), shard), p.dtype

    def settings(self, name: str) -> dict[str, float]:
        """The numbers in its param group."""
        return numbers_in(self._matrices[name][1])

    def value(self, name: str) -> Found:
        """The parameter as this process holds it."""
        found = self._placed(name, self._matrices[name][0])
        if isinstance(found, str):
            raise EvidenceError(f"{name} cannot be captured: {found}.")
        return found

    def gradient(self, name: str) -> Found:
        """Its gradient, by its own placement."""
        p = self._matrices[name][0]
        if p.grad is None:
            return "it has no gradient"
        if on_mesh(p) and not on_mesh(p.grad):
            return "its gradient is no DTensor, and where it belongs is not told"
        return self._placed(name, p.grad)

    def momentum(self, name: str) -> Found:
        """What the state has of it, under the first key that fits."""
        p = self._matrices[name][0]
        # Not by index: an optimizer's state makes what it is asked for.
        state = self._state.get(p, {})
        shapes = {tuple(p.shape), tuple(local_of(p).shape)}
        key = momentum_key(state, lambda x: tuple(x.shape) in shapes)
        if key is None:
            return _no_momentum(state)
        x = state[key]
        if on_mesh(p) and not on_mesh(x):
            if tuple(x.shape) == tuple(local_of(p).shape):
                found = self._placed(name, p)
                if not isinstance(found, Held):
                    return found
                return found._replace(dtype=x.dtype, fetch=lambda: x, key=key)
            # Kept whole by the one rank that computes it.
            return Held(tuple(x.shape), whole_region(x.shape), False, x.dtype, lambda: x, key)
        found = self._placed(name, x)
        return found._replace(key=key) if isinstance(found, Held) else found

    def _placed(self, name: str, tensor: Tensor) -> Found:
        shape, shard = tuple(tensor.shape), self._placements.get(name)
        if on_mesh(tensor):
            found = _of_mesh(name, tensor)
        elif shard is not None:
            whole = _whole(shape, shard)
            sides = (
                ((0, size),) if i != shard.axis else shard.spans for i, size in enumerate(whole)
            )
            found, shape = tuple(sides), whole
        else:
            found = whole_region(shape) if self._first else None
        local = local_of(tensor)
        if found is None or isinstance(found, str) or not local.numel():
            return found if isinstance(found, str) else None
        if tuple(local.shape) != tuple(map(length, found)):
            return (
                f"this rank holds {tuple(local.shape)} of it, where its placement says "
                f"{tuple(map(length, found))}"
            )
        return Held(shape, found, False, tensor.dtype, lambda: local)


def whole_region(shape: Iterable[int]) -> Region:
    """All of a tensor."""
    return tuple(((0, size),) for size in shape)


def numbers_in(group: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a param group; those of a pair as ``betas.0`` and ``betas.1``."""
    found: dict[str, float] = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        several = isinstance(value, tuple | list)
        for i, x in enumerate(value if several else (value,)):
            number = x.item() if isinstance(x, Tensor) and x.numel() == 1 else x
            if isinstance(number, numbers.Real) and math.isfinite(number):
                found[f"{key}.{i}" if several else key] = float(number)
    return found


def momentum_key(state: Mapping[str, Any], fits: Callable[[Tensor], bool]) -> str | None:
    """The first key that momentum is kept under, of those with a tensor that fits."""
    held = (key for key in MOMENTUM_KEYS if isinstance(state.get(key), Tensor))
    return next((key for key in held if fits(state[key])), None)


def _no_momentum(state: Mapping[str, Any]) -> str:
    if not state:
        return "the optimizer has no state for it"
    keys = ", ".join(sorted(map(str, state)))
    return f"no momentum of its shape is in the state, which has {keys}"


def _of_mesh(name: str, tensor: Tensor) -> Region | str | None:
    placed: Any = tensor
    mesh, coordinate = placed.device_mesh, placed.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    try:
        found = members(name, tensor).held
    except (InputError, LayoutError) as error:
        return error.message.rstrip(".")
    repeated = (i for i, placement in enumerate(placed.placements) if placement.is_replicate())
    first = not any(coordinate[axis] for axis in repeated if mesh.shape[axis] > 1)
    return found if first and all(found) else None


def _whole(shape: tuple[int, ...], shard: Shard | None) -> tuple[int, ...]:
    """Shape of the whole of a plain tensor that is a shard."""
    if shard is None:
        return shape
    if shard.flat or shard.partial or shard.padding or shard.axis >= len(shape):
        raise EvidenceError(
            f"A tensor of shape {shape} cannot be placed by {shard!r}.",
            "Placements are of whole rows along one axis, without padding.",
        )
    return (*shape[: shard.axis], shard.size, *shape[shard.axis + 1 :])


def clean(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    wrappers = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


class Partitioned:
    """Parameters of a DeepSpeed engine at ZeRO stage 1 to 3, or with a BF16 optimizer.

    What is recorded is the float32 master that the step updates, of which each rank holds a slice
    of the flattened weight.

    Args:
        engine: The engine.
        names: Names by the identity of the parameter.

    Raises:
        EvidenceError: If weights are divided among a part of the ranks, or this is no engine that
            is laid out as DeepSpeed 0.19.8's.
    """

    def __init__(self, engine: Any, names: Mapping[int, str]) -> None:
        self._zero, self._inner = engine.optimizer, engine.optimizer.optimizer
        self._third = hasattr(self._zero, "sub_group_to_group_id")
        self._bf16 = hasattr(self._zero, "bf16_groups")
        self._helpers: Any = import_module("deepspeed.utils")
        groups = "fp16_groups" if self._third else "bf16_groups" if self._bf16 else "bit16_groups"
        lists = getattr(self._zero, groups, None)
        needed = ("grad_position", "fp32_partitioned_groups_flat") if self._third else ()
        if lists is None or not all(hasattr(self._zero, key) for key in needed):
            raise EvidenceError(
                f"{type(self._zero).__name__} does not tell which weights it divides, as DeepSpeed "
                "0.19.8's optimizers do."
            )
        self._group: dict[str, int] = {}
        self._weights: dict[str, Any] = {}
        for i, params in enumerate(lists):
            for p in params:
                shape = getattr(p, "ds_shape", p.shape)
                if len(shape) > 1:
                    if id(p) not in names:
                        raise EvidenceError(
                            f"A parameter of shape {tuple(shape)} is none of the model's.",
                            "The engine's own model is taken where none is given.",
                        )
                    name = clean(names[id(p)])
                    self._weights[name], self._group[name] = p, i
        self._among_all()

    def _among_all(self) -> None:
        distributed: Any = import_module("torch.distributed")
        world = group_of_ranks()[1]
        for name, p in self._weights.items():
            group = p.ds_process_group if self._third else p._dp_group
            if (some := distributed.get_world_size(group)) != world:
                raise EvidenceError(
                    f"{name} is divided among {some} of {world} ranks; what the others hold is not "
                    "told.",
                    "Capture a run whose ZeRO groups are all ranks.",
                )

    @property
    def names(self) -> Iterable[str]:
        """What the matrices are called."""
        return self._weights

    def weight(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape of the whole parameter, and its dtype."""
        p = self._weights[name]
        return tuple(getattr(p, "ds_shape", p.shape)), p.dtype

    def settings(self, name: str) -> dict[str, float]:
        """The numbers in its param group."""
        i = self._group[name]
        i = self._zero.sub_group_to_group_id[i] if self._third else i
        scale = {"loss_scale": float(getattr(self._zero, "loss_scale", 1.0))}
        return numbers_in(self._inner.param_groups[i]) | (scale if scale["loss_scale"] != 1 else {})

    def value(self, name: str) -> Found:
        """The slice of the master that this rank updates."""
        p = self._weights[name]
        if self._third:
            return self._slice(p, torch.float32, lambda: self._helpers.safe_get_local_fp32_param(p))
        mapping = p._hp_mapping
        return mapping and self._fragment(p, mapping.hp_fragment)

    def gradient(self, name: str) -> Found:
        """The averaged gradient, still multiplied by the loss scale and not clipped."""
        p = self._weights[name]
        if self._third:
            return self._slice(p, torch.float32, lambda: self._helpers.safe_get_local_grad(p))
        if p._hp_mapping is None:
            return None
        if self._folded(p):
            return (
                "ZeRO stages 1 and 2 put the orthogonalised update in its place in the backward "
                "pass; momentum before and after tell it"
            )
        if self._bf16 and getattr(p, "_hp_grad", None) is None:
            return "it has no gradient"
        try:
            found = p._hp_mapping.get_lp_grad_fragment(p._index_in_param_group).view(-1)
        except ValueError:
            return "it has no gradient; call engine.backward before the capture begins"
        address = p._hp_mapping.lp_fragment_address
        whole = found.numel() == p.numel()
        return self._fragment(p, found.narrow(0, address.start, address.numel) if whole else found)

    def momentum(self, name: str) -> Found:
        """The slice of momentum that belongs to the slice of the master."""
        p, i = self._weights[name], self._group[name]
        if self._third:
            flat = self._zero.fp32_partitioned_groups_flat[i]
            state = self._inner.state.get(flat, {})
            key = momentum_key(state, lambda x: x.numel() == flat.numel())
            if key is None:
                return _no_momentum(state)
            get = self._helpers.safe_get_local_optimizer_state
            found = self._slice(p, state[key].dtype, lambda: get(p, key))
            return found and found._replace(key=key)
        if (mapping := p._hp_mapping) is None:
            return None
        flat = self._inner.param_groups[i]["params"][0]
        state = self._inner.state.get(flat, {})
        inside = self._zero.params_in_partition[i] if self._folded(p) else ()
        size = sum(q.numel() for q in inside) or flat.numel()
        key = momentum_key(state, lambda x: x.numel() == size)
        if key is None:
            return _no_momentum(state)
        start, address = mapping.hp_fragment_address.start, mapping.lp_fragment_address
        if inside:
            # Every weight that begins or ends here is kept whole, one after another.
            before = next(j for j, q in enumerate(inside) if q is p)
            start = sum(q.numel() for q in inside[:before]) + address.start
        found = self._fragment(p, state[key].view(-1).narrow(0, start, address.numel))
        return found._replace(key=key)

    def _folded(self, p: Any) -> bool:
        """Whether ZeRO runs Muon on whole gradients as it fills its partition with them."""
        muon = getattr(p, "use_muon", False) and "muon" in type(self._inner).__name__.lower()
        return muon and not self._bf16 and not self._zero.cpu_offload

    def _fragment(self, p: Any, x: Tensor) -> Held:
        start = p._hp_mapping.lp_fragment_address.start
        region = (((start, start + x.numel()),),)
        return Held(tuple(p.shape), region, True, x.dtype, lambda: x.view(-1))

    def _slice(self, p: Any, dtype: torch.dtype, fetch: Callable[[], Tensor]) -> Held | None:
        """A slice at stage 3: equal ones for all ranks, the last ones with padding."""
        size, rank = p.ds_tensor.ds_numel, p.ds_zero_partition_rank
        start, stop = min(rank * size, p.ds_numel), min((rank + 1) * size, p.ds_numel)
        if start == stop:
            return None
        region = (((start, stop),),)
        return Held(tuple(p.ds_shape), region, True, dtype, lambda: fetch()[: stop - start])
