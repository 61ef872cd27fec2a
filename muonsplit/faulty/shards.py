"""Faults of sharding that need one process only: the iteration is given a piece of a matrix."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from muonsplit.dialect import Arithmetic
from muonsplit.faulty.base import Break, Broken, Layouts, broken, by_block
from muonsplit.faulty.registry import fault
from muonsplit.layout import Layout
from muonsplit.muon import orthogonalize
from muonsplit.newton_schulz import newton_schulz, scale_factor
from muonsplit.subjects.protocol import Hyper

_RANKS = 2
# Rows are padded to a multiple of this, as collectives want them.
_ALIGNED = 24


def _in_pieces(update: Tensor, axis: int, arithmetic: Arithmetic) -> Tensor:
    pieces = [orthogonalize(piece, None, arithmetic) for piece in update.chunk(_RANKS, axis)]
    return torch.cat(pieces, axis)


def _whole_ones(how: Callable[[Tensor, Arithmetic], Tensor], ndim: int) -> Break:
    """Breaks weights that are kept whole and have that many dimensions."""

    def hook(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        if layout is None and update.ndim == ndim:
            return how(update, arithmetic)
        return orthogonalize(update, layout, arithmetic)

    return hook


@fault(
    check="recognition.whole", model="llama", kind="any Muon", origin="AReaL #1270; Moonlight #27"
)
def rows_of_a_shard(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Each of two ranks orthogonalises its own rows of a matrix."""
    return broken(model, layouts, hyper, _whole_ones(lambda u, a: _in_pieces(u, 0, a), 2))


@fault(check="cut.columns", model="llama", kind="any Muon", origin="Megatron-LM #6380")
def columns_of_a_shard(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Each of two ranks orthogonalises its own columns: the update depends on the parallelism."""
    return broken(model, layouts, hyper, _whole_ones(lambda u, a: _in_pieces(u, 1, a), 2))


@fault(check="cut.rows", model="deepseek-v2-lite", kind="any Muon", origin="PaddleFleet #1703")
def slab_of_an_expert(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Under expert parallelism each rank orthogonalises its slab of every expert."""
    return broken(model, layouts, hyper, _whole_ones(lambda u, a: _in_pieces(u, 1, a), 3))


@fault(check="cut.rows", model="deepseek-v2-lite", kind="any Muon", origin="xtuner #1582")
def experts_as_one_matrix(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """All experts of a layer, stored as one weight, are orthogonalised as one matrix."""

    def how(update: Tensor, arithmetic: Arithmetic) -> Tensor:
        return orthogonalize(update.flatten(0, 1), None, arithmetic).view_as(update)

    return broken(model, layouts, hyper, _whole_ones(how, 3))


@fault(check="arithmetic.scale", model="deepseek-v2-lite", origin="Megatron-LM #6740")
def padding_in_the_scale(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Blocks padded with zero rows are scaled by the padded shape."""

    def padded(batch: Tensor, arithmetic: Arithmetic) -> Tensor:
        rows = -(-batch.shape[1] // _ALIGNED) * _ALIGNED
        return newton_schulz(batch, arithmetic) * scale_factor(arithmetic, rows, batch.shape[2])

    return broken(model, layouts, hyper, by_block(padded))
