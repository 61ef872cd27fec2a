"""Three steps of every peer that can be driven here, beside the reference in its dialect."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests_cpu.peers.compare import Compared, Peer, compare, one_process
from tests_cpu.peers.drivers import PEERS
from tests_cpu.peers.table import table

pytestmark = pytest.mark.downstream

DOCS = Path(__file__).parent.parent / "docs" / "peers.md"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CASES = [
    pytest.param(peer, label, dtype, decay, id=f"{peer.name}-{label}-{dtype}-{decay}")
    for peer in PEERS
    for label in peer.shapes
    for dtype in DTYPES
    for decay in (0.0, 0.1)
    if peer.figures[dtype] is not None
]


@pytest.fixture(scope="module", autouse=True)
def surroundings() -> Iterator[None]:
    """Checkouts of peers that are in no registry, and a process group for those that ask."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_BUILD_OPS", "0")
        patch.setenv("DS_ACCELERATOR", "cpu")
        for checkout in Path(os.environ.get("MUONSPLIT_PEERS", "/nowhere")).glob("*"):
            patch.syspath_prepend(str(checkout))
            patch.syspath_prepend(str(checkout / "examples"))
        with one_process():
            yield


def compared(peer: Peer, label: str, dtype: str, decay: float, seed: int) -> Compared:
    if peer.needs != "torch" and os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        pytest.skip("peers are compared as they are written: set TORCHDYNAMO_DISABLE=1")
    if importlib.util.find_spec(peer.needs) is None and peer.needs not in sys.modules:
        pytest.skip(f"{peer.needs} is not installed")
    return compare(peer, peer.shapes[label], DTYPES[dtype], decay, seed)


@pytest.mark.parametrize(("peer", "label", "dtype", "decay"), CASES)
def test_three_steps(peer: Peer, label: str, dtype: str, decay: float) -> None:
    for seed in (0, 1):
        found, figure = compared(peer, label, dtype, decay, seed), peer.figures[dtype]
        assert figure is not None
        assert found.same_bits if figure == 0 else found.off <= figure


# A knob that is set otherwise: the comparison has to see each of them.
OTHERWISE = {
    "momentum": "dion:momentum=ema",
    "nesterov": "jordan:nesterov=false",
    "form": "jordan:form=paren",
    "coefficients": "jordan:coefficients=you",
    "normalize": "jordan:epsilon=0.1",
    "scale": "jordan:scale=moonlight",
    "scale_on": "jordan:scale_on=rate",
    "decay": "jordan:decay=folded",
    "cpu_dtype": "jordan:cpu_dtype=float32",
    "pre_cast": "gram-newton-schulz-0.1.6:pre_cast=none",
    "step": "dion:scale_on=rate",
    "restarts": "gram-newton-schulz-0.1.6:restarts=1+3",
    "tall": "emerging-optimizers-0.3.0-highest:tall=right",
    "foreach": "jordan:foreach=all",
}


@pytest.mark.parametrize("name", OTHERWISE.values(), ids=OTHERWISE)
def test_bits_tell_every_knob_apart(name: str) -> None:
    base = name.partition(":")[0]
    peer = next(p for p in PEERS if p.dialect == base)
    dtype = "bfloat16" if "foreach" in name else "float32"
    assert not compared(replace(peer, dialect=name), "tall", dtype, 0.1, 0).same_bits


def test_the_docs_carry_the_table() -> None:
    assert table() in DOCS.read_text()
