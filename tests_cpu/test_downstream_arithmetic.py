"""DeepSpeed's own kernels and ours, bit for bit."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from muonsplit.dialect import DIALECTS, dialect_named
from muonsplit.layout import Layout
from muonsplit.muon import advance_momentum, orthogonalize
from muonsplit.observe.tolerance import rounding_bound
from muonsplit.subjects.deepspeed import DIALECT

pytestmark = pytest.mark.downstream

# With this CPU's own half-precision products, where DeepSpeed takes them.
GRAM = replace(dialect_named(DIALECT).arithmetic, halves="native")
STANDARD = DIALECTS["deepspeed-0.19.8-standard"].arithmetic

# Heads, width, columns: blocks whose rows of A and X start on cache lines, as real ones do.
PER_HEAD = {
    "wide": (3, 16, 48),
    "wide-narrow-head": (6, 4, 64),
    "square": (3, 16, 16),
    "tall": (3, 24, 8),
    "very-tall": (2, 64, 4),
    "one-head": (1, 16, 32),
}
per_head = pytest.mark.parametrize(
    ("heads", "width", "cols"), PER_HEAD.values(), ids=list(PER_HEAD)
)


@pytest.fixture(scope="module")
def deepspeed() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        # All three are read while it is imported.
        patch.setenv("DS_BUILD_OPS", "0")
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        pytest.importorskip("deepspeed")
        return pytest.importorskip("deepspeed.runtime.zero.muon.original_muon")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def test_the_dtypes_are_deepspeeds(deepspeed: ModuleType) -> None:
    assert deepspeed.ns_compute_dtype("gram") == getattr(torch, GRAM.cpu_dtype)
    assert deepspeed.ns_compute_dtype("standard") == getattr(torch, STANDARD.cpu_dtype)


@per_head
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
def test_gram_per_head_is_deepspeeds(
    deepspeed: ModuleType, heads: int, width: int, cols: int, nesterov: bool
) -> None:
    arithmetic = replace(GRAM, nesterov=nesterov)
    layout = Layout.heads("q", heads, width)
    ours, theirs = torch.zeros(heads * width, cols), torch.zeros(heads * width, cols)
    for step in range(3):
        gradient = normal(heads * width, cols, seed=step)
        update = deepspeed.muon_update(
            gradient.clone(), theirs, beta=0.95, nesterov=nesterov, num_heads=heads
        )
        moved = advance_momentum(gradient, ours, arithmetic, 0.95)
        assert same_bits(ours, theirs)
        assert same_bits(orthogonalize(moved, layout, arithmetic), update)


@pytest.mark.parametrize("shape", [(3, 16, 48), (3, 16, 16), (3, 24, 8)], ids=str)
def test_gram_per_expert_is_deepspeeds(deepspeed: ModuleType, shape: tuple[int, ...]) -> None:
    gradient = normal(*shape)
    theirs = deepspeed.muon_update(gradient.clone(), torch.zeros(shape), is_expert_group=True)
    moved = advance_momentum(gradient, torch.zeros(shape), GRAM, 0.95)
    assert same_bits(orthogonalize(moved, None, GRAM), theirs)


@pytest.mark.parametrize("shape", [(16, 48), (16, 16), (48, 16)], ids=str)
def test_gram_of_a_whole_weight_is_deepspeeds(
    deepspeed: ModuleType, shape: tuple[int, int]
) -> None:
    gradient = normal(*shape)
    theirs = deepspeed.muon_update(gradient.clone(), torch.zeros(shape))
    moved = advance_momentum(gradient, torch.zeros(shape), GRAM, 0.95)
    ours = orthogonalize(moved, None, GRAM)
    # A single matrix takes another routine of the library than a batch: equal up to rounding.
    assert float((ours - theirs).norm() / theirs.norm()) <= 2 * rounding_bound(moved, GRAM)


def standard(module: ModuleType, width: int, cols: int) -> tuple[int, int]:
    """Of 20 weights of 2 heads, how many DeepSpeed's standard form and ours agree on in bits."""
    same, total, layout = 0, 20, Layout.heads("q", 2, width)
    for seed in range(total):
        gradient = normal(2 * width, cols, seed=seed)
        zeros = torch.zeros_like(gradient)
        theirs = module.muon_update(
            gradient.clone(), zeros.clone(), ns_method="standard", num_heads=2
        )
        moved = advance_momentum(gradient, zeros, STANDARD, 0.95)
        ours = orthogonalize(moved, layout, STANDARD)
        same += same_bits(ours, theirs)
        bound = 2 * max(rounding_bound(block, STANDARD) for block in moved.split(width))
        assert float((ours - theirs).norm() / theirs.norm()) <= bound
    return same, total


# float32 sums in another order flip a rounding to bfloat16 now and then; a rounding too many or
# too few changes every weight.
@pytest.mark.parametrize(
    ("width", "cols"), [(4, 8), (4, 4), (16, 4)], ids=["wide", "square", "tall-by-4"]
)
def test_standard_per_head_is_deepspeeds(deepspeed: ModuleType, width: int, cols: int) -> None:
    same, total = standard(deepspeed, width, cols)
    assert same >= total // 2


def test_standard_rounds_the_scale_as_deepspeed_does(deepspeed: ModuleType) -> None:
    # √2 is no bfloat16 number, and DeepSpeed multiplies before it leaves bfloat16.
    same, total = standard(deepspeed, 8, 4)
    assert same >= total // 2
