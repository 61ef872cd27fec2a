"""One small function a peer, and the table of what they agree on with the reference."""

import ast
import importlib
import math
import os
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from muonsplit.subjects.deepspeed import DIALECT as DEEPSPEED
from tests_cpu.peers.compare import BETA, HEADS, LR, Build, Peer, Stepper


def load(name: str) -> Any:
    return importlib.import_module(name)


def torchs(adjust: str | None) -> Build:
    return lambda p, decay: torch.optim.Muon([p], LR, decay, BETA, adjust_lr_fn=adjust)


def muon_optimizer(p: Parameter, decay: float) -> Stepper:
    return load("muon").SingleDeviceMuon([p], lr=LR, momentum=BETA, weight_decay=decay)


def deepspeed(method: str, heads: bool = False) -> Build:
    def build(p: Parameter, decay: float) -> Stepper:
        module = load("deepspeed.runtime.zero.muon.original_muon")
        if heads:
            p.muon_num_heads = HEADS
        return module.SingleDeviceMuon(
            [p], lr=LR, momentum=BETA, weight_decay=decay, ns_method=method
        )

    return build


def split(x: Tensor) -> list[Tensor]:
    return list(x.view(HEADS, -1, x.shape[-1]).unbind(0))


def join(blocks: list[Tensor]) -> Tensor:
    return torch.cat(list(blocks))


def gram_newton_schulz(gram: bool, heads: bool = False) -> Build:
    def build(p: Parameter, decay: float) -> Stepper:
        functions = {"param_split_fn": split, "param_recombine_fn": join} if heads else {}
        return load("gram_newton_schulz.muon.muon").Muon(
            [{"params": [p], **functions}],
            lr=LR,
            momentum=BETA,
            weight_decay=decay,
            ns_use_kernels=False,
            ns_algorithm="gram_newton_schulz" if gram else "standard_newton_schulz",
            gram_newton_schulz_restart_iterations=[2],
        )

    return build


def pytorch_optimizer(gram: bool, foreach: bool = True) -> Build:
    def build(p: Parameter, decay: float) -> Stepper:
        return load("pytorch_optimizer").Muon(
            [
                {
                    "params": [p],
                    "use_muon": True,
                    **({"ns_method": "gram_newton_schulz"} if gram else {}),
                }
            ],
            lr=LR,
            momentum=BETA,
            weight_decay=decay,
            foreach=foreach,
        )

    return build


def heavyball(p: Parameter, decay: float) -> Stepper:
    module = load("heavyball")
    return module.Muon([p], lr=LR, betas=(BETA, 0.99), weight_decay=decay, compile_step=False)


def muon_fsdp2(p: Parameter, decay: float) -> Stepper:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    held = Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
    muon = load("muon_fsdp2").Muon(
        [{"params": [held], "use_muon": True, "lr": LR, "momentum": BETA, "weight_decay": decay}]
    )

    def step() -> None:
        held.grad = distribute_tensor(p.grad, mesh, [Shard(0)])
        muon.step()
        p.data.copy_(held.full_tensor())

    return SimpleNamespace(step=step)


def _loops(package: str) -> Any:
    """Their own loops for a CPU, which they keep but do not choose there."""
    module = load(f"{package}.orthogonalize.orthogonalize")
    loops = {"newton_schulz": module.ns_loop, "polar_express": module.pe_loop}
    module._get_orthogonalization_fn = lambda strategy, use_triton: loops[strategy]
    return load(package)


def dtensor_muon(strategy: str) -> Build:
    def build(p: Parameter, decay: float) -> Stepper:
        return _loops("dtensor_muon").Muon(
            [{"params": [p], "algorithm": "muon"}],
            lr=LR,
            wd=decay,
            momentum=BETA,
            use_cautious_wd=False,
            orthogonalization_strategy=strategy,
        )

    return build


