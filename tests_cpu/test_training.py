"""Miniatures of the named models train: from a config through its plan to a loss that falls."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from muonsplit import Decision, plan
from muonsplit.dialect import DIALECTS
from muonsplit.layout import Layout
from muonsplit.models.load import build, resolve
from muonsplit.models.miniature import VOCABULARY, miniature
from muonsplit.muon import PerHeadMuon
from muonsplit.newton_schulz import polynomial, scale_factor
from muonsplit.subjects.protocol import Stepper

pytestmark = pytest.mark.slow

STEPS, LR, ADAMW_LR = 20, 0.02, 0.01
SEQUENCES, TOKENS = 4, 6
LM_LOSS = nn.functional.cross_entropy


class Setting(NamedTuple):
    """What is trained, and by which dialect."""

    model: str
    dialect: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.model}-{self.dialect}-{str(self.dtype).removeprefix('torch.')}"


SETTINGS = [
    Setting("glm-5.2", "glm-5", torch.float32),
    Setting("glm-5.2", "glm-5", torch.bfloat16),
    Setting("kimi-k3", "kimi-k3", torch.float32),
    Setting("kimi-k3", "kimi-k3", torch.bfloat16),
    Setting("glm-5.2", "deepspeed-0.19.8", torch.float32),
]
each_setting = pytest.mark.parametrize("setting", SETTINGS, ids=str)


class Trained(NamedTuple):
    """A model before and after, and what happened in between.

    Attributes:
        losses: On the true next tokens, before every step and after the last.
        gradients: Of each parameter: which of its slices ever had one that is not zero.
    """

    model: nn.Module
    before: Mapping[str, Tensor]
    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]


Factory = Callable[[nn.Module, Setting, float], Stepper]


Layouts = Mapping[str, Layout | None]


def per_head(
    named: Iterable[tuple[str, nn.Parameter]], layouts: Layouts, setting: Setting, lr: float = 1.0
) -> PerHeadMuon:
    return PerHeadMuon(named, layouts, dialect=setting.dialect, lr=lr * LR, adamw_lr=lr * ADAMW_LR)


def reference(model: nn.Module, setting: Setting, lr: float) -> Stepper:
    layouts = plan(model, setting.dialect).layouts()
    return per_head(model.named_parameters(), layouts, setting, lr)


@functools.cache
def tokens() -> tuple[Tensor, Tensor]:
    """Inputs and what follows them: after each token comes the one that a permutation says."""
    source = torch.Generator().manual_seed(0)
    follows = torch.randperm(VOCABULARY, generator=source)
    read = [torch.randint(VOCABULARY, (SEQUENCES,), generator=source)]
    for _ in range(TOKENS):
        read.append(follows[read[-1]])
    text = torch.stack(read, dim=1)
    return text[:, :-1], text[:, 1:]


def halves() -> list[tuple[Tensor, Tensor]]:
    """Two batches of as many tokens as one another: the mean of their means is that of all."""
    return list(zip(*(x.chunk(2) for x in tokens()), strict=True))


def entropy() -> float:
    """Of the true next tokens, in nats: who ignores the input can do no better on average."""
    share = torch.bincount(tokens()[1].flatten()) / tokens()[1].numel()
    return float(-torch.special.xlogy(share, share).sum())


@functools.cache
def small_config(name: str) -> dict[str, object]:
    return miniature(resolve(name).config)


def untrained(setting: Setting, changed: Mapping[str, object] = MappingProxyType({})) -> nn.Module:
    torch.manual_seed(0)
    model = build({**small_config(setting.model), **changed}, "cpu").train()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(setting.dtype)
    return model


def logits(model: nn.Module, inputs: Tensor | None = None) -> Tensor:
    given = model(tokens()[0] if inputs is None else inputs)
    return (given if isinstance(given, Tensor) else given.logits).float().flatten(0, 1)


def train(
    setting: Setting,
    factory: Factory = reference,
    *,
    lr: float = 1.0,
    steps: int = STEPS,
    shuffled: bool = False,
) -> Trained:
    model, targets = untrained(setting), tokens()[1].flatten()
    named = dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in named.items()}
    reached = {name: torch.zeros(len(p), dtype=torch.bool) for name, p in named.items()}
    optimizer, source = factory(model, setting, lr), torch.Generator().manual_seed(1)
    losses: list[float] = []
    for _ in range(steps):
        model.zero_grad()
        seen = logits(model)
        order = torch.randperm(len(targets), generator=source)
        LM_LOSS(seen, targets[order] if shuffled else targets).backward()
        losses.append(float(LM_LOSS(seen.detach(), targets)))
        for name, p in named.items():
            if p.grad is not None:
                reached[name] |= p.grad.flatten(1).any(1) if p.ndim > 1 else p.grad != 0
        optimizer.step()
    with torch.no_grad():
        losses.append(float(LM_LOSS(logits(model), targets)))
    return Trained(model, before, tuple(losses), reached)


trained = functools.cache(train)


def raw(tensor: Tensor) -> Tensor:
    """Its bytes: −0 is not 0, a NaN is itself."""
    return tensor.detach().contiguous().view(torch.uint8)


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    pairs = zip(one.named_parameters(), other.parameters(), strict=True)
    return [name for (name, p), q in pairs if not torch.equal(raw(p), raw(q))]


@each_setting
def test_the_loss_falls_below_what_can_be_had_without_reading(setting: Setting) -> None:
    losses = trained(setting).losses
    # Untrained it knows nothing yet: all tokens alike, give or take what random logits add.
    assert abs(losses[0] - math.log(VOCABULARY)) < 0.5
    # A quarter of what is left to whoever learns only which tokens are frequent.
    assert losses[-1] < entropy() / 4
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("setting", SETTINGS[:4:2], ids=str)
def test_targets_in_random_order_cannot_be_learned(setting: Setting) -> None:
    """The control: drawn anew each step, they leave only frequencies to learn, on the same road."""
    control = train(setting, shuffled=True).losses
    assert control[0] == trained(setting).losses[0]
    assert control[-1] > 0.9 * entropy()


def test_without_a_learning_rate_nothing_moves() -> None:
    still = train(SETTINGS[2], lr=0.0, steps=2)
    assert still.losses[0] == still.losses[-1]
    assert differing(still.model, untrained(SETTINGS[2])) == []


@each_setting
def test_all_parameters_and_buffers_stay_finite(setting: Setting) -> None:
    model = trained(setting).model
    assert {p.dtype for p in model.parameters()} == {setting.dtype}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.isfinite().all(), name


# GLM's indexer picks keys by a top-k, which passes no gradient on: it has a loss of its own.
WITHOUT_GRADIENT = {
    "glm-5.2": {
        f"model.layers.{layer}.self_attn.indexer.{leaf}"
        for layer in (0, 1, 2, 6)
        for leaf in (
            *("wq_b.weight", "wk.weight", "weights_proj.weight"),
            *("k_norm.weight", "k_norm.bias"),
        )
    },
    "kimi-k3": set[str](),
}
# Kimi's first attention residual has one source to weigh: its weight is 1 whatever the query.
ZERO_GRADIENT = {
    "glm-5.2": set[str](),
    "kimi-k3": {
        "model.layers.0.self_attention_res_norm.weight",
        "model.layers.0.self_attention_res_proj.weight",
    },
}


@each_setting
def test_what_has_a_gradient_moves_and_what_has_none_is_as_expected(setting: Setting) -> None:
    run = trained(setting)
    named = dict(run.model.named_parameters())
    without = {name for name, p in named.items() if p.grad is None}
    assert without == WITHOUT_GRADIENT[setting.model]
    zero = {name for name, reached in run.gradients.items() if not reached.any()} - without
    assert zero == ZERO_GRADIENT[setting.model]
    still = {name for name, p in named.items() if torch.equal(raw(p), raw(run.before[name]))}
    assert still == without | zero
    for decision in plan(run.model, setting.dialect).split:
        moved = (named[decision.name] != run.before[decision.name]).detach().any(1)
        blocks = decision.layout.blocks() if decision.layout else ()
        assert all(moved[slice(*span)].all() for b in blocks for span in b.spans), decision.name


@each_setting
def test_every_expert_that_was_asked_moves_and_no_other(setting: Setting) -> None:
    run, stacks = trained(setting), 0
    for name, p in run.model.named_parameters():
        if name.rpartition(".")[0].endswith("experts") and p.ndim == 3:
            moved = (p != run.before[name]).flatten(1).any(1)
            assert torch.equal(moved, run.gradients[name]), name
            # 24 tokens ask two of four experts each.
            assert moved.all(), name
            stacks += 1
    assert stacks == {"glm-5.2": 8, "kimi-k3": 6}[setting.model]


@pytest.mark.parametrize("setting", SETTINGS[1:3], ids=str)
def test_a_second_run_has_the_same_bytes(setting: Setting) -> None:
    """The other settings are run a second time head by head."""
    again = train(setting)
    assert differing(again.model, trained(setting).model) == []
    assert again.losses == trained(setting).losses


class HeadByHead:
    """Every block is a parameter of its own, in the weight's memory, with its own optimizer."""

    def __init__(self, model: nn.Module, setting: Setting, lr: float) -> None:
        layouts = plan(model, setting.dialect).layouts()
        whole = {n: p for n, p in model.named_parameters() if layouts.get(n) is None}
        cut = {n: None for n in whole if n in layouts}
        self.parts: list[tuple[nn.Parameter, nn.Parameter, slice]] = []
        for name, layout in layouts.items():
            for block in layout.blocks() if layout else ():
                weight, (rows,) = model.get_parameter(name), [slice(*span) for span in block.spans]
                self.parts.append((nn.Parameter(weight.data[rows]), weight, rows))
        given = [(whole, cut), *(({"w": part}, {"w": None}) for part, _, _ in self.parts)]
        self.optimizers = [per_head(p.items(), cut, setting, lr) for p, cut in given]

    def step(self) -> None:
        for part, weight, rows in self.parts:
            assert weight.grad is not None
            part.grad = weight.grad[rows]
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.parametrize("setting", [SETTINGS[0], *SETTINGS[3:]], ids=str)
def test_heads_by_layout_are_heads_alone_to_the_bit(setting: Setting) -> None:
    alone = train(setting, HeadByHead)
    assert differing(alone.model, trained(setting).model) == []
    assert alone.losses == trained(setting).losses


