"""Which hypothesis explains an update: direction and size apart, in float64."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.errors import LayoutError
from muonsplit.layout import Layout
from muonsplit.muon import orthogonalize


class Fit(NamedTuple):
    """How well one hypothesis explains an update.

    Attributes:
        hypothesis: Its name.
        residual: ‖U − s·O‖ / ‖s·O‖ with the best size s: the error of direction.
        size: That s: how much larger the update is than the hypothesis says.
    """

    hypothesis: str
    residual: float
    size: float

    def __str__(self) -> str:
        return f"{self.hypothesis}: direction off by {self.residual:.2g}, size × {self.size:.4g}"


def compare(name: str, update: Tensor, expected: Tensor) -> Fit:
    """Fits an update to what a hypothesis expects.

    Args:
        name: The hypothesis.
        update: What was observed.
        expected: What it predicts, same shape, any positive size.
    """
    seen, wanted = update.double().flatten(), expected.double().flatten()
    energy = wanted.dot(wanted)
    if energy == 0:
        return Fit(name, 0.0 if seen.norm() == 0 else float("inf"), 1.0)
    size = float(seen.dot(wanted) / energy)
    if size <= 0:  # dead, or pointing away: no rescaling makes it the same direction
        return Fit(name, float("inf"), size)
    off = (seen - size * wanted).norm() / (size * energy.sqrt())
    return Fit(name, float(off), size)


def fit(
    update: Tensor,
    direction: Tensor,
    hypotheses: Mapping[str, Layout | None],
    arithmetic: Arithmetic,
) -> list[Fit]:
    """Ranks hypotheses by how well they explain an update, the best first.

    Args:
        update: The observed update divided by the learning rate, shape ``[rows, cols]``.
        direction: What was to be orthogonalised.
        hypotheses: Layouts by name.
        arithmetic: What is computed on a block; evaluated in float64.
    """
    exact = arithmetic.exact()
    fits = [
        compare(name, update, orthogonalize(direction.double(), layout, exact))
        for name, layout in hypotheses.items()
    ]
    return sorted(fits, key=lambda found: found.residual)


def hypotheses(planned: Layout | None, rows: int) -> dict[str, Layout | None]:
    """The usual ways to be wrong about a weight: pairs, halves, thirds, whole.

    Args:
        planned: The planned layout; None for whole.
        rows: Rows of the weight.
    """
    others = {name: layout for name, layout in _variants(planned, rows) if not layout.is_whole}
    return {"as planned": planned, "whole matrix": None, **others}


def _variants(planned: Layout | None, rows: int) -> Iterator[tuple[str, Layout]]:
    if rows % 3 == 0:
        yield "Q | K | V", Layout.heads("part", 3, rows // 3)
    if planned is None or planned.axis or len(planned.segments) > 1 or planned.groups > 1:
        return
    yield from (
        ("half heads", Layout.heads(role, 2 * heads, width // 2))
        for role, heads, width in planned.segments
        if width % 2 == 0
    )
    try:
        yield "head pairs", planned.per_block(2)
    except LayoutError:
        return
