"""What makes equal bits a promise can be read in the kernel's text; nothing here runs it."""

import ast
import inspect
from pathlib import Path

import torch

import muonsplit
from muonsplit.kernels import launch
from muonsplit.kernels.tiles import Tile, tile

KERNEL = Path(muonsplit.__file__).parent / "kernels" / "kernel.py"
TREE = ast.parse(KERNEL.read_text())
FUNCTIONS = {node.name: node for node in ast.walk(TREE) if isinstance(node, ast.FunctionDef)}
MAIN = FUNCTIONS["newton_schulz_kernel"]


def named(node: ast.AST) -> list[str]:
    """Every name and attribute in a piece of code, in order."""
    return [
        found.id if isinstance(found, ast.Name) else found.attr
        for found in ast.walk(node)
        if isinstance(found, ast.Name | ast.Attribute)
    ]


def constant(function: ast.FunctionDef) -> set[str]:
    """Its compile-time arguments."""
    return {
        a.arg for a in function.args.args if a.annotation and "constexpr" in named(a.annotation)
    }


def test_no_sum_is_shared_and_nothing_is_tuned() -> None:
    used = set(named(TREE))
    assert not {name for name in used if name.startswith("atomic") or "autotune" in name}
    # One axis of programs: a second one would split a block or a sum.
    axes = [
        call.args[0].value
        for call in ast.walk(TREE)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("program_id", "num_programs")
        and isinstance(call.args[0], ast.Constant)
    ]
    assert axes == [0, 0]


def test_the_number_of_blocks_bounds_a_loop_and_chooses_no_code() -> None:
    assert "blocks" not in constant(MAIN)
    assert named(MAIN).count("blocks") == 1
    loop = next(node for node in ast.walk(MAIN) if isinstance(node, ast.For))
    assert named(loop.iter) == ["range", "first", "blocks", "num_programs", "tl"]
    decorator = MAIN.decorator_list[0]
    assert isinstance(decorator, ast.Call)
    kept = {word.arg: word.value for word in decorator.keywords}["do_not_specialize"]
    numbers = {a.arg for a in MAIN.args.args} - constant(MAIN)
    small = {name for name in numbers if name.islower()} - {"factor", "epsilon", "scale"}
    assert set(ast.literal_eval(kept)) == small


def test_compile_time_arguments_know_a_block_and_no_batch() -> None:
    assert set(inspect.signature(launch.constants).parameters) == {
        "rows",
        "cols",
        "program",
        "ends",
        "entry",
        "interpreted",
    }
    assert set(inspect.signature(tile).parameters) == {"rows", "cols", "dtype", "architecture"}
    assert set(inspect.signature(launch.options).parameters) == {"entry"}


def test_products_and_sums_are_not_fused_and_float32_is_not_cut() -> None:
    assert launch.options(Tile(16, 16, 16, 4, 2))["enable_fp_fusion"] is False
    dots = [
        call
        for call in ast.walk(TREE)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "dot"
    ]
    precisions = [
        ast.literal_eval(word.value)
        for call in dots
        for word in call.keywords
        if word.arg == "input_precision"
    ]
    assert precisions == ["ieee"] * len(dots)
    assert dots


def test_what_one_thread_writes_is_waited_for_before_another_reads() -> None:
    # No interpreter and no binary shows a missing barrier; a race on a device may, or may not.
    loop = next(node for node in ast.walk(MAIN) if isinstance(node, ast.For))
    ops = next(node for node in loop.body if isinstance(node, ast.For))
    before, after = loop.body[loop.body.index(ops) - 1], ops.body[-1]
    assert "debug_barrier" in named(before)
    assert "debug_barrier" in named(after)
    bodies = [node.body for node in ast.walk(FUNCTIONS["_operate"]) if isinstance(node, ast.If)]
    statements = [[ast.unparse(line) for line in body] for body in bodies]
    leaving = next(lines for lines in statements if lines[-1].startswith("_leave("))
    assert leaving[-2] == "tl.debug_barrier()"


def test_what_is_misaligned_or_has_other_strides_is_copied() -> None:
    X = torch.arange(1.0, 49.0).view(2, 4, 6)
    off = torch.cat([torch.zeros(1), X.flatten()])[1:].view_as(X)
    for other in (off, X.mT.contiguous().mT, X.repeat(1, 1, 2)[..., :6], X[:1].expand(2, 4, 6)):
        held = launch.aligned(other)
        assert held.is_contiguous()
        assert held.data_ptr() % 16 == 0
        assert torch.equal(held, other)
    assert launch.aligned(X).data_ptr() == X.data_ptr()
