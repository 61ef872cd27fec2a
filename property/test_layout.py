"""What holds for every layout."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonsplit.errors import CutHeadError
from muonsplit.layout import Block, Layout, Segment
from property.strategies import layouts, pieces


def rows_of(block: Block) -> list[int]:
    return [row for start, stop in block.spans for row in range(start, stop)]


@given(layouts())
def test_blocks_are_the_heads_or_their_roles(layout: Layout) -> None:
    expected = pieces(layout)
    found = [(block.role, rows_of(block)) for block in layout.blocks()]
    if layout.joined:
        roles = dict.fromkeys(role for role, _ in expected)
        expected = [(r, [i for role, rows in expected if role == r for i in rows]) for r in roles]
    assert found == expected
    assert [b.rows for b in layout.blocks()] == [len(rows) for _, rows in expected]
    assert layout.is_whole == (len(expected) == 1)


@given(layouts())
def test_blocks_cover_every_row_once(layout: Layout) -> None:
    covered = sorted(row for block in layout.blocks() for row in rows_of(block))
    assert covered == list(range(layout.rows))


@given(layouts())
def test_heads_of_a_role_are_numbered(layout: Layout) -> None:
    for role in {block.role for block in layout.blocks()}:
        heads = [block.head for block in layout.blocks() if block.role == role]
        assert heads == list(range(len(heads)))


@given(layouts())
def test_written_form_is_read_back(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@given(st.text(alphabet="qkv whole123×|()x, axisjoned\n", max_size=24))
def test_what_parses_is_what_str_writes(text: str) -> None:
    try:
        layout = Layout.parse(text)
    except ValueError:
        return
    assert str(layout) == text


@given(layouts(joined=False, max_groups=3, max_heads=3, max_width=3), st.data())
def test_shard_cuts_where_the_weight_is_cut(layout: Layout, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layout.rows - 1))
    stop = data.draw(st.integers(start + 1, layout.rows))
    inside: list[tuple[str, list[int]]] = []
    for role, rows in pieces(layout):
        kept = [row - start for row in rows if start <= row < stop]
        if kept and len(kept) < len(rows):
            with pytest.raises(CutHeadError, match=f"{rows[0]}–{rows[-1]}"):
                layout.shard(start, stop)
            return
        if kept:
            inside.append((role, kept))
    shard = layout.shard(start, stop)
    assert [(block.role, rows_of(block)) for block in shard.blocks()] == inside
    assert (shard.rows, shard.axis, shard.joined) == (stop - start, layout.axis, False)


@given(layouts(joined=False), st.data())
def test_every_run_of_whole_heads_is_a_shard(layout: Layout, data: st.DataObject) -> None:
    heads = pieces(layout)
    first = data.draw(st.integers(0, len(heads) - 1))
    last = data.draw(st.integers(first, len(heads) - 1))
    start, stop = heads[first][1][0], heads[last][1][-1] + 1
    shard = layout.shard(start, stop)
    assert [(b.role, [r + start for r in rows_of(b)]) for b in shard.blocks()] == (
        heads[first : last + 1]
    )


@given(layouts(joined=True), st.data())
def test_shard_of_a_joined_layout_holds_whole_roles(layout: Layout, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layout.rows - 1))
    stop = data.draw(st.integers(start + 1, layout.rows))
    held: dict[str, list[int]] = {}
    total: dict[str, int] = {}
    for role, rows in pieces(layout):
        total[role] = total.get(role, 0) + len(rows)
        if kept := [row - start for row in rows if start <= row < stop]:
            held.setdefault(role, []).extend(kept)
    if any(len(rows) < total[role] for role, rows in held.items()):
        with pytest.raises(CutHeadError):
            layout.shard(start, stop)
        return
    shard = layout.shard(start, stop)
    assert {block.role: rows_of(block) for block in shard.blocks()} == held


@given(layouts(), st.integers(1, 3))
def test_batches_and_write_are_inverse(layout: Layout, cols: int) -> None:
    shape = (cols, layout.rows) if layout.axis else (layout.rows, cols)
    weight = torch.arange(layout.rows * cols, dtype=torch.float64).view(shape)
    matrix = weight.T if layout.axis else weight
    batches = layout.batches(weight)
    found = sorted(block.tolist() for batch in batches for block in batch)
    assert found == sorted(matrix[rows_of(block)].tolist() for block in layout.blocks())
    result = torch.full_like(weight, torch.nan)
    layout.write([batch.clone() for batch in batches], result)
    assert torch.equal(result, weight)


@given(layouts())
def test_only_a_joined_role_is_copied(layout: Layout) -> None:
    weight = torch.zeros((2, layout.rows) if layout.axis else (layout.rows, 2))
    for batch in layout.batches(weight):
        batch.fill_(1.0)
    if layout.joined:
        for block in layout.blocks():
            matrix = weight.T if layout.axis else weight
            assert bool((matrix[rows_of(block)] == float(len(block.spans) == 1)).all())
    else:
        assert bool((weight == 1).all())


@given(layouts(joined=False, max_heads=2), st.integers(1, 3))
def test_per_block_joins_neighbours(layout: Layout, heads: int) -> None:
    segments = tuple(Segment(s.role, s.heads * heads, s.width) for s in layout.segments)
    finer = Layout(segments, layout.groups, layout.axis)
    grouped = [rows_of(block) for block in finer.per_block(heads).blocks()]
    alone = [rows for _, rows in pieces(finer)]
    assert grouped == [list(chain(*alone[i : i + heads])) for i in range(0, len(alone), heads)]


@given(layouts(), layouts())
def test_same_cut_is_equality_of_row_sets(one: Layout, other: Layout) -> None:
    left, right = ({tuple(rows_of(b)) for b in x.blocks()} for x in (one, other))
    # A whole weight is the same matrix whichever axis is said not to be cut.
    expected = left == right and (one.axis == other.axis or len(left) == 1)
    assert one.same_cut(other) is other.same_cut(one) is expected


@given(layouts(joined=False))
def test_same_cut_ignores_names_and_grouping(layout: Layout) -> None:
    spelled = Layout(
        tuple(Segment("x", 1, len(rows)) for _, rows in pieces(layout)), axis=layout.axis
    )
    assert layout.same_cut(spelled)
    assert spelled.same_cut(layout)
