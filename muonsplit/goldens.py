"""Goldens: what was once reviewed, and the step that reviews a change.

``plan.json`` of every golden model is what the rules say of it at full size; ``truth/*`` is what
every model of ``cases.json`` says of its own attention, beside the plan. ``numeric/*`` holds
inputs of small integers, exact in every dtype, and outputs of the float64 singular-value oracle.
A value that differs is written beside the old one as ``*.new`` and refused until it is accepted.
"""

import difflib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from muonsplit.dialect import DEFAULT_DIALECT, DIALECTS
from muonsplit.errors import GoldenError, UsageError
from muonsplit.files import write_whole
from muonsplit.geometry import plan
from muonsplit.models.load import build, golden_models, golden_root, resolve
from muonsplit.newton_schulz import scale_factor, singular_value_oracle
from muonsplit.observe.gradients import generator
from muonsplit.recognition.rows import weight_rows

# (blocks, rows, columns): wide, tall with a ratio that is no integer, square.
_SHAPES = {"wide": (3, 12, 32), "tall": (3, 28, 8), "square": (2, 16, 16)}
# LAPACK builds differ in the last bits of float64.
_NUMERIC = 1e-11


@dataclass(frozen=True, slots=True)
class Golden:
    """One golden file.

    Attributes:
        name: ``plan/MODEL`` or ``numeric/DIALECT``.
        path: Where it is.
        make: Computes its content anew.
        differences: What differs between two contents, line by line; nothing if they agree.
    """

    name: str
    path: Path
    make: Callable[[], bytes]
    differences: Callable[[bytes, bytes], list[str]]

    @property
    def waiting(self) -> Path:
        """Where a new content waits for review."""
        return self.path.with_name(self.path.name + ".new")


def goldens() -> dict[str, Golden]:
    """Every golden by name."""
    return {golden.name: golden for golden in (*_plans(), *_truths(), *_numerics())}


def check(names: Sequence[str] = ()) -> list[str]:
    """Computes goldens anew and writes what differs beside the old.

    Args:
        names: Which; all by default.

    Returns:
        A line for each that differs, is missing, or waits for review; nothing if all is well.
    """
    problems: list[str] = []
    for golden in _chosen(names):
        new = golden.make()
        old = golden.path.read_bytes() if golden.path.is_file() else None
        if old is not None and not golden.differences(old, new):
            if golden.waiting.exists():
                problems.append(f"{golden.name}: {golden.waiting.name} waits for review")
            continue
        write_whole(golden.waiting, new)
        what = "is missing" if old is None else "differs"
        problems.append(f"{golden.name}: {what}; the new value is in {golden.waiting}")
    return problems


def diff(names: Sequence[str] = ()) -> list[str]:
    """What the values that wait for review would change, line by line."""
    lines: list[str] = []
    for golden in _chosen(names):
        if golden.waiting.is_file():
            old = golden.path.read_bytes() if golden.path.is_file() else b""
            changed = golden.differences(old, golden.waiting.read_bytes())
            lines += [f"{golden.name}:", *changed]
    return lines


def accept(names: Sequence[str]) -> list[str]:
    """Puts reviewed values in place of the old.

    Returns:
        The names that were accepted.

    Raises:
        GoldenError: If nothing waits under a name.
    """
    accepted: list[str] = []
    for golden in _chosen(names):
        if not golden.waiting.is_file():
            raise GoldenError(f"{golden.name} has no new value.", "Run muonsplit golden check.")
        os.replace(golden.waiting, golden.path)
        accepted.append(golden.name)
    return accepted


def _chosen(names: Sequence[str]) -> list[Golden]:
    known = goldens()
    for name in names:
        if name not in known:
            raise UsageError(f"There is no golden {name!r}.", f"Known: {', '.join(known)}.")
    return [known[name] for name in names or known]


def _plans() -> Iterator[Golden]:
    for model in golden_models():
        path = golden_root() / "models" / model / "plan.json"
        yield Golden(f"plan/{model}", path, lambda model=model: _plan(model), _text_differences)


def _plan(model: str) -> bytes:
    """The plan, a line a decision, so that a review shows what moved."""
    made = plan(build(resolve(model).config), DEFAULT_DIALECT).to_json()
    lists = {key: value for key, value in made.items() if isinstance(value, list)}
    parts = [f'"model": {json.dumps(model)}', f'"dialect": {json.dumps(made["dialect"])}']
    for key, decisions in lists.items():
        rows = ",\n".join(json.dumps(d, ensure_ascii=False) for d in decisions)
        parts.append(f'"{key}": [\n{rows}\n]')
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode()


def cases() -> list[dict[str, Any]]:
    """The hard cases of recognition, their answers found elsewhere: see their ``source``."""
    return json.loads((golden_root() / "cases.json").read_text())


def _truths() -> Iterator[Golden]:
    for model in dict.fromkeys(case["model"] for case in cases()):
        name = model.removeprefix("transformers:")
        path = golden_root() / "truth" / f"{name}.json"
        yield Golden(f"truth/{name}", path, lambda model=model: _truth(model), _text_differences)


def _truth(model: str) -> bytes:
    """What a model computes beside what the rules say, a line a weight."""
    rows = weight_rows(build(resolve(model).config))
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return f'{{"model": {json.dumps(model)}, "weights": [\n{lines}\n]}}\n'.encode()


def _text_differences(old: bytes, new: bytes) -> list[str]:
    before, after = old.decode().splitlines(), new.decode().splitlines()
    return list(difflib.unified_diff(before, after, "accepted", "new", lineterm="", n=0))


def _numerics() -> Iterator[Golden]:
    for name in DIALECTS:
        path = golden_root() / "numeric" / f"{name}.safetensors"
        yield Golden(f"numeric/{name}", path, lambda name=name: _numeric(name), _differences)


def _numeric(name: str) -> bytes:
    tensors: dict[str, Tensor] = {}
    arithmetic = DIALECTS[name].arithmetic
    for label, shape in _SHAPES.items():
        draw = torch.randint(-3, 4, shape, generator=generator("numeric", label))
        given = draw.to(torch.float64)
        factor = scale_factor(arithmetic, *shape[1:])
        tensors[f"{label}.input"] = given
        tensors[f"{label}.expected"] = singular_value_oracle(given, arithmetic) * factor
    rule = {"rule": "fp64 SVD polynomial, arithmetic of the dialect, scaled by the block's shape"}
    return save(tensors, metadata={"dialect": name, **rule})


def _differences(old: bytes, new: bytes) -> list[str]:
    """Tensors that differ by more than the last bits."""
    try:
        before, after = load(old), load(new)
    except Exception as error:
        return [f"unreadable: {error}"]
    found = [f"{key}: only on one side" for key in sorted(before.keys() ^ after.keys())]
    for key in sorted(before.keys() & after.keys()):
        off = float((before[key] - after[key]).norm() / before[key].norm())
        if not off <= _NUMERIC:
            found.append(f"{key}: relative difference {off:.3g}, {_NUMERIC:g} allowed")
    return found
