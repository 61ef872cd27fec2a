"""Shape confirms: rows = heads × width exactly, or the candidate is nothing."""

from collections.abc import Sequence
from typing import NamedTuple

from muonsplit.geometry.candidates import HeadGeometry


class Answer(NamedTuple):
    """What the candidates come to.

    Attributes:
        geometry: The confirmed geometry, or None where the weight stays whole.
        reason: Which candidate confirmed, or which failed and by how much.
    """

    geometry: HeadGeometry | None
    reason: str


def confirm(shape: Sequence[int], candidates: Sequence[HeadGeometry]) -> Answer:
    """Confirms candidates by shape; their order never matters.

    Candidates that agree in heads and width are one answer, by however many routes they come.
    Confirmed candidates that disagree are ambiguous, and the weight is declined.

    Args:
        shape: The weight's logical shape.
        candidates: What is plausible.
    """
    if len(shape) != 2:
        return Answer(None, f"declined: {len(shape)}-D, heads are rows of a matrix")
    rows = shape[0]
    confirmed: dict[tuple[int, int], HeadGeometry] = {}
    for found in sorted(candidates, key=_owner_first):
        if found.heads * found.width == rows:
            confirmed.setdefault((found.heads, found.width), found)
    if not confirmed:
        return Answer(None, _nothing(rows, candidates))
    if len(confirmed) > 1:
        both = ", ".join(map(str, confirmed.values()))
        return Answer(None, f"declined: ambiguous, the shape confirms each of {both}")
    geometry = next(iter(confirmed.values()))
    if geometry.heads == 1:
        return Answer(None, f"whole: one head of {geometry.width} rows ({geometry.source})")
    if geometry.width == 1:
        return Answer(None, f"declined: {geometry.heads} heads of a single row each")
    return Answer(geometry, f"confirmed: {geometry}")


def _owner_first(found: HeadGeometry) -> tuple[int, str, int, int]:
    """The route to name where several agree: the one that leans on the config least."""
    return found.source.count("config."), found.source, found.heads, found.width


def _nothing(rows: int, candidates: Sequence[HeadGeometry]) -> str:
    if not candidates:
        return f"declined: neither owner nor config states head counts and widths for {rows} rows"
    closest = sorted(set(candidates), key=lambda c: (abs(c.heads * c.width - rows), c))[:2]
    missed = "; ".join(f"{c}, off by {c.heads * c.width - rows:+d}" for c in closest)
    return f"declined: no candidate gives {rows} rows: {missed}"
