"""Configs are input to be distrusted; miniatures keep what the rules could be fooled by."""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from muonsplit.errors import ConfigError, MuonsplitError, UsageError
from muonsplit.geometry import plan
from muonsplit.models.load import build, complete, read_config, resolve
from muonsplit.models.miniature import miniature

MODELS = Path(__file__).parents[1] / "golden" / "models"
NAMES = sorted(path.name for path in MODELS.iterdir())
TYPES = ["llama", "qwen2", "mistral", "deepseek_v3", "gpt2"]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 40,
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[object], Path]:
    def to_file(content: object) -> Path:
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return to_file


def refused(call: Callable[[], object], kind: type[MuonsplitError], *said: str) -> None:
    with pytest.raises(MuonsplitError) as raised:
        call()
    assert type(raised.value) is kind
    assert raised.value.exit_code >= 64
    for part in said:
        assert part in str(raised.value)


def test_a_config_file_or_its_directory(write: Callable[[object], Path]) -> None:
    path = write(LLAMA)
    assert resolve(str(path)) == resolve(str(path.parent))
    assert resolve(str(path)).config == LLAMA
    assert resolve(str(path)).name == path.parent.name


@pytest.mark.parametrize("name", NAMES)
def test_golden_models_are_what_their_file_says(name: str) -> None:
    spec = resolve(name)
    assert spec.name == name
    assert spec.config == json.loads((MODELS / name / "config.json").read_text())


@pytest.mark.parametrize("spec", ["missing.json", "no/such/dir", "./missing"])
def test_a_missing_file(spec: str) -> None:
    refused(lambda: resolve(spec), ConfigError, spec)


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    refused(lambda: resolve(str(tmp_path)), ConfigError, str(tmp_path))


@pytest.mark.parametrize("spec", ["nope", "GLM-5", "glm-5.3", "pythia-1.5b"])
def test_an_unknown_name_lists_those_known(spec: str) -> None:
    refused(lambda: resolve(spec), UsageError, repr(spec), "glm-5.2", "kimi-k3", "transformers:")


@pytest.mark.parametrize("spec", ["x" * 5000, "a\0b"], ids=["too long", "null byte"])
def test_a_name_no_file_can_have(spec: str) -> None:
    refused(lambda: resolve(spec), UsageError)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1, 2]", "list"),
        ("null", "NoneType"),
        ('"llama"', "str"),
        ('{"model_type": "llama"', "not readable JSON"),
        ("", "not readable JSON"),
        ("[" * 100_000, "not readable JSON"),
        ('{"a":' * 100_000, "not readable JSON"),
        ('{"a":' * 100 + "1" + "}" * 100, "nests deeper than 16"),
        ('{"hidden_size": ' + "9" * 10_000 + "}", "not readable JSON"),
        ("{}" + " " * 5_000_000, "larger than"),
    ],
    ids=[
        "array",
        "null",
        "string",
        "broken",
        "empty",
        "open brackets",
        "open braces",
        "deep",
        "digits",
        "5 MB",
    ],
)
def test_what_is_no_config(write: Callable[[object], Path], content: str, said: str) -> None:
    path = write(content)
    refused(lambda: read_config(path), ConfigError, said)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a": "\xff"}')
    refused(lambda: read_config(path), ConfigError, str(path))


@pytest.mark.parametrize("value", [10**18, 0, -1, True, False, 3.5, 4.0, "8", [4, 0], float("nan")])
@pytest.mark.parametrize(
    "field", ["num_attention_heads", "head_dim", "hidden_size", "kv_lora_rank"]
)
def test_a_size_that_is_none(
    write: Callable[[object], Path], field: str, value: float | str | list[int]
) -> None:
    path = write({**LLAMA, field: value})
    shown = repr(value[1] if isinstance(value, list) else value)
    refused(lambda: read_config(path), ConfigError, field, f"got {shown}")


def test_a_nested_field_is_named_in_full(write: Callable[[object], Path]) -> None:
    path = write({"text_config": {"num_attention_heads": 0}})
    refused(lambda: read_config(path), ConfigError, "text_config.num_attention_heads", "0")


def test_more_layers_than_can_be_built(write: Callable[[object], Path]) -> None:
    path = write({**LLAMA, "num_hidden_layers": 10**6})
    refused(lambda: read_config(path), ConfigError, "num_hidden_layers", "10000", str(10**6))


