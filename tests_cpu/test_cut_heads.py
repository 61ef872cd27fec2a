"""What a finding on cut heads takes an update for: the ways to be wrong about what a rank holds."""

from types import SimpleNamespace
from typing import Any

import pytest

from muonsplit.checks import cut_heads
from muonsplit.geometry import Decision
from muonsplit.layout import Layout
from muonsplit.sharding.ways import Sharding


def ways(layout: str, cols: int, sharding: Sharding) -> dict[str, str]:
    """The hypotheses on a weight, as they are written."""
    parsed = Layout.parse(layout)
    shape = (parsed.rows, cols)
    d = Decision("w", shape, "", "q_proj", "query", parsed, None, None, "given", "given")
    case: Any = SimpleNamespace(sharding=sharding)
    found = cut_heads._by_shard(case, d)  # pyright: ignore[reportPrivateUsage]
    return {name: str(way) for name, way in found.items()}


@pytest.mark.parametrize(
    ("layout", "sharding", "expected"),
    [
        # Two heads of 8 rows on four ranks: half heads; four rows are no two heads of two or more.
        (
            "k 2×8",
            Sharding("fsdp", 4),
            {
                "each rank's part": "part 4×4",
                "each rank's part of a head": "part 4×4",
                "as many heads on each rank": "part 8×2",
            },
        ),
        # Three heads of 4 rows on 2 ranks: the middle one is cut in halves.
        (
            "q 3×4",
            Sharding("fsdp", 2),
            {
                "each rank's part": "part 2×6",
                "each rank's part of a head": "part 4 | part 2×2 | part 4",
                "as many heads on each rank": "part 6×2",
            },
        ),
        # 15 rows on 2 ranks: 8 and 7; the second head is cut into three rows and two.
        (
            "q 3×5",
            Sharding("fsdp", 2),
            {
                "each rank's part": "part 8 | part 7",
                "each rank's part of a head": "part 5 | part 3 | part 2 | part 5",
            },
        ),
        # 9 rows on 4 ranks: 3, 3, 3 and none. Heads of 4 and 5 would leave a row alone.
        ("q 4 | k 5", Sharding("fsdp", 4), {"each rank's part": "part 3×3"}),
    ],
)
def test_hypotheses_on_what_a_rank_holds(
    layout: str, sharding: Sharding, expected: dict[str, str]
) -> None:
    assert ways(layout, 24, sharding) == expected
