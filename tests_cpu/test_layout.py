"""Layouts cut where the design's table says, and nowhere else."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from muonsplit.errors import CutHeadError, LayoutError
from muonsplit.layout import Layout, Segment


class Row(NamedTuple):
    """One row of the design's table, with what it must mean written out by hand."""

    layout: Layout
    text: str
    rows: int
    blocks: int
    # Index among the blocks -> role, head, rows.
    spot: dict[int, tuple[str, int, Sequence[int]]]


_FUSED = (Segment("q", 1, 96), Segment("k", 1, 96), Segment("v", 1, 96))
_GROUPED = (Segment("q", 16, 64), Segment("k", 1, 64), Segment("v", 1, 64))

TABLE = {
    "llama-q": Row(
        Layout.heads("q", 32, 128),
        "q 32×128",
        4096,
        32,
        {0: ("q", 0, range(128)), 5: ("q", 5, range(640, 768))},
    ),
    "glm-kv-joint": Row(
        Layout.heads("kv", 64, 448),
        "kv 64×448",
        28672,
        64,
        {63: ("kv", 63, range(28224, 28672))},
    ),
    "glm-kv-apart": Row(
        Layout((Segment("k", 1, 192), Segment("v", 1, 256)), groups=64),
        "64 × (k 192 | v 256)",
        28672,
        128,
        {0: ("k", 0, range(192)), 3: ("v", 1, range(640, 896)), 4: ("k", 2, range(896, 1088))},
    ),
    "neox": Row(
        Layout(_FUSED, groups=64),
        "64 × (q 96 | k 96 | v 96)",
        18432,
        192,
        {4: ("k", 1, range(384, 480)), 191: ("v", 63, range(18336, 18432))},
    ),
    "phi-3": Row(
        Layout((Segment("q", 32, 96), Segment("k", 8, 96), Segment("v", 8, 96))),
        "q 32×96 | k 8×96 | v 8×96",
        4608,
        48,
        {33: ("k", 1, range(3168, 3264)), 40: ("v", 0, range(3840, 3936))},
    ),
    "falcon-40b": Row(
        Layout(_GROUPED, groups=8),
        "8 × (q 16×64 | k 64 | v 64)",
        9216,
        144,
        {
            16: ("k", 0, range(1024, 1088)),
            18: ("q", 16, range(1152, 1216)),
            35: ("v", 1, range(2240, 2304)),
        },
    ),
    "gpt-2": Row(
        Layout((Segment("q", 12, 64), Segment("k", 12, 64), Segment("v", 12, 64)), axis=1),
        "q 12×64 | k 12×64 | v 12×64, axis 1",
        2304,
        36,
        {13: ("k", 1, range(832, 896)), 35: ("v", 11, range(2240, 2304))},
    ),
    "heads-per-block-2": Row(
        Layout.heads("q", 32, 128).per_block(2),
        "q 16×256",
        4096,
        16,
        {1: ("q", 1, range(256, 512))},
    ),
    "megatron-joined": Row(
        Layout(_GROUPED, groups=8, joined=True),
        "8 × (q 16×64 | k 64 | v 64), joined",
        9216,
        3,
        {
            0: ("q", 0, [g * 1152 + i for g in range(8) for i in range(1024)]),
            1: ("k", 0, [g * 1152 + 1024 + i for g in range(8) for i in range(64)]),
            2: ("v", 0, [g * 1152 + 1088 + i for g in range(8) for i in range(64)]),
        },
    ),
    "gate-up-interleaved": Row(
        Layout((Segment("gate", 1, 1), Segment("up", 1, 1)), groups=11, joined=True),
        "11 × (gate 1 | up 1), joined",
        22,
        2,
        {0: ("gate", 0, range(0, 22, 2)), 1: ("up", 0, range(1, 22, 2))},
    ),
    "gate-and-up-joined": Row(
        Layout((Segment("gate", 2, 4), Segment("up", 2, 3)), joined=True),
        "gate 2×4 | up 2×3, joined",
        14,
        2,
        {0: ("gate", 0, range(8)), 1: ("up", 0, range(8, 14))},
    ),
    "whole": Row(Layout.whole(4096), "whole 4096", 4096, 1, {0: ("all", 0, range(4096))}),
}

