"""What the members of a group send each other: pieces of tensors, and what they agree on."""

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from muonsplit.errors import InputError
from muonsplit.sharding.members import Members

# By the default group, which a process may leave and enter anew, and the ranks.
_GROUPS: dict[tuple[Any, tuple[int, ...]], Any] = {}


def group_of(members: Members) -> Any:
    """The process group of those who hold a tensor; made where the mesh has none, by all of them.

    Raises:
        InputError: If there is no default process group, or the group has other ranks.
    """
    distributed: Any = import_module("torch.distributed")
    if not distributed.is_initialized():
        raise InputError(
            f"There is no process group that ranks {list(members.ranks)} could exchange in.",
            "Step between torch.distributed.init_process_group and destroy_process_group.",
        )
    key = (distributed.group.WORLD, members.ranks)
    if key not in _GROUPS:
        if len(members.axes) == 1:
            group = members.mesh.get_group(members.axes[0])
        else:
            group = distributed.new_group(list(members.ranks), use_local_synchronization=True)
        if tuple(distributed.get_process_group_ranks(group)) != members.ranks:
            ranks = distributed.get_process_group_ranks(group)
            raise InputError(f"A mesh of ranks {list(members.ranks)} has a group of {ranks}.")
        _GROUPS[key] = group
    return _GROUPS[key]


def swap(
    sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]], members: Members
) -> None:
    """Every member sends every other tensors, in one exchange of bytes.

    All members have to call it.

    Args:
        sent: What each member is sent, in an order that it knows.
        received: Where what each member sends goes, of the shapes and dtypes that it sends.
        members: Who they are.
    """
    distributed: Any = import_module("torch.distributed")
    device = next((x.device for part in (*sent, *received) for x in part), None)
    device = _device(members) if device is None else device
    chunks = [as_bytes(x) for part in sent for x in part]
    given = torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.uint8, device=device)
    sizes = [[sum(_size(x) for x in part) for part in parts] for parts in (received, sent)]
    found = torch.empty(sum(sizes[0]), dtype=torch.uint8, device=device)
    distributed.all_to_all_single(found, given, *sizes, group=group_of(members))
    targets = [x for part in received for x in part]
    for target, chunk in zip(targets, found.split([_size(x) for x in targets]), strict=True):
        # Copied, since a chunk need not begin where its dtype may.
        target.copy_(chunk.clone().view(target.dtype).view(target.shape))


def agree(facts: Mapping[str, str], members: Members) -> None:
    """Makes sure that all members say the same. All of them have to call it.

    Args:
        facts: Text by what it tells; as many on every member.
        members: Who they are.

    Raises:
        InputError: On every member alike, if some differ; it names them and in what.
    """
    distributed: Any = import_module("torch.distributed")
    group = group_of(members)
    digests = b"".join(sha256(text.encode()).digest() for text in facts.values())
    given = torch.frombuffer(bytearray(digests), dtype=torch.uint8).to(_device(members))
    heard = [torch.empty_like(given) for _ in members.ranks]
    distributed.all_gather(heard, given, group=group)
    said = [bytes(x.tolist()) for x in heard]
    size = sha256().digest_size
    apart: list[str] = []
    for i, fact in enumerate(facts):
        each = [digest[i * size : (i + 1) * size] for digest in said]
        # The first of the most frequent.
        usual = Counter(each).most_common(1)[0][0]
        others = [r for r, digest in zip(members.ranks, each, strict=True) if digest != usual]
        if others:
            like = members.ranks[each.index(usual)]
            apart.append(f"{fact} on {_named(others)} (not as on rank {like})")
    if apart:
        raise InputError(
            f"Ranks {list(members.ranks)} hold weights together but were given other optimizers: "
            f"{'; '.join(apart)}.",
            "Build the optimizer alike on every rank.",
        )


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _device(members: Members) -> torch.device:
    kind = members.mesh.device_type
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a tensor, row by row."""
    return x.contiguous().view(-1).view(torch.uint8)


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()
