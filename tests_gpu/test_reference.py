"""The reference on a CUDA device: its arithmetic, and the shard property on that device."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from muonsplit.dialect import dialect_named
from muonsplit.layout import Layout
from muonsplit.muon import PerHeadMuon, orthogonalize
from muonsplit.newton_schulz import scale_factor, singular_value_oracle
from muonsplit.observe.gradients import draw_uneven
from muonsplit.observe.tolerance import rounding_bound

pytestmark = pytest.mark.gpu

# GLM-5.2-0.8B's q_b and kv_b, Kimi-K3-0.40B's KDA query.
WEIGHTS = {"q_b": (16, 256, 512), "kv_b": (16, 320, 128), "kda": (8, 32, 1024)}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


@pytest.fixture(params=WEIGHTS)
def weight(request: pytest.FixtureRequest) -> tuple[Tensor, int, int]:
    heads, width, cols = WEIGHTS[request.param]
    drawn = draw_uneven({"w": (heads * width, cols)}, "gpu", request.param)["w"]
    return drawn.cuda(), heads, width


@pytest.mark.parametrize(
    "dialect", ["deepspeed-0.19.8", "deepspeed-0.19.8-standard", "torch-2.13+per-head"]
)
def test_agrees_with_the_oracle(weight: tuple[Tensor, int, int], dialect: str) -> None:
    update, heads, width = weight
    arithmetic = dialect_named(dialect).arithmetic
    made = orthogonalize(update, Layout.heads("q", heads, width), arithmetic).double().cpu()
    blocks = update.cpu().view(heads, width, -1)
    wanted = singular_value_oracle(blocks, arithmetic)
    wanted = wanted * scale_factor(arithmetic, width, update.shape[1])
    # The bound asks for the dtype of the iteration, here the accelerator's.
    here = replace(arithmetic, cpu_dtype=arithmetic.compute_dtype)
    for block, seen, exact in zip(blocks, made.view_as(wanted), wanted, strict=True):
        assert (seen - exact).norm() <= rounding_bound(block, here) * exact.norm()


@pytest.mark.parametrize("tp", [2, 4])
def test_the_head_does_not_see_its_neighbours(weight: tuple[Tensor, int, int], tp: int) -> None:
    # Independence is promised anywhere; equal bits for another batch size are cuBLAS' to give.
    update, heads, width = weight
    arithmetic = dialect_named("deepspeed-0.19.8").arithmetic
    layout = Layout.heads("q", heads, width)
    rows = heads // tp * width
    poisoned = torch.full_like(update, float("nan"))
    poisoned[:rows] = update[:rows]
    kept = orthogonalize(update, layout, arithmetic)[:rows]
    assert torch.equal(bits(orthogonalize(poisoned, layout, arithmetic)[:rows]), bits(kept))


def test_training_state_stays_on_the_device() -> None:
    p = torch.nn.Parameter(torch.randn(64, 48, device="cuda"))
    norm = torch.nn.Parameter(torch.ones(48, device="cuda"))
    optimizer = PerHeadMuon([("w", p), ("norm", norm)], {"w": Layout.heads("q", 4, 16)})
    p.grad, norm.grad = torch.randn_like(p), torch.randn_like(norm)
    optimizer.step()
    assert all(
        value.is_cuda
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    assert p.isfinite().all()