@pytest.mark.parametrize("value", [10**18, -(10**18)])
def test_no_number_is_that_large(write: Callable[[object], Path], value: int) -> None:
    path = write({**LLAMA, "max_position_embeddings": value})
    refused(lambda: read_config(path), ConfigError, "max_position_embeddings", str(value))


def test_null_is_no_size_and_passes(write: Callable[[object], Path]) -> None:
    assert read_config(write({**LLAMA, "head_dim": None}))["head_dim"] is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**LLAMA, "model_type": "no_such_type"}, "'no_such_type'"),
        ({"hidden_size": 32}, "None"),
        ({**LLAMA, "model_type": ["llama"]}, "['llama']"),
        ({**LLAMA, "model_type": "clip"}, "clip"),
        ({**LLAMA, "num_attention_heads": 5}, "llama"),
        ({**LLAMA, "hidden_size": 2**31, "vocab_size": 2**31}, "llama"),
        ({**LLAMA, "rope_parameters": "x"}, "rope_parameters"),
        ({"model_type": "kimi_k3_text"}, "hidden_size"),
    ],
    ids=["unknown", "absent", "list", "no language model", "indivisible", "huge", "rope", "empty"],
)
def test_what_cannot_be_built(config: dict[str, Any], said: str) -> None:
    refused(lambda: build(config), ConfigError, said)
    refused(lambda: miniature(config), ConfigError, said)


def test_a_transformers_type_that_is_none() -> None:
    refused(lambda: build(resolve("transformers:NOPE").config), ConfigError, "'NOPE'")


def test_code_named_in_a_config_is_not_run(write: Callable[[object], Path]) -> None:
    path = write({**LLAMA, "auto_map": {"AutoModelForCausalLM": "evil_modeling.Evil"}})
    (path.parent / "evil_modeling.py").write_text("raise SystemExit('ran')\n")
    model = build(resolve(str(path.parent)).config)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert "evil_modeling" not in sys.modules


@pytest.mark.parametrize("name", ["llama", "kimi-k3-0.40b"])
def test_meta_costs_no_memory_and_cpu_is_initialised(name: str) -> None:
    config = miniature(resolve(name).config)
    assert all(p.is_meta for p in build(config).parameters())
    parameters = list(build(config, "cpu").parameters())
    assert all(p.device.type == "cpu" and p.isfinite().all() for p in parameters)
    assert {str(p.dtype) for p in parameters} == {"torch.float32"}


@functools.cache
def full(name: str) -> tuple[dict[str, Any], nn.Module]:
    config = resolve(name).config
    return config, build(config)


@functools.cache
def small(name: str) -> tuple[dict[str, Any], nn.Module]:
    config = miniature(full(name)[0])
    return config, build(config)


EVERY = [*NAMES, *(f"transformers:{t}" for t in TYPES)]


