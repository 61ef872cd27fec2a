"""Cuts, what chance would make of them, and the decision, on changes whose cut is known."""

import pytest
import torch
from torch import Tensor

from muonsplit import Layout
from muonsplit.audit.chance import Gain, compared, coordinates, mixed, turned
from muonsplit.audit.cuts import cuts
from muonsplit.audit.decide import Decided, Weight, decide
from muonsplit.audit.sizes import Rates, rules
from muonsplit.audit.spectra import sized
from muonsplit.dialect import dialect_named
from muonsplit.geometry import plan
from muonsplit.models.load import build, resolve

ARITHMETIC = dialect_named("moonlight+per-head").arithmetic
HEADS, WIDTH = 8, 32


def orthogonal(blocks: Tensor) -> Tensor:
    """Each block with all its singular values at one: no iteration of ours."""
    U, _, Vh = torch.linalg.svd(blocks.double(), full_matrices=False)
    return (U @ Vh).float()


def stepped(rank: int, parts: int, cols: int, seed: int, shared: bool) -> Tensor:
    """A gradient of some rank, orthogonalised in equal parts of rows, over 0.2·√max(r, c)."""
    source = torch.Generator().manual_seed(seed)
    rows = HEADS * WIDTH
    gradient = torch.randn(rows, rank, generator=source) @ torch.randn(rank, cols, generator=source)
    if shared:  # heads have much in common, as those of a model do
        gradient += (
            3 * torch.randn(rows, 1, generator=source) @ torch.randn(1, cols, generator=source)
        )
    made = orthogonal(gradient.view(parts, rows // parts, cols))
    return 0.2 * max(rows // parts, cols) ** 0.5 * made.view(rows, cols)


CUTS: dict[str, Layout | None] = {
    "as planned": Layout.heads("q", HEADS, WIDTH),
    "whole matrix": None,
    "head pairs": Layout.heads("q", HEADS // 2, 2 * WIDTH),
    "half heads": Layout.heads("q", 2 * HEADS, WIDTH // 2),
}
PARTS = {"as planned": HEADS, "whole matrix": 1, "head pairs": HEADS // 2, "half heads": 2 * HEADS}


def decided(change: Tensor) -> Decided:
    given = coordinates(change)

    def compare(candidate: Layout | None, other: Layout | None) -> Gain:
        return compared(lambda axis: given, candidate, other)

    sizes = {name: sized(change, layout, None) for name, layout in CUTS.items()}
    weight = Weight(tuple(change.shape), CUTS, sizes)
    return decide(weight, "as planned", rules(ARITHMETIC), Rates(1.0, 1.0), 1, compare)


@pytest.mark.parametrize("cols", [192, 320, 512])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rank", [24, 160])
def test_every_cut_is_read_right(rank: int, cut: str, cols: int) -> None:
    found = [decided(stepped(rank, PARTS[cut], cols, seed, True)).cut for seed in range(4)]
    assert set(found) <= {cut, ""}
    assert found.count(cut) >= 3


def test_white_noise_on_few_rows_is_never_read_wrong() -> None:
    found = {
        (cut, decided(stepped(2048, parts, 2048, seed, False)).cut)
        for seed in range(2)
        for cut, parts in PARTS.items()
    }
    assert {seen for cut, seen in found if seen not in (cut, "")} == set()


def test_a_change_of_another_size_fits_nothing() -> None:
    found = decided(3 * stepped(24, HEADS, 320, 0, True))
    assert found.cut == ""
    assert "nothing that was tried fits" in found.reason


def test_what_did_not_move_is_not_decided() -> None:
    found = decided(torch.zeros(HEADS * WIDTH, 320))
    assert (found.cut, found.tried) == ("", ())
    assert "did not move" in found.reason


@pytest.mark.parametrize("shape", [(128, 96), (128, 512)])
def test_what_is_true_is_not_ruled_out(shape: tuple[int, int]) -> None:
    """Independent heads against all that is coarser or finer, many times."""
    rows, cols = shape
    heads, pairs = Layout.heads("q", 8, rows // 8), Layout.heads("q", 4, rows // 4)
    halves = Layout.heads("q", 16, rows // 16)
    wrong = 0
    for seed in range(40):
        source = torch.Generator().manual_seed(seed)
        change = orthogonal(torch.randn(8, rows // 8, cols, generator=source)).view(rows, cols)
        given = coordinates(change)
        wrong += turned(given, None, heads, seed).rules_out
        wrong += turned(given, pairs, heads, seed).rules_out
        wrong += mixed(given, halves, heads, seed).rules_out
    assert wrong == 0


def test_what_is_orthogonal_rules_out_its_parts() -> None:
    source = torch.Generator().manual_seed(0)
    change = orthogonal(torch.randn(1, 128, 256, generator=source))[0]
    for heads in (2, 4, 8):
        found = turned(coordinates(change), None, Layout.heads("q", heads, 128 // heads), 0)
        # The edge of a sum of k free projections, each on a share s of the space.
        share = 128 / heads / 256
        edge = 1 + (heads - 2) * share + 2 * ((heads - 1) * share * (1 - share)) ** 0.5
        assert found.rules_out
        assert found.gain == pytest.approx(edge**0.5, rel=0.08)


@pytest.mark.parametrize("model", ["llama", "glm-5.2", "kimi-k3"])
def test_no_two_hypotheses_cut_alike(model: str) -> None:
    decisions = plan(build(resolve(model).config), "deepspeed-0.19.8").decisions
    for d in {(d.owner, d.leaf, d.shape): d for d in decisions}.values():
        found = cuts(d, (), (64, 8))
        assert next(iter(found.values())) == d.layout
        rows = {
            name: (layout.axis, frozenset(b.spans for b in layout.blocks())) if layout else None
            for name, layout in found.items()
        }
        assert len(set(rows.values())) == len(rows)
