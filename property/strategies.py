"""Hypothesis strategies: layouts, matrices and the bits they are compared by."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from muonsplit.layout import Layout, Segment

ROLES = ("q", "k", "v", "kv", "gate_up", "q2", "all")


@st.composite
def layouts(
    draw: st.DrawFn,
    max_groups: int = 4,
    max_heads: int = 4,
    max_width: int = 5,
    joined: bool | None = None,
) -> Layout:
    """Layouts of up to four segments, few enough rows to list."""
    segments = draw(
        st.lists(
            st.builds(
                Segment,
                st.sampled_from(ROLES),
                st.integers(1, max_heads),
                st.integers(1, max_width),
            ),
            min_size=1,
            max_size=4,
        )
    )
    return Layout(
        tuple(segments),
        draw(st.integers(1, max_groups)),
        draw(st.sampled_from([0, 1])),
        draw(st.booleans()) if joined is None else joined,
    )


def pieces(layout: Layout) -> list[tuple[str, list[int]]]:
    """Role and rows of every head, counted row by row: what a layout means, said once more."""
    found: list[tuple[str, list[int]]] = []
    row = 0
    for _ in range(layout.groups):
        for role, heads, width in layout.segments:
            for _ in range(heads):
                found.append((role, [row + i for i in range(width)]))
                row += width
    return found


class Heads(NamedTuple):
    """An attention projection: its sizes and the seed of its entries."""

    heads: int
    width: int
    cols: int
    seed: int

    @property
    def layout(self) -> Layout:
        return Layout.heads("q", self.heads, self.width)

    def update(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.heads * self.width, self.cols, generator=generator)

    def rows(self, head: int) -> slice:
        return slice(head * self.width, (head + 1) * self.width)


def projections(min_heads: int = 1) -> st.SearchStrategy[Heads]:
    """Projections in all proportions, also of sizes no vector unit divides."""
    return st.builds(
        Heads,
        st.integers(min_heads, 6),
        st.integers(2, 24),
        st.integers(2, 48),
        st.integers(0, 2**31 - 1),
    )


class Place(NamedTuple):
    """Where a matrix lies in memory, all in elements.

    Attributes:
        offset: Elements before its first.
        gap: Elements between its rows, or columns.
        by_columns: Whether it is stored transposed.
    """

    offset: int
    gap: int
    by_columns: bool

    def hold(self, x: Tensor) -> Tensor:
        """A copy of a matrix in such a place, with NaN around it."""
        outer, inner = x.T.shape if self.by_columns else x.shape
        memory = x.new_full((self.offset + outer * (inner + self.gap),), torch.nan)
        held = memory[self.offset :].view(outer, inner + self.gap)[:, :inner]
        held = held.T if self.by_columns else held
        return held.copy_(x)


def places() -> st.SearchStrategy[Place]:
    """Contiguous, offset, strided and transposed."""
    return st.builds(
        Place, st.sampled_from([0, 0, 1, 3, 16, 17]), st.sampled_from([0, 0, 1, 16]), st.booleans()
    )


class Sharding(NamedTuple):
    """A projection whose heads are moved, cut into shards and laid somewhere in memory.

    Attributes:
        p: The projection.
        tp: Equal shards.
        order: Where each head comes from.
        place: Where the whole lies.
        shard_place: Where each shard lies.
        threads: Threads that compute.
    """

    p: Heads
    tp: int
    order: tuple[int, ...]
    place: Place
    shard_place: Place
    threads: int


@st.composite
def shardings(draw: st.DrawFn, max_heads: int = 6) -> Sharding:
    """Shardings of sizes that vector units divide and of sizes they do not, wide and tall."""
    heads = draw(st.integers(1, max_heads))
    width = draw(st.integers(2, 64) | st.sampled_from([16, 32, 48, 64]))
    cols = draw(st.integers(2, 96) | st.sampled_from([16, 64, 96]))
    return Sharding(
        Heads(heads, width, cols, draw(st.integers(0, 2**31 - 1))),
        draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        tuple(draw(st.permutations(range(heads)))),
        draw(places()),
        draw(places()),
        draw(st.sampled_from([1, 2])),
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Computes with that many threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bits(x: Tensor) -> Tensor:
    """The bits of a float32 tensor: +0 is not −0 here, and a NaN equals itself."""
    assert x.dtype == torch.float32
    return x.contiguous().view(torch.int32)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(bits(one), bits(other))
