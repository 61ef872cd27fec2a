"""What a reader sees of an audit: true to the numbers, and harmless whatever a stranger wrote."""

import base64
import html
import math
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from markdown_it import MarkdownIt
from torch import Tensor

from muonsplit.audit.result import (
    Audit,
    AuditedWeight,
    Evidence,
    Explained,
    Outcome,
    Picture,
    Settings,
    Tried,
)
from muonsplit.dialect import Dialect, dialect_named
from muonsplit.errors import MuonsplitError
from muonsplit.report import audit as words
from muonsplit.report.audit import audit_cause, audit_markdown, audit_notes, audit_tables
from muonsplit.report.audit_page import audit_html, write_audit_reports
from muonsplit.report.gram import SIDE, gram, png, scale_of, spectra
from muonsplit.report.terminal import show
from tests_cpu.certificates import ACTS, HOSTILE, LONG

CHROMIUM = shutil.which("chromium")
HEADS, WIDTH, INPUTS = 8, 16, 256
ROWS = HEADS * WIDTH
# Bounds of the quintic with five steps, rounded; what a hypothesis is held against.
LOW, HIGH = 0.68, 1.21
BLOCKS, MATRIX = "spectral, of the block", "spectral, of the matrix"
QUERY = "model.layers.{}.self_attn.q_proj.weight"
_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe]")


@pytest.fixture(autouse=True)
def as_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def polar(matrix: Tensor) -> Tensor:
    """All singular values made one, by the decomposition itself."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def quintic(matrix: Tensor) -> Tensor:
    """Five steps of Muon's quintic, which lift what is large to about one; Jordan et al., 2024."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = matrix / matrix.norm()
    for _ in range(5):
        gram = X @ X.T
        X = a * X + (b * gram + c * gram @ gram) @ X
    return X


def updated(heads: int, lift: Callable[[Tensor], Tensor] = quintic) -> Tensor:
    """A step on a gradient of few large directions, orthogonalised in so many parts of rows."""
    source = torch.Generator().manual_seed(3)
    left, right = (torch.randn(size, 24, generator=source) for size in (ROWS, INPUTS))
    noise = torch.randn(ROWS, INPUTS, generator=source)
    gradient = left * torch.logspace(0, -1, 24) @ right.T + 3e-4 * noise
    return torch.cat([lift(part) for part in gradient.chunk(heads)])


def pictured(step: Tensor) -> Picture:
    rows = step / step.norm(dim=1, keepdim=True)
    cosines = ((rows @ rows.T).abs().clamp(max=1) * 255).round().to(torch.uint8)
    values = [torch.linalg.svdvals(part).tolist() for part in (step[:WIDTH], step)]
    return Picture(
        ((0, ROWS),),
        0,
        base64.b64encode(bytes(cosines.flatten().tolist())).decode(),
        tuple(range(0, ROWS, WIDTH)),
        *(tuple(found[:64]) for found in values),
    )


def tried(step: Tensor, cut: str, parts: int) -> Tried:
    tops = [float(torch.linalg.svdvals(part)[0]) for part in step.chunk(parts)]
    off = max(1.0, LOW / min(tops), max(tops) / HIGH)
    layout = "whole" if parts == 1 else f"q {parts}×{ROWS // parts}"
    return Tried(cut, layout, BLOCKS, parts, min(tops), max(tops), LOW, HIGH, off, "")


