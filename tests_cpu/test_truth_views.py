"""Views against attention whose heads are known because they were written here."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from muonsplit import Layout
from muonsplit.errors import InputError
from muonsplit.models.load import build, resolve
from muonsplit.truth import Truth
from muonsplit.truth.views import views

HEADS, WIDTH, HIDDEN = 4, 6, 20
INNER = HEADS * WIDTH


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[batch, heads, time, width]`` → ``[batch, time, heads · width]``."""
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
    return (scores @ v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """A fused projection, a way to take it apart, and an output projection."""

    def __init__(self, rows: int, apart: Any, inner: int = INNER) -> None:
        super().__init__()
        self.fused = nn.Linear(HIDDEN, rows)
        self.out = nn.Linear(inner, HIDDEN)
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        return self.out(attend(*self.apart(self.fused(x)))) @ torch.ones(HIDDEN, 1)


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def truth_of(model: nn.Module, name: str) -> Truth:
    return views(model.to("meta"))[name]


def concatenated(x: Tensor) -> list[Tensor]:
    return [heads(part) for part in x.chunk(3, -1)]


def interleaved(x: Tensor) -> list[Tensor]:
    return list(x.unflatten(-1, (HEADS, 3, WIDTH)).transpose(1, 2).unbind(3))


def grouped(x: Tensor) -> list[Tensor]:
    """Two groups of two queries, a key and a value."""
    x = x.unflatten(-1, (2, 4, WIDTH)).transpose(1, 2)
    q = x[:, :, :, :2].transpose(2, 3).flatten(1, 2)
    k, v = (x[:, :, :, i].repeat_interleave(2, 1) for i in (2, 3))
    return [q, k, v]


def slabs(x: Tensor) -> list[Tensor]:
    """Two slabs of q, v, k."""
    x = x.unflatten(-1, (2, 3, 2, WIDTH))
    q, v, k = (x[..., i, :, :].flatten(2, 3).transpose(1, 2) for i in range(3))
    return [q, k, v]


def multi_query(x: Tensor) -> list[Tensor]:
    q, k, v = x.split([INNER, WIDTH, WIDTH], -1)
    return [heads(q), k[:, None], v[:, None]]


def rotary(x: Tensor) -> list[Tensor]:
    q, k, v = concatenated(x)

    def turned(x: Tensor) -> Tensor:
        half = torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1)
        return x * torch.ones(WIDTH) + half * torch.ones(WIDTH)

    return [turned(q), turned(k), v]


def complex_rotary(x: Tensor) -> list[Tensor]:
    q, k, v = concatenated(x)

    def turned(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * pairs.abs()).flatten(3)

    return [turned(q), turned(k), v]


def padded_in_place(x: Tensor) -> list[Tensor]:
    """K is written into a larger buffer, as latent attention puts its rotary part beside it."""
    q, k, v = concatenated(x)
    wide = k.new_empty(*k.shape[:-1], WIDTH + 2)
    wide[..., :WIDTH].copy_(k)
    return [F.pad(q, (0, 2)), wide, v]


