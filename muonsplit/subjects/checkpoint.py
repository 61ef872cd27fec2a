"""A subject's state in a checkpoint that any number of ranks can read."""

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from muonsplit.errors import LackingError


def save(folder: str, model: nn.Module, stepper: Any) -> None:
    """Writes the state of the subject's optimizers with ``torch.distributed.checkpoint``.

    Args:
        folder: A folder that all ranks see.
        model: The model whose parameter names the state is stored by.
        stepper: A torch optimizer, or something that has ``optimizers``.

    Raises:
        LackingError: If it has no state that can be stored by name.
    """
    checkpoint, state = _state(model, stepper)
    _quietly(lambda: checkpoint.save(state, checkpoint_id=folder))


def load(folder: str, model: nn.Module, stepper: Any) -> None:
    """Puts back what :func:`save` wrote, on this number of ranks.

    Args:
        folder: As for :func:`save`.
        model: As for :func:`save`.
        stepper: As for :func:`save`.

    Raises:
        LackingError: If it has no state that can be stored by name.
    """
    checkpoint, state = _state(model, stepper)
    _quietly(lambda: checkpoint.load(state, checkpoint_id=folder))
    by_name: Any = import_module("torch.distributed.checkpoint.state_dict")
    by_name.set_optimizer_state_dict(model, _optimizers(stepper), state["optimizer"])


def _state(model: nn.Module, stepper: Any) -> tuple[Any, dict[str, Any]]:
    optimizers = _optimizers(stepper)
    by_name: Any = import_module("torch.distributed.checkpoint.state_dict")
    try:
        state = by_name.get_optimizer_state_dict(model, optimizers)
    except (KeyError, AssertionError, RuntimeError) as error:
        said = f"its state cannot be stored by parameter name: {type(error).__name__}: {error}"
        raise LackingError(said) from error
    return import_module("torch.distributed.checkpoint"), {"optimizer": state}


def _optimizers(stepper: Any) -> list[torch.optim.Optimizer]:
    found = [stepper] if isinstance(stepper, torch.optim.Optimizer) else None
    found = found or getattr(stepper, "optimizers", None)
    if not found:
        raise LackingError("the subject is no torch optimizer whose state can be stored by name")
    return list(found)


def _quietly(act: Callable[[], object]) -> None:
    refused: Any = import_module("torch.distributed.checkpoint.api").CheckpointException
    with warnings.catch_warnings():
        # Of a single process without a group, which is what is meant here.
        warnings.simplefilter("ignore")
        try:
            act()
        except refused as error:
            # It is no Exception, and would end the process.
            raise RuntimeError(f"the checkpoint fails: {error}") from error
