"""Shape confirms: rows = heads × width exactly, or the candidate is nothing."""

from collections.abc import Sequence
from typing import NamedTuple

from muonsplit.geometry.candidates import HeadGeometry, plainness


class Answer(NamedTuple):
    """What the candidates come to.

    Attributes:
        geometry: The confirmed geometry, or None where the weight stays whole.
        reason: Which candidate confirmed, or which failed and by how much.
        open: Whether the rules leave it open: no candidate fits, or several that disagree.
        one_order: Whether every confirmed candidate has the same order of roles.
    """

    geometry: HeadGeometry | None
    reason: str
    open: bool = False
    one_order: bool = True


def confirm(rows: int, candidates: Sequence[HeadGeometry]) -> Answer:
    """Confirms candidates by shape; their order never matters.

    Candidates that agree in heads and width are one answer, by however many routes they come.
    Confirmed candidates that disagree are ambiguous, and the weight is declined. Queries with a
    gate are considered where none without one fits.

    Args:
        rows: The weight's logical size on the axis of its heads.
        candidates: What is plausible.
    """
    fitting = sorted((c for c in candidates if c.heads * c.width == rows), key=_plainest)
    fitting = [c for c in fitting if not c.gated] or fitting
    confirmed = {(c.heads, c.width): c for c in reversed(fitting)}
    if not confirmed:
        return Answer(None, _nothing(rows, candidates), open=True)
    if len(confirmed) > 1:
        both = ", ".join(map(str, sorted(confirmed.values(), key=_plainest)))
        return Answer(None, f"declined: ambiguous, the shape confirms each of {both}", open=True)
    geometry = next(iter(confirmed.values()))
    if geometry.heads == 1:
        return Answer(None, f"whole: one head of {geometry.width} rows ({geometry.source})")
    if geometry.width == 1:
        return Answer(None, f"declined: {geometry.heads} heads of a single row each")
    orders = {(c.parts, c.groups) for c in fitting}
    return Answer(geometry, f"confirmed: {geometry}", one_order=len(orders) == 1)


def _plainest(found: HeadGeometry) -> tuple[object, ...]:
    """The route to name where several agree."""
    return *plainness(found.source), found.heads, found.width, found.parts, found.groups


def _nothing(rows: int, candidates: Sequence[HeadGeometry]) -> str:
    if not candidates:
        return f"declined: neither owner nor config states head counts and widths for {rows} rows"
    closest = sorted(set(candidates), key=lambda c: (abs(c.heads * c.width - rows), *_plainest(c)))[
        :2
    ]
    missed = "; ".join(f"{c}, off by {c.heads * c.width - rows:+d}" for c in closest)
    return f"declined: no candidate gives {rows} rows: {missed}"
