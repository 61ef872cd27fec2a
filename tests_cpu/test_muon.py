"""The reference optimizer against a few lines of float64, and torch's AdamW."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from muonsplit.dialect import DIALECTS, Arithmetic, Dialect, SplitRule
from muonsplit.errors import InputError, UsageError
from muonsplit.layout import Layout
from muonsplit.muon import PerHeadMuon, advance_momentum, orthogonalize

JORDAN = (3.4445, -4.7750, 2.0315)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def exact(**choices: Any) -> Dialect:
    return Dialect("exact", SplitRule(), Arithmetic(cpu_dtype="float64", **choices), {})


def orthogonal(block: Tensor, scale: Callable[[int, int], float]) -> Tensor:
    """Five Jordan steps on the singular values of a float64 matrix."""
    U, S, Vh = torch.linalg.svd(block, full_matrices=False)
    S = S / (S.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        S = JORDAN[0] * S + JORDAN[1] * S**3 + JORDAN[2] * S**5
    return scale(*block.shape) * U @ S.diag() @ Vh


SCALES: dict[str, Callable[[int, int], float]] = {
    "jordan": lambda r, c: math.sqrt(max(1.0, r / c)),
    "moonlight": lambda r, c: 0.2 * math.sqrt(max(r, c)),
    "bernstein": lambda r, c: math.sqrt(r / c),
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
@pytest.mark.parametrize("momentum", ["ema", "ema_muladd", "sum", "sum_alpha"])
@pytest.mark.parametrize("decay", [0.0, 0.1], ids=["no-decay", "decay"])
def test_two_steps_are_worked_by_hand(
    momentum: str, nesterov: bool, scale: str, decay: float
) -> None:
    beta, lr = 0.9, 0.05
    weight = Parameter(normal(12, 3))
    expected, buffer = weight.detach().clone(), torch.zeros(12, 3, dtype=torch.float64)
    optimizer = PerHeadMuon(
        [("w", weight)],
        {"w": Layout.heads("q", 3, 4)},
        dialect=exact(momentum=momentum, nesterov=nesterov, scale=scale),
        lr=lr,
        momentum=beta,
        weight_decay=decay,
    )
    for step in (1, 2):
        g = normal(12, 3, seed=step)
        weight.grad = g.clone()
        optimizer.step()
        if momentum.startswith("ema"):
            buffer = beta * buffer + (1 - beta) * g
            ahead = beta * buffer + (1 - beta) * g
        else:
            buffer = beta * buffer + g
            ahead = beta * buffer + g
        update = ahead if nesterov else buffer
        heads = [orthogonal(update[i : i + 4], SCALES[scale]) for i in (0, 4, 8)]
        expected = expected * (1 - lr * decay) - lr * torch.cat(heads)
        assert torch.allclose(weight.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("momentum", ["ema", "ema_muladd", "sum", "sum_alpha"])
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
def test_momentum_by_hand(momentum: Any, nesterov: bool) -> None:
    buffer = torch.tensor([8.0])
    arithmetic = Arithmetic(momentum=momentum, nesterov=nesterov)
    update = advance_momentum(torch.tensor([4.0]), buffer, arithmetic, 0.75)
    # ema: ¾·8 + ¼·4 = 7, then ¼·4 + ¾·7; sum: ¾·8 + 4 = 10, then 4 + ¾·10.
    after, ahead = (7.0, 6.25) if momentum.startswith("ema") else (10.0, 11.5)
    assert buffer.item() == after
    assert update.item() == (ahead if nesterov else after)


@pytest.mark.parametrize("decay", [0.0, 0.1], ids=["no-decay", "decay"])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.8, 0.999), (0.0, 0.5)], ids=str)
def test_other_parameters_are_trained_by_adamw(decay: float, betas: tuple[float, float]) -> None:
    shapes = [(5,), (4, 3), (2, 3, 4), ()]
    mine = [Parameter(normal(*s, dtype=torch.float32)) for s in shapes]
    theirs = [Parameter(p.detach().clone()) for p in mine]
    ours = PerHeadMuon(
        [(f"p{i}", p) for i, p in enumerate(mine)],
        {},
        adamw_lr=0.01,
        lr=99.0,
        betas=betas,
        eps=1e-2,
        weight_decay=decay,
    )
    torchs = torch.optim.AdamW(theirs, lr=0.01, betas=betas, eps=1e-2, weight_decay=decay)
    for step in range(4):
        for i, (p, r) in enumerate(zip(mine, theirs, strict=True)):
            p.grad = normal(*p.shape, seed=10 * step + i, dtype=torch.float32)
            r.grad = p.grad.clone()
        ours.step()
        torchs.step()
    for p, r in zip(mine, theirs, strict=True):
        assert torch.allclose(p, r, rtol=1e-6, atol=1e-6)


def test_experts_are_orthogonalised_each_on_its_own() -> None:
    experts = Parameter(torch.zeros(3, 6, 4, dtype=torch.float64))
    optimizer = PerHeadMuon(
        [("experts", experts)], {"experts": None}, dialect=exact(), lr=1.0, momentum=0.0
    )
    experts.grad = normal(3, 6, 4)
    optimizer.step()
    for found, gradient in zip(experts.detach(), normal(3, 6, 4), strict=True):
        expected = -orthogonal(gradient, SCALES["jordan"])
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def model() -> dict[str, Parameter]:
    shapes = {"q": (12, 5), "o": (5, 12), "experts": (2, 4, 6), "bias": (7,), "embed": (3, 5)}
    return {
        name: Parameter(normal(*shape, seed=i, dtype=torch.float32))
        for i, (name, shape) in enumerate(shapes.items())
    }


def give_gradients(parameters: dict[str, Parameter], step: int) -> None:
    for i, p in enumerate(parameters.values()):
        p.grad = normal(*p.shape, seed=100 * step + i, dtype=torch.float32)


LAYOUTS = {"q": Layout.heads("q", 3, 4), "o": None, "experts": None}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_saved_run_resumes_to_the_bit(dialect: str) -> None:
    straight = model()
    first = PerHeadMuon(straight.items(), LAYOUTS, dialect=dialect, weight_decay=0.1)
    for step in (1, 2):
        give_gradients(straight, step)
        first.step()
    saved = copy.deepcopy(first.state_dict())
    resumed = {name: Parameter(p.detach().clone()) for name, p in straight.items()}
    second = PerHeadMuon(resumed.items(), LAYOUTS, dialect=dialect, weight_decay=0.7)
    second.load_state_dict(saved)
    for step in (3, 4):
        for parameters, optimizer in ((straight, first), (resumed, second)):
            give_gradients(parameters, step)
            optimizer.step()
    for name, p in straight.items():
        assert torch.equal(p.view(torch.int32), resumed[name].view(torch.int32)), name


def test_layouts_are_not_saved() -> None:
    parameters = model()
    optimizer = PerHeadMuon(parameters.items(), LAYOUTS)
    give_gradients(parameters, 1)
    optimizer.step()
    state = optimizer.state_dict()
    assert set(state) == {"state", "param_groups"}
    assert "layout" not in repr(state).lower()
    assert {frozenset(kept) for kept in state["state"].values()} == {
        frozenset({"momentum_buffer", "step"}),
        frozenset({"step", "exp_avg", "exp_avg_sq"}),
    }


def test_a_resumed_run_is_cut_as_it_is_built() -> None:
    saved_from, built = model(), model()
    first = PerHeadMuon(saved_from.items(), LAYOUTS)
    give_gradients(saved_from, 1)
    first.step()
    second = PerHeadMuon(built.items(), LAYOUTS | {"q": None}, momentum=0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    before = built["q"].detach().clone()
    give_gradients(built, 2)
    second.step()
    arithmetic = DIALECTS["deepspeed-0.19.8"].arithmetic
    buffer = torch.zeros(12, 5)
    for step in (1, 2):
        gradient = normal(12, 5, seed=100 * step, dtype=torch.float32)
        update = advance_momentum(gradient, buffer, arithmetic, 0.95)
    expected = before - 0.02 * orthogonalize(update, None, arithmetic)
    assert torch.allclose(built["q"], expected, rtol=0, atol=1e-6)


def test_the_closure_is_called_with_gradients_on() -> None:
    weight = Parameter(normal(4, 4, dtype=torch.float32))
    optimizer = PerHeadMuon([("w", weight)], {"w": None})
    before, calls = weight.detach().clone(), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert len(calls) == 1
    assert loss.item() == calls[0] == pytest.approx(float(before.square().sum()))
    assert not torch.equal(weight, before)


def test_without_a_closure_nothing_is_returned() -> None:
    assert PerHeadMuon([("w", Parameter(torch.zeros(2, 2)))], {}).step() is None


def test_parameters_without_gradient_are_left_alone() -> None:
    parameters = model()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = PerHeadMuon(parameters.items(), LAYOUTS, weight_decay=0.5)
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in parameters.items())
    assert not optimizer.state
    give_gradients(parameters, 1)
    parameters["q"].grad = parameters["bias"].grad = None
    optimizer.step()
    unchanged = {name for name, p in parameters.items() if torch.equal(p, before[name])}
    assert unchanged == {"q", "bias"}
    assert all(parameters[name] not in optimizer.state for name in unchanged)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_gradients_are_only_read(dialect: str) -> None:
    parameters = model()
    optimizer = PerHeadMuon(parameters.items(), LAYOUTS, dialect=dialect)
    for step in (1, 2):
        give_gradients(parameters, step)
        before = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        optimizer.step()
        for name, gradient in before.items():
            assert torch.equal(parameters[name].grad, gradient), name


def test_the_momentum_is_not_the_update() -> None:
    # Without Nesterov the update is the buffer itself; orthogonalising it must not touch it.
    weight = Parameter(torch.zeros(8, 4))
    optimizer = PerHeadMuon([("w", weight)], {"w": Layout.heads("q", 2, 4)}, dialect="dion")
    weight.grad = normal(8, 4, dtype=torch.float32)
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], weight.grad)


def test_groups_have_their_own_learning_rates() -> None:
    names = ("fast", "slow")
    weights = {name: Parameter(torch.zeros(4, 6)) for name in names}
    biases = {name: Parameter(torch.zeros(3)) for name in names}
    groups = [
        {
            "params": [(name, weights[name]), (f"{name}.bias", biases[name])],
            "lr": lr,
            "adamw_lr": lr / 2,
        }
        for name, lr in (("fast", 0.5), ("slow", 0.125))
    ]
    optimizer = PerHeadMuon(groups, dict.fromkeys(names))
    for p in (*weights.values(), *biases.values()):
        p.grad = normal(*p.shape, dtype=torch.float32)
    optimizer.step()
    # Powers of two, so that the ratio is exact.
    assert torch.equal(weights["fast"], 4 * weights["slow"])
    assert torch.equal(biases["fast"], 4 * biases["slow"])
    assert bool((weights["slow"] != 0).all())
    # AdamW's first step is its rate in every entry.
    assert biases["slow"].abs().tolist() == pytest.approx([0.0625] * 3, rel=1e-5)


@pytest.mark.parametrize("name", ["q", "bias"])
def test_weight_decay_is_decoupled(name: str) -> None:
    plain, decayed = model(), model()
    before = plain[name].detach().clone()
    for parameters, decay in ((plain, 0.0), (decayed, 0.5)):
        give_gradients(parameters, 1)
        PerHeadMuon(parameters.items(), LAYOUTS, lr=0.25, adamw_lr=0.125, weight_decay=decay).step()
    rate = 0.125 if name == "bias" else 0.25
    # The update does not see the decay: what differs is the weight before, times rate times ½.
    assert torch.allclose(plain[name] - decayed[name], rate * 0.5 * before, rtol=0, atol=1e-6)


def test_every_weight_equals_itself_alone() -> None:
    together = {f"w{i}": Parameter(torch.zeros(8, 16)) for i in range(3)}
    cuts = {"w0": Layout.heads("q", 2, 4), "w1": Layout.heads("k", 2, 4), "w2": None}
    for i, p in enumerate(together.values()):
        p.grad = normal(8, 16, seed=i, dtype=torch.float32)
    PerHeadMuon(together.items(), cuts).step()
    for i, (name, layout) in enumerate(cuts.items()):
        alone = Parameter(torch.zeros(8, 16))
        alone.grad = normal(8, 16, seed=i, dtype=torch.float32)
        PerHeadMuon([(name, alone)], {name: layout}).step()
        assert torch.equal(alone, together[name])


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(f, v) for f in ("lr", "adamw_lr", "weight_decay", "eps") for v in (NAN, INF, -1e-9)],
        *[("momentum", v) for v in (NAN, -0.1, 1.0, 2.0)],
        *[("betas", (v, 0.9)) for v in (NAN, -0.1, 1.0)],
        *[("betas", (0.9, v)) for v in (NAN, -0.1, 1.0)],
    ],
    ids=str,
)
@pytest.mark.parametrize("place", ["argument", "group"])
def test_hyperparameters_out_of_range_are_refused(field: str, value: Any, place: str) -> None:
    named = [("w", Parameter(torch.zeros(4, 4)))]
    params: Any = [{"params": named, field: value}] if place == "group" else named
    arguments: dict[str, Any] = {field: value} if place == "argument" else {}
    with pytest.raises(InputError, match=field):
        PerHeadMuon(params, {"w": None}, **arguments)


def test_the_edges_of_the_ranges_are_taken() -> None:
    named = [("w", Parameter(torch.zeros(4, 4)))]
    PerHeadMuon(named, {}, lr=0, adamw_lr=0, weight_decay=0, eps=0, momentum=0, betas=(0.0, 0.0))


def test_parameters_need_names() -> None:
    with pytest.raises(InputError, match="named_parameters"):
        PerHeadMuon([Parameter(torch.zeros(4, 4))], {})
    with pytest.raises(InputError, match="named_parameters"):
        PerHeadMuon([{"params": [Parameter(torch.zeros(4, 4))]}], {})


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ({"nobody": None}, "'nobody', which is no parameter"),
        ({"w": Layout.heads("q", 2, 3)}, "does not fit"),
        ({"w": Layout.heads("q", 2, 4, axis=1)}, "does not fit"),
        ({"bias": None}, "2-D or 3-D"),
        ({"bias": Layout.whole(8)}, "2-D"),
        ({"experts": Layout.heads("q", 2, 4)}, "2-D"),
        ({"kernel": None}, "2-D or 3-D"),
    ],
    ids=["unknown", "rows", "axis", "vector", "vector-cut", "stack-cut", "4-D"],
)
def test_layouts_must_fit(layouts: dict[str, Layout | None], message: str) -> None:
    named = {
        "w": Parameter(torch.zeros(8, 6)),
        "bias": Parameter(torch.zeros(8)),
        "experts": Parameter(torch.zeros(8, 8, 8)),
        "kernel": Parameter(torch.zeros(8, 8, 8, 8)),
    }
    with pytest.raises(InputError, match=message):
        PerHeadMuon(named.items(), layouts)


def test_a_layout_on_columns_fits_by_columns() -> None:
    weight = Parameter(torch.zeros(6, 8, dtype=torch.float64))
    layout = Layout.heads("q", 2, 4, axis=1)
    optimizer = PerHeadMuon([("w", weight)], {"w": layout}, dialect=exact(), lr=1.0, momentum=0.0)
    weight.grad = normal(6, 8)
    optimizer.step()
    for i in (0, 4):
        # A Conv1D's block is output rows by inputs once it is transposed, also for the scale.
        expected = -orthogonal(normal(6, 8)[:, i : i + 4].T, SCALES["jordan"])
        assert torch.allclose(weight.detach()[:, i : i + 4].T, expected, rtol=0, atol=1e-12)


def test_an_unknown_dialect_is_refused() -> None:
    with pytest.raises(UsageError, match="nobody"):
        PerHeadMuon([("w", Parameter(torch.zeros(4, 4)))], {}, dialect="nobody")


@pytest.mark.parametrize("dialect", ["muonium-0.2.0", "dtensor-muon-0.1.0"])
def test_a_float32_buffer_survives_a_checkpoint_of_bfloat16_weights(dialect: str) -> None:
    # torch's own load_state_dict rounds what it restores to the dtype of the parameter.
    def made(weight: Tensor) -> tuple[Parameter, PerHeadMuon]:
        p = Parameter(weight.clone())
        layouts = {"w": Layout.heads("q", 2, 4)}
        return p, PerHeadMuon([("w", p)], layouts, dialect=dialect, lr=0.02)

    def stepped(p: Parameter, optimizer: PerHeadMuon, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        p.grad = torch.randn(8, 6, generator=source).bfloat16()
        optimizer.step()

    start = torch.randn(8, 6, generator=torch.Generator().manual_seed(9)).bfloat16()
    p, optimizer = made(start)
    stepped(p, optimizer, 0)
    q, resumed = made(p.detach())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.state[q]["momentum_buffer"].dtype == torch.float32
    assert torch.equal(resumed.state[q]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])
    stepped(p, optimizer, 1)
    stepped(q, resumed, 1)
    assert torch.equal(p, q)
