"""Each framework, told by an export where the blocks are, and watched while it steps."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import muonsplit
from muonsplit.geometry import Decision, Plan, plan
from muonsplit.geometry.export import (
    FUNCTIONS,
    apply_tags,
    bind_groups,
    by_parameter,
    deepspeed_tags,
    export,
)
from muonsplit.layout import Layout
from muonsplit.models.load import build, resolve
from muonsplit.models.miniature import miniature
from muonsplit.observe.cut import Cut, Tensors, differing_lines, scan
from muonsplit.observe.gradients import draw, flip_row
from muonsplit.subjects.deepspeed import Engine
from muonsplit.subjects.drive import Task
from muonsplit.subjects.process import Worker
from muonsplit.subjects.protocol import Hyper

pytestmark = pytest.mark.downstream


class Weight(NamedTuple):
    """A weight, how it is cut, and which of its lines that makes one block."""

    shape: tuple[int, ...]
    layout: str | None
    blocks: list[list[int]]
    axis: int = 0


def runs(*lengths: int) -> list[list[int]]:
    return [list(range(sum(lengths[:i]), sum(lengths[: i + 1]))) for i in range(len(lengths))]


WEIGHTS = {
    "q": Weight((32, 24), "q 4×8", runs(8, 8, 8, 8)),
    "kv": Weight((40, 12), "4 × (k 4 | v 6)", runs(4, 6, 4, 6, 4, 6, 4, 6)),
    "fused": Weight((32, 12), "2 × (q 2×4 | k 4 | v 4)", runs(4, 4, 4, 4, 4, 4, 4, 4)),
    "projections": Weight(
        (24, 12),
        "2 × (q 8 | k 4), joined",
        [[*range(8), *range(12, 20)], [8, 9, 10, 11, 20, 21, 22, 23]],
    ),
    "gate_up": Weight(
        (12, 10), "6 × (gate 1 | up 1), joined", [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
    ),
    "conv1d": Weight((12, 24), "q 3×8, axis 1", runs(8, 8, 8), axis=1),
    "o": Weight((24, 16), None, runs(24)),
    "experts": Weight((3, 8, 12), None, runs(8, 8, 8)),
}
OTHERS = {"embedding": (16, 8), "norm": (8,)}


def decision(name: str, shape: tuple[int, ...], layout: str | None) -> Decision:
    cut = None if layout is None else Layout.parse(layout)
    return Decision(name, shape, "Attention", name, "other", cut, None, None, "", "")


def planned(*names: str) -> Plan:
    return Plan(
        "test",
        tuple(decision(n, WEIGHTS[n].shape, WEIGHTS[n].layout) for n in names),
        tuple(decision(n, shape, None) for n, shape in OTHERS.items()),
    )


Step = Callable[[nn.Module], None]


def deepspeed(module: ModuleType, form: Any) -> Step:
    def step(model: nn.Module) -> None:
        apply_tags(model, form)
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for p in model.parameters():
            groups[p.use_muon].append(p)
        listed = [{"params": found, "use_muon": muon} for muon, found in groups.items()]
        module.SingleDeviceMuonWithAuxAdam(listed).step()

    return step


def dion(module: ModuleType, form: Any) -> Step:
    return lambda model: module.Muon(bind_groups(model, form), weight_decay=0.0).step()


def muonium(module: ModuleType, form: Any) -> Step:
    kernels = importlib.import_module("muonium.orthogonalize.orthogonalize")
    # Off CUDA its Triton loops refuse to run; the plain ones are beside them.
    kernels._get_orthogonalization_fn = lambda strategy, _: (
        kernels.ns_loop if strategy == "newton_schulz" else kernels.pe_loop
    )
    return lambda model: module.Muon(bind_groups(model, form), wd=0.0).step()


def gram_newton_schulz(module: ModuleType, form: Any) -> Step:
    options = {"ns_use_kernels": False, "gram_newton_schulz_restart_iterations": [2]}
    functions = FUNCTIONS["gram-newton-schulz"]
    return lambda model: module.Muon(bind_groups(model, form, functions), **options).step()


def optimuon(module: ModuleType, form: Any) -> Step:
    options = {"normuon": False, "cautious_wd": False}
    functions = FUNCTIONS["optimuon"]
    return lambda model: module.Muon(bind_groups(model, form, functions), **options).step()


def megatron(module: ModuleType, form: Any) -> Step:
    def step(model: nn.Module) -> None:
        apply_tags(model, form)
        trained = [p for p in model.parameters() if not module._is_muon_excluded(p)]
        assert len(trained) == len(form) - len(OTHERS)
        module.TensorParallelMuon(trained, split_qkv=True, is_qkv_fn=lambda p: p.is_qkv).step()

    return step


def xtuner(module: ModuleType, form: Any) -> Step:
    def step(model: nn.Module) -> None:
        # It steps DTensors only; alone in its group it holds every row.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            named = dict(model.named_parameters())
            sharded = nn.ParameterDict()
            for name, p in named.items():
                sharded[name] = nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
                sharded[name].grad = distribute_tensor(p.grad, mesh, [Shard(0)])
            trained = [sharded[name] for name in named if name not in OTHERS]
            sizes = by_parameter(sharded, form)
            module.Muon(trained, flatten=True, muon_split_sizes=sizes).step()
            for name, p in named.items():
                p.copy_(sharded[name].to_local())
        finally:
            dist.destroy_process_group()

    return step


def optax(module: ModuleType, form: Any) -> Step:
    jax = importlib.import_module("jax")
    numbers = module.contrib.MuonDimensionNumbers
    axes = {
        name: told and numbers(tuple(told["reduction_axis"]), tuple(told["output_axis"]))
        for name, told in form.items()
    }
    optimizer = module.contrib.muon(0.02, muon_weight_dimension_numbers=axes)

    @jax.jit
    def updated(grads: Any, params: Any) -> Any:
        return optimizer.update(grads, optimizer.init(params), params)[0]

    def step(model: nn.Module) -> None:
        def held(name: str, value: Tensor) -> Any:
            shape = form[name]["reshape"] if form[name] else value.shape
            return jax.numpy.asarray(value.detach().numpy()).reshape(tuple(shape))

        named = dict(model.named_parameters())
        params = {name: held(name, p) for name, p in named.items()}
        grads = {name: held(name, p.grad) for name, p in named.items()}
        for name, update in updated(grads, params).items():
            named[name].add_(torch.tensor(update.tolist()).view(named[name].shape))

    return step


class Peer(NamedTuple):
    """How a framework is imported and built, and which weights its form can express."""

    module: str
    key: str
    make: Callable[[ModuleType, Any], Step]
    weights: tuple[str, ...]
    routes: bool = False


ROWS = ("q", "fused", "o", "experts")
PEERS = {
    "deepspeed": Peer(
        "deepspeed.runtime.zero.muon.original_muon",
        "parameter_attributes",
        deepspeed,
        ROWS,
        routes=True,
    ),
    "dion": Peer("dion", "param_groups", dion, (*ROWS, "kv"), routes=True),
    "muonium": Peer("muonium", "param_groups", muonium, (*ROWS, "kv"), routes=True),
    "gram-newton-schulz": Peer(
        "gram_newton_schulz.muon", "param_groups", gram_newton_schulz, tuple(WEIGHTS)
    ),
    "optimuon": Peer(
        "optimuon", "param_groups", optimuon, tuple(n for n in WEIGHTS if n != "experts")
    ),
    "megatron": Peer(
        "megatron.core.optimizer.emerging_optimizers",
        "parameter_attributes",
        megatron,
        ("q", "kv", "fused", "projections", "gate_up", "o"),
    ),
    "xtuner": Peer("xtuner.v1.optim.muon", "muon_split_sizes", xtuner, ("q", "kv", "fused", "o")),
    "optax": Peer(
        "optax",
        "muon_weight_dimension_numbers",
        optax,
        (*ROWS, "gate_up", "conv1d"),
        routes=True,
    ),
}


@pytest.fixture(scope="module", params=PEERS)
def framework(request: pytest.FixtureRequest) -> str:
    with pytest.MonkeyPatch.context() as patch:
        # Read while they are imported.
        patch.setenv("DS_BUILD_OPS", "0")
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        pytest.importorskip(PEERS[request.param].module, exc_type=ImportError)
    return request.param


def observed(framework: str, plan: Plan) -> Mapping[str, tuple[Cut, Cut]]:
    """How a step from zero, told by the export, cuts each weight along its rows and columns."""
    peer = PEERS[framework]
    step = peer.make(importlib.import_module(peer.module), export(plan, framework)[peer.key])
    shapes = {d.name: d.shape for d in (*plan.decisions, *plan.others)}
    gradients = draw(shapes, "export")

    @torch.no_grad()
    def probe(given: Tensors) -> Tensors:
        model = nn.ParameterDict({n: nn.Parameter(torch.zeros(s)) for n, s in shapes.items()})
        for name, p in model.named_parameters():
            p.grad = given[name].clone()
        # Several of them compile their step, which takes minutes on a CPU.
        with torch.compiler.set_stance("force_eager"):
            step(model)
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    base = probe(gradients)
    assert all(p.isfinite().all() for p in base.values())

    def moved(name: str, after: Tensor, axis: int) -> frozenset[int]:
        return differing_lines(after, base[name], axis)

    rows, columns = (scan(axis, gradients, probe, moved, "export") for axis in (0, 1))
    return {name: (rows[name], columns[name]) for name in rows}


def as_written(seen: Mapping[str, tuple[Cut, Cut]], name: str) -> bool:
    """Whether the observed cut of a weight is the one written out in the table above."""
    weight = WEIGHTS[name]
    along, across = seen[name][weight.axis], seen[name][1 - weight.axis]
    same = [sorted(block) for block in along.blocks] == weight.blocks
    return same and along.complete and not along.displaced and across.whole


def test_the_step_cuts_as_planned(framework: str) -> None:
    peer = PEERS[framework]
    seen = observed(framework, planned(*peer.weights))
    assert {name: str(seen[name][0]) for name in peer.weights if not as_written(seen, name)} == {}
    if peer.routes:
        assert str(seen["embedding"][0]) == "single lines: nothing is orthogonalised"


@pytest.mark.parametrize(
    ("wrong", "blocks"),
    [("q 2×16", runs(16, 16)), (None, runs(32)), ("q 8×4", runs(*[4] * 8))],
    ids=["half the heads", "left whole", "half heads"],
)
def test_a_wrong_export_is_seen(framework: str, wrong: str | None, blocks: list[list[int]]) -> None:
    right = planned("q", "o")
    told = dataclasses.replace(
        right, decisions=(decision("q", WEIGHTS["q"].shape, wrong), right.decisions[1])
    )
    seen = observed(framework, told)
    assert not as_written(seen, "q")
    assert as_written(seen, "o")
    assert [sorted(block) for block in seen["q"][0].blocks] == blocks


@muonsplit.subject(dialect="deepspeed-0.19.8", recognises=True)
def tagged_engine(model: nn.Module, hyper: Hyper) -> Engine:
    """ZeRO stage 1 with the plan's tags, set where DeepSpeed's own tagger has been before."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "optimizer": {
            "type": "Muon",
            "params": {
                "lr": hyper.lr,
                "momentum": hyper.momentum,
                "weight_decay": hyper.weight_decay,
                "torch_adam": True,
                **({"betas": (0.0, 0.0)} if hyper.momentum == 0 else {}),
            },
        },
    }
    engine = Engine(model, config)
    apply_tags(model, deepspeed_tags(plan(model)))
    return engine