@cache
def measured(heads: int) -> tuple[tuple[Tried, ...], Picture]:
    """The hypotheses on a step that was cut into so many heads, and its picture."""
    step = updated(heads)
    ways = (
        *(("as planned", HEADS), ("whole matrix", 1), ("half heads", 2 * HEADS)),
        *(("head pairs", HEADS // 2), ("2 parts of rows", 2)),
    )
    return tuple(tried(step, name, parts) for name, parts in ways), pictured(step)


def weight(
    cut: int = HEADS,
    outcome: Outcome = "as planned",
    layer: int = 0,
    planned: str = "q 8×16",
    **changed: Any,
) -> AuditedWeight:
    """A weight whose numbers are those of a step that was cut into so many heads."""
    ways, picture = measured(cut)
    found = AuditedWeight(
        weight=QUERY.format(layer),
        leaf="LlamaAttention.q_proj",
        shape=(ROWS, INPUTS),
        planned=planned,
        observed="whole" if cut == 1 else f"q {cut}×{ROWS // cut}",
        outcome=outcome,
        reason="" if outcome == "as planned" else "larger blocks than planned",
        margin=1.83,
        sigma=0.0,
        next="half heads",
        scale=BLOCKS,
        tried=ways,
        explained=(),
        picture=picture,
    )
    return replace(found, **changed)


def undecided(**changed: Any) -> AuditedWeight:
    reason = "rounding of the checkpoints hides the step"
    unsure: dict[str, Any] = {
        "observed": "",
        "reason": reason,
        "margin": 0.0,
        "next": "",
        "scale": "",
    }
    found = weight(HEADS, "undecided", **(unsure | changed))
    loose = tuple(replace(t, low=0.05, high=4.9, off=1.0) for t in found.tried)
    return replace(found, tried=loose)


def unread(**changed: Any) -> AuditedWeight:
    lost: dict[str, Any] = {"observed": "", "margin": 0.0, "next": "", "scale": "", "tried": ()}
    reason = "model-00002-of-00004.safetensors is cut off at byte 4096"
    return weight(HEADS, "unread", reason=reason, picture=None, **(lost | changed))


def audited(*weights: AuditedWeight, **changed: Any) -> Audit:
    made = Audit(
        model="llama",
        config="0" * 64,
        dialect=dialect_named("deepspeed-0.19.8"),
        evidence=Evidence("checkpoints", "1a" * 32, "2b" * 32, (), 3, ()),
        settings=Settings(1, (0.0198, 0.0203), False, 0.002, True, (BLOCKS,), "float32"),
        weights=weights,
        findings=(),
    )
    return replace(made, **changed)


def conforming() -> Audit:
    output = weight(
        1, planned="whole", weight="model.layers.0.self_attn.o_proj.weight", leaf="X.o_proj"
    )
    return audited(*(weight(layer=layer) for layer in range(3)), output)


def violating() -> Audit:
    return audited(
        weight(1, "otherwise", layer=0), weight(1, "otherwise", layer=1), weight(layer=2)
    )


def hostile() -> Audit:
    odd = [0.0, -1.0, math.nan, math.inf, 1e300]
    ways = tuple(
        Tried(HOSTILE, HOSTILE, HOSTILE, 10**30, x, x, x, x, x, HOSTILE + LONG) for x in odd
    )
    picture = Picture(((0, 1),), 1, base64.b64encode(b"\xff").decode(), (), (math.nan,), (1.0,))
    bad = AuditedWeight(
        *(HOSTILE, HOSTILE, (8, 4), HOSTILE, HOSTILE, "otherwise", HOSTILE + LONG),
        *(math.inf, math.inf, HOSTILE, HOSTILE, ways),
        (Explained(HOSTILE, HOSTILE, HOSTILE, math.nan, math.inf),),
        picture,
    )
    plain = dialect_named("deepspeed-0.19.8")
    return Audit(
        HOSTILE,
        HOSTILE,
        Dialect(HOSTILE, plain.split, plain.arithmetic, plain.sources),
        Evidence(HOSTILE, HOSTILE, HOSTILE, (HOSTILE,), 1, (HOSTILE,)),
        Settings(1, (math.nan, math.inf), True, math.nan, True, (HOSTILE,), HOSTILE),
        (bad, replace(bad, outcome="undecided", observed="")),
        (HOSTILE + LONG,),
    )


def pixels(file: bytes) -> list[bytes]:
    """The rows of a PNG of grey bytes without filters, every check sum checked."""
    assert file[:8] == b"\x89PNG\r\n\x1a\n"
    chunks: dict[bytes, bytes] = {}
    at = 8
    while at < len(file):
        size, name = struct.unpack(">I4s", file[at : at + 8])
        data = file[at + 8 : at + 8 + size]
        assert struct.unpack(">I", file[at + 8 + size : at + 12 + size])[0] == zlib.crc32(
            name + data
        )
        chunks[name] = data
        at += 12 + size
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *kind = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert kind == [8, 0, 0, 0, 0]  # eight bits, grey, deflate, no filter, not interlaced
    raw = zlib.decompress(chunks[b"IDAT"])
    assert len(raw) == height * (width + 1)
    lines = [raw[i * (width + 1) : (i + 1) * (width + 1)] for i in range(height)]
    assert all(line[0] == 0 for line in lines)
    return [line[1:] for line in lines]


def drawn(uri: str) -> list[bytes]:
    kind, _, content = uri.partition(",")
    assert kind == "data:image/png;base64"
    return pixels(base64.b64decode(content, validate=True))


def test_a_png_holds_its_pixels() -> None:
    assert pixels(png(bytes(range(6)), 3)) == [b"\0\1\2", b"\3\4\5"]


def shades(step: Tensor, same_block: bool) -> list[int]:
    """Of rows of one block, or of two: the shades of their overlaps, the diagonal left out."""
    rows = drawn(gram(pictured(step)).uri)
    return [
        rows[i][j]
        for i in range(ROWS)
        for j in range(ROWS)
        if i != j and (i // WIDTH == j // WIDTH) is same_block
    ]


def test_blocks_show_where_heads_were_orthogonalised() -> None:
    step = updated(HEADS, polar)
    rows = drawn(gram(pictured(step)).uri)
    assert all(rows[i][i] == 0 for i in range(ROWS))  # black
    assert set(shades(step, same_block=True)) == {255}  # white
    between = shades(step, same_block=False)
    assert sum(shade < 200 for shade in between) > len(between) / 2  # grey


def test_only_the_diagonal_shows_where_the_whole_was_orthogonalised() -> None:
    rows = drawn(gram(pictured(updated(1, polar))).uri)
    assert all(rows[i][j] == (0 if i == j else 255) for i in range(ROWS) for j in range(ROWS))


@pytest.mark.parametrize("heads", [1, HEADS])
def test_mean_overlaps_are_those_of_the_step(heads: int) -> None:
    step = updated(heads)
    rows = step / step.norm(dim=1, keepdim=True)
    cosines = (rows @ rows.T).abs()
    block = torch.arange(ROWS) // WIDTH
    same = block[:, None] == block[None, :]
    found = gram(pictured(step))
    assert found.inside == pytest.approx(
        float(cosines[same & ~torch.eye(ROWS, dtype=torch.bool)].mean()), abs=1 / 255
    )
    assert found.outside == pytest.approx(float(cosines[~same].mean()), abs=1 / 255)


def encoded(*cosines: int) -> str:
    return base64.b64encode(bytes(cosines)).decode()


def test_rows_keep_their_numbers_and_lines_their_place() -> None:
    picture = Picture(((0, 2), (16, 18)), 1, encoded(*[255] * 16), (0, 2), (), ())
    found = gram(picture)
    assert (found.count, found.axis) == (4, "columns")
    assert found.lines == (SIDE / 2,)
    assert found.ticks == ((0.0, "0"), (SIDE / 2, "16"))


def test_where_there_is_no_room_a_number_is_left_out() -> None:
    rows = tuple((i, i + 1) for i in range(0, 300, 2))
    found = gram(Picture(rows, 0, encoded(*[0] * 150**2), (), (), ()))
    tops = [top for top, _ in found.ticks]
    assert len(tops) > 20
    assert min(b - a for a, b in pairwise(tops)) >= 11


def test_one_row_has_nothing_to_overlap_with() -> None:
    found = gram(Picture(((7, 8),), 0, encoded(255), (), (), ()))
    assert math.isnan(found.inside)
    assert math.isnan(found.outside)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cosines": "not base64!"}, "no base64"),
        ({"cosines": "é"}, "no base64"),
        ({"cosines": encoded(1, 2, 3)}, "holds 3 cosines; expected 4"),
        ({"cosines": ""}, "holds 0 cosines"),
        ({"cosines": encoded(*[0] * 9)}, "holds 9 cosines; expected 4"),
        ({"rows": ()}, "expected stretches"),
        ({"rows": ((3, 1),)}, "expected stretches"),
        ({"rows": ((-2, 0),)}, "expected stretches"),
        ({"rows": ((0, 10**18),)}, "expected stretches"),
        ({"axis": 2}, "expected stretches"),
        ({"boundaries": (0, 2)}, "expected 0 to 1"),
        ({"boundaries": (-1,)}, "expected 0 to 1"),
    ],
)
def test_a_malformed_picture_is_refused_and_nothing_is_written(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    picture = replace(Picture(((0, 2),), 0, encoded(255, 0, 0, 255), (0, 1), (), ()), **changed)
    with pytest.raises(MuonsplitError, match=said):
        gram(picture)
    with pytest.raises(MuonsplitError, match=said):
        write_audit_reports(audited(weight(picture=picture)), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sizes_stand_on_a_logarithmic_scale() -> None:
    scale = scale_of([0.1, 10.0])
    assert scale.at(1.0) == pytest.approx(0.5)
    assert scale.at(0.1) + scale.at(10.0) == pytest.approx(1.0)
    assert [scale.at(value) for value in (0.0, -1.0, math.nan, math.inf)] == [0, 0, 0, 1]
    assert scale.ticks() == [0.1, 1.0, 10.0]


@pytest.mark.parametrize("sizes", [[], [1.0], [1e-9, 1e9], [math.inf, math.nan, -1.0, 0.0]])
def test_a_scale_has_room_and_ticks_whatever_the_sizes(sizes: list[float]) -> None:
    scale = scale_of(sizes)
    assert 0 < scale.least <= 0.5 * max([1.0, *(size / 2 for size in sizes if size < 1e30)])
    assert scale.most > 2
    assert 1 <= len(scale.ticks()) <= 8


def test_values_are_held_against_what_is_possible() -> None:
    found = weight(HEADS)
    assert found.picture is not None
    planned, whole = found.tried[0], found.tried[1]
    plot = spectra(found.picture, planned, whole)
    assert plot is not None
    block, matrix = plot.panels
    assert (block.name, block.fits) == ("planned block", True)
    assert (matrix.name, matrix.fits) == ("whole matrix", False)
    top = float(torch.linalg.matrix_norm(updated(HEADS), 2))
    assert matrix.largest == f"{top:.3g}"
    assert block.possible == "0.68–1.21"
    assert block.band is not None
    assert matrix.band == block.band  # one scale for both
    inside = [block.band[0] <= y <= sum(block.band) for _, y in block.points]
    assert inside == [LOW <= value <= HIGH for value in found.picture.spectrum]
    assert matrix.points[0][1] < block.band[0]  # above it


def test_a_weight_that_is_planned_whole_has_one_panel() -> None:
    found = weight(1, planned="whole")
    assert found.picture is not None
    plot = spectra(found.picture, None, found.tried[1])
    assert plot is not None
    assert [(p.name, p.fits) for p in plot.panels] == [("whole matrix", True)]
    page = audit_html(audited(found))
    assert ">whole matrix</text>" in page
    assert ">planned block</text>" not in page


@pytest.mark.parametrize("values", [(), (math.nan,), (1.0, math.inf), (-1.0,)])
def test_values_that_are_none_are_not_drawn(values: tuple[float, ...]) -> None:
    assert spectra(Picture(((0, 1),), 0, "", (), values, values), None, None) is None


def test_many_values_are_thinned() -> None:
    plot = spectra(Picture(((0, 1),), 0, "", (), (), (1.0,) * 100_000), None, None)
    assert plot is not None
    assert len(plot.panels[0].points) <= 64


def test_weights_that_differ_by_layer_are_one_row_with_the_worst_margin() -> None:
    sure, less, off = weight(), weight(layer=1, margin=1.2), undecided(layer=2)
    found = audit_tables(audited(sure, less, off))[0]
    rows = [dict(zip(found.columns, row, strict=True)) for row in found.rows]
    assert [row["shape"] for row in rows] == ["(128, 256) ×2", "(128, 256) ×1"]
    assert rows[0]["next hypothesis"] == "half heads: its sizes are off by ×1.2"
    assert rows[0]["scale"] == BLOCKS
    assert [rows[1][name] for name in ("observed", "scale", "next hypothesis")] == ["–", "", ""]
    assert found.note == "inconclusive: 2 as planned, 1 undecided"


def test_reasons_in_other_words_are_counted() -> None:
    first, second = undecided(), undecided(layer=1, reason="too small", margin=0.5)
    found = audit_tables(audited(first, second))[0]
    assert found.rows[0][-1] == f"{first.reason} (1 other in other words)"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "next, half heads: its sizes are off by ×1.83"),
        (
            {"margin": 1.134, "sigma": 28.96},
            "next, half heads: its blocks would overlap 1.13 times as much, 29 standard errors",
        ),
        ({"margin": 1.0}, "next, half heads: possible too"),
        ({"margin": math.nan}, "next, half heads: possible too"),
        ({"margin": math.inf}, "next, half heads: its sizes are off by any factor"),
        ({"next": ""}, "nothing else was possible"),
        ({"observed": ""}, "not decided"),
        ({"margin": 0.0}, "not decided"),
    ],
)
def test_how_sure_in_words(changed: dict[str, Any], said: str) -> None:
    assert words.sure(weight(**changed)) == said


