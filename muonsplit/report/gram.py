"""What the picture of an audited weight is drawn from: an image, and sizes on a common scale.

Lengths are CSS pixels. A picture comes from a certificate that a stranger may have written.
"""

import base64
import binascii
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from muonsplit.audit.result import Picture, Tried
from muonsplit.errors import CertificateError

SIDE = 384
PLOT_WIDTH, PLOT_HEIGHT = 108.0, 240.0
_LETTERS = 11.0
_MOST_ROWS, _MOST_VALUES = 2048, 64
# Sizes are drawn over at most this factor; what is below stands at the lower end.
_DEEPEST = 200.0
# The eye has to tell 0.05 from 0.1, and nothing between 0.5 and 1: a root spreads the small ones.
_SHADES = bytes(round(255 * (1 - math.sqrt(cosine / 255))) for cosine in range(256))


@dataclass(frozen=True, slots=True)
class Gram:
    """Overlaps of rows as an image, and what is written on it.

    Attributes:
        uri: The image, a PNG of one pixel an overlap, as a ``data:`` address.
        count: How many rows are shown.
        axis: What they are: ``rows`` or ``columns``.
        lines: Where planned blocks begin, from the top and from the left.
        ticks: Where rows begin to be named, and their numbers.
        inside: Mean overlap of different rows between neighbouring lines; NaN without any.
        outside: Mean overlap of rows that a line parts; NaN without lines.
    """

    uri: str
    count: int
    axis: str
    lines: tuple[float, ...]
    ticks: tuple[tuple[float, str], ...]
    inside: float
    outside: float


def gram(picture: Picture) -> Gram:
    """Draws the overlaps of rows: the darker, the more two rows point the same way.

    Raises:
        CertificateError: If the picture does not hold what it says.
    """
    rows = _numbers(picture)
    count = len(rows)
    cosines = _bytes(picture.cosines, count)
    if not all(0 <= at < count for at in picture.boundaries):
        raise CertificateError(
            f"A picture of {count} rows has boundaries {_some(picture.boundaries)}; expected 0 to "
            f"{count - 1}."
        )
    edges = sorted({0, *picture.boundaries})
    jumps = [i for i in range(1, count) if rows[i] != rows[i - 1] + 1]
    inside, outside = _means(cosines, count, edges)
    encoded = base64.b64encode(png(cosines.translate(_SHADES), count)).decode()
    return Gram(
        f"data:image/png;base64,{encoded}",
        count,
        ("rows", "columns")[picture.axis],
        tuple(_px(at / count * SIDE) for at in edges[1:]),
        _ticks(rows, sorted({*edges, *jumps})),
        inside,
        outside,
    )


def png(grey: bytes, width: int) -> bytes:
    """A picture in shades of grey from 0, black, to 255, row after row, as a PNG file.

    Written as the PNG specification (W3C, third edition, sections 5 and 11) says.
    """
    height = len(grey) // width
    lines = b"".join(b"\0" + grey[i * width : (i + 1) * width] for i in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )


def _numbers(picture: Picture) -> list[int]:
    """The number of each shown row."""
    stretches = picture.rows
    sound = picture.axis in (0, 1) and all(0 <= a < b for a, b in stretches)
    count = sum(b - a for a, b in stretches) if sound else 0
    if not 0 < count <= _MOST_ROWS:
        raise CertificateError(
            f"A picture shows rows {_some(stretches)} of axis {picture.axis}; expected stretches "
            f"from start to stop of axis 0 or 1, of 1 to {_MOST_ROWS} rows together."
        )
    return [row for a, b in stretches for row in range(a, b)]


def _bytes(text: str, count: int) -> bytes:
    try:
        cosines = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CertificateError(f"The cosines of a picture are no base64: {error}.") from None
    if len(cosines) != count**2:
        raise CertificateError(
            f"A picture of {count} rows holds {len(cosines)} cosines; expected {count**2}, one for "
            "each row with each row."
        )
    return cosines


def _some(values: Sequence[object]) -> str:
    return repr(tuple(values[:8])) + ("…" if len(values) > 8 else "")


def _means(cosines: bytes, count: int, edges: Sequence[int]) -> tuple[float, float]:
    """Mean overlap of different rows of one block, and of rows of two."""
    total = sum(cosines)
    own, pairs = 0, 0
    for a, b in pairwise([*edges, count]):
        own += sum(sum(cosines[i * count + a : i * count + b]) for i in range(a, b))
        own -= sum(cosines[i * count + i] for i in range(a, b))
        pairs += (b - a) * (b - a - 1)
    diagonal = sum(cosines[:: count + 1])
    others = count * (count - 1) - pairs
    return _mean(own, pairs), _mean(total - own - diagonal, others)


def _mean(total: int, count: int) -> float:
    return total / 255 / count if count else math.nan


