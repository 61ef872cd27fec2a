"""MODEL → config → module. Configs are data: read with limits, never executed, never downloaded."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

from muonsplit.errors import ConfigError, UsageError
from muonsplit.models.bare import BARE, bare
from muonsplit.models.kimi_k3 import KimiK3Config, KimiK3ForCausalLM

Config = dict[str, Any]

KIMI_K3 = "kimi_k3_text"
_LARGEST_FILE = 1 << 20
_LARGEST_NUMBER = 1 << 31
_DEEPEST = 16
_MOST_LAYERS = 10_000
_STRUCTURAL = re.compile(
    r"(.*_)?(num_heads|n_heads?|attention_heads|key_value_heads|head_dim|hidden_size|d_model|n_embd"
    r"|num_hidden_layers|n_layers?|encoder_layers|decoder_layers|vocab_size|intermediate_size"
    r"|lora_rank)"
)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as it was asked for.

    Attributes:
        name: Golden name, file stem or ``transformers:TYPE``.
        config: Its config; ``model_type`` chooses the class.
    """

    name: str
    config: Config


# Model types that transformers does not have.
_OWN: dict[str, Callable[[Config], nn.Module]] = {
    KIMI_K3: lambda config: KimiK3ForCausalLM(KimiK3Config.from_dict(config)),
    BARE: lambda config: bare(config["weights"]),
}


def golden_root() -> Path:
    """The folder of goldens: inside the package when installed, beside it in a checkout."""
    package = Path(str(resources.files("muonsplit")))
    packaged = package / "golden"
    return packaged if packaged.is_dir() else package.parent / "golden"


def golden_models() -> dict[str, Any]:
    """Name → what is known of each golden model: the public model, source and status."""
    return json.loads((golden_root() / "models.json").read_text())


def resolve(spec: str) -> ModelSpec:
    """Finds a model's config.

    Args:
        spec: A golden name, a ``config.json`` or its directory, or ``transformers:MODEL_TYPE``.

    Raises:
        UsageError: If it is none of these.
        ConfigError: If the config cannot be read, or holds what no config may.
    """
    if spec.startswith("transformers:"):
        return ModelSpec(spec, {"model_type": spec.removeprefix("transformers:")})
    known = golden_models()
    if spec in known:
        return ModelSpec(spec, read_config(golden_root() / "models" / spec / "config.json"))
    path = _config_path(Path(spec))
    if path is not None:
        name = path.parent.name if path.name == "config.json" else path.stem
        return ModelSpec(name or path.stem, read_config(path))
    shown = spec if len(spec) < 200 else f"{spec[:200]}…"
    if spec.endswith(".json") or "/" in spec:
        raise ConfigError(
            f"There is no config file at {shown}.", "Give a config.json or its directory."
        )
    raise UsageError(
        f"There is no model {shown!r}.",
        f"Use a golden name ({', '.join(known)}), a config.json or its directory, or "
        "transformers:MODEL_TYPE.",
    )


def _config_path(path: Path) -> Path | None:
    try:
        path = path / "config.json" if path.is_dir() else path
        return path if path.is_file() else None
    except OSError:  # a name too long to be one
        return None


def read_config(path: Path) -> Config:
    """Reads a config file and checks it.

    Raises:
        ConfigError: If it is too large, no JSON object, or :func:`check_config` refuses it.
    """
    if path.stat().st_size > _LARGEST_FILE:
        raise ConfigError(f"{path} is larger than {_LARGEST_FILE} bytes; a config is not.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a JSON {type(config).__name__}; expected an object.")
    check_config(config)
    return config


