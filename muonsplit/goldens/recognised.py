"""Goldens of recognition: plans of the golden models, truths of the models of hard cases."""

import json
from collections.abc import Iterator
from typing import Any

from muonsplit.dialect import DEFAULT_DIALECT
from muonsplit.geometry import plan
from muonsplit.goldens.golden import Golden, text_differences
from muonsplit.models import load
from muonsplit.recognition.rows import weight_rows


def plans() -> Iterator[Golden]:
    """One for each golden model."""
    for model in load.golden_models():
        path = load.golden_root() / "models" / model / "plan.json"
        yield Golden(f"plan/{model}", path, lambda model=model: _plan(model), text_differences)


def _plan(model: str) -> bytes:
    """The plan, a line a decision, so that a review shows what moved."""
    made = plan(load.build(load.resolve(model).config), DEFAULT_DIALECT).to_json()
    lists = {key: value for key, value in made.items() if isinstance(value, list)}
    parts = [f'"model": {json.dumps(model)}', f'"dialect": {json.dumps(made["dialect"])}']
    for key, decisions in lists.items():
        rows = ",\n".join(json.dumps(d, ensure_ascii=False) for d in decisions)
        parts.append(f'"{key}": [\n{rows}\n]')
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode()


def cases() -> list[dict[str, Any]]:
    """The hard cases of recognition, their answers found elsewhere: see their ``source``."""
    return json.loads((load.golden_root() / "cases.json").read_text())


def truths() -> Iterator[Golden]:
    """One for each model of :func:`cases`."""
    for model in dict.fromkeys(case["model"] for case in cases()):
        name = model.removeprefix("transformers:")
        path = load.golden_root() / "truth" / f"{name}.json"
        yield Golden(f"truth/{name}", path, lambda model=model: _truth(model), text_differences)


def _truth(model: str) -> bytes:
    """What a model computes beside what the rules say, a line a weight."""
    rows = weight_rows(load.build(load.resolve(model).config))
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return f'{{"model": {json.dumps(model)}, "weights": [\n{lines}\n]}}\n'.encode()
