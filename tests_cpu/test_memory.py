"""What an update holds beside its input: counted allocations, not resident memory."""

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from muonsplit.dialect import DIALECTS
from muonsplit.layout import Layout
from muonsplit.muon import orthogonalize

SHAPES = [(16, 64, 512), (16, 128, 2048), (64, 128, 512), (16, 256, 512), (8, 512, 64)]
FAST = DIALECTS["deepspeed-0.19.8"].arithmetic.fastest()


def peak(run: Callable[[], object]) -> int:
    """The most bytes that were allocated at once while something ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = run()
    del kept
    events = profiled.profiler.kineto_results.events()
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def test_the_count_sees_what_is_allocated() -> None:
    assert peak(lambda: torch.empty(1000, 1000) + 1) >= 2 * 4_000_000
    assert peak(lambda: torch.empty(1000).add_(1)) < 100_000


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_update_holds_three_times_its_blocks_at_most(shape: tuple[int, int, int]) -> None:
    heads, d, n = shape
    update, layout = torch.randn(heads * d, n), Layout.heads("q", heads, d)
    most = peak(lambda: orthogonalize(update, layout, FAST))
    assert most <= 3 * update.numel() * update.element_size()


def test_blocks_are_not_copied_to_be_put_together() -> None:
    # Four shards of one weight take what one weight takes: results, and one chunk of buffers.
    update, layout = torch.randn(64 * 128, 512), Layout.heads("q", 64, 128)
    most = peak(lambda: orthogonalize(update, layout, FAST))
    chunk = (8 << 20) + (1 << 20)
    assert most <= update.numel() * update.element_size() + chunk
