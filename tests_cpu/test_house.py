"""The house rules that a reader cannot check at a glance."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import muonsplit

PACKAGE = Path(muonsplit.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

_CORE = {"errors", "layout", "dialect", "newton_schulz", "sharding", "muon"}
_DRIVEN = {*_CORE, "kernels", "geometry", "models", "observe", "subjects"}
# What each part of the package may import besides itself. geometry, truth and
# observe, the three answers, never import each other.
MAY_IMPORT = {
    "errors": set[str](),
    "layout": {"errors"},
    "dialect": {"errors"},
    "kernels": {"errors"},
    "sharding": {"errors", "layout"},
    "newton_schulz": {"errors", "dialect", "kernels"},
    "muon": {"errors", "layout", "dialect", "newton_schulz", "sharding"},
    "geometry": {"errors", "layout", "dialect", "sharding"},
    "cost": {"errors", "layout", "dialect", "newton_schulz", "sharding", "geometry"},
    "truth": {"errors", "layout"},
    "models": {"errors"},
    "files": set[str](),
    "evidence": {"errors", "files", "layout", "sharding"},
    "benchmark": {*_CORE, "kernels"},
    "observe": _CORE,
    "recognition": {"errors", "layout", "dialect", "geometry", "truth", "models", "files"},
    "subjects": {*_CORE, "models", "kernels"},
    "checks": {*_DRIVEN, "truth", "recognition"},
    "certificate": {*_DRIVEN, "truth", "recognition", "checks", "files"},
    "audit": {*_DRIVEN, "recognition", "truth", "certificate", "checks", "evidence", "files"},
    "faulty": {*_DRIVEN, "checks", "certificate"},
    "goldens": {*_DRIVEN, "files", "recognition"},
    "report": {
        *_DRIVEN,
        "cost",
        "recognition",
        "truth",
        "files",
        "checks",
        "certificate",
        "faulty",
        "audit",
    },
    "cli": {
        *_DRIVEN,
        "audit",
        "cost",
        "recognition",
        "truth",
        "checks",
        "certificate",
        "faulty",
        "goldens",
        "report",
    },
    "api": {*_DRIVEN, "checks", "certificate", "report"},
    "pytest_plugin": {"api", "errors"},
    "__main__": {"cli"},
    "__init__": {*_DRIVEN, "recognition", "truth", "api", "pytest_plugin", "evidence"},
}


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("muonsplit"):
            names = (
                [node.module] if "." in node.module else [f"muonsplit.{a.name}" for a in node.names]
            )
            yield from (name.split(".")[1] for name in names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downward(path: Path) -> None:
    assert set(imported(path)) <= MAY_IMPORT[part(path)] | {part(path)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_are_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    assert all((f.end_lineno or 0) - f.lineno < 60 for f in functions)