# Small enough to write every block's rows down; the order of batches is the layout's own.
SMALL: dict[str, tuple[Layout, list[list[int]]]] = {
    "heads": (Layout.heads("q", 3, 2), [[0, 1], [2, 3], [4, 5]]),
    "whole": (Layout.whole(3), [[0, 1, 2]]),
    "groups-of-two-widths": (
        Layout((Segment("k", 1, 1), Segment("v", 1, 2)), groups=3),
        [[0], [1, 2], [3], [4, 5], [6], [7, 8]],
    ),
    "groups-of-one-width": (
        Layout((Segment("q", 2, 2), Segment("k", 1, 2)), groups=2),
        [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]],
    ),
    "few-groups-many-heads": (
        Layout((Segment("q", 3, 1), Segment("k", 1, 2)), groups=2),
        [[0], [1], [2], [3, 4], [5], [6], [7], [8, 9]],
    ),
    "widths-that-return": (
        Layout((Segment("q", 1, 1), Segment("k", 1, 2), Segment("v", 1, 1))),
        [[0], [1, 2], [3]],
    ),
    "joined": (
        Layout((Segment("q", 2, 1), Segment("k", 1, 2)), groups=2, joined=True),
        [[0, 1, 4, 5], [2, 3, 6, 7]],
    ),
    "joined-in-one-piece": (
        Layout((Segment("q", 2, 2), Segment("k", 1, 2)), joined=True),
        [[0, 1, 2, 3], [4, 5]],
    ),
}

table = pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
small = pytest.mark.parametrize(("layout", "blocks"), SMALL.values(), ids=SMALL)
axes = pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])


def on_axis(layout: Layout, axis: int) -> Layout:
    return Layout(layout.segments, layout.groups, axis, layout.joined)


def numbered(rows: int, cols: int, axis: int = 0) -> Tensor:
    """A weight whose every entry is another, row r starting at r·cols."""
    weight = torch.arange(rows * cols, dtype=torch.float32).view(rows, cols)
    return weight.T.contiguous() if axis else weight


@table
def test_table_row_covers_its_rows_in_its_blocks(row: Row) -> None:
    blocks = row.layout.blocks()
    assert row.layout.rows == row.rows
    assert len(blocks) == row.blocks
    assert row.layout.is_whole == (row.blocks == 1)
    for index, (role, head, rows) in row.spot.items():
        block = blocks[index]
        assert (block.role, block.head) == (role, head)
        assert [r for start, stop in block.spans for r in range(start, stop)] == list(rows)
        assert block.rows == len(rows)
        assert f"{role}[{head}]" in str(block)


@table
def test_table_row_is_written_and_read_back(row: Row) -> None:
    assert str(row.layout) == row.text
    assert Layout.parse(row.text) == row.layout


@pytest.mark.parametrize("name", ["all", "whole"])
@pytest.mark.parametrize("heads", [1, 2])
def test_roles_that_mean_whole_do_not_change_when_read_back(name: str, heads: int) -> None:
    try:
        layout = Layout.heads(name, heads, 8)
    except LayoutError:
        return
    assert Layout.parse(str(layout)) == layout


def test_what_is_not_cut_is_one_block_of_every_row() -> None:
    assert Layout.whole(5) == Layout((Segment("all", 1, 5),))
    assert Layout.whole(5, 1) == Layout((Segment("all", 1, 5),), axis=1)


def test_a_block_of_several_spans_names_each() -> None:
    k = TABLE["gate-up-interleaved"].layout.shard(0, 22).blocks()[1]
    assert str(k).startswith("up[0] rows 1–1, 3–3, 5–5, ")


def test_adjacent_rows_of_a_joined_role_are_one_span() -> None:
    q, k = Layout((Segment("q", 4, 8), Segment("k", 2, 8)), joined=True).blocks()
    assert (q.spans, k.spans) == (((0, 32),), ((32, 48),))


