"""What adapters share: cuts as functions and heights, options, and AdamW beside a Muon."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from muonsplit.errors import LayoutError, SubjectError
from muonsplit.layout import Layout
from muonsplit.subjects.beside import MuonAndAdamW, Weight, by_expert, by_layout
from muonsplit.subjects.connect import ADAPTERS, connect
from muonsplit.subjects.protocol import Hyper
from muonsplit.subjects.told import Cut, read_options, same, sizes

LAYOUTS = (
    "q 4×6",
    "q 2×9 | k 3 | v 3",
    "4 × (k 2 | v 4)",
    "2 × (q 2×4 | k 2 | v 2), joined",
    "q 12 | k 6 | v 6, axis 1",
)


class Model(nn.Module):
    """A matrix, a stack of two, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(24, 10, generator=generator))
        self.stack = nn.Parameter(torch.randn(2, 6, 8, generator=generator))
        self.vector = nn.Parameter(torch.randn(5, generator=generator))


WHOLE: dict[str, Layout | None] = {"matrix": None, "stack": None}
SPLIT = WHOLE | {"matrix": Layout.heads("q", 4, 6)}


class PerGroup(torch.optim.SGD):
    """Stands for a Muon that is told by param group: what it is told shows in the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p].setdefault("sum", torch.zeros_like(p))
                kept += p.grad
                p -= kept.sum(dim=(-2, -1), keepdim=True) * (group["heads"] or 1)


def both(model: Model, layouts: dict[str, Layout | None]) -> MuonAndAdamW:
    def make(weights: list[Weight]) -> torch.optim.Optimizer:
        groups = [
            {"params": params, "heads": layout and len(layout.blocks())}
            for layout, params in by_layout(weights)
        ]
        return PerGroup(groups, lr=0.1)

    return MuonAndAdamW(model, layouts, Hyper(), make, by_expert, ("heads",))


def stepped(model: Model, optimizer: MuonAndAdamW, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_cut_splits_into_its_blocks_and_joins_them_again(text: str) -> None:
    layout = Layout.parse(text)
    weight = torch.randn((10, 24) if layout.axis else (24, 10))
    rows = weight.mT if layout.axis else weight
    wanted = [torch.cat([rows[a:b] for a, b in block.spans]) for block in layout.blocks()]
    split = Cut(layout).split(weight)
    assert len(split) == len(wanted)
    assert all(any(torch.equal(block, one) for one in split) for block in wanted)
    assert torch.equal(Cut(layout).join(split), weight)


def test_heights_are_of_consecutive_rows_only() -> None:
    assert sizes("dion", Layout.parse(LAYOUTS[1])) == [9, 9, 3, 3]
    assert sizes("dion", Layout.parse(LAYOUTS[2])) == [2, 4] * 4
    for text, said in ((LAYOUTS[3], "apart"), (LAYOUTS[4], "columns")):
        with pytest.raises(SubjectError, match=said):
            sizes("dion", Layout.parse(text))


def test_options_are_read_or_refused_by_name() -> None:
    choices = {"mode": same("one", "two")}
    assert read_options("x", {"mode": "two"}, choices) == {"mode": "two"}
    with pytest.raises(SubjectError, match="takes one, two; got 'three'"):
        read_options("x", {"mode": "three"}, choices)
    with pytest.raises(SubjectError, match="no option 'moad'"):
        read_options("x", {"moad": "one"}, choices)


def test_a_stack_is_stepped_matrix_by_matrix_in_place() -> None:
    model = Model()
    before, kept = model.stack.detach().clone(), model.stack
    optimizer = both(model, WHOLE)
    stepped(model, optimizer, 1)
    assert kept.grad is not None
    moved = before - kept.grad.sum(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(kept.detach(), moved)
    assert torch.equal(optimizer.state[kept]["sum"], kept.grad)


def test_groups_show_the_models_own_parameters() -> None:
    model = Model()
    seen = [p for group in both(model, SPLIT).param_groups for p in group["params"]]
    assert {id(p) for p in seen} == {id(p) for p in model.parameters()}
    assert len(seen) == 3


def test_a_layout_that_does_not_cover_its_weight_is_refused() -> None:
    with pytest.raises(LayoutError, match="24"):
        both(Model(), {"matrix": Layout.heads("q", 4, 5)})


@pytest.mark.parametrize("after", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("before", [WHOLE, SPLIT], ids=["whole", "split"])
def test_a_state_brings_no_cut_along(
    before: dict[str, Layout | None], after: dict[str, Layout | None]
) -> None:
    """The layouts make other param groups, so that the parameters are in another order too."""
    first, second = Model(), Model()
    one = both(first, before)
    stepped(first, one, 1)
    two = both(second, after)
    second.load_state_dict(first.state_dict())
    two.load_state_dict(one.state_dict())
    start = second.matrix.detach().clone()
    stepped(second, two, 2)
    assert first.matrix.grad is not None
    assert second.matrix.grad is not None
    kept = first.matrix.grad + second.matrix.grad
    blocks = 1 if after is WHOLE else 4
    torch.testing.assert_close(two.state[second.matrix]["sum"], kept)
    torch.testing.assert_close(second.matrix.detach(), start - blocks * kept.sum())
    assert {group.get("heads") for group in two.param_groups} >= {None if blocks == 1 else 4}


def test_a_model_of_nothing_but_muon_weights_needs_no_adamw() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4, 4))
    optimizer = MuonAndAdamW(
        model, {"weight": None}, Hyper(), lambda w: torch.optim.SGD([x.parameter for x in w])
    )
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", [n for n in ADAPTERS if n not in ("builtin", "faulty")])
def test_every_adapter_can_be_named_without_its_peer(name: str) -> None:
    found = connect(name, Path())
    assert found.info.dialect
    assert not found.info.off or found.info.recognises
