"""Operations that multiply and sum: where rows are mixed, or handed on to an output."""

from typing import Any

from torch import Tensor

from muonsplit.truth.moves import Handler
from muonsplit.truth.rows import NO_ROW, Origin, Rows, varies
from muonsplit.truth.tape import Call, LostError, Tape

# The labels of leading dimensions that an ellipsis stands for, written from the last one.
_FREE = "αβγδεζηθ"


def matrices(tape: Tape, call: Call) -> None:
    """``left @ right``."""
    left, right = call.given(0, "input"), call.given(1, "other", call.kwargs.get("mat2"))
    if getattr(call.func, "__name__", "") == "__rmatmul__":
        left, right = right, left
    _matrices(tape, left, right, call.out)


def added_matrices(tape: Tape, call: Call) -> None:
    """``bias + left @ right``; what the bias carries is added to, not multiplied."""
    left = call.given(1, "batch1", call.kwargs.get("mat1"))
    right = call.given(2, "batch2", call.kwargs.get("mat2"))
    _matrices(tape, left, right, call.out)


def _matrices(tape: Tape, left: Tensor, right: Tensor, out: Tensor) -> None:
    if left.ndim < 2 or right.ndim < 2:
        raise LostError
    if right.ndim == 2:
        _multiply(tape, (left, "…k"), (right, "kj"), (out, "…j"))
    else:
        _multiply(tape, (left, "…ik"), (right, "…kj"), (out, "…ij"))


def _linear(tape: Tape, call: Call) -> None:
    _multiply(tape, (call.args[0], "…k"), (call.given(1, "weight"), "jk"), (call.out, "…j"))


def _einsum(tape: Tape, call: Call) -> None:
    equation, *operands = call.args
    if len(operands) == 1 and not isinstance(operands[0], Tensor):
        operands = list(operands[0])
    inputs, _, output = equation.replace(" ", "").replace("...", "…").partition("->")
    labels = inputs.split(",")
    if len(labels) != 2 or not output:
        raise LostError
    _multiply(tape, (operands[0], labels[0]), (operands[1], labels[1]), (call.out, output))


def _multiply(
    tape: Tape, a: tuple[Tensor, str], b: tuple[Tensor, str], product: tuple[Tensor, str]
) -> None:
    """One product of two operands, written as einsum writes it."""
    out, kept = product[0], _spelled(product[1], product[0].ndim)
    operands = [(tape.rows(x), _spelled(labels, x.ndim)) for x, labels in (a, b)]
    tape.mixings.product(operands[0], operands[1], kept)
    carried: Rows = {}
    for rows, labels in operands:
        for origin, maps in rows.items():
            if not origin.projected:
                _hand_on(carried, origin, maps, labels, out, kept)
    tape.carry(out, carried)


def _hand_on(
    carried: Rows, origin: Origin, maps: list[Tensor], labels: str, out: Tensor, kept: str
) -> None:
    """Hands the rows of a weight on to the output, unless they are summed over."""
    gone = [dim for dim, label in enumerate(labels) if label not in kept]
    maps = [row for row in maps if not any(varies(row, dim) for dim in gone)]
    if not maps or not any(varies(maps[0], dim) for dim in range(len(labels))):
        return
    order = sorted(
        (dim for dim in range(len(labels)) if dim not in gone),
        key=lambda dim: kept.index(labels[dim]),
    )
    for row in maps:
        for dim in gone:
            row = row.narrow(dim, 0, 1)
        shape = [1] * out.ndim
        for dim in order:
            shape[kept.index(labels[dim])] = row.shape[dim]
        row = row.permute(*order, *gone).reshape(shape).expand(out.shape)
        carried.setdefault(origin._replace(projected=True), []).append(row)


def _spelled(labels: str, ndim: int) -> str:
    """Labels with the ellipsis written out."""
    if "…" not in labels:
        return labels
    before, after = labels.split("…")
    free = ndim - len(before) - len(after)
    return before + _FREE[:free][::-1] + after


def _attention(tape: Tape, call: Call) -> None:
    names = enumerate(("query", "key", "value"))
    tape.mixings.attention([tape.rows(call.given(i, name)) for i, name in names])


def _experts(tape: Tape, call: Call) -> None:
    """Experts take a token in one piece."""
    tape.mixings.whole(tape.rows(call.args[0]))


def _convolution(tape: Tape, call: Call) -> None:
    """Over time: channel by channel rows stay apart, all channels together they are mixed."""
    groups, out = call.given(6, "groups", 1), call.out
    channels = call.args[0].shape[1]
    rows = {o: maps for o, maps in tape.rows(call.args[0]).items() if o.projected}
    if groups == 1:
        tape.mixings.whole(rows)
        return
    if not groups == channels == out.shape[1]:
        raise LostError
    carried: Rows = {}
    for origin, maps in rows.items():
        for row in maps:
            channel = row.amax(-1, keepdim=True)
            if bool(((row != channel) & (row != NO_ROW)).any()):
                raise LostError
            carried.setdefault(origin, []).append(channel.expand(out.shape))
    tape.carry(out, carried)


def _multi_head_attention(tape: Tape, call: Call) -> None:
    """Attention of torch's own: concatenated ``[q | k | v]``, heads as its argument says."""
    query, heads = call.args[0], call.args[4]
    tape.mixings.whole({o: m for x in call.args[:3] for o, m in tape.rows(x).items()})
    weights: list[tuple[Any, int]] = [(call.args[5], 3)]
    weights += [(call.kwargs.get(f"{part}_proj_weight"), 1) for part in "qkv"]
    for weight, parts in weights:
        for origin, maps in tape.rows(weight).items():
            if origin.axis == 0:
                for part in maps[0][:, 0].reshape(parts, heads, -1):
                    tape.mixings.heads(origin._replace(projected=True), part)
    closing = call.given(10, "out_proj_weight")
    out = call.out[0]
    carried: Rows = {}
    for origin, maps in tape.rows(closing).items():
        _hand_on(carried, origin, maps, "jk", out, _spelled("…j", query.ndim))
    tape.carry(out, carried)


HANDLERS: dict[str, Handler] = {
    "linear": _linear,
    "einsum": _einsum,
    "linalg_solve_triangular": matrices,
    "scaled_dot_product_attention": _attention,
    "_grouped_mm": _experts,
    "grouped_mm": _experts,
    "conv1d": _convolution,
    "multi_head_attention_forward": _multi_head_attention,
}