@small
@axes
def test_batches_hold_the_blocks_rows(layout: Layout, blocks: list[list[int]], axis: int) -> None:
    layout = on_axis(layout, axis)
    weight = numbered(layout.rows, 3, axis)
    matrix = weight.T if axis else weight
    found = [block for batch in layout.batches(weight) for block in batch]
    # Equal widths come together, so the order is not the blocks' own; their first entry tells.
    found.sort(key=lambda block: float(block[0, 0]))
    expected = sorted((matrix[rows] for rows in blocks), key=lambda block: float(block[0, 0]))
    assert [block.tolist() for block in found] == [block.tolist() for block in expected]
    if not layout.joined:
        assert [list(range(*block.spans[0])) for block in layout.blocks()] == blocks


@small
@axes
def test_batches_are_views_unless_rows_are_gathered(
    layout: Layout, blocks: list[list[int]], axis: int
) -> None:
    layout = on_axis(layout, axis)
    weight = numbered(layout.rows, 3, axis)
    storage = weight.untyped_storage().data_ptr()
    for batch, block in zip(layout.batches(weight), layout.blocks(), strict=False):
        gathered = layout.joined and len(block.spans) > 1
        assert (batch.untyped_storage().data_ptr() == storage) is not gathered


def test_a_run_of_equal_widths_is_few_batches() -> None:
    # Two groups of three single rows are two batches of three, not three of two.
    layout = SMALL["few-groups-many-heads"][0]
    shapes = [tuple(b.shape) for b in layout.batches(torch.zeros(layout.rows, 4))]
    assert shapes == [(3, 1, 4), (3, 1, 4), (2, 2, 4)]


def test_equal_widths_are_one_batch() -> None:
    phi, falcon = TABLE["phi-3"].layout, TABLE["falcon-40b"].layout
    apart = TABLE["glm-kv-apart"].layout
    shapes = [[tuple(b.shape) for b in x.batches(torch.zeros(x.rows, 2))] for x in (phi, falcon)]
    assert shapes == [[(48, 96, 2)], [(144, 64, 2)]]
    assert [tuple(b.shape) for b in apart.batches(torch.zeros(apart.rows, 2))] == [
        (64, 192, 2),
        (64, 256, 2),
    ]


@small
@axes
def test_write_undoes_batches(layout: Layout, blocks: list[list[int]], axis: int) -> None:
    layout = on_axis(layout, axis)
    weight = numbered(layout.rows, 3, axis)
    result = torch.full_like(weight, torch.nan)
    layout.write([batch.clone() for batch in layout.batches(weight)], result)
    assert torch.equal(result, weight)


@pytest.mark.parametrize("joined", [False, True])
def test_write_refuses_a_missing_batch(joined: bool) -> None:
    layout = Layout((Segment("k", 1, 1), Segment("v", 1, 2)), groups=3, joined=joined)
    weight = numbered(9, 2)
    with pytest.raises(ValueError, match="shorter"):
        layout.write(layout.batches(weight)[:1], weight)


@pytest.mark.parametrize("shape", [(7, 6), (6,), (2, 6, 3)], ids=["rows", "1-D", "3-D"])
def test_batches_refuse_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="covers 6 rows"):
        Layout.heads("q", 3, 2).batches(torch.zeros(shape))


def test_axis_1_measures_columns() -> None:
    layout = Layout.heads("q", 3, 2, axis=1)
    assert [tuple(b.shape) for b in layout.batches(torch.zeros(5, 6))] == [(3, 2, 5)]
    with pytest.raises(LayoutError, match="axis 1"):
        layout.batches(torch.zeros(6, 5))


@pytest.mark.parametrize(
    ("name", "start", "stop", "text"),
    [
        ("llama-q", 1024, 2048, "q 8×128"),
        ("llama-q", 0, 4096, "q 32×128"),
        ("llama-q", 3968, 4096, "q 128"),
        ("glm-kv-apart", 448, 1344, "2 × (k 192 | v 256)"),
        ("glm-kv-apart", 192, 640, "v 256 | k 192"),
        ("phi-3", 2976, 3264, "q 96 | k 2×96"),
        # Half a group of q, then its k and v, then the next group's first two q.
        ("falcon-40b", 512, 1280, "q 8×64 | k 64 | v 64 | q 2×64"),
        ("falcon-40b", 1152, 3456, "2 × (q 16×64 | k 64 | v 64)"),
        ("gpt-2", 704, 832, "q 64 | k 64, axis 1"),
        ("whole", 0, 4096, "whole 4096"),
        ("megatron-joined", 0, 9216, "8 × (q 16×64 | k 64 | v 64), joined"),
        ("gate-and-up-joined", 0, 8, "gate 2×4, joined"),
        ("gate-and-up-joined", 8, 14, "up 2×3, joined"),
    ],
)
def test_shard_of_whole_heads(name: str, start: int, stop: int, text: str) -> None:
    assert str(TABLE[name].layout.shard(start, stop)) == text