def test_what_was_decided_by_the_input_has_no_sizes() -> None:
    best = (Explained("as planned", "gradient", "quintic, 5 steps", 0.01, 1.0),)
    found = weight(explained=best, scale="", margin=41.26)
    said = "next, half heads: it explains the recorded input 41.3 times worse"
    assert words.sure(found) == said
    assert said in audit_html(audited(found))


def test_of_equal_margins_the_one_with_fewer_standard_errors_is_the_worst() -> None:
    by_size, clear, close = (weight(margin=1.2, sigma=sigma) for sigma in (0.0, 40.0, 7.0))
    assert words.Group((by_size, clear, close)).worst is close
    assert words.Group((by_size, clear)).worst is clear


def test_weights_of_another_scale_are_another_row() -> None:
    made = audited(weight(), weight(outcome="otherwise", layer=1, scale=MATRIX))
    found = audit_tables(made)[0]
    at = found.columns.index("scale")
    assert [row[at] for row in found.rows] == [BLOCKS, MATRIX]


def test_the_observed_hypothesis_is_that_of_the_observed_scale() -> None:
    found = weight()
    other = replace(found.tried[0], scale=MATRIX, off=1.0)
    both = replace(found, tried=(*found.tried, other))
    assert words.seen(both) is found.tried[0]
    assert words.seen(replace(both, scale=MATRIX)) is other
    assert words.nearest(replace(both, scale=MATRIX))[0] is other
    assert words.seen(replace(both, observed="")) is None
    assert words.hypothesis(both, "whole") is found.tried[1]
    assert words.hypothesis(both, "whole matrix") is None


