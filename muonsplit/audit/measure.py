"""What is measured of one weight: a few numbers for each way it may have been cut."""

import ctypes
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from muonsplit.audit.spectra import Sized, sized, unsure
from muonsplit.errors import EvidenceError
from muonsplit.evidence.saved import Saved
from muonsplit.layout import Layout

# A change whose rounding is this much smaller than its largest value hides nothing.
_NEGLIGIBLE = 1e-3


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a weight without its values.

    Attributes:
        before: SHA-256 of what was read of the earlier checkpoint.
        after: Likewise of the later one.
        sizes: Sizes of the blocks of each cut.
    """

    before: str
    after: str
    sizes: dict[str, tuple[Sized, ...]]


@dataclass(frozen=True, slots=True)
class Change:
    """What a weight became.

    Attributes:
        values: Before less decay, less after; float32, ``[rows, cols]`` or a stack of such.
        unsure: Standard deviation of each element's error by rounding; None if it is negligible.
        before: SHA-256 of what was read of the earlier checkpoint.
        after: Likewise of the later one.
    """

    values: Tensor
    unsure: Tensor | None
    before: str
    after: str


def change(before: Saved, after: Saved, name: str, decay: float) -> Change:
    """Reads a weight twice.

    Args:
        before: The earlier checkpoint.
        after: The later one.
        name: The weight.
        decay: Learning rate times weight decay, which the weight lost besides.

    Raises:
        EvidenceError: If it cannot be read, or holds what is no number.
    """
    earlier = _read(before, name)
    later = _read(after, name)
    digests = _digest(earlier), _digest(later)
    if digests[0] == digests[1]:
        decay = 0.0  # what was not stepped did not decay either
    # Of float64 no more is kept than of float32.
    earlier, later = (x.float() if x.dtype == torch.float64 else x for x in (earlier, later))
    for half in (torch.bfloat16, torch.float16):
        # Both: a run in float32 may begin with weights of a half precision.
        if _all_of(half, later) and _all_of(half, earlier):
            earlier, later = earlier.to(half), later.to(half)
    coarser = max(later, earlier, key=lambda x: torch.finfo(x.dtype).eps)
    values = earlier.float() if earlier.dtype != torch.float32 else earlier
    values = values.mul_(1 - decay).sub_(later)
    if not bool(torch.isfinite(values).all()):
        raise EvidenceError(f"{name} holds NaN or infinity.", "The run had diverged.")
    most = 2 * torch.finfo(coarser.dtype).eps * float(coarser.float().norm())
    negligible = _NEGLIGIBLE * float(values.norm()) / min(values.shape[-2:]) ** 0.5
    return Change(values, None if most <= negligible else unsure(coarser), *digests)


def _read(saved: Saved, name: str) -> Tensor:
    found = saved.read(name)
    if not found.dtype.is_floating_point or found.element_size() < 2:
        raise EvidenceError(
            f"{name} is stored in {found.dtype} at {saved.path}: steps do not show in it.",
            "Audit the checkpoint that training resumes from.",
        )
    return found


def _all_of(half: torch.dtype, values: Tensor) -> bool:
    """Whether float32 values are those of a half precision; the first rows tell if they are not."""
    return values.dtype == torch.float32 and all(
        torch.equal(part, part.to(half).float()) for part in values.split(64)
    )


def _digest(values: Tensor) -> str:
    values = values.contiguous()
    raw = (ctypes.c_ubyte * values.nbytes).from_address(values.data_ptr())
    return hashlib.sha256(raw).hexdigest()


def measured(found: Change, cuts: Mapping[str, Layout | None], doubt: float) -> Measured:
    """The sizes of a weight's blocks under each cut.

    Args:
        found: What it became.
        cuts: Layouts by name.
        doubt: What else may hide in the largest singular value of a block: decay that was not
            taken off.
    """
    sizes = {name: sized(found.values, layout, found.unsure) for name, layout in cuts.items()}
    doubted = {
        name: tuple(s._replace(hidden=s.hidden + doubt) for s in each)
        for name, each in sizes.items()
    }
    return Measured(found.before, found.after, doubted)