@pytest.mark.parametrize(
    ("name", "start", "stop", "head"),
    [
        ("llama-q", 0, 100, "q[0] rows 0–127"),
        ("llama-q", 64, 256, "q[0] rows 0–127"),
        ("llama-q", 127, 256, "q[0] rows 0–127"),
        ("llama-q", 128, 257, "q[2] rows 256–383"),
        ("glm-kv-joint", 0, 14337, "kv[32] rows 14336–14783"),
        ("glm-kv-apart", 0, 448 + 100, "k[1] rows 448–639"),
        ("falcon-40b", 1056, 1152, "k[0] rows 1024–1087"),
        ("gpt-2", 0, 800, "k[0] rows 768–831"),
        ("whole", 0, 2048, "all[0] rows 0–4095"),
        ("gate-up-interleaved", 0, 2, "gate[0]"),
    ],
)
def test_shard_that_cuts_a_head_names_it(name: str, start: int, stop: int, head: str) -> None:
    with pytest.raises(CutHeadError) as raised:
        TABLE[name].layout.shard(start, stop)
    assert head in str(raised.value)
    assert "Shard at a multiple of the head width" in raised.value.hint


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (8, 8), (16, 8), (-8, 8), (0, 25), (24, 32)])
def test_shard_outside_the_weight_is_refused(start: int, stop: int) -> None:
    with pytest.raises(LayoutError, match="no shard") as raised:
        Layout.heads("q", 3, 8).shard(start, stop)
    assert not isinstance(raised.value, CutHeadError)


@pytest.mark.parametrize(
    ("text", "heads", "expected"),
    [
        ("q 32×128", 1, "q 32×128"),
        ("q 32×128", 32, "q 4096"),
        ("q 4×8 | k 2×8", 2, "q 2×16 | k 16"),
        ("3 × (q 4×8 | k 2×4), axis 1", 2, "3 × (q 2×16 | k 8), axis 1"),
        ("3 × (q 4×8 | k 4), joined", 1, "3 × (q 4×8 | k 4), joined"),
    ],
)
def test_per_block_takes_consecutive_heads(text: str, heads: int, expected: str) -> None:
    assert str(Layout.parse(text).per_block(heads)) == expected


