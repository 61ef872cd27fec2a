"""Operations that move rows or keep them: replayed on row numbers as they are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from muonsplit.truth.rows import CPU, NO_ROW, Rows, broadcast, joined, replayed
from muonsplit.truth.tape import Call, LostError, Tape, tensors_in

Handler = Callable[[Tape, Call], None]


def moved(tape: Tape, call: Call) -> None:
    """A view, a slice, a permutation: the same on row numbers."""
    rows = tape.rows(call.args[0])
    if not rows:
        raise LostError
    args, kwargs = call.args, call.kwargs
    if tensors_in((args[1:], kwargs)):
        args = _blindly(call, rows)
    outputs = [call.out] if isinstance(call.out, Tensor) else list(call.out)
    for result, carried in zip(outputs, replayed(call.func, rows, args, kwargs), strict=True):
        tape.carry(result, carried)


def _blindly(call: Call, rows: Rows) -> tuple[Any, ...]:
    """Arguments with some index for one that has no values, if any picks the same rows."""
    first, last = (_numbered(call.args, number) for number in (0, -1))
    pairs = zip(
        replayed(call.func, rows, first, call.kwargs),
        replayed(call.func, rows, last, call.kwargs),
        strict=True,
    )
    for one, other in pairs:
        for origin in one:
            for a, b in zip(one[origin], other[origin], strict=True):
                if bool((a != b).any()):
                    raise LostError
    return first


def _numbered(args: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    return (args[0], *(_number(value, number) for value in args[1:]))


def _number(value: Any, number: int) -> Any:
    if isinstance(value, Tensor):
        return torch.full(value.shape, number, dtype=torch.long, device=CPU)
    if isinstance(value, (tuple, list)):
        return type(value)(_number(item, number) for item in value)
    return value


def kept(tape: Tape, call: Call) -> None:
    """One input, one output of its shape, row by row."""
    tape.carry(call.out, broadcast([tape.rows(call.args[0])], call.out.shape))


def elementwise(tape: Tape, call: Call) -> None:
    """Several inputs, broadcast against each other."""
    tape.carry(call.out, broadcast(map(tape.rows, call.tensors()), call.out.shape))


def told(tape: Tape, call: Call) -> None:
    """A statistic, a selection, a look-up: passed on by value, not by row."""


def _cat(tape: Tape, call: Call) -> None:
    parts = [part for part in call.given(0, "tensors") if part.numel()]
    parts = [(tape.rows(part), part.shape) for part in parts]
    tape.carry(call.out, joined(parts, call.given(1, "dim", 0)))


def _stack(tape: Tape, call: Call) -> None:
    dim = call.given(1, "dim", 0)
    parts = [
        (
            {o: [row.unsqueeze(dim) for row in maps] for o, maps in tape.rows(part).items()},
            part.unsqueeze(dim).shape,
        )
        for part in call.given(0, "tensors")
    ]
    tape.carry(call.out, joined(parts, dim))


def _pad(tape: Tape, call: Call) -> None:
    widths = call.given(1, "pad")
    rows = tape.rows(call.args[0])
    tape.carry(
        call.out, {o: [F.pad(row, widths, value=NO_ROW) for row in m] for o, m in rows.items()}
    )


def _reshaped_as(tape: Tape, call: Call) -> None:
    rows = tape.rows(call.args[0])
    shape = call.out.shape
    tape.carry(call.out, {o: [row.reshape(shape) for row in m] for o, m in rows.items()})


def _complex(tape: Tape, call: Call) -> None:
    """Two rows an element: one map of the real parts, one of the imaginary."""
    rows = tape.rows(call.args[0])
    tape.carry(
        call.out, {o: [half for row in m for half in row.unbind(-1)] for o, m in rows.items()}
    )


def _real(tape: Tape, call: Call) -> None:
    rows = tape.rows(call.args[0])
    shape = call.out.shape
    tape.carry(
        call.out, {o: [row.unsqueeze(-1).expand(shape) for row in m] for o, m in rows.items()}
    )


def _set_item(tape: Tape, call: Call) -> None:
    target, index, value = call.args
    if tensors_in((index,)):
        raise LostError
    _write(tape, target, lambda row: row[index], tape.rows(value))


def _copied(tape: Tape, call: Call) -> None:
    _write(tape, call.args[0], lambda row: row, tape.rows(call.args[1]))


def _write(tape: Tape, target: Tensor, part: Callable[[Tensor], Tensor], written: Rows) -> None:
    """Writes maps into a part of a tensor, or of the tensor it is a view of."""
    base = target if target._base is None else target._base
    maps = {o: [row.clone() for row in found] for o, found in tape.rows(base).items()}
    for origin, found in written.items():
        kept = maps.setdefault(origin, [])
        while len(kept) < len(found):
            fresh = torch.full(base.shape, NO_ROW, dtype=torch.int32, device=CPU)
            kept.append(kept[-1].clone() if kept else fresh)
    for origin, kept in maps.items():
        found = written.get(origin, [])
        for index, row in enumerate(kept):
            whole = row.contiguous()
            seen = whole.as_strided(target.shape, target.stride(), target.storage_offset())
            place = part(seen)
            place.copy_(found[min(index, len(found) - 1)]) if found else place.fill_(NO_ROW)
            kept[index] = whole
    tape.carry(base, maps)


HANDLERS: dict[str, Handler] = {
    "cat": _cat,
    "concat": _cat,
    "concatenate": _cat,
    "stack": _stack,
    "pad": _pad,
    "view_as": _reshaped_as,
    "reshape_as": _reshaped_as,
    "expand_as": kept,
    "view_as_complex": _complex,
    "view_as_real": _real,
    "__setitem__": _set_item,
    "copy_": _copied,
}