def head_norms(weight: Tensor, heads: int) -> Tensor:
    return weight.detach().double().reshape(heads, -1).norm(dim=1)


def longest(decision: Decision, columns: int, dialect: str) -> float:
    """How far one step may move one head: its blocks, each with all singular values at most."""
    arithmetic = DIALECTS[dialect].arithmetic
    most = float(polynomial(torch.linspace(0, 1, 10_001, dtype=torch.float64), arithmetic).max())
    assert decision.layout
    assert decision.heads
    blocks = decision.layout.blocks()
    sizes = [block.rows for block in blocks[: len(blocks) // decision.heads]]
    return LR * math.hypot(
        *(scale_factor(arithmetic, r, columns) * most * min(r, columns) ** 0.5 for r in sizes)
    )


@each_setting
def test_the_imbalance_of_head_norms_is_recorded(
    setting: Setting, record_property: Callable[[str, object], None]
) -> None:
    """The largest norm of a head over the smallest, before and after, at worst over the layers."""
    run = trained(setting)
    named = dict(run.model.named_parameters())
    recorded: dict[str, tuple[float, float]] = {}
    for decision in plan(run.model, setting.dialect).split:
        assert decision.heads
        norms = [head_norms(w[decision.name], decision.heads) for w in (run.before, named)]
        # No further than all steps one way, at full length.
        way = STEPS * longest(decision, named[decision.name].shape[1], setting.dialect)
        assert 0 < float((norms[1] - norms[0]).abs().max()) < way, decision.name
        found = [float(n.max() / n.min()) for n in norms]
        worst = recorded.get(decision.leaf, (1.0, 1.0))
        recorded[decision.leaf] = (max(worst[0], found[0]), max(worst[1], found[1]))
    assert {"q_b_proj", "kv_b_proj"} <= recorded.keys()
    for leaf, (before, after) in recorded.items():
        assert 1 < before < math.inf
        assert 1 < after < math.inf
        record_property(f"head_norm_imbalance.{leaf}", f"{before:.4f} → {after:.4f}")


# transformers' classes of the gate, bounded and not, are witnesses: they follow FLA too.
BOUNDED = ("kimi-k3", "transformers:glm5_next")
UNBOUNDED = ("kimi-k3-0.40b", "transformers:kimi_linear")


@pytest.mark.parametrize("name", [*BOUNDED, *UNBOUNDED])
def test_delta_attention_starts_as_fla_prescribes(name: str) -> None:
    """A `dt_bias` of whatever was in memory is a NaN at step 0, whoever the optimizer is.

    flash-linear-attention, `KDAPreTrainedModel._init_weights`: time steps log-uniform from 10⁻³ to
    10⁻¹ through the inverse of softplus; rates from 1 to 16, but 1 under a lower bound.
    """
    torch.manual_seed(0)
    named = dict(build(small_config(name), "cpu").named_parameters())
    biases = [key for key in named if key.endswith("dt_bias")]
    assert biases
    for key in biases:
        dt_bias = named[key].detach().double()
        rates = named[key.replace("dt_bias", "A_log")].detach().double().exp()
        steps = nn.functional.softplus(dt_bias)
        # Float32 holds a bias of −7 to 2⁻²², by which the step is off too: its slope is its size.
        assert 1e-3 * (1 - 1e-6) <= steps.min() < 2e-3
        assert 5e-2 < steps.max() <= 1e-1 * (1 + 1e-6)
        # As many below the geometric mean as above: four deviations, where they are drawn.
        assert abs(float((steps < 1e-2).double().mean()) - 0.5) < 2 / len(steps) ** 0.5
        assert dt_bias.unique().numel() > 0.9 * dt_bias.numel()
        if name in BOUNDED:
            assert bool((rates == 1).all())
        else:
            assert 1 - 1e-6 <= rates.min() < rates.max() <= 16 * (1 + 1e-6)
            assert rates.unique().numel() == rates.numel()
