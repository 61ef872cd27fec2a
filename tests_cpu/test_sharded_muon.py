"""The reference optimizer on divided parameters: the bits of one process, and what travels."""

import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from muonsplit.dialect import DIALECTS
from muonsplit.errors import CutHeadError, InputError, LayoutError, MuonsplitError
from muonsplit.layout import Layout
from muonsplit.muon import PerHeadMuon
from tests_cpu.ranks import run

pytestmark = pytest.mark.dist

DIALECT = "deepspeed-0.19.8"
# By rows of a scale on the learning rate that differs from block to block.
BY_BLOCK = "torch-2.13"
# Its scale is by the shape of the whole matrix.
BY_MATRIX = "optimuon-0.1.1"
SPOKEN = (DIALECT, BY_BLOCK, BY_MATRIX)
Shapes = Mapping[str, tuple[int, ...]]
# Of each axis of a mesh: the axis of the weight that is divided, or None.
Axes = Sequence[int | None]

LAYOUTS = {
    "q": "q 3×8",
    "k": "k 4×4",
    "joint": "kv 4×10",
    "apart": "4 × (k 4 | v 6)",
    "fused": "q 2×9 | k 5 | v 5",
    "joined": "3 × (q 2×4 | k 2 | v 2), joined",
    "conv": "q 3×6 | k 2×4 | v 2×5, axis 1",
    "o": None,
    "wide": None,
    "experts": None,
}
SHAPES = {
    "q": (24, 20),
    "k": (16, 20),
    "joint": (40, 12),
    "apart": (40, 12),
    "fused": (28, 20),
    "joined": (36, 20),
    "conv": (10, 36),
    "o": (20, 24),
    "wide": (3, 40),
    "experts": (5, 6, 7),
    # Trained by AdamW.
    "bias": (7,),
    "embed": (9, 5),
}


def layouts(names: Sequence[str]) -> dict[str, Layout | None]:
    return {n: Layout.parse(s) if s else None for n, s in LAYOUTS.items() if n in names}