def test_details_show_every_hypothesis_of_every_weight(capsys: pytest.CaptureFixture[str]) -> None:
    best = (Explained("whole matrix", "momentum", "quintic, 5 steps", 0.0021, 1.0003),)
    found = audit_tables(audited(weight(explained=best), weight(layer=1), unread()), details=True)
    assert [t.title.partition(": ")[2] for t in found[1:]] == [
        "hypotheses",
        "on the recorded input",
        "hypotheses",
    ]
    assert [row[0] for row in found[1].rows][:2] == ["as planned", "half heads"]
    assert [row[6].partition(" ")[0] for row in found[1].rows] == ["fits", "fits", *["off"] * 3]
    assert found[2].rows == (("whole matrix", "momentum", "quintic, 5 steps", "0.21 %", "×1"),)
    show(found)
    assert "head pairs" in capsys.readouterr().out
    assert len(audit_tables(audited(weight()))) == 1


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (conforming(), "conforms: 4 Muon weights of llama, orthogonalised as planned"),
        (
            violating(),
            "violates: 2 of 3 Muon weights orthogonalised otherwise: LlamaAttention.q_proj whole, "
            "planned q 8×16",
        ),
        (
            audited(weight(1, "otherwise"), weight(4, "otherwise")),
            "violates: 2 of 2 Muon weights orthogonalised otherwise: LlamaAttention.q_proj whole, "
            "planned q 8×16 (and 1 more weight)",
        ),
        (
            audited(weight(outcome="otherwise", scale=MATRIX)),
            "violates: 1 of 1 Muon weight orthogonalised otherwise: LlamaAttention.q_proj q 8×16, "
            "as planned, but its scale is spectral, of the matrix",
        ),
        (
            audited(weight(outcome="otherwise", observed="", scale="", margin=0.0)),
            "violates: 1 of 1 Muon weight orthogonalised otherwise: LlamaAttention.q_proj not as "
            "planned, q 8×16",
        ),
        (
            audited(weight(), findings=("nothing moved", "odd")),
            "violates: nothing moved (and 1 more finding)",
        ),
        (
            audited(undecided(), undecided(layer=1), unread(layer=2), weight(layer=3)),
            "inconclusive: 3 of 4 Muon weights could not be told: rounding of the checkpoints "
            "hides the step",
        ),
        (audited(), "inconclusive: there was no Muon weight to look at"),
    ],
)
def test_the_cause_of_every_verdict(made: Audit, said: str) -> None:
    assert audit_cause(made) == audit_notes(made)[0] == said


