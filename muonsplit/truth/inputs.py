"""Meta inputs for a forward pass, and for the parts that a text-only pass does not reach."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Long enough to have time, a square, and a multiple of small windows.
TOKENS = 16
_WIDE = ("hidden_states", "hidden_state", "inputs_embeds", "x", "input", "inputs", "embeddings")
_TOLD = {"output_attentions": False, "output_hidden_states": False, "use_cache": False}


def text(model: nn.Module, device: str = "meta") -> dict[str, Any]:
    """What a text-only forward pass takes, as far as the model's signature names it."""
    ids = torch.arange(1, TOKENS + 1, device=device)[None]
    names = _parameters(model)
    offered = {
        "input_ids": ids,
        "decoder_input_ids": ids,
        "use_cache": False,
        "return_dict": True,
    }
    taken = {name: value for name, value in offered.items() if name in names}
    return taken or {next(iter(names), "input_ids"): ids}


def guesses(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Inputs that a part of a model might take, likeliest first: they decide no answer.

    A wrong guess fails or is never followed to a product; it cannot move a row elsewhere.
    """
    names = _parameters(module)
    if not names:
        return
    width, *others = [*_widths(module), None]
    if width is None:
        return
    beside = any(_is_beside(name) for name in names)
    for shape in ((1, TOKENS, width), (TOKENS, width), (1, 4, 4, width), (1, width, 4, 4)):
        # What is attended to may be wider or narrower than what attends.
        for other in dict.fromkeys((width, *others)) if beside else (width,):
            if other is not None:
                there = tuple(other if size == width else size for size in shape)
                yield _given(names, shape, there)


def _given(
    names: dict[str, inspect.Parameter], shape: tuple[int, ...], beside: tuple[int, ...]
) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for index, (name, parameter) in enumerate(names.items()):
        value = _value(name, index, shape, beside)
        if value is not None or parameter.default is inspect.Parameter.empty:
            given[name] = value
    return given


def _value(name: str, index: int, shape: tuple[int, ...], beside: tuple[int, ...]) -> Any:
    one = torch.ones(1, device="meta")
    if index == 0 or name in _WIDE:
        return torch.zeros(shape, device="meta")
    if name in _TOLD:
        return _TOLD[name]
    if _is_beside(name):
        return torch.zeros(beside, device="meta")
    if name in ("position_embeddings", "position_embedding", "rotary_pos_emb_tuple"):
        # Size one broadcasts against a head of any width.
        return (one, one)
    if name in ("cos", "sin", "rotary_pos_emb", "freqs_cis", "freqs"):
        return one
    if name == "cu_seqlens":
        return torch.tensor([0, shape[-2]], dtype=torch.int32, device="cpu")
    if name in ("max_seqlen", "seqlen"):
        return shape[-2]
    if name in ("grid_thw", "image_grid_thw"):
        return torch.tensor([[1, 4, 4]], device="cpu")
    return None


def _is_beside(name: str) -> bool:
    return name.endswith(("_states", "_hidden", "_embeds")) or name in ("key", "value")


def _widths(module: nn.Module) -> list[int]:
    """The inputs of the weights that a part of a model holds, in order, each once.

    A part that holds a table takes numbers of its rows, and is not called.
    """
    found: dict[int, None] = {}
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            return []
        for name in ("weight", "in_proj_weight"):
            weight: Any = getattr(part, name, None)
            if isinstance(weight, Tensor) and 0 < weight.ndim <= 2:
                found[weight.shape[-1]] = None
    return list(found)[:3]


def _parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    try:
        found = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return {}
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in found.items() if p.kind not in kinds}
