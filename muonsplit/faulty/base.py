"""A sound optimizer with one hook to break."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.dialect import DEFAULT_DIALECT, Arithmetic, Dialect, dialect_named
from muonsplit.layout import Layout
from muonsplit.muon import Direction, PerHeadMuon, orthogonalize
from muonsplit.newton_schulz import newton_schulz, scale_factor
from muonsplit.subjects.protocol import Hyper

Layouts = Mapping[str, Layout | None]
# Update, layout, arithmetic → what is subtracted instead.
Break = Callable[[Tensor, Layout | None, Arithmetic], Tensor]
# A batch of blocks of one shape, arithmetic → what is subtracted instead.
Batch = Callable[[Tensor, Arithmetic], Tensor]


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


class Named(Broken):
    """The reference, except for what :meth:`direction` makes of some weights."""

    def direction(self, name: str, update: Tensor) -> Tensor:
        """What is subtracted from a weight instead.

        Args:
            name: The weight.
            update: What momentum made of its gradient.
        """
        return orthogonalize(update, self.layouts[name], self.arithmetic)

    def orthogonalized(
        self, names: Sequence[str], updates: Sequence[Tensor]
    ) -> Sequence[Direction]:
        """See :meth:`~muonsplit.muon.PerHeadMuon.orthogonalized`."""
        pairs = zip(names, updates, strict=True)
        return [Direction(self.direction(name, update), 1.0) for name, update in pairs]


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


def choosing(dialect: str = DEFAULT_DIALECT, **changes: Any) -> Dialect:
    """A dialect with other fields of its arithmetic."""
    sound = dialect_named(dialect)
    return replace(sound, arithmetic=replace(sound.arithmetic, **changes))


def leaf_of(name: str) -> str:
    """The module that holds a parameter: ``q_proj`` of ``…self_attn.q_proj.weight``."""
    return name.split(".")[-2]


def recut(
    model: nn.Module,
    layouts: Layouts,
    leaves: Sequence[str],
    cut: Callable[[Tensor], Layout | None],
) -> Layouts:
    """The layouts with those of some leaves replaced.

    Args:
        model: The model to train.
        layouts: What was told.
        leaves: Names of the modules that hold the weights.
        cut: The other layout of a weight.
    """
    chosen = {n: p for n, p in model.named_parameters() if n in layouts and leaf_of(n) in leaves}
    return {**layouts, **{name: cut(p) for name, p in chosen.items()}}


def each_block(update: Tensor, layout: Layout | None, how: Callable[[Tensor], Tensor]) -> Tensor:
    """Puts together what is made of each batch of blocks.

    Args:
        update: The weight's update.
        layout: How it is cut; None for one block, or one for each expert.
        how: Batch ``[B, rows, cols]`` → the same shape.
    """
    if layout is None:
        whole = update if update.ndim == 3 else update.unsqueeze(0)
        return how(whole).view_as(update)
    result = torch.empty_like(update, memory_format=torch.contiguous_format)
    layout.write([how(batch) for batch in layout.batches(update)], result)
    return result


def by_block(how: Batch) -> Break:
    """Breaks a weight by what becomes of each batch of its blocks."""

    def hook(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        return each_block(update, layout, lambda batch: how(batch, arithmetic))

    return hook


def sound(batch: Tensor, arithmetic: Arithmetic) -> Tensor:
    """What the reference makes of a batch of blocks."""
    return newton_schulz(batch, arithmetic) * scale_factor(arithmetic, *batch.shape[1:])


def of_norm(total: Tensor, batch: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Orthogonalises blocks as if each had the given squared norm.

    An extra row and column, zero but for their corner, bring every block to that norm and mix with
    nothing.
    """
    padded = torch.nn.functional.pad(batch, (0, 1, 0, 1))
    padded[:, -1, -1] = (total - batch.square().sum((1, 2))).clamp(min=0).sqrt()
    factor = scale_factor(arithmetic, *batch.shape[1:])
    return newton_schulz(padded, arithmetic)[:, :-1, :-1] * factor


def heads_of(model: nn.Module, field: str = "num_attention_heads") -> int:
    """A count as the model's top-level config states it."""
    return int(getattr(model.config, field))


def equal_blocks(parameter: Tensor, count: int) -> Layout | None:
    """``count`` equal blocks if the rows divide, as a recogniser that trusts divisibility cuts."""
    rows = parameter.shape[0]
    if parameter.ndim != 2 or rows % count:
        return None
    return Layout.heads("q", count, rows // count)