def muonium(strategy: str, heads: bool = False) -> Build:
    def build(p: Parameter, decay: float) -> Stepper:
        sizes = {"split_sizes": [p.shape[0] // HEADS] * HEADS} if heads else {}
        return _loops("muonium").Muon(
            [{"params": [p], **sizes}],
            lr=LR,
            wd=decay,
            momentum=BETA,
            use_cautious_wd=False,
            orthogonalization_strategy=strategy,
        )

    return build


def optimuon(gram: bool, heads: bool = False, **settings: Any) -> Build:
    def build(p: Parameter, decay: float) -> Stepper:
        functions = {"ns_split_fn": split, "ns_recombine_fn": join} if heads else {}
        return load("optimuon").Muon(
            [p],
            lr=LR,
            momentum=BETA,
            weight_decay=decay,
            normuon=False,
            cautious_wd=False,
            gram_ns=gram,
            **functions,
            **settings,
        )

    return build


def emerging(heads: bool = False, **settings: Any) -> Build:
    def build(p: Parameter, decay: float) -> Stepper:
        if not hasattr(typing, "override"):  # it is written for Python 3.12
            typing.override = lambda function: function
        kind = load("emerging_optimizers.orthogonalized_optimizers").Muon
        if heads:
            kind = _per_head(kind)
        return kind([p], lr=LR, momentum=BETA, weight_decay=decay, **settings)

    return build


def _per_head(kind: Any) -> Any:
    class PerHead(kind):
        """As its example notebook overrides it."""

        def orthogonalize(self, p: Tensor, grad: Tensor, **_: Any) -> Tensor:
            heads = grad.reshape(HEADS, -1, grad.shape[1])
            return self.scaled_orthogonalize_fn(heads).reshape(grad.shape)

    return PerHead


def torchtitan(adjust: str | None, heads: bool = False) -> Build:
    """Its kernels; its optimizer asks for CUDA."""

    def build(p: Parameter, decay: float) -> Stepper:
        module = load("torchtitan.distributed.flex_shard.dist_muon")
        buffer = torch.zeros_like(p)
        shape = (HEADS, p.shape[0] // HEADS, p.shape[1]) if heads else tuple(p.shape)

        def step() -> None:
            update = module._prepare_muon_input(
                p.grad, buffer, momentum=BETA, nesterov=True, out=torch.empty_like(p)
            )
            direction = module._compute_muon_direction(
                update.view(shape),
                ns_coefficients=(3.4445, -4.775, 2.0315),
                ns_steps=5,
                eps=1e-7,
                out=torch.empty(shape, dtype=p.dtype),
            )
            module._apply_muon_update(
                p.data.view(shape),
                direction,
                lr=LR,
                weight_decay=decay,
                adjust_lr_fn=adjust,
                compute_matrix_shape=shape,
            )

        return SimpleNamespace(step=torch.no_grad()(step))

    return build


def dion(**group: Any) -> Build:
    """From a checkout of its repository: it is in no registry."""

    def build(p: Parameter, decay: float) -> Stepper:
        settings = {k: v for k, v in group.items() if k not in ("num_heads", "split")}
        cut: dict[str, Any] = {k: v for k, v in group.items() if k == "num_heads"}
        if "split" in group:
            quarter = p.shape[0] // 4
            cut["split_sizes"] = [2 * quarter, quarter, quarter]
        return load("dion").Muon(
            [{"params": [p], **cut}], lr=LR, mu=BETA, weight_decay=decay, **settings
        )

    return build


def taken(path: str, *names: str) -> dict[str, Any]:
    """Functions and classes of a checkout's file, without what it imports and compiles."""
    file = Path(os.environ["MUONSPLIT_PEERS"]) / path
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    for node in tree.body:
        node.decorator_list = []  # torch.compile
    space: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "Tensor": Tensor,
        "Literal": typing.Literal,
    }
    exec(compile(tree, str(file), "exec"), space)
    return space


def moonlight(p: Parameter, decay: float) -> Stepper:
    """From a checkout: its example is a script, of which only the optimizer is taken."""
    space = taken("Moonlight/examples/toy_train.py", "zeropower_via_newtonschulz5", "Muon")
    muon = space["Muon"](lr=LR, wd=decay, muon_params=[p], momentum=BETA)
    return SimpleNamespace(step=torch.no_grad()(muon.step))


def xtuner(p: Parameter, decay: float) -> Stepper:
    """From a checkout: its own functions in its own order; its class asks for a cluster."""
    before, after = (f"muon_update_{when}_orthogonalize" for when in ("pre", "post"))
    names = (before, after, "zeropower_via_newtonschulz5", "_get_muon_lr_ratio")
    space = taken("xtuner/xtuner/v1/optim/muon.py", *names)
    buffer, lr = torch.zeros_like(p), torch.tensor(LR)
    ratio = space["_get_muon_lr_ratio"](*p.shape, "rms_norm")

    def step() -> None:
        updates = space[before]([p.grad], [buffer], torch.tensor(BETA), True)
        updates = [space["zeropower_via_newtonschulz5"](u, 1e-8, 1) for u in updates]
        space[after]([p.data], updates, lr, lr * ratio, torch.tensor(decay))

    return SimpleNamespace(step=torch.no_grad()(step))


def optax(heads: bool = False) -> Build:
    """In JAX, whose weights are input × output; heads are a batch axis between them."""

    def build(p: Parameter, decay: float) -> Stepper:
        package, jax = load("optax"), load("jax")
        rows, cols = p.shape
        axes = package.contrib.MuonDimensionNumbers(0, 2 if heads else 1)
        muon = package.contrib.muon(
            LR,
            beta=BETA,
            weight_decay=decay,
            muon_weight_dimension_numbers={"w": axes},
        )

        def read(x: Tensor) -> Any:
            turned = x.detach().mT.reshape(cols, HEADS, -1) if heads else x.detach().mT
            return {"w": jax.numpy.asarray(turned.contiguous().numpy())}

        state = muon.init(read(p))

        def step() -> None:
            nonlocal state
            updates, state = muon.update(read(p.grad), state, read(p))
            moved = torch.from_dlpack(package.apply_updates(read(p), updates)["w"])
            p.data.copy_(moved.reshape(cols, rows).mT)

        return SimpleNamespace(step=step)

    return build


_F32 = {"float32": 0.0, "bfloat16": None}
_XLA = {"float32": 1e-6, "bfloat16": None}
_SUMS = "XLA sums in another order"


PEERS = (
    Peer("torch.optim.Muon", "torch-2.13", torchs(None), "torch"),
    Peer(
        "torch.optim.Muon, match_rms_adamw",
        "torch-2.13:scale=moonlight",
        torchs("match_rms_adamw"),
        "torch",
    ),
    Peer("muon-optimizer", "jordan", muon_optimizer, "muon"),
    Peer("deepspeed standard", "deepspeed-0.19.8-standard", deepspeed("standard"), "deepspeed"),
    Peer(
        "deepspeed standard, heads",
        "deepspeed-0.19.8-standard",
        deepspeed("standard", heads=True),
        "deepspeed",
        heads=True,
    ),
    Peer("deepspeed gram", "deepspeed-0.19.8", deepspeed("gram"), "deepspeed", DEEPSPEED),
    Peer(
        "deepspeed gram, heads",
        "deepspeed-0.19.8",
        deepspeed("gram", heads=True),
        "deepspeed",
        DEEPSPEED,
        heads=True,
    ),
    Peer(
        "gram-newton-schulz",
        "gram-newton-schulz-0.1.6",
        gram_newton_schulz(True),
        "gram_newton_schulz",
    ),
    Peer(
        "gram-newton-schulz, heads",
        "gram-newton-schulz-0.1.6",
        gram_newton_schulz(True, heads=True),
        "gram_newton_schulz",
        heads=True,
    ),
    Peer(
        "gram-newton-schulz standard",
        "gram-newton-schulz-0.1.6-standard",
        gram_newton_schulz(False),
        "gram_newton_schulz",
    ),
    Peer(
        "pytorch-optimizer",
        "pytorch-optimizer-4.1.0",
        pytorch_optimizer(False),
        "pytorch_optimizer",
    ),
    Peer(
        "pytorch-optimizer gram",
        "pytorch-optimizer-4.1.0-gram",
        pytorch_optimizer(True),
        "pytorch_optimizer",
    ),
    Peer(
        "heavyball",
        "heavyball-3.2.1",
        heavyball,
        "heavyball",
        # Twice the largest of many runs, which is ten standard deviations; three ulps.
        figures={"float32": 6e-4, "bfloat16": 5e-3},
        why="it rounds to bfloat16 at random",
    ),
    Peer("muon-fsdp2", "muon-fsdp2-0.3.0", muon_fsdp2, "muon_fsdp2"),
    Peer("dtensor-muon", "dtensor-muon-0.1.0", dtensor_muon("newton_schulz"), "dtensor_muon"),
    Peer("muonium", "muonium-0.2.0", muonium("newton_schulz"), "muonium"),
    Peer(
        "muonium, heads",
        "muonium-0.2.0",
        muonium("newton_schulz", heads=True),
        "muonium",
        heads=True,
    ),
    Peer("optimuon", "optimuon-0.1.1", optimuon(True), "optimuon"),
    Peer("optimuon, heads", "optimuon-0.1.1", optimuon(True, heads=True), "optimuon", heads=True),
    Peer(
        "optimuon standard",
        "optimuon-0.1.1-standard",
        optimuon(False, ns_coefficients=(3.4445, -4.7750, 2.0315), ns_norm_scale=1.0),
        "optimuon",
    ),
    Peer(
        "emerging-optimizers",
        "emerging-optimizers-0.3.0",
        emerging(),
        "emerging_optimizers",
        figures=_F32,
    ),
    Peer(
        "emerging-optimizers highest",
        "emerging-optimizers-0.3.0-highest",
        emerging(fp32_matmul_prec="highest"),
        "emerging_optimizers",
        figures=_F32,
    ),
    Peer(
        "emerging-optimizers, heads",
        "emerging-optimizers-0.3.0",
        emerging(heads=True),
        "emerging_optimizers",
        heads=True,
        figures=_F32,
    ),
    Peer("torchtitan", "torchtitan-0.3.0", torchtitan(None), "torchtitan", contiguous=True),
    Peer(
        "torchtitan, heads",
        "torchtitan-0.3.0",
        torchtitan(None, heads=True),
        "torchtitan",
        heads=True,
    ),
    Peer(
        "torchtitan match_rms, heads",
        "torchtitan-0.3.0:scale=moonlight",
        torchtitan("match_rms_adamw", heads=True),
        "torchtitan",
        heads=True,
    ),
    Peer("dion", "dion", dion(), "dion"),
    Peer("dion, heads", "dion", dion(num_heads=HEADS), "dion", heads=True),
    Peer(
        "dion NS5",
        "dion-newton-schulz",
        dion(use_polar_express=False, nesterov=True, adjust_lr="rms_norm"),
        "dion",
    ),
    Peer("Moonlight", "moonlight", moonlight, "toy_train"),
    Peer("xtuner", "xtuner", xtuner, "xtuner"),
    Peer("optax", "optax-0.2.8", optax(), "optax", figures=_XLA, why=_SUMS),
    Peer(
        "optax, heads",
        "optax-0.2.8",
        optax(heads=True),
        "optax",
        heads=True,
        figures=_XLA,
        why=_SUMS,
    ),
)