def test_notes_say_what_the_audit_rests_on() -> None:
    lacking = ("model.layers.0.a.weight", "model.layers.1.a.weight")
    proof = Evidence("checkpoints", "", "", (), 3, lacking)
    found = audit_notes(audited(undecided(), undecided(layer=1), unread(), evidence=proof))
    for said in (
        "evidence: checkpoints",
        "steps between: 1",
        "learning rate: 0.0198–0.0203, fitted",
        "weight decay × learning rate: 0.002, given",
        "dtype of the checkpoints: float32",
        "Muon weights that the checkpoint lacks: 2: model.layers.{0,1}.a.weight",
        "tensors that are none of the model: 3",
        "2 weights undecided: rounding of the checkpoints hides the step",
        "1 weight unread: model-00002-of-00004.safetensors is cut off at byte 4096",
    ):
        assert said in found
    assert "momentum" in found[-1]
    assert found[-1].startswith("This is evidence from a run")


def test_weights_whose_scale_is_open_are_counted() -> None:
    two = f"{BLOCKS} or {MATRIX}"
    made = audited(weight(), *(weight(layer=i, scale=two) for i in (1, 2)))
    assert "2 weights as planned whose scale may be by another rule" in audit_notes(made)
    assert not [line for line in audit_notes(audited(weight())) if "another rule" in line]


