"""Follows the rows of every weight through a forward pass, up to where they are mixed.

Rows are mixed by a product that sums over them. The dimensions that both of its operands share and
that it keeps (the batch of an attention product) are heads: rows with different indices there are
never mixed. Nothing here knows a name or a config.
"""

from contextlib import suppress
from typing import Any

from torch import _C  # pyright: ignore[reportPrivateUsage]
from torch.overrides import TorchFunctionMode

from muonsplit.truth import moves, products
from muonsplit.truth import operations as op
from muonsplit.truth.moves import Handler
from muonsplit.truth.shapes import shaped
from muonsplit.truth.stand_ins import stand_in
from muonsplit.truth.tape import Call, LostError, Tape

_HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(op.MOVES, moves.moved),
    **dict.fromkeys(op.KEEPS, moves.kept),
    **dict.fromkeys(op.ELEMENTWISE, moves.elementwise),
    **dict.fromkeys(op.TOLD, moves.told),
    **dict.fromkeys(op.MATRIX_PRODUCTS, products.matrices),
    **dict.fromkeys(op.ADDED_PRODUCTS, products.added_matrices),
    **moves.HANDLERS,
    **products.HANDLERS,
}


class Follower(TorchFunctionMode):
    """A mode under which every tensor carries the rows of the weights it is made of.

    What it makes of nothing is made on ``meta``.

    Args:
        tape: What tensors carry, and where what is seen is written down.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs an operation, then does the same to the rows its inputs carry."""
        kwargs = kwargs or {}
        name = _name(func)
        if name in op.MAKES and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        with _C.DisableTorchFunction():
            out = shaped(name, args, kwargs)
            if out is None:
                out = _run(name, func, args, kwargs)
            if name not in op.ASKS:
                self._follow(name, Call(func, args, kwargs, out))
        return out

    def _follow(self, name: str, call: Call) -> None:
        carried = [rows for tensor in call.tensors() if (rows := self._tape.rows(tensor))]
        if not carried:
            return
        handler = _HANDLERS.get(name)
        # An operation whose maps cannot be made as its output was is one not followed.
        with suppress(LostError, RuntimeError, TypeError, IndexError, ValueError):
            if handler is not None:
                handler(self._tape, call)
                return
        for rows in carried:
            self._tape.mixings.lose(rows, name)


def _run(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return func(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        return stand_in(name, args, error)


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    if name == "__get__":  # a property, such as mT
        with suppress(AttributeError):
            return func.__self__.__name__
    return name
