"""Subject for DeepSpeed 0.19.8: its Muon on its own, or inside the engine at a ZeRO stage.

``deepspeed`` steps ``SingleDeviceMuonWithAuxAdam`` on parameters that DeepSpeed's own tagger has
marked. ``deepspeed:stage=1`` steps the same optimizer through ``deepspeed.initialize``. The two
are worth comparing: a stage may tag the heads and then orthogonalise the whole matrix.

DeepSpeed is imported when a subject is built, because importing it takes seconds and reads the
environment. Everything runs on the CPU: in this process, as the only member of a gloo group, or on
several ranks, where the engine divides what its stage divides.
"""

import math
import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.errors import SubjectError
from muonsplit.subjects.protocol import Hyper, Stepper, subject
from muonsplit.subjects.told import SWITCH, imported, join_group, read_options, same

_MUON = "deepspeed.runtime.zero.muon.original_muon"
_ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
# What a launcher says where there is one.
_ONLY_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


_CLIPPING = "gradient_clipping"
_CHOICES: dict[str, Mapping[str, Any]] = {
    "per_head": SWITCH,
    "ns_method": same("gram", "standard"),
}
_OF_ZERO: dict[str, Mapping[str, Any]] = dict.fromkeys(
    ("parameter_alignment", "reduce_scatter", "round_robin_gradients"), SWITCH
)
_OF_ENGINE: dict[str, Mapping[str, Any]] = {
    "stage": {"0": 0, "1": 1, "2": 2, "3": 3},
    "grad_accum_dtype": same("fp32", "bf16"),
    "zero_init": SWITCH,
    **_OF_ZERO,
}


# DeepSpeed's Gram takes float16 wherever the accelerator says it has it; so do some CPUs.
_FLOAT16 = torch.ops.mkldnn._is_mkldnn_fp16_supported()
DIALECT = "deepspeed-0.19.8:cpu_dtype=float16" if _FLOAT16 else "deepspeed-0.19.8"


@subject(
    dialect=DIALECT,
    recognises=True,
    off={"per_head": "false"},
    options={"ns_method": ("gram", "standard")},
    ways=("engine",),
)
def build(
    model: nn.Module, hyper: Hyper, micro_batches: int = 1, way: str = "", **options: str
) -> Stepper:
    """Builds DeepSpeed's per-head Muon for a model.

    Args:
        model: The model; DeepSpeed finds the heads from its ``config`` and parameter names.
        hyper: Learning rate and decay of both the Muon and the Adam parameters, and momentum.
            With momentum at 0 Adam's betas are 0 as well, so that no step remembers another.
        micro_batches: Backward passes a step, which the engine counts.
        way: How the model is divided among ranks; an engine divides it itself.
        **options: ``stage`` (0 to 3; absent steps the optimizer without the engine),
            ``per_head`` (true or false), ``ns_method`` (gram or standard) and, with a stage,
            ``gradient_clipping`` (default 0, where DeepSpeed's is 1), ``grad_accum_dtype`` (fp32
            or bf16), ``parameter_alignment``, ``reduce_scatter``, ``round_robin_gradients`` and,
            at stage 3, ``zero_init`` (true or false). A model in bfloat16 turns ``bf16`` on.

    Returns:
        A ``torch.optim.Optimizer`` without a stage, else an :class:`Engine`.

    Raises:
        SubjectError: An option is unknown, has an unusable value or needs a stage.
        ValueError: From DeepSpeed, when it finds no attention weight to split by heads.
    """
    chosen = _read(options)
    staged = "stage" in chosen
    if way and staged != (way == "engine"):
        raise SubjectError(
            f"The deepspeed subject {'with' if staged else 'without'} a stage does not run under "
            f"{way!r}.",
            "An engine divides the model itself: give a stage, and --sharding engine.",
        )
    if not staged:
        return _bare(model, hyper, chosen)
    config = {**_config(hyper, chosen), "gradient_accumulation_steps": micro_batches}
    if any(p.dtype == torch.bfloat16 for p in model.parameters()):
        config["bf16"] = {"enabled": True}
    return Engine(model, config, chosen.get("zero_init", False))


