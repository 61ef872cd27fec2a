"""The kernel on a CUDA device: its numbers, and the promise that a block's bits are its own.

Rounding to half precision hides what differs in the last place, so float32 comes first everywhere.
Bits are compared as integers: +0 is not −0, and a NaN equals itself.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic, dialect_named
from muonsplit.dialect.arithmetic import DTypeName
from muonsplit.kernels import Ends, Kind, Op, Program, launches, run
from muonsplit.kernels.launch import launch
from muonsplit.kernels.named import NAMED, Matrix
from muonsplit.layout import Layout
from muonsplit.muon import PerHeadMuon
from muonsplit.newton_schulz import newton_schulz, singular_value_oracle
from muonsplit.newton_schulz.program import program
from muonsplit.observe.gradients import draw, draw_uneven, generator
from muonsplit.observe.tolerance import bounds

pytestmark = pytest.mark.gpu

DTYPES: tuple[DTypeName, ...] = ("float32", "float16", "bfloat16")
# Whole tiles; a tall block; sides that no tile divides. Every shape and dtype is one more binary.
SHAPES = {"wide": (8, 64, 512), "tall": (8, 96, 40), "odd": (8, 100, 333)}
# One Gram iteration on every shape, and each of the other orders of products on one.
CASES = [
    *(("deepspeed-0.19.8", shape) for shape in SHAPES),
    ("gram-newton-schulz-0.1.6", "wide"),
    ("torch-2.13", "odd"),
    ("heavyball-3.2.1", "tall"),
    ("optimuon-0.1.1", "tall"),
]
Run = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _the_card_is_in_the_tile_table() -> None:
    major, minor = torch.cuda.get_device_capability()
    if not torch.version.hip and major not in (8, 9, 10):
        pytest.skip(f"no tiles for compute capability {major}.{minor}")


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> DTypeName:
    return request.param


@pytest.fixture(params=SHAPES)
def batch(request: pytest.FixtureRequest) -> Tensor:
    return drawn(request.param).cuda()


@pytest.fixture
def ours(dtype: DTypeName) -> Run:
    arithmetic = arithmetic_in(dtype)
    return lambda X: newton_schulz(X, arithmetic, backend="triton")


def drawn(shape: str) -> Tensor:
    blocks, rows, cols = SHAPES[shape]
    return draw_uneven({"w": (blocks * rows, cols)}, "kernel", shape)["w"].view(blocks, rows, cols)


def arithmetic_in(dtype: DTypeName, dialect: str = "deepspeed-0.19.8") -> Arithmetic:
    """A dialect in another dtype; a Gram iteration has to restart more often in bfloat16."""
    known = dialect_named(dialect).arithmetic
    restarts = (1, 3) if dtype == "bfloat16" and known.restarts else known.restarts
    return replace(known, compute_dtype=dtype, cpu_dtype=dtype, restarts=restarts)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(bits(one), bits(other))


def skip_unless_free(gib: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib * 2**30:
        pytest.skip(f"needs {gib:g} GiB of free memory, has {free / 2**30:.1f}")


def distances(made: Tensor, exact: Tensor) -> Tensor:
    """Relative errors, block by block."""
    exact = exact.flatten(1)
    return (made.to(exact).flatten(1) - exact).norm(dim=1) / exact.norm(dim=1)


def slack(arithmetic: Arithmetic, long: int) -> float:
    """What two roads with the same rounding points may differ by.

    A roundoff of the coarsest dtype, or √n of float32, in which both sum n terms in other orders.
    """
    return max(arithmetic.roundoff, torch.finfo(torch.float32).eps / 2 * long**0.5)


@functools.cache
def errors(dialect: str, shape: str, dtype: DTypeName) -> tuple[list[float], list[float]]:
    """Relative errors of every block: the kernel's, and those of the emulation on a CPU."""
    arithmetic, blocks = arithmetic_in(dtype, dialect), drawn(shape)
    exact = singular_value_oracle(blocks, arithmetic)
    made = newton_schulz(blocks.cuda(), arithmetic, backend="triton").cpu()
    emulated = newton_schulz(blocks, arithmetic)
    return distances(made, exact).tolist(), distances(emulated, exact).tolist()


