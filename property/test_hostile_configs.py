"""Whatever an owner or a config holds or raises: a plan, a decline or a typed error.

And never a split whose heads and widths are not the rows.
"""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from muonsplit.errors import ConfigError
from muonsplit.geometry import Plan, plan
from muonsplit.geometry.candidates import candidates
from muonsplit.models.load import build, check_config

MODELS = Path(__file__).parents[1] / "golden" / "models"
LEAVES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "q_b_proj",
    "kv_b_proj",
    "qkv_proj",
    "kv_proj",
    "in_proj_qkv",
)
FIELDS = (
    *("num_heads", "num_attention_heads", "num_key_value_heads", "num_k_heads", "num_v_heads"),
    *("n_head", "swa_num_attention_heads", "num_key_value_groups", "head_dim", "v_head_dim"),
    *("head_k_dim", "head_v_dim", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim"),
    *("hidden_size", "d_model", "layer_idx", "per_layer_config", "attribute_map", "text_config"),
)
DIALECTS = (
    "deepspeed-0.19.8",
    "deepspeed-0.19.8:fused_qkv=heads,gated_query=apart,mla_key_value=apart",
    "deepspeed-0.19.8:fused_qkv=projections",
    "deepspeed-0.19.8:fused_qkv=heads,heads_per_block=2",
)
RAISED = (RuntimeError, KeyError, RecursionError, AttributeError, ValueError, OSError, MemoryError)


class Anything:
    """Raises whatever is done with it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __iter__(self) -> Any:
        raise KeyError

    def __getitem__(self, key: object) -> Any:
        raise RecursionError

    def __eq__(self, other: object) -> bool:
        raise ValueError

    __hash__ = object.__hash__


class Slotted:
    """Has no ``__dict__`` to list."""

    __slots__ = ("head_dim", "num_heads")

    def __init__(self) -> None:
        self.num_heads, self.head_dim = 4, 8


class NoNames:
    """Raises when it is asked for its names."""

    num_heads, head_dim = 4, 8

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError

    @property
    def attribute_map(self) -> Any:
        raise KeyError


VALUES = st.one_of(
    st.integers(1, 16),
    st.integers(-3, 64),
    st.integers(),
    st.booleans(),
    st.floats(),
    st.text(max_size=3),
    st.none(),
    st.lists(st.integers(0, 8) | st.none(), max_size=3),
    st.dictionaries(st.sampled_from(FIELDS), st.integers(0, 8), max_size=3),
    st.builds(Anything),
    st.just(int),
)


class Config:
    """Raises the fields that are exceptions, and may hold itself."""

    def __init__(self, fields: dict[str, Any], own: list[str]) -> None:
        self.__dict__.update(fields)
        for name in own:
            self.__dict__[name] = self
        self.__dict__.setdefault("attribute_map", dict.fromkeys(fields, ""))

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if isinstance(value, BaseException):
            raise value
        return value


RAISING = st.sampled_from(RAISED).map(lambda kind: kind("hostile"))
CONFIGS = st.one_of(
    st.none(),
    st.builds(Anything),
    st.builds(Slotted),
    st.builds(NoNames),
    st.builds(
        Config,
        st.dictionaries(st.sampled_from(FIELDS), VALUES | RAISING, max_size=8),
        st.lists(st.sampled_from(FIELDS), max_size=2),
    ),
)


class HostileAttention(nn.Module):
    """One leaf; attributes that are exceptions are raised when they are read."""

    def __init__(self, leaf: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> None:
        super().__init__()
        holder = nn.Module()
        holder.weight = nn.Parameter(torch.empty(shape, device="meta"))
        setattr(self, leaf, holder)
        self.__dict__.update(attributes)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if isinstance(value, BaseException):
            raise value
        return value


def check(decided: Plan) -> None:
    """No layout that does not cover its axis, and no head count that does not make the rows."""
    for d in decided.decisions:
        if d.heads is not None and d.width is not None:
            size = d.shape[0 if d.layout is None else d.layout.axis]
            assert d.layout is None or d.heads * d.width == d.layout.rows == size
    for d in decided.split:
        assert d.heads is not None
        assert d.width is not None
        assert d.heads > 1
        assert d.width > 1


@given(
    st.sampled_from(LEAVES),
    st.tuples(st.sampled_from([32, 64, 96]) | st.integers(2, 128), st.integers(2, 4)),
    # Some of a plain attention's fields stand, or nothing would ever be split.
    st.builds(
        lambda plain, hostile: plain | hostile,
        st.sampled_from([{"num_heads": 4, "head_dim": 8}, {"head_dim": 8}, {}]),
        st.dictionaries(st.sampled_from(FIELDS), VALUES | RAISING, max_size=4),
    ),
    CONFIGS,
    CONFIGS,
    st.sampled_from(DIALECTS),
)
def test_hostile_owners_and_configs(
    leaf: str,
    shape: tuple[int, int],
    attributes: dict[str, Any],
    config: Any,
    above: Any,
    dialect: str,
) -> None:
    owner = HostileAttention(leaf, shape, attributes)
    if config is not None:
        owner.__dict__["config"] = config
    model = nn.ModuleDict({"self_attn": owner})
    model.__dict__["config"] = above
    decided = plan(model, dialect)
    assert len(decided.decisions) == 1
    check(decided)


@given(
    st.one_of(VALUES, RAISING, st.lists(st.builds(SimpleNamespace, head_dim=VALUES), max_size=3)),
    VALUES,
)
def test_hostile_per_layer_configs(per_layer: Any, index: Any) -> None:
    config = Config({"per_layer_config": per_layer, "num_heads": 4, "head_dim": 8}, [])
    owner = HostileAttention("q_proj", (32, 4), {"layer_idx": index, "config": config})
    decided = plan(nn.ModuleDict({"self_attn": owner}))
    assert len(decided.decisions) == 1
    check(decided)


class Liar(int):
    """An integer whose products are what they have to be."""

    def __mul__(self, other: object) -> int:
        return 32

    __rmul__ = __mul__


class Raiser(int):
    """An integer that cannot be compared."""

    def __lt__(self, other: object) -> bool:
        raise RuntimeError

    __gt__ = __le__ = __ge__ = __lt__


@pytest.mark.parametrize(
    ("kind", "leaf"),
    [
        (Liar, "q_proj"),
        (Liar, "k_proj"),
        (Raiser, "q_proj"),
        (Raiser, "k_proj"),
        (Raiser, "qkv_proj"),
    ],
)
def test_only_plain_integers_count(kind: type[int], leaf: str) -> None:
    owner = HostileAttention(leaf, (32, 4), {"num_heads": kind(5), "head_dim": 7})
    (decision,) = plan(nn.ModuleDict({"self_attn": owner})).decisions
    assert decision.layout is None
    assert "ambiguous" not in decision.reason


def test_the_same_number_under_many_names_is_one_candidate() -> None:
    counts = {f"num_{i}_heads": 3 for i in range(300)}
    owner = SimpleNamespace(**counts, **{f"x{i}_head_dim": 5 for i in range(300)})
    # 3 × 5 and, with a gate, 3 × 10. A config of a megabyte can name thousands of fields.
    assert len(candidates("query", owner, None)) < 10_000


REAL = {
    name: json.loads((MODELS / name / "config.json").read_text())
    | {"num_hidden_layers": 1, "vocab_size": 64}
    for name in ("llama", "gpt-neox-20b", "deepseek-v2-lite")
}
JSON = st.one_of(
    st.integers(0, 64),
    st.sampled_from([0, -1, 2**31, 2**63, 10**30, 1, 3, 7]),
    st.booleans(),
    st.floats(),
    st.text(max_size=4),
    st.none(),
    st.lists(st.integers(-1, 8), max_size=3),
    st.dictionaries(st.sampled_from(["a", "num_attention_heads"]), st.integers(-1, 8), max_size=2),
)


@given(st.data(), st.sampled_from(sorted(REAL)), st.sampled_from(DIALECTS))
def test_mutated_real_configs(data: st.DataObject, name: str, dialect: str) -> None:
    config = copy.deepcopy(REAL[name])
    for _ in range(data.draw(st.integers(1, 3), "mutations")):
        field = data.draw(st.sampled_from([*sorted(config), *FIELDS, "nested"]), "field")
        if field in config and data.draw(st.booleans(), "missing"):
            del config[field]
        else:
            config[field] = data.draw(JSON, "value")
    try:
        check_config(config)
        model = build(config)
    except ConfigError:
        return
    check(plan(model, dialect))