def _ticks(rows: Sequence[int], starts: Iterable[int]) -> tuple[tuple[float, str], ...]:
    """The numbers of rows at which something begins, where there is room for them."""
    found: list[tuple[float, str]] = []
    for at in starts:
        top = _px(at / len(rows) * SIDE)
        if not found or top - found[-1][0] >= _LETTERS:
            found.append((top, str(rows[at])))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Scale:
    """A logarithmic scale from 0 to 1."""

    least: float
    most: float

    def at(self, value: float) -> float:
        """Where a value stands; at an end if it is beyond it or is no number."""
        if not value > self.least:
            return 0.0
        return min(1.0, math.log(value / self.least) / math.log(self.most / self.least))

    def ticks(self) -> list[float]:
        """Round values on it: powers of ten, between them 2 and 5 if it is short."""
        digits = (1.0,) if self.most / self.least > 100 else (1.0, 2.0, 5.0)
        first, last = (math.floor(math.log10(end)) for end in (self.least, self.most))
        found = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
        return [value for value in found if self.least <= value <= self.most * 1.001]


def scale_of(values: Iterable[float]) -> Scale:
    """A scale on which values stand, and the span from ½ to 2, with a little room around them."""
    sizes = [value for value in values if 0 < value < 1e30]
    most = max([2.0, *sizes])
    return Scale(max(min([0.5, *sizes]), most / _DEEPEST) / 1.1, most * 1.1)


@dataclass(frozen=True, slots=True)
class Panel:
    """Singular values of one matrix, the largest first, and where the largest may be.

    Attributes:
        name: Whose they are.
        largest: The largest of each block, in words; of this one if that is all that is known.
        possible: What they may be, in words; empty if nothing is known.
        reach: Top and height of the largest of each block; None if nothing is known.
        band: Top and height of what they may be; None if nothing is known.
        fits: Whether all of them are there.
        points: Where each value stands, from the left and from the top.
    """

    name: str
    largest: str
    possible: str
    reach: tuple[float, float] | None
    band: tuple[float, float] | None
    fits: bool
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Spectra:
    """Singular values of a planned block and of the whole matrix, on one scale."""

    ticks: tuple[tuple[float, str], ...]
    panels: tuple[Panel, ...]


def spectra(picture: Picture, planned: Tried | None, whole: Tried | None) -> Spectra | None:
    """Draws singular values against what the iteration makes; None if there is nothing to draw.

    Args:
        picture: Whose values.
        planned: The hypothesis that the weight was cut as planned; None if it is planned whole.
        whole: The hypothesis that it was not cut.
    """
    parts = [("planned block", picture.spectrum, planned), ("whole matrix", picture.whole, whole)]
    shown = [(name, values, tried) for name, values, tried in parts if _drawable(values)]
    if planned is None and picture.whole:
        shown = [part for part in shown if part[0] == "whole matrix"]
    if not shown:
        return None
    known = [tried for *_, tried in shown if tried]
    ends = [end for t in known for end in (t.low, t.high, t.least, t.most)]
    scale = scale_of([*ends, *(value for _, values, _ in shown for value in values)])
    ticks = tuple((_down(scale, value), f"{value:g}") for value in scale.ticks())
    return Spectra(ticks, tuple(_panel(*part, scale) for part in shown))


def _drawable(values: Sequence[float]) -> bool:
    return len(values) > 0 and all(0 <= value < math.inf for value in values)


def _panel(name: str, values: Sequence[float], tried: Tried | None, scale: Scale) -> Panel:
    ordered = sorted(values, reverse=True)
    step = max(1, math.ceil(len(ordered) / _MOST_VALUES))
    kept = ordered[::step]
    points = tuple(
        (_px(24 + i / max(1, len(kept) - 1) * (PLOT_WIDTH - 32)), _down(scale, value))
        for i, value in enumerate(kept)
    )
    if tried is None:
        return Panel(name, f"{ordered[0]:.3g}", "", None, None, False, points)
    return Panel(
        name,
        span(tried.least, tried.most),
        span(tried.low, tried.high),
        _tall(scale, tried.least, tried.most, 4.0),
        _tall(scale, tried.low, tried.high, 1.0),
        tried.fits,
        points,
    )


def _tall(scale: Scale, low: float, high: float, least: float) -> tuple[float, float]:
    """Top and height of an interval, of a height that can be seen."""
    top, bottom = _down(scale, high), _down(scale, low)
    lacking = max(0.0, least - (bottom - top))
    return _px(top - lacking / 2), _px(bottom - top + lacking)


def _down(scale: Scale, value: float) -> float:
    return _px(PLOT_HEIGHT * (1 - scale.at(value)))


def span(low: float, high: float) -> str:
    """An interval to three digits: ``0.68–1.13``, or one number if its ends look the same."""
    ends = f"{low:.3g}", f"{high:.3g}"
    return ends[0] if ends[0] == ends[1] else "–".join(ends)


def _px(length: float) -> float:
    return round(length, 2)