def half_as_many(x: Tensor) -> list[Tensor]:
    return [heads(part, HEADS // 2) for part in x.chunk(3, -1)]


@pytest.mark.parametrize(
    ("rows", "apart", "expected"),
    [
        (3 * INNER, concatenated, "q 4×6 | k 4×6 | v 4×6"),
        (3 * INNER, interleaved, "4 × (q 6 | k 6 | v 6)"),
        (8 * WIDTH, grouped, "2 × (q 2×6 | k 6 | v 6)"),
        (3 * INNER, slabs, "2 × (q 2×6 | v 2×6 | k 2×6)"),
        (INNER + 2 * WIDTH, multi_query, "q 4×6 | k 6 | v 6"),
        (3 * INNER, rotary, "q 4×6 | k 4×6 | v 4×6"),
        (3 * INNER, complex_rotary, "q 4×6 | k 4×6 | v 4×6"),
        (3 * INNER, padded_in_place, "q 4×6 | k 4×6 | v 4×6"),
        (3 * INNER, half_as_many, "q 2×12 | k 2×12 | v 2×12"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_fused_rows_are_told_apart(rows: int, apart: Any, expected: str) -> None:
    truth = truth_of(Model(rows, apart), "fused.weight")
    assert truth.state == "heads"
    assert truth.layout is not None
    assert truth.layout.same_cut(Layout.parse(expected))
    assert truth.objection(Layout.parse(expected)) == ""


def test_a_wrong_view_is_another_truth() -> None:
    right = truth_of(Model(3 * INNER, concatenated), "fused.weight")
    wrong = truth_of(Model(3 * INNER, half_as_many), "fused.weight")
    cut = Layout.parse("q 4×6 | k 4×6 | v 4×6")
    assert right.objection(cut) == ""
    assert "6 of the rows 0–11 of a head" in wrong.objection(cut)
    assert "more than one head" in right.objection(Layout.parse("q 2×12 | k 2×12 | v 2×12"))


def test_heads_of_keys_belong_to_their_queries() -> None:
    """A block of q₁ and k₀ is two heads; a block of q₀ and k₀ is one."""
    truth = truth_of(Model(3 * INNER, interleaved), "fused.weight")
    assert truth.objection(Layout.heads("qkv", HEADS, 3 * WIDTH)) == ""
    shifted = Layout.parse("a 12 | b 3×18 | c 6")
    assert "more than one head" in truth.objection(shifted)


def test_the_output_projection_has_no_heads_on_its_rows() -> None:
    truth = truth_of(Model(3 * INNER, concatenated), "out.weight")
    assert truth.state == "none"
    assert "no heads" in truth.objection(Layout.heads("o", HEADS, HIDDEN // HEADS))
    assert truth.objection(None) == ""


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, 2 * INNER)
        self.kv = nn.Linear(HIDDEN, 2 * INNER)
        self.gate = nn.Linear(HIDDEN, INNER)
        self.out = nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, gate = self.q(x).unflatten(-1, (HEADS, -1)).chunk(2, -1)
        k, v = (heads(part) for part in self.kv(x).chunk(2, -1))
        attended = attend(q.transpose(1, 2), k, v) * gate.flatten(2).sigmoid()
        return self.out(attended * self.gate(x).sigmoid())


def test_gates_serve_no_head() -> None:
    found = views(Gated().to("meta"))
    assert str(found["q.weight"].layout) == "4 × (head 6 | rest 6)"
    assert found["q.weight"].objection(Layout.heads("q", HEADS, 2 * WIDTH)) == ""
    assert "more than one head" in found["q.weight"].objection(Layout.heads("q", 2, 4 * WIDTH))
    assert "of a head" in found["q.weight"].objection(Layout.heads("q", 16, 3))
    assert found["gate.weight"].state == "none"


class Sorted(nn.Module):
    """Takes its query through an operation that no one can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(HIDDEN, INNER), nn.Linear(HIDDEN, INNER)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.fft.fft(self.q(x)).real
        return attend(heads(q), heads(self.k(x)), heads(self.k(x)))


def test_what_cannot_be_followed_is_unknown() -> None:
    found = views(Sorted().to("meta"))
    assert found["q.weight"].state == "unknown"
    assert "fft" in found["q.weight"].evidence
    assert found["k.weight"].state == "heads"


class Stored(nn.Module):
    """Weights stored ``[in, out]``, as transformers' Conv1D has them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(HIDDEN, 3 * INNER))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.zeros(3 * INNER)
        return torch.addmm(bias, x.reshape(-1, HIDDEN), self.weight).view(*x.shape[:-1], -1)


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.fused = Stored()
        self.out = nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(attend(*concatenated(self.fused(self.norm(x)))))


def test_heads_may_lie_on_columns() -> None:
    truth = truth_of(Columns(), "fused.weight")
    assert str(truth.layout) == "head 12×6, axis 1"
    assert "axis 1" in truth.objection(Layout.heads("q", HIDDEN // 5, 5))


class Absorbed(nn.Module):
    """Latent attention with the key's up-projection multiplied into the query."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(HIDDEN, 8)
        self.up = nn.Linear(8, 2 * INNER, bias=False)
        self.out = nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        key, value = self.up.weight.unflatten(0, (HEADS, -1)).chunk(2, 1)
        latent = self.down(x)
        q = torch.einsum("bhtd,hdr->bhtr", heads(self.q(x)), key)
        scores = torch.einsum("bhtr,bsr->bhts", q, latent).softmax(-1)
        seen = torch.einsum("bhts,bsr->bhtr", scores, latent)
        return self.out(torch.einsum("bhtr,hdr->bthd", seen, value).flatten(2))


def test_weights_that_meet_weights_are_followed() -> None:
    found = views(Absorbed().to("meta"))
    assert str(found["q.weight"].layout) == "head 4×6"
    assert found["down.weight"].state == "none"
    up = found["up.weight"]
    assert up.objection(Layout.parse("4 × (k 6 | v 6)")) == ""
    assert up.objection(Layout.heads("kv", HEADS, 2 * WIDTH)) == ""
    assert "more than one head" in up.objection(Layout.heads("kv", 2, 4 * WIDTH))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Linear(HIDDEN, HIDDEN)
        self.tower = Gated()
        self.torchs_own = nn.MultiheadAttention(HIDDEN, 5, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.text(torch.zeros(1, input_ids.shape[-1], HIDDEN))


def test_parts_that_text_does_not_reach_are_called() -> None:
    found = views(Tower().to("meta"))
    assert str(found["tower.q.weight"].layout) == "4 × (head 6 | rest 6)"
    assert str(found["torchs_own.in_proj_weight"].layout) == "head 15×4"


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Model(3 * INNER, concatenated)
        self.broken = nn.Linear(HIDDEN, HIDDEN)
        self.last = Model(3 * INNER, interleaved)

    def forward(self, x: Tensor) -> Tensor:
        self.first(x)
        with torch.no_grad():
            return self.last(self.broken(x[..., 1:]))


def test_a_part_that_fails_costs_only_its_own_answer() -> None:
    model = Failing().to("meta")
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    found = views(model)
    assert found["first.fused.weight"].state == "heads"
    assert found["broken.weight"].state == "unknown"
    after = {name: dict(module.__dict__) for name, module in model.named_modules()}
    assert after.keys() == before.keys()
    assert all(after[name].keys() == before[name].keys() for name in after)
    assert model.training


def renamed(module: nn.Module) -> nn.Module:
    """The same computation under names that mean nothing, owner classes included."""
    module = copy.deepcopy(module)
    for index, part in enumerate(list(module.modules())):
        children = part._modules
        fresh = {f"m{index}_{i}": child for i, child in enumerate(children.values())}
        aliases = dict(zip(children, fresh, strict=True))
        part._modules = fresh
        part.__class__ = type("Thing", (type(part),), {"__getattr__": _aliased(aliases)})
    return module


def _aliased(aliases: dict[str, str]) -> Any:
    def get(self: nn.Module, name: str) -> Any:
        return nn.Module.__getattr__(self, aliases.get(name, name))

    return get


@pytest.mark.parametrize("name", ["kimi-k3-0.40b", "transformers:qwen2", "transformers:gpt_neox"])
def test_renaming_modules_changes_no_truth(name: str) -> None:
    config = {**resolve(name).config}
    if name.startswith("transformers:"):
        config["num_hidden_layers"] = 2
    model = build(config)
    before = list(views(model).values())
    after = views(renamed(model))
    assert not any("self_attn" in key or "attention" in key for key in after)
    assert list(after.values()) == before
    assert sum(truth.state == "heads" for truth in before) >= 2


def test_the_config_is_not_read() -> None:
    model = build({"model_type": "llama", "num_hidden_layers": 1})
    before = views(model)
    layer = model.get_submodule("model.layers.0.self_attn")
    # What the rules read and this forward pass does not.
    del layer.num_key_value_groups
    model.config.num_attention_heads = model.config.num_key_value_heads = 7
    assert views(model) == before


def test_views_ask_for_meta() -> None:
    with pytest.raises(InputError, match=r"fused.weight is on cpu"):
        views(Model(3 * INNER, concatenated))