def test_what_was_recorded_was_asked() -> None:
    recorded = Evidence("capture", "", "", ("momentum",), 0, ())
    found = audit_notes(audited(weight(), evidence=recorded))
    assert "recorded input: momentum" in found
    assert "form of the momentum" not in found[-1]


def test_reasons_are_counted_where_there_are_many() -> None:
    found = audit_notes(audited(*(undecided(layer=i, reason=f"no {i}") for i in range(20))))
    assert sum("weight undecided: no" in line for line in found) == 8
    assert "12 more weights undecided or unread for other reasons" in found


def test_markdown_holds_verdict_weights_and_what_is_open() -> None:
    text = audit_markdown(audited(weight(1, "otherwise"), weight(layer=1)))
    assert text.startswith("## ❌ Audit of a run: violates\n")
    assert "**violates: 1 of 2 Muon weights orthogonalised otherwise" in text
    assert "| LlamaAttention.q_proj | (128, 256) ×1 |" in text
    assert "model.layers.0.self_attn.q_proj.weight: hypotheses" in text
    assert "model.layers.1.self_attn.q_proj.weight: hypotheses" not in text
    assert "    learning rate: 0.0198–0.0203, fitted" in text


def test_markdown_fits_a_job_summary_and_counts_what_is_left_out() -> None:
    many = tuple(undecided(leaf=f"Owner.leaf{i}", reason=LONG[:900]) for i in range(1500))
    text = audit_markdown(audited(*many))
    assert len(text.encode()) < 2**20
    assert re.search(
        r"\n[0-9]+ more lines are left out; the certificate holds everything\.\n", text
    )


