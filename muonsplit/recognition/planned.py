"""A plan whose open questions the truth has settled."""

from typing import Literal

from torch import nn

from muonsplit.dialect import DEFAULT_DIALECT, Dialect
from muonsplit.geometry import Plan, plan
from muonsplit.truth.views import views


def planned(
    model: nn.Module,
    dialect: Dialect | str = DEFAULT_DIALECT,
    arbiter: Literal["views"] | None = None,
) -> Plan:
    """The plan of a model; with an arbiter, what the rules leave open is settled by the truth.

    Args:
        model: Any module; with an arbiter its parameters must be on ``meta``.
        dialect: A dialect or its name.
        arbiter: ``"views"`` follows the model's own forward pass, if a weight needs it.
    """
    if arbiter is None:
        return plan(model, dialect)
    return plan(model, dialect, lambda: {name: t.layout for name, t in views(model).items()})
