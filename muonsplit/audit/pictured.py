"""Part of a Gram matrix, and spectra, for the reader's eye."""

import base64

import torch
from torch import Tensor

from muonsplit.audit.result import Picture, digits
from muonsplit.audit.spectra import values
from muonsplit.layout import Layout

# Rows that are shown, blocks they are of, and singular values.
_ROWS, _BLOCKS, _VALUES = 160, 8, 64
# Rows that stand for the whole matrix where it is large.
_SIDE = 1024


def pictured(change: Tensor, layout: Layout | None, size: float, whole: float) -> Picture:
    """A picture of what a weight became.

    Args:
        change: ``[rows, cols]``.
        layout: The planned cut; None for whole.
        size: What its blocks are given, learning rate and all.
        whole: Likewise the whole matrix.
    """
    axis = 0 if layout is None else layout.axis
    matrix = change.mT if axis else change
    spans, boundaries = _shown(matrix.shape[0], layout)
    rows = torch.cat([matrix[a:b] for a, b in spans]).float()
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    cosines = (rows @ rows.mT).abs().mul(255).round().clamp(max=255).to(torch.uint8)
    first = matrix if layout is None else layout.batches(change)[0][0]
    return Picture(
        spans,
        axis,
        base64.b64encode(bytes(cosines.flatten().tolist())).decode(),
        boundaries,
        _spectrum(first, size),
        _spectrum(matrix, whole),
    )


def _shown(rows: int, layout: Layout | None) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """The first rows of the first blocks, and where each begins among those shown."""
    blocks = [((0, rows),)] if layout is None else [b.spans for b in layout.blocks()]
    chosen = blocks[:_BLOCKS]
    each = _ROWS // len(chosen)
    spans: list[tuple[int, int]] = []
    boundaries: list[int] = []
    shown = 0
    for block in chosen:
        boundaries.append(shown)
        start, stop = block[0]
        stop = min(stop, start + each)
        spans.append((start, stop))
        shown += stop - start
    return tuple(spans), tuple(boundaries)


def _spectrum(matrix: Tensor, size: float) -> tuple[float, ...]:
    """Singular values, of a large matrix those of some of its rows."""
    if min(matrix.shape) > _SIDE:
        matrix = matrix[:: -(-matrix.shape[0] // _SIDE)]
    found = values(matrix.unsqueeze(0))[0].flip(0) / (size or 1.0)
    step = max(1, len(found) // _VALUES)
    return tuple(digits(value) for value in found[::step][:_VALUES].tolist())