@pytest.mark.slow
def test_the_engine_takes_the_tags_and_leaves_the_indexer_whole() -> None:
    pytest.importorskip("deepspeed")
    config = miniature(resolve("glm-5.2").config)
    shapes = {n: tuple(p.shape) for n, p in build(config).named_parameters()}
    start, gradients = draw(shapes, "start", size=1e-3), draw(shapes, "export")
    first = {n: flip_row(g, 0, n) if g.ndim == 2 else g for n, g in gradients.items()}
    with Worker(f"file:{__file__}:tagged_engine", timeout=300) as worker:
        worker.describe()
        base, after = (
            worker.run(Task(config, start, [given], {}, Hyper())).after[0]
            for given in (gradients, first)
        )

    def moved(leaf: str) -> set[int]:
        """How many rows move with the first, in each weight of a leaf."""
        named = [n for n in shapes if n.endswith(f".{leaf}.weight")]
        return {len(differing_lines(after[n], base[n], 0)) for n in named}

    rows = {n.split(".")[-2]: shape[0] for n, shape in shapes.items() if n.endswith("weight")}
    assert moved("q_b_proj") == {config["qk_nope_head_dim"] + config["qk_rope_head_dim"]}
    assert moved("kv_b_proj") == {config["qk_nope_head_dim"] + config["v_head_dim"]}
    # By DeepSpeed's own tags the indexer is split: see test_downstream_deepspeed.
    assert moved("wq_b") == {rows["wq_b"]}
    assert moved("o_proj") == {rows["o_proj"]}