def normal(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def part(x: Tensor, cuts: Sequence[tuple[int, int, int]]) -> Tensor:
    """What torch.chunk leaves of a tensor: of each cut the axis, the place and how many."""
    for axis, place, world in cuts:
        chunks = x.chunk(world, axis)
        x = chunks[place] if place < len(chunks) else x.narrow(axis, 0, 0)
    return x


class Pair:
    """The same weights in one process and divided, and an optimizer for each.

    Args:
        divided: The divided parameters, by name; their values are those of :func:`starts`.
        cuts: What each of them is of its whole, as :func:`part` takes it.
        settings: Of both optimizers.
    """

    def __init__(
        self,
        divided: Mapping[str, nn.Parameter],
        cuts: Mapping[str, Sequence[tuple[int, int, int]]],
        **settings: Any,
    ) -> None:
        self.divided, self.cuts = divided, cuts
        self.whole = starts({n: tuple(p.shape) for n, p in divided.items()}, dtype_of(divided))
        chosen: dict[str, Any] = {"dialect": DIALECT, "lr": 0.05, "weight_decay": 0.1, **settings}
        cut = chosen.pop("layouts", layouts(list(divided)))
        self.one = PerHeadMuon(self.whole.items(), cut, **chosen)
        self.many = PerHeadMuon(divided.items(), cut, **chosen)

    def gradients(self, step: int) -> dict[str, Tensor]:
        return {
            n: normal(p.shape, 1000 * step + i, p.dtype)
            for i, (n, p) in enumerate(self.whole.items())
        }

    def give(self, step: int) -> None:
        """Gives both the gradients of a step, every other one replicated to the divided side."""
        for i, (name, gradient) in enumerate(self.gradients(step).items()):
            self.whole[name].grad = gradient.clone()
            p: Any = self.divided[name]
            local = part(gradient, self.cuts[name]).clone()
            shape, stride = gradient.shape, gradient.stride()
            placements = p.placements
            if i % 2 and all(type(x) is Shard for x in placements):
                local, placements = gradient.clone(), [Replicate()] * len(placements)
            p.grad = DTensor.from_local(
                local, p.device_mesh, placements, run_check=False, shape=shape, stride=stride
            )

    def step(self, steps: Sequence[int] = (1, 2, 3)) -> None:
        for step in steps:
            self.give(step)
            self.one.step()
            self.many.step()

    def apart(self) -> list[str]:
        """What differs in bits between this rank's part and that of the whole."""
        found: list[str] = []
        for name, p in self.whole.items():
            mine: Any = self.divided[name]
            pairs: dict[str, tuple[Tensor, Any]] = {"": (p, mine)}
            state = self.many.state[mine]
            for key, kept in self.one.state[p].items():
                if isinstance(kept, Tensor):
                    pairs[key] = (kept, state[key])
            assert len(pairs) == (2 if name in self.one.layouts else 3)
            assert self.one.state[p]["step"] == state["step"]
            for key, (one, many) in pairs.items():
                assert (many.device_mesh, many.placements) == (mine.device_mesh, mine.placements)
                expected = part(one.detach(), self.cuts[name])
                local = many.detach().to_local()
                same = local.dtype == expected.dtype and local.numel() == expected.numel()
                if not same or not torch.equal(bits(local), bits(expected).view(local.shape)):
                    found.append(f"{name} {key}".strip())
        start = starts({n: tuple(p.shape) for n, p in self.whole.items()}, dtype_of(self.divided))
        found += [f"{n} did not move" for n, p in self.whole.items() if torch.equal(p, start[n])]
        return found


def dtype_of(parameters: Mapping[str, Tensor]) -> torch.dtype:
    return next(iter(parameters.values())).dtype


def starts(shapes: Shapes, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {n: nn.Parameter(normal(s, i, dtype)) for i, (n, s) in enumerate(shapes.items())}


def placed(
    mesh: DeviceMesh, axes: Mapping[str, Axes], shapes: Shapes, dtype: torch.dtype, **settings: Any
) -> Pair:
    """Parameters divided as torch's own ``distribute_tensor`` divides them."""
    divided: dict[str, nn.Parameter] = {}
    cuts: dict[str, Any] = {}
    for name, p in starts(shapes, dtype).items():
        # An axis that a weight does not have is not divided.
        dims = [d if d is not None and d < p.ndim else None for d in axes[name]]
        placements = [Replicate() if d is None else Shard(d) for d in dims]
        divided[name] = nn.Parameter(distribute_tensor(p.detach(), mesh, placements))
        where = zip(dims, mesh.get_coordinate() or (), mesh.shape, strict=True)
        cuts[name] = [(d, place, world) for d, place, world in where if d is not None]
    return Pair(divided, cuts, **settings)


def everywhere(axes: Axes, names: Sequence[str] = tuple(SHAPES)) -> dict[str, Axes]:
    return dict.fromkeys(names, axes)


def check(mesh_shape: tuple[int, ...], axes: Mapping[str, Axes], **settings: Any) -> list[str]:
    mesh = init_device_mesh("cpu", mesh_shape)
    pair = placed(mesh, axes, SHAPES, torch.float32, **settings)
    pair.step()
    return pair.apart()


MESHES: dict[str, tuple[tuple[int, ...], Mapping[str, Axes]]] = {
    "rows-2": ((2,), everywhere([0])),
    "columns-2": ((2,), everywhere([1])),
    "third-axis-2": ((2,), everywhere([2])),
    "tp-2": ((2,), {**everywhere([0]), "o": [1], "conv": [1]}),
    "rows-4": ((4,), everywhere([0])),
    "columns-4": ((4,), everywhere([1])),
    "third-axis-4": ((4,), everywhere([2])),
    "replicated-rows": ((2, 2), everywhere([None, 0])),
    "rows-replicated": ((2, 2), everywhere([0, None])),
    "rows-columns": ((2, 2), everywhere([0, 1])),
    "rows-rows": ((2, 2), everywhere([0, 0])),
    "matrices": ((2, 2), everywhere([1, 2])),
    "alone-rows": ((1, 4), everywhere([0, 0])),
    "mixed": ((2, 2), {n: [[0, None], [None, 0], [0, 1]][i % 3] for i, n in enumerate(SHAPES)}),
}


def spoken(world: int) -> tuple[str, ...]:
    return SPOKEN if world == 2 else (DIALECT, BY_BLOCK)


def _meshes(world: int) -> dict[str, list[str]]:
    return {
        f"{name}, {dialect}": check(shape, axes, dialect=dialect)
        for name, (shape, axes) in MESHES.items()
        if torch.Size(shape).numel() == world
        for dialect in spoken(world)
    }


@pytest.mark.parametrize("world", [2, 4])
def test_every_mesh_gives_the_bits_of_one_process(world: int) -> None:
    for found in run(world, _meshes, world):
        meshes = [s for s, _ in MESHES.values() if torch.Size(s).numel() == world]
        assert len(found) == len(spoken(world)) * len(meshes)
        assert {name: apart for name, apart in found.items() if apart} == {}


def _across() -> dict[str, list[str]]:
    # Along both axes ranks ascend, but not from place to place.
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]])
    found: dict[str, list[str]] = {}
    for axes in ([0, 0], [1, 0], [None, 0]):
        pair = placed(mesh, everywhere(axes), SHAPES, torch.float32)
        pair.step()
        found[str(axes)] = pair.apart()
    return found