def test_nothing_a_stranger_wrote_acts(capsys: pytest.CaptureFixture[str]) -> None:
    show(audit_tables(hostile(), details=True))
    printed = capsys.readouterr().out + "\n".join(audit_notes(hostile()))
    text = audit_markdown(hostile())
    assert not _ACTING.search(printed + text)
    assert "[red]markup[/red]" in re.sub(r"\s+", "", printed)
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    assert {t.type for t in tokens}.isdisjoint({"html_block", "fence"})
    assert {child.content for child in inline if child.type == "html_inline"} <= {"<br>"}
    assert {child.type for child in inline}.isdisjoint({"link_open", "image", "code_inline"})


class _Parts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.addresses: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.addresses |= {value or "" for name, value in attrs if name in ("href", "src")}


@pytest.mark.parametrize("made", [hostile(), violating()])
def test_a_page_needs_nothing_and_runs_nothing(made: Audit) -> None:
    page = audit_html(made)
    parts = _Parts()
    parts.feed(page)
    assert parts.tags.isdisjoint({"script", "img", "iframe", "object", "embed", "a", "form"})
    assert not [name for name in parts.attributes if name.startswith("on") or name == "xlink:href"]
    pictures = parts.addresses - {"data:,"}
    assert pictures
    assert all(re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/=]+", uri) for uri in pictures)
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page
    assert not _ACTING.search(page)


@pytest.mark.parametrize(
    ("found", "said", "tone"),
    [
        (weight(), "8 blocks, each on its own, as planned", "conforms"),
        (weight(1, planned="whole"), "The whole matrix as one, as planned", "conforms"),
        (weight(1, "otherwise"), "The whole matrix as one, not as planned", "violates"),
        (weight(4, "otherwise"), "4 blocks, each on its own, not as planned", "violates"),
        (
            weight(outcome="otherwise", scale=MATRIX),
            "8 blocks, each on its own, as planned; not so its scale",
            "violates",
        ),
        (weight(outcome="otherwise", observed="", scale=""), "Not as planned", "violates"),
        (undecided(), "Undecided", "inconclusive"),
        (unread(), "Not read", "inconclusive"),
        (weight(observed="odd", outcome="otherwise"), "odd, not as planned", "violates"),
    ],
)
def test_the_page_says_at_a_glance_what_was_orthogonalised(
    found: AuditedWeight, said: str, tone: str
) -> None:
    page = audit_html(audited(found))
    assert f'<span class="big">{said}</span>' in page
    assert f'<details class="card audited {tone}"' in page


def test_the_page_shows_the_picture_that_the_audit_holds() -> None:
    page = audit_html(audited(weight()))
    uri = re.search(r'<image href="([^"]+)"', page)
    assert uri is not None
    rows = drawn(uri[1])
    assert len(rows) == len(rows[0]) == ROWS
    assert "inside each block only the diagonal is dark" in page
    assert audit_html(audited(unread())).count("<image") == 0


