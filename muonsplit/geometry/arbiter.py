"""Who is asked what the rules leave open."""

from collections.abc import Callable, Mapping

from muonsplit.geometry.candidates import HeadGeometry
from muonsplit.layout import Layout, Segment


class Arbiter:
    """Asks an arbiter when it is first needed."""

    def __init__(self, ask: Callable[[], Mapping[str, Layout | None]] | None) -> None:
        self._ask = ask
        self._answers: Mapping[str, Layout | None] | None = None

    def geometry(self, name: str, role: str) -> HeadGeometry | None:
        """Heads of one width, if the arbiter knows of such."""
        if self._ask is None:
            return None
        if self._answers is None:
            self._answers = self._ask()
        layout = self._answers.get(name)
        if layout is None:
            return None
        widths = {segment.width for segment in layout.segments}
        if len(widths) != 1:
            return None
        (width,) = widths
        heads = layout.rows // width
        return HeadGeometry(heads, width, "arbiter", (Segment(role, heads, width),))
