"""Hypothesis strategies: layouts, matrices and the bits they are compared by."""

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


def bits(x: Tensor) -> Tensor:
    """The bits of a float32 tensor: +0 is not −0 here, and a NaN equals itself."""
    assert x.dtype == torch.float32
    return x.contiguous().view(torch.int32)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(bits(one), bits(other))