@pytest.mark.parametrize(
    ("text", "heads", "message"),
    [
        ("q 32×128", 3, "do not divide the 32"),
        ("q 4×8 | k 8", 2, "'k'"),
        ("64 × (k 192 | v 256)", 2, "do not divide the 1"),
        ("8 × (q 16×64 | k 64), joined", 2, "joined"),
        ("q 4×8 | k 2×8, joined", 2, "already hold every head"),
        ("q 32×128", 0, "^heads must be a positive integer"),
        ("q 32×128", -1, "positive integer"),
        ("q 32×128", True, "positive integer"),
        ("q 32×128", 2.0, "positive integer"),
    ],
)
def test_per_block_refuses(text: str, heads: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.parse(text).per_block(heads)


@pytest.mark.parametrize("count", [True, False, 0, -1, 2.0, "2", None], ids=repr)
@pytest.mark.parametrize("place", ["heads", "width", "groups"])
def test_counts_are_positive_integers(count: Any, place: str) -> None:
    sizes = {"heads": 2, "width": 2, "groups": 2, place: count}
    with pytest.raises(LayoutError, match="positive integer"):
        Layout((Segment("q", sizes["heads"], sizes["width"]),), groups=sizes["groups"])


@pytest.mark.parametrize("role", ["", "Q", "1q", "_q", "q k", "q-k", "q\n", "ü", None, 3])
def test_roles_are_lower_case_words(role: Any) -> None:
    with pytest.raises(LayoutError, match="role"):
        Layout((Segment(role, 2, 2),))


@pytest.mark.parametrize(
    "fields",
    [
        {"segments": ()},
        {"segments": [Segment("q", 2, 2)]},
        {"segments": None},
        {"segments": ("q", 2, 2)},
        {"segments": (("q", 2),)},
        {"segments": (7,)},
        {"axis": 2},
        {"axis": -1},
        {"axis": True},
        {"axis": False},
        {"axis": None},
        {"axis": 1.0},
        {"axis": "0"},
        {"joined": 1},
        {"joined": None},
        {"joined": "joined"},
    ],
    ids=str,
)
def test_other_fields_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        Layout(**{"segments": (Segment("q", 2, 2),), **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"segments": None}, "A layout needs a tuple of segments, got None."),
        ({"segments": (7,)}, "A segment is (role, heads, width), got 7."),
        ({"segments": (("q", 0, 2),)}, "heads of 'q' must be a positive integer, got 0."),
        ({"segments": (("q", 2, True),)}, "width of 'q' must be a positive integer, got True."),
        ({"groups": 0}, "groups must be a positive integer, got 0."),
        ({"axis": 2}, "A layout cuts axis 0 or 1, got axis=2."),
        ({"joined": 1}, "joined is true or false, got 1."),
    ],
)
def test_a_refusal_names_the_field_and_its_value(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LayoutError) as raised:
        Layout(**{"segments": (Segment("q", 2, 2),), **fields})
    assert str(raised.value) == said


@pytest.mark.parametrize(
    "text",
    [
        "q 32x128",
        "q 032×128",
        " q 32×128",
        "q 32×128 ",
        "q 32×128\n",
        "q  32×128",
        "q 1×128",
        "q 0×128",
        "q 32×0",
        "q 32 × 128",
        "q -1",
        "q +1",
        "q 1.0",
        "q ٣",
        "Q 32×128",
        "32 × 128",
        "32×128",
        "q",
        "q ",
        "q 4×8 |k 4×8",
        "q 4×8| k 4×8",
        "q 4×8 | ",
        " | q 4×8",
        "q 4×8, k 4×8",
        "0 × (q 1)",
        "1 × (q 1)",
        "02 × (q 1)",
        "2 × q 1",
        "2 × (q 1",
        "2 × ()",
        "2×(q 1)",
        "2 × (2 × (q 1))",
        "2 × (q 1) | k 1",
        "",
        "whole",
        "whole 0",
        "whole 2×8",
        "whole 8 | q 8",
        "all 8",
        "q 8, axis 0",
        "q 8, axis 2",
        "q 8, axis 1, axis 1",
        "q 8, joined, axis 1",
        "q 8, joined, joined",
        ", joined",
        pytest.param("q " + "9" * 5000, id="5000-digit-width"),
        pytest.param("q " + "9" * 5000 + "×2", id="5000-digit-heads"),
        pytest.param("9" * 5000 + " × (q 2)", id="5000-digit-groups"),
        pytest.param("whole " + "9" * 5000, id="5000-digit-whole"),
    ],
)
def test_parse_refuses_near_misses(text: str) -> None:
    with pytest.raises(LayoutError, match="is no layout"):
        Layout.parse(text)


def test_parse_of_a_hostile_count_makes_no_blocks() -> None:
    text = "999999999999999999 × (q 999999999999999999×2)"
    assert str(Layout.parse(text)) == text


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("q 4×8", "k 4×8", True),
        ("4 × (k 8)", "k 4×8", True),
        ("q 2×8 | k 2×8", "q 4×8", True),
        ("q 4×8", "q 2×16", False),
        ("q 4×8", "q 4×8, axis 1", False),
        ("whole 32", "whole 32, axis 1", True),
        ("whole 32", "q 4×8, joined", True),
        ("q 4×8", "q 5×8", False),
        ("2 × (q 8 | k 8), joined", "q 2×8 | k 2×8, joined", False),
    ],
)
def test_same_cut_looks_at_rows_not_names(one: str, other: str, same: bool) -> None:
    left, right = Layout.parse(one), Layout.parse(other)
    assert left.same_cut(right) is right.same_cut(left) is same