class Engine:
    """A DeepSpeed engine, driven as a :class:`~muonsplit.subjects.protocol.Stepper`.

    Args:
        model: The model, which the engine takes over.
        config: DeepSpeed's configuration.
        zero_init: Whether weights are sharded before the engine sees them, as ``zero.Init`` does.
    """

    def __init__(self, model: nn.Module, config: dict[str, Any], zero_init: bool = False) -> None:
        deepspeed = _deepspeed()
        _join_group()
        if zero_init:
            deepspeed.zero.Init(module=model, config_dict_or_path=config)
        self._model = model
        self._gathered = ExitStack()
        self._gather = deepspeed.zero.GatheredParameters
        self._sharded = config["zero_optimization"]["stage"] == 3
        self._engine: Any = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )[0]

    def forward(self) -> Tensor:
        """Returns the loss of the model, holding every weight in its full shape until backward."""
        # Stage 3 gathers a module's weights while that module runs, and the loss may read weights
        # without calling their module: so all are gathered at once.
        if self._sharded:
            self._gathered.enter_context(self._gather(list(self._model.parameters())))
        return self._engine()

    def backward(self, loss: Tensor) -> None:
        """Propagates the loss and reduces the gradients the way the stage does."""
        with self._gathered:
            self._engine.backward(loss)

    def step(self) -> None:
        """Updates the parameters and clears their gradients."""
        self._engine.step()

    def parameters(self) -> dict[str, Tensor]:
        """Returns a copy of every parameter in its full shape, by name."""
        named = dict(self._model.named_parameters())
        with self._gather(list(named.values()), enabled=self._sharded):
            return {name: weight.detach().clone() for name, weight in named.items()}

    def close(self) -> None:
        """Releases the engine's hooks and buffers; the process group stays for the next one."""
        self._engine.destroy()


def _bare(model: nn.Module, hyper: Hyper, chosen: Mapping[str, Any]) -> torch.optim.Optimizer:
    deepspeed = _deepspeed()
    params = _optimizer_params(hyper, chosen)
    deepspeed.set_optimizer_flags(
        SimpleNamespace(optimizer_name="muon", optimizer_params=params), model
    )
    # The engine's own class needs the engine: stepped on whole weights it ignores the heads.
    muon: Any = import_module(_MUON)
    groups: list[dict[str, Any]] = []
    trained = [p for p in model.parameters() if p.requires_grad]
    for use_muon, extra in ((True, ("momentum", "ns_method")), (False, ("betas",))):
        members = [p for p in trained if getattr(p, "use_muon", False) is use_muon]
        keys = ("lr", "weight_decay", *extra)
        settings = {key: params[key] for key in keys if key in params}
        groups.append({"params": members, "use_muon": use_muon, **settings})
    return muon.SingleDeviceMuonWithAuxAdam([group for group in groups if group["params"]])


def _read(options: Mapping[str, str]) -> dict[str, Any]:
    if "stage" not in options:
        for name in options:
            if name in (*_OF_ENGINE, _CLIPPING):
                said = f"Option {name!r} of the deepspeed subject is the engine's."
                raise SubjectError(said, "Give a stage too: stage=0, 1, 2 or 3.")
        return read_options("deepspeed", options, _CHOICES)
    left = dict(options)
    clipping = left.pop(_CLIPPING, "0")
    read = read_options("deepspeed", left, _CHOICES | _OF_ENGINE)
    try:
        return {**read, _CLIPPING: _clipping(clipping)}
    except ValueError:
        raise SubjectError(
            f"Option {_CLIPPING!r} of the deepspeed subject takes a finite number, 0 or more; got "
            f"{clipping!r}."
        ) from None


def _clipping(text: str) -> float:
    norm = float(text)
    if not math.isfinite(norm) or norm < 0:
        raise ValueError(text)
    return norm


def _optimizer_params(hyper: Hyper, chosen: Mapping[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {
        "lr": hyper.lr,
        "momentum": hyper.momentum,
        "weight_decay": hyper.weight_decay,
        "per_head_muon": chosen.get("per_head", True),
    }
    if hyper.momentum == 0:
        params["betas"] = (0.0, 0.0)
    if "ns_method" in chosen:
        params["ns_method"] = chosen["ns_method"]
    return params


def _config(hyper: Hyper, chosen: Mapping[str, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": chosen["stage"]}
    if chosen["stage"] == 3:
        # DeepSpeed refuses Muon at stage 3 with its own default of this option.
        zero["reduce_scatter"] = False
    zero.update({key: chosen[key] for key in _OF_ZERO if key in chosen})
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # By default DeepSpeed clips to norm 1, and at stages 1 to 3 it clips the orthogonalised
        # update, which would hide the step size of every weight.
        _CLIPPING: chosen[_CLIPPING],
        "zero_optimization": zero,
        "optimizer": {
            "type": "Muon",
            "params": {**_optimizer_params(hyper, chosen), "torch_adam": True},
        },
    }
    if "grad_accum_dtype" in chosen:
        config["data_types"] = {"grad_accum_dtype": chosen["grad_accum_dtype"]}
    return config


def _deepspeed() -> Any:
    os.environ.update({**_ENVIRONMENT, **{k: os.environ.get(k, v) for k, v in _ONLY_RANK.items()}})
    deepspeed = imported("deepspeed", "deepspeed==0.19.8")
    imported(_MUON, "deepspeed==0.19.8")
    deepspeed.utils.logger.setLevel("ERROR")
    return deepspeed


def _join_group() -> None:
    # Left to itself DeepSpeed probes for compilers and builds a shared-memory collective, which
    # one process has no use for.
    ops: Any = import_module("deepspeed.ops")
    ops.__compatible_ops__ = defaultdict(bool)
    join_group()
