"""Row maps: which row of a weight each element of a tensor comes from, replayed op by op.

A tensor that a forward pass makes carries, for every weight it descends from, integer tensors of
its own shape: element for element, the row of the weight, or −1 for none. Moving operations are
replayed on them as they are. A rotary embedding adds two orders of the same rows, so a tensor may
carry several maps of one weight.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

NO_ROW = -1
# A model that is followed makes its tensors on meta; maps have values.
CPU = torch.device("cpu")
# Rotary embeddings make two orders, nested ones a few; more say nothing new of which rows meet.
_MOST_MAPS = 6


class Origin(NamedTuple):
    """What a map counts: the rows (axis 0) or columns (axis 1) of a weight.

    Attributes:
        name: Parameter name.
        axis: 0 or 1.
        projected: Whether the weight has been multiplied by an input already.
    """

    name: str
    axis: int
    projected: bool


Rows = dict[Origin, list[Tensor]]


def rows_of_weight(name: str, weight: Tensor) -> Rows:
    """The maps of a weight ``[..., rows, cols]`` itself: one of its rows, one of its columns."""
    rows = torch.arange(weight.shape[-2], dtype=torch.int32, device=CPU)[:, None].expand(
        weight.shape
    )
    columns = torch.arange(weight.shape[-1], dtype=torch.int32, device=CPU).expand(weight.shape)
    return {Origin(name, 0, False): [rows], Origin(name, 1, False): [columns]}


def varies(row: Tensor, dim: int) -> bool:
    """Whether a map differs along a dimension."""
    if row.shape[dim] <= 1 or row.stride(dim) == 0:
        return False
    row = squeezed(row)
    return bool((row != row.narrow(dim, 0, 1)).any())


def squeezed(row: Tensor) -> Tensor:
    """A map without its copies: size 1 along every dimension it is expanded over."""
    for dim, stride in enumerate(row.stride()):
        if stride == 0 and row.shape[dim] > 1:
            row = row.narrow(dim, 0, 1)
    return row


def condensed(row: Tensor) -> Tensor:
    """A map with size 1 along every dimension along which its rows are the same, or padding."""
    row = squeezed(row)
    for dim in range(row.ndim):
        if row.shape[dim] > 1:
            top = row.amax(dim, keepdim=True)
            if bool(((row == top) | (row == NO_ROW)).all()):
                row = top
    return row


def broadcast(sources: Iterable[Rows], shape: torch.Size) -> Rows:
    """The maps of an elementwise result: every operand's, broadcast."""
    found: Rows = {}
    for rows in sources:
        for origin, maps in rows.items():
            for row in maps:
                _add(found, origin, row.expand(shape))
    return found


def _add(found: Rows, origin: Origin, row: Tensor) -> None:
    kept = found.setdefault(origin, [])
    if len(kept) < _MOST_MAPS and not any(_same(row, other) for other in kept):
        kept.append(row)


def _same(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def joined(parts: Sequence[tuple[Rows, torch.Size]], dim: int) -> Rows:
    """The maps of a concatenation; where a part has none of a weight it holds no row of it."""
    found: Rows = {}
    for origin in dict.fromkeys(origin for rows, _ in parts for origin in rows):
        choices = [rows.get(origin, []) for rows, _ in parts]
        for index in range(max(map(len, choices))):
            pieces = [
                maps[min(index, len(maps) - 1)]
                if maps
                else torch.full((1,), NO_ROW, device=CPU).expand(shape)
                for maps, (_, shape) in zip(choices, parts, strict=True)
            ]
            found.setdefault(origin, []).append(_cat(pieces, dim))
    return found


def _cat(pieces: list[Tensor], dim: int) -> Tensor:
    """Concatenates without spelling out the dimensions along which no piece differs."""
    dim = dim % pieces[0].ndim
    shape = list(pieces[0].shape)
    shape[dim] = sum(piece.shape[dim] for piece in pieces)
    for other in range(len(shape)):
        if other != dim and all(piece.stride(other) == 0 for piece in pieces):
            pieces = [piece.narrow(other, 0, 1) for piece in pieces]
    return torch.cat([piece.to(torch.int32) for piece in pieces], dim).expand(shape)


def replayed(func: Any, rows: Rows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Rows]:
    """The maps of what a moving operation gives for its first argument, an entry an output."""
    outputs: list[Rows] = []
    for origin, maps in rows.items():
        for row in maps:
            results = func(row, *args[1:], **kwargs)
            for index, result in enumerate(_tuple(results)):
                if index == len(outputs):
                    outputs.append({})
                outputs[index].setdefault(origin, []).append(result)
    return outputs


def _tuple(results: Any) -> Iterator[Tensor]:
    yield from (results,) if isinstance(results, Tensor) else results