def products(config: dict[str, Any]) -> dict[str, int]:
    """Every product of a head count and a head width that the model's type gives a meaning."""
    c = complete(config)
    linear = c.get("linear_attn_config") or {}
    counts = {
        "heads": c.get("num_attention_heads") or c.get("n_head"),
        "kv": c.get("num_key_value_heads"),
        "index": c.get("index_n_heads"),
        "linear": linear.get("num_heads"),
    }
    hidden = c.get("hidden_size") or c["n_embd"]
    nope, rope, value = (c.get(k) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    # Kimi K3 states a head_dim that no layer has, and which is no divisor of anything.
    plain = None if c["model_type"] == "kimi_k3_text" else c.get("head_dim")
    widths = {
        "head": plain,
        "index": c.get("index_head_dim"),
        "linear": linear.get("head_dim"),
        "value": value,
        "nope": nope,
        "rope": rope,
        "query": nope and nope + rope,
        "key-value": nope and nope + value,
    }
    if hidden % counts["heads"] == 0 and not nope:
        widths["hidden/heads"] = hidden // counts["heads"]
    return {"hidden": hidden} | {
        f"{count}·{width}": n * w
        for count, n in counts.items()
        for width, w in widths.items()
        if n and w
    }


def classes(values: dict[str, int]) -> set[frozenset[str]]:
    return {frozenset(k for k, v in values.items() if v == value) for value in values.values()}


@pytest.mark.parametrize("name", EVERY)
def test_equal_products_stay_equal_and_others_apart(name: str) -> None:
    assert classes(products(small(name)[0])) == classes(products(full(name)[0]))


def test_the_indexer_keeps_its_trap() -> None:
    c = small("glm-5.2")[0]
    assert c["index_n_heads"] * c["index_head_dim"] == c["num_attention_heads"] * c["head_dim"]
    assert c["index_n_heads"] != c["num_attention_heads"]
    # In the 0.8B model the same product is another, and stays so.
    c = small("glm-5.2-0.8b")[0]
    assert c["index_n_heads"] * c["index_head_dim"] != c["num_attention_heads"] * c["head_dim"]


@pytest.mark.parametrize("name", ["llama", "gpt-neox-20b", "deepseek-v2-lite"])
def test_the_output_projection_stays_square(name: str) -> None:
    leaves = {"o_proj", "dense"}
    for _, model in (full(name), small(name)):
        shapes = {d.shape for d in plan(model).decisions if d.kind == "output" and d.leaf in leaves}
        assert shapes
        assert all(rows == cols for rows, cols in shapes)


def signatures(model: nn.Module) -> set[frozenset[tuple[str, str]]]:
    """The parameters of each kind of layer, by owner class and name."""
    modules = dict(model.named_modules())
    stacks = [m for m in modules.values() if isinstance(m, nn.ModuleList)]
    layers = max(stacks, key=lambda stack: sum(p.numel() for p in stack.parameters()))
    return {
        frozenset(
            (type(layer.get_submodule(name.rpartition(".")[0])).__name__, name)
            for name, _ in layer.named_parameters()
        )
        for layer in layers
    }


@pytest.mark.parametrize("name", EVERY)
def test_every_kind_of_layer_is_there(name: str) -> None:
    assert signatures(small(name)[1]) == signatures(full(name)[1])


@pytest.mark.parametrize(
    ("name", "kinds"), [("glm-5.2", 3), ("glm-5.2-0.8b", 3), ("kimi-k3", 3), ("llama", 1)]
)
def test_kinds_of_layer(name: str, kinds: int) -> None:
    # Dense or sparse, with or without an indexer, delta attention or MLA: as far as they occur.
    assert len(signatures(small(name)[1])) == kinds


@pytest.mark.parametrize("name", EVERY)
def test_the_same_weights_are_split(name: str) -> None:
    decided = [
        {(d.owner, d.leaf, d.kind, d.layout is not None) for d in plan(model).decisions}
        for _, model in (full(name), small(name))
    ]
    assert decided[0] == decided[1]


@pytest.mark.parametrize("name", EVERY)
def test_it_is_small_and_still_has_heads(name: str) -> None:
    config, model = small(name)
    assert sum(p.numel() for p in model.parameters()) < 2_000_000
    was = full(name)[0]
    for field in ("num_attention_heads", "num_key_value_heads", "index_n_heads", "n_head"):
        if complete(was).get(field):
            assert 1 < config[field] <= complete(was)[field]
    # Of two heads, a pair is the whole matrix: that fault could not be told from another.
    assert max(config.get("num_attention_heads", 0), config.get("n_head", 0)) >= 4
    for d in plan(model).split:
        assert d.heads is not None
        assert d.width is not None
        assert d.heads > 1
        assert d.width > 1


@pytest.mark.parametrize("name", EVERY)
def test_a_miniature_of_a_miniature_builds(name: str) -> None:
    again = build(miniature(small(name)[0]))
    kept = {(d.owner, d.leaf) for d in plan(again).split}
    assert kept == {(d.owner, d.leaf) for d in plan(small(name)[1]).split}


def test_a_config_is_left_as_it_was() -> None:
    config = resolve("kimi-k3").config
    before = json.dumps(config)
    miniature(config)
    assert json.dumps(config) == before


@pytest.mark.parametrize(
    ("model_type", "split"),
    [("llama", 3), ("qwen2", 3), ("mistral", 3), ("deepseek_v3", 2), ("gpt2", 0)],
)
def test_transformers_types_end_to_end(model_type: str, split: int) -> None:
    config = miniature(resolve(f"transformers:{model_type}").config)
    leaves = {d.leaf for d in plan(build(config)).split}
    assert len(leaves) == split