def test_a_mesh_may_count_ranks_by_columns() -> None:
    for found in run(4, _across):
        assert found == {"[0, 0]": [], "[1, 0]": [], "[None, 0]": []}


def _out_of_order() -> str:
    p = distribute_tensor(normal((8, 6), 0), DeviceMesh("cpu", [1, 0]), [Shard(0)])
    return _caught(lambda: PerHeadMuon([("w", nn.Parameter(p))], {"w": None}))


def test_a_mesh_out_of_order_is_refused() -> None:
    # torch itself scatters shards in the order of ranks, and counts them in that of the mesh.
    for said in run(2, _out_of_order):
        assert said.startswith(InputError.__name__)
        assert "w is on a mesh of ranks [1, 0]" in said


# Parts of multiples of 64 elements: behind the last whole vector of a bfloat16 tensor, torch rounds
# x + a·y after the product too, in one process as in many.
HALF = {
    "q": (24, 16),
    "k": (16, 8),
    "apart": (40, 64),
    "fused": (28, 64),
    "joined": (36, 64),
    "o": (64, 24),
    "experts": (3, 64, 16),
    "bias": (512,),
}


def _dialects(names: Sequence[str], dtype: torch.dtype, **settings: Any) -> dict[str, list[str]]:
    mesh = init_device_mesh("cpu", (2,))
    found: dict[str, list[str]] = {}
    for name in names:
        axes = {**everywhere([0]), "o": [1], "experts": [1]}
        pair = placed(mesh, axes, HALF, dtype, dialect=name, **settings)
        pair.step()
        found[name] = pair.apart()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_dialect_gives_the_bits_of_one_process(dtype: torch.dtype) -> None:
    expected: dict[str, list[str]] = {name: [] for name in DIALECTS}
    assert run(2, _dialects, list(DIALECTS), dtype) == [expected] * 2


def _fast() -> dict[str, list[str]]:
    mesh = init_device_mesh("cpu", (2,))
    found: dict[str, list[str]] = {}
    for name in SPOKEN:
        pair = placed(mesh, everywhere([0]), SHAPES, torch.float32, dialect=name, fast=True)
        pair.step()
        found[name] = pair.apart()
    return found


def test_the_quick_road_gives_the_bits_of_one_process() -> None:
    expected: dict[str, list[str]] = {name: [] for name in SPOKEN}
    assert run(2, _fast) == [expected] * 2


