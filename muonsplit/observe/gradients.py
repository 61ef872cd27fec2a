"""Inputs for a subject: seeded, and made without knowing where the heads are."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]


def generator(*key: object) -> torch.Generator:
    """A generator whose seed is a digest of the key, so that order of use does not matter."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def draw(shapes: Shapes, *key: object, size: float = 1.0) -> dict[str, Tensor]:
    """One standard normal tensor a shape, times ``size``; float32."""
    return {
        name: torch.randn(shape, generator=generator(*key, name)) * size
        for name, shape in shapes.items()
    }


def draw_uneven(shapes: Shapes, *key: object) -> dict[str, Tensor]:
    """Normal gradients whose rows come in stretches of different size, from ½ to 2.

    Heads of one size hide a whole-matrix update and a shared norm; the stretches are of random
    length, so that they say nothing of where a head begins.
    """
    return {
        name: tensor * _stretches(tensor, *key, name) for name, tensor in draw(shapes, *key).items()
    }


def conditioned(batch: Tensor) -> Tensor:
    """The same singular vectors with singular values from 1 down to ⅓, evenly; float32.

    Newton–Schulz amplifies rounding along small singular values, so the sharpest comparison with
    an exact result is made without any.

    Args:
        batch: Matrices, shape ``[..., rows, cols]``.
    """
    U, S, Vh = torch.linalg.svd(batch.double(), full_matrices=False)
    return ((U * torch.linspace(1, 1 / 3, S.shape[-1], dtype=S.dtype)) @ Vh).float()


def _stretches(tensor: Tensor, *key: object) -> Tensor:
    rows = tensor.numel() // tensor.shape[-1]
    source = generator(*key, "stretches")
    lengths = torch.randint(3, 18, (rows,), generator=source)
    sizes = 4.0 ** (torch.rand(rows, generator=source) - 0.5)
    per_row = sizes.repeat_interleave(lengths)[:rows]
    if tensor.ndim < 2:
        return torch.ones(())
    return per_row.view(*tensor.shape[:-1], 1)


def flip_row(gradient: Tensor, row: int, *key: object) -> Tensor:
    """The gradient with random signs in one row; its norm keeps every bit.

    Negation is exact and a square forgets it, so whatever moves elsewhere moved because rows are
    multiplied with each other, not because they share a norm.

    Args:
        gradient: Shape ``[..., cols]``.
        row: Index into the flattened rows.
        key: Seeds the signs.
    """
    flipped = gradient.clone()
    rows = flipped.view(-1, gradient.shape[-1])
    rows[row] *= _signs(rows.shape[1], *key)
    return flipped


def flip_column(gradient: Tensor, column: int, *key: object) -> Tensor:
    """The gradient with random signs in one column; see :func:`flip_row`."""
    flipped = gradient.clone()
    rows = flipped.view(-1, gradient.shape[-1])
    rows[:, column] *= _signs(rows.shape[0], *key)
    return flipped


def _signs(count: int, *key: object) -> Tensor:
    """Random signs, both of which occur; a single one is a change."""
    signs = torch.randint(0, 2, (count,), generator=generator(*key)) * 2.0 - 1
    signs[0], signs[-1] = 1.0, -1.0
    return signs