@pytest.mark.parametrize(("dialect", "shape"), CASES)
def test_rounding_explains_the_error(dialect: str, shape: str, dtype: DTypeName) -> None:
    found, _ = errors(dialect, shape, dtype)
    arithmetic = arithmetic_in(dtype, dialect)
    for error, bound in zip(found, bounds([(b, arithmetic) for b in drawn(shape)]), strict=True):
        assert error <= bound.rounding


@pytest.mark.parametrize(("dialect", "shape"), CASES)
def test_the_error_is_that_of_an_emulation(dialect: str, shape: str, dtype: DTypeName) -> None:
    allowed = slack(arithmetic_in(dtype, dialect), max(SHAPES[shape][1:]))
    for error, emulated in zip(*errors(dialect, shape, dtype), strict=True):
        assert error <= 1.5 * emulated + allowed


# Products of small integers are exact in every dtype, so that a wrong index shows as a wrong number
# and nothing else does. 2X + (−A + (3I − 2A)A)X, A = XXᵀ, in operations of each kind.
EXACT = Program(
    (
        Op(Kind.GRAM, 0),
        Op(Kind.ELEMENT, 1, 0, alpha=-2.0, diagonal=3.0),
        Op(Kind.PRODUCT, 2, 1, 0, 0, beta=-1.0),
        Op(Kind.APPLY, left=2, beta=2.0),
    ),
    5,
)
# Entries of a row that are not zero, so that every number fits the digits of the dtype.
DENSE: dict[DTypeName, int] = {"float32": 512, "float16": 6, "bfloat16": 2}


def integers(shape: str, dtype: DTypeName) -> Tensor:
    """Blocks of −1, 0 and 1."""
    blocks, rows, cols = SHAPES[shape]
    source = generator("integers", shape, dtype)
    signs = torch.randint(0, 2, (blocks, rows, cols), generator=source) * 2 - 1
    kept = torch.rand((blocks, rows, cols), generator=source) < DENSE[dtype] / max(rows, cols)
    return signs * kept


def exact_on(X: Tensor) -> tuple[Tensor, int]:
    """What ``EXACT`` makes of integer blocks, and the largest number on the way."""
    if X.size(-2) > X.size(-1):
        result, largest = exact_on(X.mT)
        return result.mT, largest
    A = X @ X.mT
    E = 3 * torch.eye(len(A[0]), dtype=A.dtype) - 2 * A
    P = E @ A - A
    result = 2 * X + P @ X
    return result, max(int(x.abs().max()) for x in (A, E, P, result))


@pytest.mark.parametrize("shape", SHAPES)
def test_integers_come_out_exact(shape: str, dtype: DTypeName) -> None:
    X, number = integers(shape, dtype), getattr(torch, dtype)
    wanted, largest = exact_on(X)
    assert largest <= 2 / torch.finfo(number).eps, "the test asks for more digits than there are"
    # A norm times zero plus one leaves the block as it is.
    ends = Ends(number, torch.float32, number, factor=0.0, epsilon=1.0)
    made = run(X.float().cuda(), EXACT, ends)
    assert made.dtype is number
    assert torch.equal(made.cpu().double(), wanted.double())


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_the_shard_of_the_result_is_the_result_of_the_shard(
    batch: Tensor, ours: Run, parts: int
) -> None:
    shards = [ours(shard) for shard in batch.chunk(parts)]
    assert same(torch.cat(shards), ours(batch))


def test_heads_in_another_order_give_the_same_bits(batch: Tensor, ours: Run) -> None:
    order = torch.randperm(len(batch), generator=generator("order")).cuda()
    assert same(ours(batch[order]), ours(batch)[order])


@pytest.mark.parametrize("kept", [0, 3, 7])
def test_neighbours_of_nan_are_not_seen(batch: Tensor, ours: Run, kept: int) -> None:
    poisoned = torch.full_like(batch, float("nan"))
    poisoned[kept] = batch[kept]
    result = ours(poisoned)
    assert same(result[kept], ours(batch)[kept])
    assert result[1].isnan().any(), "what was poisoned is not"