class Linear(nn.Module):
    """Weights whose gradients are what they are told."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        for name, p in starts(shapes).items():
            self.register_parameter(name, p)

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        loss = torch.zeros(())
        for name, p in self.named_parameters():
            loss = loss + (p * gradients[name]).sum()
        return loss


def _fully_shard(mesh_shape: tuple[int, ...]) -> list[str]:
    model = Linear(SHAPES)
    mesh = init_device_mesh(
        "cpu", mesh_shape, mesh_dim_names=("replicate", "dp")[-len(mesh_shape) :]
    )
    fully_shard(model, mesh=mesh)
    # A one-axis mesh shards; the first of two replicates.
    place, world = (mesh.get_coordinate() or [0])[-1], mesh_shape[-1]
    divided = dict(model.named_parameters())
    pair = Pair(divided, {name: [(0, place, world)] for name in divided})
    for step in (1, 2, 3):
        gradients = pair.gradients(step)
        for name, p in pair.whole.items():
            p.grad = gradients[name].clone()
        model.zero_grad()
        # Means of equal numbers over a power of two are exact.
        model(gradients).backward()
        pair.one.step()
        pair.many.step()
    return pair.apart()


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=["fsdp-2", "fsdp-4", "hsdp"])
def test_fully_sharded_training_gives_the_bits_of_one_process(mesh: tuple[int, ...]) -> None:
    world = torch.Size(mesh).numel()
    assert run(world, _fully_shard, mesh) == [[]] * world


def _tensor_and_fully_sharded() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, axes = Linear(SHAPES), {"o": 1, "conv": 1}
    for name, p in list(model.named_parameters()):
        shards = [Shard(axes.get(name, 0))]
        setattr(model, name, nn.Parameter(distribute_tensor(p.detach(), mesh["tp"], shards)))
    fully_shard(model, mesh=mesh["dp"])
    dp, tp = mesh.get_coordinate() or (0, 0)
    divided: dict[str, Any] = dict(model.named_parameters())
    assert "_StridedShard" in {type(x).__name__ for p in divided.values() for x in p.placements}
    # Tensor parallelism divides first.
    cuts = {name: [(axes.get(name, 0), tp, 2), (0, dp, 2)] for name in divided}
    pair = Pair(divided, cuts)
    pair.step()
    return pair.apart()


def test_fully_sharded_tensor_parallelism_gives_the_bits_of_one_process() -> None:
    assert run(4, _tensor_and_fully_sharded) == [[]] * 4


@contextmanager
def counted() -> Generator[list[int]]:
    """The bytes that this rank sends to others, a number for each exchange."""
    found: list[int] = []
    plain = dist.all_to_all_single

    def counting(out: Tensor, given: Tensor, outs: Any, ins: list[int], **rest: Any) -> Any:
        group = rest["group"]
        mine = dist.get_group_rank(group, dist.get_rank())
        assert given.dtype == torch.uint8
        found.append(sum(ins) - ins[mine])
        return plain(out, given, outs, ins, **rest)

    dist.all_to_all_single = counting
    try:
        yield found
    finally:
        dist.all_to_all_single = plain


def _travelled(
    mesh_shape: tuple[int, ...],
    axes: Mapping[str, Axes],
    shapes: Shapes,
    dtype: torch.dtype,
    settings: Mapping[str, Any],
) -> list[list[int]]:
    mesh = init_device_mesh("cpu", mesh_shape)
    pair = placed(mesh, axes, shapes, dtype, **settings)
    found: list[list[int]] = []
    for step in (1, 2):
        pair.give(step)
        pair.one.step()
        with counted() as bytes_:
            pair.many.step()
        found.append(bytes_)
    assert pair.apart() == []
    return found


def travelled(
    mesh_shape: tuple[int, ...],
    axes: Mapping[str, Axes],
    shapes: Shapes,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> list[list[int]]:
    """What each rank sends in one step, which is the same in every step."""
    world = torch.Size(mesh_shape).numel()
    each = run(world, _travelled, mesh_shape, axes, shapes, dtype, settings)
    for first, second in each:
        assert first == second
    return [first for first, _ in each]


def test_whole_heads_and_experts_do_not_travel() -> None:
    # Two of four heads, two groups of four, two of three roles, two of four experts; what is on
    # one rank of two.
    shapes = {"k": (16, 20), "apart": (40, 12), "experts": (4, 6, 7), "wide": (1, 8), "bias": (7,)}
    assert travelled((2,), everywhere([0]), shapes) == [[], []]
    # Replicated along the axis that would cut them.
    assert travelled((2, 2), everywhere([0, None]), shapes) == [[]] * 4


def test_what_travels_for_cut_heads_is_the_least_possible() -> None:
    # Three heads of 8 rows on 4 ranks of 6. Head 0: rows 0–5 on rank 0, 6–7 on rank 1. Head 1:
    # 8–11 on rank 1, 12–15 on rank 2. Head 2: 16–17 on rank 2, 18–23 on rank 3. One rank has to
    # put each head together and lacks at the least 2, 4 and 2 rows of it; those who sent them have
    # to be told as many rows of the result. Of head 1 ranks 1 and 2 have as much and as much to do;
    # the first of them takes it.
    row = 20 * 4
    there, back = [0, 2, 4 + 2, 0], [2, 4, 0, 2]
    expected = [[t * row, b * row] for t, b in zip(there, back, strict=True)]
    assert travelled((4,), everywhere([0]), {"q": (24, 20)}) == expected


def test_what_travels_is_of_the_dtype_it_has() -> None:
    # Rows 8–11 of head 1 on rank 0, 12–15 on rank 1: four rows go to rank 0, as bfloat16, and come
    # back so where the scale is on the update; where it is on the learning rate the iteration's own
    # numbers come back, which on a CPU are bfloat16 in float32.
    rows = 4 * 64
    shapes = {"q": (24, 64)}
    expected = {DIALECT: [[0, 2 * rows], [2 * rows, 0]], BY_BLOCK: [[0, 4 * rows], [2 * rows, 0]]}
    for dialect, wanted in expected.items():
        arithmetic = DIALECTS[dialect].arithmetic
        assert (arithmetic.scale_on == "update") == (dialect == DIALECT)
        assert travelled((2,), everywhere([0]), shapes, torch.bfloat16, dialect=dialect) == wanted


def test_a_matrix_cut_by_columns_is_put_together_once() -> None:
    # Rank 1's half of 20 × 24 goes to rank 0, and its half of the result comes back.
    half = 20 * 12 * 4
    assert travelled((2,), {"o": [1]}, {"o": (20, 24)}) == [[0, half], [half, 0]]


def test_replicas_do_not_ask_each_other() -> None:
    # Ranks 0 and 1 hold halves, and so do 2 and 3.
    half = 4 * 20 * 4
    expected = [[0, half], [half, 0]] * 2
    assert travelled((2, 2), {"q": [None, 0]}, {"q": (24, 20)}) == expected


def least(cut: Mapping[str, Layout | None], axes: Mapping[str, int], world: int) -> int:
    """The fewest elements that all blocks lack where most of each is, element by element."""
    lacking = 0
    for name, layout in cut.items():
        shape = SHAPES[name]
        holder = torch.empty(shape, dtype=torch.int64)
        for place in range(world):
            part(holder, [(axes[name], place, world)]).fill_(place)
        if layout is None:
            blocks = list(holder) if len(shape) == 3 else [holder]
        else:
            lines = holder.mT if layout.axis else holder
            blocks = [torch.cat([lines[a:b] for a, b in block.spans]) for block in layout.blocks()]
        lacking += sum(b.numel() - int(b.flatten().bincount().max()) for b in blocks)
    return lacking


@pytest.mark.parametrize("axis", [0, 1])
def test_a_step_travels_once_there_and_once_back_and_no_more_than_needed(axis: int) -> None:
    axes = dict.fromkeys(SHAPES, axis)
    found = travelled((4,), {n: [axis] for n in SHAPES}, SHAPES)
    assert [len(exchanges) for exchanges in found] == [2] * 4
    lacking = least(layouts(list(SHAPES)), axes, 4) * 4
    assert lacking > 0
    assert [sum(column) for column in zip(*found, strict=True)] == [lacking, lacking]


def _caught(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except MuonsplitError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _cut_heads(choice: str, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """What was warned of, and what differs from one process that leaves q whole."""
    mesh = init_device_mesh("cpu", (2,))
    shapes = {n: SHAPES[n] for n in names}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair = placed(mesh, everywhere([0]), shapes, torch.float32, cut_heads=choice)
    pair.one.layouts = {**layouts(names), "q": None}
    pair.step()
    return [str(w.message) for w in caught if "heads" in str(w.message)], pair.apart()


def test_cut_heads_are_dropped_with_a_warning() -> None:
    # q is cut, k is not; o has no heads.
    for warned, apart in run(2, _cut_heads, "drop", ["q", "k", "o"]):
        assert apart == []
        assert len(warned) == 1
        assert "q, q 3×8: q[1] on ranks (0, 1)" in warned[0]
        assert "k 4×4" not in warned[0]


def _refused_cuts(choice: str, names: Sequence[str]) -> str:
    mesh = init_device_mesh("cpu", (2,))
    shapes = {n: SHAPES[n] for n in names}
    axes = everywhere([0])
    return _caught(lambda: placed(mesh, axes, shapes, torch.float32, cut_heads=choice))


@pytest.mark.parametrize(
    ("choice", "names", "expected"),
    [
        ("raise", ["q", "k", "fused", "o"], ["q, q 3×8", "fused, "]),
        ("raise", ["k", "o"], []),
        ("drop", ["q", "fused", "o"], ["every weight", "q, q 3×8", "fused, "]),
        ("gather", ["q"], []),
    ],
    ids=["raise", "raise-nothing", "drop-all", "gather"],
)
def test_cut_heads_are_refused_on_every_rank_alike(
    choice: str, names: list[str], expected: list[str]
) -> None:
    first, second = run(2, _refused_cuts, choice, names)
    assert first == second
    assert first.startswith(CutHeadError.__name__ if expected else "nothing")
    assert all(text in first for text in expected)
    assert "k, k" not in first


def _mismatch(kind: str) -> str:
    mesh = init_device_mesh("cpu", (4,))
    odd = dist.get_rank() == 2
    cut = {"k": Layout.heads("k", 2, 8) if odd and kind == "layouts" else Layout.heads("k", 4, 4)}
    name = "moonlight" if odd and kind == "arithmetic" else DIALECT
    other = ["k", "other"] if odd and kind == "names" else ["k", "bias"]
    pair = placed(mesh, everywhere([0], other), {other[0]: (16, 20), other[1]: (7,)}, torch.float32)
    optimizer = PerHeadMuon(pair.divided.items(), cut, dialect=name)
    divided: dict[str, Any] = dict(pair.divided)
    before = {n: p.detach().to_local().clone() for n, p in divided.items()}
    pair.give(1)
    found = _caught(optimizer.step)
    same = all(torch.equal(p.to_local(), before[n]) for n, p in divided.items())
    return f"{found} {same}"


@pytest.mark.parametrize("kind", ["layouts", "arithmetic", "names"])
def test_ranks_with_other_optimizers_are_named_on_every_rank(kind: str) -> None:
    found = run(4, _mismatch, kind)
    assert set(found) == {found[0]}
    assert found[0].startswith(InputError.__name__)
    assert f"{kind} on rank 2 (not as on rank 0)" in found[0]
    # Nothing has been changed.
    assert found[0].endswith("True")
    others = {"layouts", "arithmetic", "names", "shapes", "dtypes", "placements"} - {kind}
    assert not any(f"{other} on" in found[0] for other in others)


def _without_a_group() -> list[str]:
    mesh = init_device_mesh("cpu", (1,))
    pair = placed(mesh, everywhere([0]), {"q": (24, 20), "bias": (7,)}, torch.float32)
    pair.give(1)
    dist.destroy_process_group()
    again = [_caught(pair.many.step), _caught(PerHeadMuon, pair.divided.items(), {})]
    assert not pair.many.state
    return again


def test_a_process_group_is_needed() -> None:
    for said in run(1, _without_a_group)[0]:
        assert said.startswith(InputError.__name__)
        assert "q is a DTensor, but there is no process group" in said


def _off_the_mesh() -> str:
    # Made by all ranks, of one of them.
    mesh = DeviceMesh("cpu", [0])
    mine = normal((8, 6) if dist.get_rank() == 0 else (0, 6), 0)
    shape = torch.Size((8, 6))
    p = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=shape, stride=(6, 1))
    return _caught(lambda: PerHeadMuon([("w", nn.Parameter(p))], {"w": None}))


def test_a_rank_needs_to_be_on_the_mesh() -> None:
    on, off = run(2, _off_the_mesh)
    assert on == "nothing"
    assert off.startswith(InputError.__name__)
    assert "w is on a mesh of ranks [0]; rank 1" in off


def _partial() -> str:
    mesh = init_device_mesh("cpu", (2,))
    p = DTensor.from_local(normal((8, 6), 0), mesh, [Partial()], run_check=False)
    return _caught(lambda: PerHeadMuon([("w", nn.Parameter(p))], {"w": None}))


def test_partial_sums_are_refused() -> None:
    for said in run(2, _partial):
        assert said.startswith(LayoutError.__name__)
        assert "Redistribute" in said


def _other_gradient() -> str:
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(normal((8, 6), 0), mesh, [Shard(0)]))
    other = DeviceMesh("cpu", [1, 0])
    optimizer = PerHeadMuon([("w", p)], {"w": None})
    p.grad = distribute_tensor(normal((8, 6), 0), other, [Shard(0)])
    return _caught(optimizer.step)


def test_a_gradient_on_another_mesh_is_refused() -> None:
    for said in run(2, _other_gradient):
        assert said.startswith(InputError.__name__)
        assert "The gradient of w is on" in said


def _trained(folder: str, dialect: str, dtype: torch.dtype, steps: Sequence[int]) -> list[str]:
    """Steps on from what is saved in a folder, if anything is, and saves what becomes of it."""
    from torch.distributed.checkpoint import state_dict as kept
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    world = dist.get_world_size()
    model = Linear(HALF).to(dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    divided = dict(model.named_parameters())
    cuts = {name: [(0, dist.get_rank(), world)] for name in divided}
    pair = Pair(divided, cuts, dialect=dialect)
    # The whole one is never interrupted.
    for step in range(1, steps[0]):
        for name, gradient in pair.gradients(step).items():
            pair.whole[name].grad = gradient
        pair.one.step()
    saved = Path(folder)
    if any(saved.iterdir()):
        model_state, state = kept.get_state_dict(model, pair.many)
        load({"model": model_state, "optimizer": state}, checkpoint_id=saved)
        kept.set_state_dict(model, pair.many, model_state_dict=model_state, optim_state_dict=state)
    pair.step(steps)
    if world == 2:
        model_state, state = kept.get_state_dict(model, pair.many)
        save({"model": model_state, "optimizer": state}, checkpoint_id=saved)
    return pair.apart()


@pytest.mark.parametrize(
    ("dialect", "dtype"),
    [(DIALECT, torch.float32), ("muonium-0.2.0", torch.bfloat16)],
    ids=["float32", "float32-buffer-of-bfloat16"],
)
def test_a_checkpoint_goes_on_at_another_world_size(
    dialect: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    assert run(2, _trained, str(tmp_path), dialect, dtype, (1, 2)) == [[]] * 2
    for world in (1, 4):
        assert run(world, _trained, str(tmp_path), dialect, dtype, (3, 4)) == [[]] * world
