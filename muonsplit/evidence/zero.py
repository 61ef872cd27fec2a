"""Checkpoints that DeepSpeed wrote at a ZeRO stage, read by DeepSpeed's own converter.

Their files are pickled, and the converter runs what is in them: so they are read only where the
caller trusts whoever made them.
"""

import io
import os
import re
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonsplit.errors import EvidenceError
from muonsplit.evidence.saved import Entry
from muonsplit.evidence.tensors import checked, entry_of

_CONVERTER = "deepspeed.utils.zero_to_fp32"
_STATES = ("*_optim_states.pt", "*_model_states.pt")
_MODEL = "mp_rank_00_model_states.pt"


_TRUST = "Or say that pickles are trusted."
_SAVE = "Where the run was made, save the weights by safetensors.torch.save_file, and give that."
_CONVERT = (
    "Where the run was made, run the script that lies in the checkpoint, python zero_to_fp32.py "
    "--safe_serialization . OUT, and give OUT."
)


class Zero:
    """Weights of a DeepSpeed checkpoint; see :class:`~muonsplit.evidence.saved.Saved`.

    These are the master copies in float32, whatever the model's dtype. At stage 3 a weight is put
    together when it is read; at stages 1 and 2 the converter holds all weights in memory at once.
    Stage 0 has no master copies apart: its weights are as the model has them.

    Args:
        path: What the caller asked for.
        folder: The folder that holds the states; see :func:`states`.

    Raises:
        EvidenceError: If DeepSpeed is not installed or cannot convert it.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        _refuse_parallel(folder)
        held = _unconverted(folder) if _is_plain(folder) else _converted(folder)
        # Buffers come with the weights; what is no tensor is of no use here.
        self._held = {name: t for name, t in held.items() if hasattr(t, "dtype")}
        self.entries = {n: Entry(tuple(t.shape), t.dtype) for n, t in self._held.items()}
        tag = re.fullmatch(r"global_step(\d{1,18})", folder.name)
        self.step = int(tag[1]) if tag else None

    def read(self, name: str) -> Tensor:
        """One weight, put together from what the ranks held."""
        entry = entry_of(self, name)
        try:
            # A view of what the converter holds: a copy is the caller's own.
            tensor = self._held[name].contiguous().clone()
        except Exception as error:
            raise _failed(self.path, error) from error
        return checked(tensor, entry, name, self.path)


def states(path: Path) -> Path | None:
    """The folder of a DeepSpeed checkpoint that holds its states.

    Args:
        path: That folder, or the one above it, where ``latest`` names it or there is no other.

    Raises:
        EvidenceError: If there are several and ``latest`` does not choose, or what it names is
            missing.
    """
    if _holds_states(path):
        return path
    latest = path / "latest"
    if latest.is_file():
        tag = latest.read_text(encoding="utf-8", errors="replace")[:300].strip()
        # A name that leads elsewhere is none.
        if tag not in ("", ".", "..") and not re.search(r"[/\\\0]", tag):
            folder = path / tag
            if folder.is_dir() and _holds_states(folder):
                return folder
        raise EvidenceError(
            f"{latest} names {tag!r}, and {path} has no such folder of DeepSpeed's states.",
            "Give the folder of the step that is meant.",
        )
    tags = sorted(entry for entry in path.iterdir() if entry.is_dir() and _holds_states(entry))
    if len(tags) > 1:
        raise EvidenceError(
            f"{path} has several DeepSpeed checkpoints: {', '.join(t.name for t in tags[:5])}.",
            "Give the folder of the step that is meant.",
        )
    return tags[0] if tags else None


def refusal(path: Path, folder: Path) -> EvidenceError:
    """Why a checkpoint is not read where pickles are not trusted, and what to do.

    Args:
        path: What the caller asked for.
        folder: What :func:`states` found there.
    """
    return EvidenceError(
        f"{path} is a DeepSpeed checkpoint, whose files are pickled; nothing was loaded.",
        f"{_SAVE if _is_plain(folder) else _CONVERT} {_TRUST}",
    )


def _is_plain(folder: Path) -> bool:
    # Stage 0 saves no states of the optimizer apart, and the converter refuses it.
    return not any(folder.glob("*_optim_states.pt"))


def _holds_states(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in _STATES)


def _refuse_parallel(folder: Path) -> None:
    others = {p.name for p in folder.glob("*mp_rank_*_model_states.pt")}
    others = {name for name in others if "mp_rank_00_" not in name}
    if others or any(folder.glob("layer_*-model_*-model_states.pt")):
        raise EvidenceError(
            f"{folder} was saved under tensor or pipeline parallelism, which DeepSpeed's converter "
            "does not put together.",
            "Convert it to a universal or Hugging Face checkpoint where the run was made.",
        )


def _converted(folder: Path) -> dict[str, Any]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    noise = io.StringIO()
    try:
        # Importing and converting both print.
        with redirect_stdout(noise), redirect_stderr(noise):
            converter: Any = import_module(_CONVERTER)
            return dict(
                converter.get_fp32_state_dict_from_zero_checkpoint(
                    str(folder.parent), folder.name, lazy_mode=True
                )
            )
    except ImportError as error:
        raise EvidenceError(
            f"Reading {folder} needs DeepSpeed, which cannot be imported: {error}.",
            f"Install deepspeed>=0.19.8. {_CONVERT}",
        ) from error
    except Exception as error:
        raise _failed(folder, error) from error


def _unconverted(folder: Path) -> dict[str, Any]:
    file = folder / _MODEL
    try:
        held = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
        return dict(held["module"])
    except Exception as error:
        raise _failed(folder, error) from error


def _failed(path: Path, error: Exception) -> EvidenceError:
    first = (str(error).strip().splitlines() or [""])[0]
    return EvidenceError(
        f"DeepSpeed's converter cannot read {path}: {type(error).__name__}: {first:.200}",
        "All ranks' files of one step have to be there, as DeepSpeed 0.19.8 writes them.",
    )
