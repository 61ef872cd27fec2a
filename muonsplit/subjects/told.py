"""How a peer is told where the heads are, and which of its own options to use."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from muonsplit.errors import SubjectError
from muonsplit.layout import Layout

Choices = Mapping[str, Mapping[str, Any]]

SWITCH: Mapping[str, bool] = {"true": True, "false": False}


def same(*values: str) -> dict[str, Any]:
    """Values that the peer calls by the same names."""
    return {value: value for value in values}


def read_options(peer: str, options: Mapping[str, str], choices: Choices) -> dict[str, Any]:
    """What the options of a connection string choose.

    Args:
        peer: Name of the subject.
        options: The options as they are written.
        choices: The values that each option may have, and what each stands for.

    Raises:
        SubjectError: If there is no such option, or it has no such value.
    """
    listed = f"Allowed options: {', '.join(sorted(choices)) or 'none'}."
    for name, text in options.items():
        if name not in choices:
            said = f"The {peer} subject takes no option {name!r} here (value {text!r})."
            raise SubjectError(said, listed)
        if text not in choices[name]:
            wanted = ", ".join(choices[name])
            said = f"Option {name!r} of the {peer} subject takes {wanted}; got {text!r}."
            raise SubjectError(said, listed)
    return {name: choices[name][text] for name, text in options.items()}


def imported(module: str, install: str) -> Any:
    """Imports a peer as it is written: what it would compile stays Python.

    Args:
        module: The module to import.
        install: What there is to install, for the error.

    Raises:
        SubjectError: If it cannot be imported.
    """
    # Compiling takes a minute and rounds differently. Read whenever torch.compile is called.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        return import_module(module)
    except ImportError as error:
        raise SubjectError(
            f"{module} cannot be imported: {error}.", f"Install {install}."
        ) from error


def without_triton(package: str, install: str) -> Any:
    """Imports a peer that would iterate with triton even on a CPU, and gives it its own loops.

    muonium and dtensor-muon hold loops for a CPU, but never choose them there.

    Args:
        package: The package to import.
        install: What there is to install, for the error.

    Raises:
        SubjectError: If it cannot be imported.
    """
    module = imported(f"{package}.orthogonalize.orthogonalize", f"{install} and triton")
    loops = {"newton_schulz": module.ns_loop, "polar_express": module.pe_loop}

    def choose(strategy: str, use_triton: bool) -> Any:
        return loops[strategy]

    module._get_orthogonalization_fn = choose
    return import_module(package)


def join_group() -> None:
    """Makes this process the only member of a gloo group, unless it is in one."""
    distributed: Any = import_module("torch.distributed")
    if not distributed.is_initialized():
        # An in-process store needs no port, so runs side by side cannot collide.
        store = distributed.HashStore()
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def sizes(peer: str, layout: Layout) -> list[int]:
    """Rows of each block from top to bottom, for a peer that is told heights.

    Args:
        peer: Name of the subject, for the error.
        layout: The layout to put into heights.

    Raises:
        SubjectError: If blocks are columns, or hold rows that are apart.
    """
    blocks = layout.blocks()
    if layout.axis == 0 and all(len(block.spans) == 1 for block in blocks):
        return [block.rows for block in blocks]
    why = "are columns" if layout.axis else "gather rows that are apart"
    raise SubjectError(
        f"{peer} is told the heights of consecutive blocks of rows, and the blocks of {layout} "
        f"{why}.",
        "Ask for a dialect that cuts consecutive rows, such as NAME:fused_qkv=heads, or certify a "
        "peer that is given functions: gram-newton-schulz, optimuon or emerging-optimizers.",
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """A layout as the two functions that some peers take; saved with their state.

    Attributes:
        layout: How a weight is cut.
    """

    layout: Layout

    def split(self, weight: Tensor) -> list[Tensor]:
        """The blocks of a weight.

        Args:
            weight: Shape ``[rows, cols]``; ``[cols, rows]`` for a layout of axis 1.

        Returns:
            Matrices ``[width, cols]``, equal widths together.
        """
        return [block for batch in self.layout.batches(weight) for block in batch]

    def join(self, blocks: list[Tensor]) -> Tensor:
        """The weight that :meth:`split` took apart.

        Args:
            blocks: Matrices in the order and of the shapes that it gave.
        """
        shape = (self.layout.rows, blocks[0].shape[-1])
        weight = blocks[0].new_empty(shape[:: -1 if self.layout.axis else 1])
        left = iter(blocks)
        batches = [torch.stack(list(islice(left, len(b)))) for b in self.layout.batches(weight)]
        self.layout.write(batches, weight)
        return weight