def check_config(config: Mapping[str, Any], where: str = "", depth: int = 0) -> None:
    """Refuses numbers and shapes that no model has, before anything is built from them.

    Raises:
        ConfigError: Naming the field, what was expected, and the value.
    """
    if depth > _DEEPEST:
        raise ConfigError(f"The config nests deeper than {_DEEPEST} levels at {where!r}.")
    for key, value in config.items():
        name = f"{where}{key}"
        if isinstance(value, Mapping):
            check_config(value, f"{name}.", depth + 1)
        elif _STRUCTURAL.fullmatch(key) and value is not None:
            _check_count(name, value)
        elif isinstance(value, int) and abs(value) > _LARGEST_NUMBER:
            raise ConfigError(f"{name} is {value}; no config value exceeds {_LARGEST_NUMBER}.")


def _check_count(name: str, value: object) -> None:
    most = _MOST_LAYERS if name.endswith("layers") else _LARGEST_NUMBER
    if isinstance(value, list):  # some configs give a count per layer
        for item in value:
            _check_count(name, item)
    elif isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        shown = repr(value)[:60]
        raise ConfigError(f"{name} must be an integer from 1 to {most}, got {shown}.")


def complete(config: Config) -> Config:
    """The config with every default its class fills in."""
    if config.get("model_type") == KIMI_K3:
        return dict(config)
    return _transformers_config(config).to_dict()


def ready() -> None:
    """Imports what building any model takes, where there is time for it."""
    with suppress(ImportError):
        for name in ("models.auto.modeling_auto", "modeling_layers", "masking_utils"):
            import_module(f"transformers.{name}")


def mappings() -> dict[str, list[str]]:
    """The model types of transformers' language models, by task."""
    from transformers.models.auto import modeling_auto as auto

    return {
        "causal": list(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        "image-text": list(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        "seq2seq": list(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    }


def build(config: Config, device: str = "meta", task: str | None = None) -> nn.Module:
    """Builds the language model of a config.

    Args:
        config: As :func:`resolve` gives it.
        task: ``causal``, ``image-text`` or ``seq2seq``; by default the first that there is.
        device: ``meta`` costs no memory at any size; ``cpu`` allocates and initialises float32.

    Raises:
        ConfigError: If the type is unknown or the class refuses the config.
    """
    own = _OWN.get(str(config.get("model_type")))
    if own is not None:
        with torch.device(device):
            return own(config)
    resolved = _transformers_config(config)
    auto = _auto_class(resolved, task)
    try:
        with torch.device(device):
            return auto.from_config(resolved, dtype=torch.float32)
    except Exception as error:
        raise _unbuildable(config, error) from error


def _transformers_config(config: Config) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "Building a model needs transformers.", "pip install 'muonsplit[hf]'"
        ) from error
    transformers.logging.set_verbosity_error()
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"model_type is {model_type!r}; expected {KIMI_K3!r} or one that transformers "
            f"{transformers.__version__} knows.",
            "transformers.CONFIG_MAPPING lists them.",
        )
    # Code named in a config is never run; what an instance wrote of itself is not input.
    dropped = {"model_type", "auto_map", "transformers_version", "architectures", "torch_dtype"}
    try:
        fields = {key: value for key, value in config.items() if key not in dropped}
        return transformers.AutoConfig.for_model(model_type, **fields)
    except Exception as error:
        raise _unbuildable(config, error) from error


def _auto_class(config: Any, task: str | None) -> Any:
    import transformers
    from transformers.models.auto import modeling_auto as auto

    known = {
        "causal": (auto.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
        "image-text": (
            auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
            transformers.AutoModelForImageTextToText,
        ),
        "seq2seq": (
            auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
            transformers.AutoModelForSeq2SeqLM,
        ),
    }
    for name, (mapping, cls) in known.items():
        if task in (None, name) and type(config) in mapping:
            return cls
    what = "language" if task is None else task
    raise ConfigError(f"transformers has no {what} model for {config.model_type!r}.")


def _unbuildable(config: Config, error: Exception) -> ConfigError:
    said = " ".join(str(error).split())[:300]
    return ConfigError(
        f"transformers cannot build {config.get('model_type')!r} from this config: "
        f"{type(error).__name__}: {said}"
    )