def test_a_large_picture_is_whole() -> None:
    source = torch.Generator().manual_seed(0)
    noise = torch.randint(256, (256 * 256,), generator=source).tolist()
    page = audit_html(audited(weight(picture=Picture(((0, 256),), 0, encoded(*noise), (), (), ()))))
    uri = re.search(r'<image href="([^"]+)"', page)
    assert uri is not None
    assert len(uri[1]) > 50_000  # longer than what a page shows of any other string
    assert len(drawn(uri[1])) == 256


def test_the_picture_is_taken_from_the_weight_that_has_one() -> None:
    page = audit_html(audited(weight(picture=None), weight(layer=1), weight(layer=2, picture=None)))
    assert page.count("<image") == 1
    assert f"step overlap, {QUERY.format(1)}" in page


def test_what_is_off_comes_first_and_what_finds_no_room_is_counted() -> None:
    many = tuple(unread(leaf=f"Owner.leaf{i}") for i in range(70))
    page = audit_html(audited(weight(), *many, weight(1, "otherwise")))
    assert "12 more sets of weights are not drawn" in page
    few = audit_html(audited(weight(), weight(1, "otherwise")))
    assert few.index("not as planned</span>") < few.index("own, as planned</span>")


def test_far_hypotheses_are_folded_but_plan_and_whole_stay() -> None:
    found = weight()
    near = tuple(replace(found.tried[2], cut=f"near {i}") for i in range(9))
    page = audit_html(audited(replace(found, tried=(*found.tried, *near))))
    shown, folded = page.split("more hypotheses</summary>")
    assert shown.rstrip().endswith("7")
    assert ">whole matrix<br>" in shown
    assert ">head pairs<br>" in folded


def test_reports_are_the_same_for_the_same_audit(tmp_path: Path) -> None:
    once, again = (write_audit_reports(violating(), tmp_path / name) for name in ("a", "b"))
    assert [path.name for path in once] == ["report.md", "report.html"]
    assert [p.read_bytes() for p in once] == [p.read_bytes() for p in again]
    assert {path.name for path in (tmp_path / "a").iterdir()} == {path.name for path in once}


# Replaces the page in a frame by what can be seen of it and by how wide it is.
_MEASURE = """<script>
addEventListener("load", () => {
  const frame = document.querySelector("iframe").contentDocument;
  const unnamed = frame.querySelectorAll("svg:not(:has(title)), table:not(:has(caption))").length;
  const pictures = [...frame.querySelectorAll("image")].map(found => found.getBBox().width);
  document.title = [frame.documentElement.scrollWidth, unnamed, pictures, frame.title].join(";");
});
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
@pytest.mark.parametrize("width", [1000, 400])
@pytest.mark.parametrize("made", [violating, hostile])
def test_nothing_overflows_the_page(made: Callable[[], Audit], width: int, tmp_path: Path) -> None:
    page = audit_html(made())
    policy = next(line for line in page.splitlines() if "Content-Security-Policy" in line)
    frame = html.escape(page.replace(policy, ""), quote=True)
    style = f"width: {width}px; border: 0"
    source = tmp_path / "page.html"
    source.write_text(f'<body><iframe srcdoc="{frame}" style="{style}"></iframe>{_MEASURE}</body>')
    command = [CHROMIUM or "", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", source.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = html.unescape(re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)[1])  # type: ignore[index]
    wide, unnamed, drawn_at, said = title.split(";", 3)
    assert int(wide) <= width
    assert unnamed == "0"
    assert set(drawn_at.split(",")) == {str(SIDE)}
    assert "ran" not in said.split()


@pytest.mark.parametrize("act", ACTS[2:5])
def test_what_would_act_is_read_as_text(act: str) -> None:
    page = audit_html(hostile())
    assert act not in page
    assert html.escape(act).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in page
