"""A sound optimizer with one hook to break."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from muonsplit.dialect import DEFAULT_DIALECT, Arithmetic, Dialect, dialect_named
from muonsplit.layout import Layout
from muonsplit.muon import Direction, PerHeadMuon, orthogonalize
from muonsplit.subjects.protocol import Hyper

Layouts = Mapping[str, Layout | None]
# Update, layout, arithmetic → what is subtracted instead.
Break = Callable[[Tensor, Layout | None, Arithmetic], Tensor]


class Broken(PerHeadMuon):
    """The reference, except for what ``broken`` makes of each weight.

    Args:
        broken: Replaces the orthogonalisation of one weight.
        **settings: As for :class:`~muonsplit.muon.PerHeadMuon`.
    """

    def __init__(self, *args: Any, broken: Break = orthogonalize, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._broken = broken

    def orthogonalized(
        self, names: Sequence[str], updates: Sequence[Tensor]
    ) -> Sequence[Direction]:
        """See :meth:`~muonsplit.muon.PerHeadMuon.orthogonalized`."""
        return [
            Direction(self._broken(update, self.layouts[name], self.arithmetic), 1.0)
            for name, update in zip(names, updates, strict=True)
        ]


def broken(
    model: nn.Module,
    layouts: Layouts,
    hyper: Hyper,
    how: Break = orthogonalize,
    dialect: Dialect | None = None,
    kind: type[Broken] = Broken,
) -> Broken:
    """The reference with other layouts, arithmetic, orthogonalisation or step."""
    return kind(
        model.named_parameters(),
        layouts,
        dialect=dialect or dialect_named(DEFAULT_DIALECT),
        lr=hyper.lr,
        momentum=hyper.momentum,
        weight_decay=hyper.weight_decay,
        broken=how,
    )


def heads_of(model: nn.Module, field: str = "num_attention_heads") -> int:
    """A count as the model's top-level config states it."""
    return int(getattr(model.config, field))


def equal_blocks(parameter: Tensor, count: int) -> Layout | None:
    """``count`` equal blocks if the rows divide, as a recogniser that trusts divisibility cuts."""
    rows = parameter.shape[0]
    if parameter.ndim != 2 or rows % count:
        return None
    return Layout.heads("q", count, rows // count)