@pytest.mark.parametrize("programs", [1, 3, 8])
def test_the_number_of_programs_does_not_show(
    batch: Tensor, ours: Run, dtype: DTypeName, programs: int
) -> None:
    assert same(launched(batch, dtype, programs), ours(batch))


def test_nothing_of_a_block_is_left_in_the_scratch_for_the_next(
    batch: Tensor, ours: Run, dtype: DTypeName
) -> None:
    # One program: each block works where one full of NaN did.
    poisoned = torch.full_like(batch, float("nan"))
    poisoned[1::2] = batch[1::2]
    assert same(launched(poisoned, dtype, 1)[1::2], ours(batch)[1::2])


def launched(X: Tensor, dtype: DTypeName, programs: int) -> Tensor:
    """What ``ours`` is, by hand, with as many programs."""
    number, arithmetic = getattr(torch, dtype), arithmetic_in(dtype)
    ends = Ends(number, torch.float32, number, epsilon=1e-7)
    ops = program(arithmetic, *X.shape[-2:], number)
    return launch(X, ops, ends, programs=programs)


@pytest.fixture
def memory_of_nan() -> Iterator[None]:
    """What torch allocates is filled; see ``torch.utils.deterministic``."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("memory_of_nan")
def test_what_lay_in_the_scratch_does_not_show(batch: Tensor, ours: Run) -> None:
    assert torch.empty(4, device=batch.device).isnan().all()
    poisoned = ours(batch)
    torch.use_deterministic_algorithms(False)
    assert poisoned.isfinite().all()
    assert same(poisoned, ours(batch))


def at_an_odd_offset(X: Tensor) -> Tensor:
    held = X.new_empty(X.numel() + 1)
    held[1:] = X.flatten()
    return held[1:].view_as(X)


def with_gaps_between_rows(X: Tensor) -> Tensor:
    return torch.cat((X, torch.full_like(X[..., :3], float("nan"))), -1)[..., : X.size(-1)]


def column_major(X: Tensor) -> Tensor:
    return X.mT.contiguous().mT


@pytest.mark.parametrize("lay", [at_an_odd_offset, with_gaps_between_rows, column_major])
def test_where_a_block_lies_does_not_show(
    batch: Tensor, ours: Run, lay: Callable[[Tensor], Tensor]
) -> None:
    view = lay(batch)
    assert torch.equal(view, batch)
    assert view.data_ptr() % 16 or not view.is_contiguous()
    assert same(ours(view), ours(batch))


def test_two_hundred_runs_give_the_same_bits(batch: Tensor, ours: Run) -> None:
    first = bits(ours(batch))
    agreed = torch.ones((), dtype=torch.bool, device=batch.device)
    for _ in range(200):
        agreed &= (bits(ours(batch)) == first).all()
    assert agreed.item()


def test_another_stream_gives_the_same_bits(batch: Tensor, ours: Run) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = ours(batch)
    torch.cuda.current_stream().wait_stream(stream)
    assert same(result, ours(batch))


def test_a_replayed_graph_gives_the_same_bits(batch: Tensor, ours: Run) -> None:
    wanted = ours(batch)  # compiles, and puts the list of operations on the device
    held = torch.ones_like(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = ours(held)
    held.copy_(batch)
    graph.replay()
    torch.cuda.synchronize()
    assert same(result, wanted)


def test_compiled_code_gives_the_same_bits(ours: Run) -> None:
    torch.compiler.reset()  # else one dtype counts as the recompilation of another
    batch = drawn("wide").cuda()
    compiled = torch.compile(ours, fullgraph=True, dynamic=False)
    assert same(compiled(batch), ours(batch))


def test_more_than_two_to_the_31_elements_are_addressed() -> None:
    skip_unless_free(12)
    blocks, rows, cols = 2050, 128, 8192
    X = torch.empty(blocks, rows, cols, dtype=torch.float16, device="cuda")
    X.normal_(generator=torch.Generator("cuda").manual_seed(31))
    assert X.numel() > 2**31
    arithmetic = arithmetic_in("float16")
    result = newton_schulz(X, arithmetic, backend="triton")
    for i in (0, 2047, 2048, blocks - 1):  # the third begins at 2³¹
        alone = newton_schulz(X[i : i + 1].clone(), arithmetic, backend="triton")
        assert same(result[i : i + 1], alone), i


# Every matrix in the iteration that DeepSpeed takes, and two shapes in the others.
FULL: list[tuple[Matrix, DTypeName, str]] = [
    *((matrix, "float16", "deepspeed-0.19.8") for matrix in NAMED),
    *((NAMED[i], "bfloat16", "deepspeed-0.19.8-standard") for i in (0, 3)),
    (NAMED[0], "float32", "deepspeed-0.19.8"),
]


def id_of(value: object) -> str:
    return f"{value.model} {value.weight}" if isinstance(value, Matrix) else str(value)


@pytest.mark.parametrize(("matrix", "dtype", "dialect"), FULL, ids=id_of)
def test_full_size_numbers_and_bits(matrix: Matrix, dtype: DTypeName, dialect: str) -> None:
    skip_unless_free(8)
    shape = (matrix.blocks, matrix.rows, matrix.cols)
    arithmetic = arithmetic_in(dtype, dialect)
    X = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(7))
    result = newton_schulz(X, arithmetic, backend="triton")
    # float64 on the device: an iteration of its own, without one rounding point of the kernel's.
    exact = newton_schulz(X.double(), arithmetic.exact())
    ends = X[[0, -1]].cpu()
    emulated = distances(newton_schulz(ends, arithmetic), exact[[0, -1]].cpu()).max().item()
    allowed = 1.5 * emulated + slack(arithmetic, max(shape[1:]))
    assert distances(result, exact).max().item() <= allowed
    for i in (0, shape[0] - 1):
        alone = newton_schulz(X[i : i + 1], arithmetic, backend="triton")
        assert same(result[i : i + 1], alone)
    for _ in range(20):
        assert same(newton_schulz(X, arithmetic, backend="triton"), result)


LAYOUTS = {
    f"{role}.{layer}": Layout.heads(role, *SHAPES[shape][:2])
    for layer in range(3)
    for role, shape in (("q", "wide"), ("k", "tall"))
}


def stepped(names: Sequence[str]) -> dict[str, Tensor]:
    """Named weights after two steps of an optimizer that has no others."""
    cols = {"q": SHAPES["wide"][2], "k": SHAPES["tall"][2]}
    shapes = {name: (LAYOUTS[name].rows, cols[name[0]]) for name in LAYOUTS}
    weights = draw(shapes, "weights")
    parameters = {name: torch.nn.Parameter(weights[name].cuda()) for name in names}
    layouts = {name: LAYOUTS[name] for name in names}
    optimizer = PerHeadMuon(parameters.items(), layouts, backend="triton")
    for step in range(2):
        gradients = draw(shapes, "gradients", step)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].cuda()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def test_a_step_is_one_launch_a_shape() -> None:
    before = Counter(launches)
    stepped(list(LAYOUTS))
    made = {(each.short, each.long): count for each, count in (launches - before).items()}
    assert made == {(64, 512): 2, (40, 96): 2}  # two steps


def test_a_weight_steps_among_others_as_it_does_alone() -> None:
    together = stepped(list(LAYOUTS))
    for name, weight in together.items():
        assert same(weight, stepped([name])[name]), name


def test_survey_of_which_shards_of_a_bmm_keep_their_bits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # For contrast, and printed only: nobody promises it, so no answer is wrong.
    lines = ["", f"torch.bmm on {torch.cuda.get_device_name()}, shards of X Xᵀ with equal bits:"]
    for (rows, cols), name in product(((64, 512), (256, 2048), (448, 512), (100, 333)), DTYPES):
        X = torch.randn(64, rows, cols, device="cuda").to(getattr(torch, name))
        whole = torch.bmm(X, X.mT)
        sizes: list[str] = []
        for size in (32, 16, 8, 1):
            parts = torch.cat([torch.bmm(part, part.mT) for part in X.split(size)])
            torch.testing.assert_close(parts, whole, rtol=0.02, atol=0.02 * cols**0.5)
            sizes.append(f"{size}: {'yes' if same(parts, whole) else 'NO'}")
        lines.append(f"  64 × {rows:>3} × {cols:<4} {name:<8}  {'  '.join(sizes)}")
    with capsys.disabled():
        print("\n".join(lines))
