"""The Triton kernel in Triton's interpreter: `tox -e interp`."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonsplit.certificate.run import Question, certify
from muonsplit.dialect import DIALECTS, dialect_named
from muonsplit.errors import InputError, MuonsplitError, SubjectError, UsageError
from muonsplit.kernels import launch as launching
from muonsplit.kernels import launches
from muonsplit.kernels.launch import launch
from muonsplit.kernels.tiles import ARCHITECTURES, LARGEST, classes, tile
from muonsplit.layout import Layout
from muonsplit.muon import PerHeadMuon, directions
from muonsplit.newton_schulz import newton_schulz
from muonsplit.observe.tolerance import rounding_bound
from muonsplit.subjects.process import Worker
from tests_cpu import kernel_case as case

pytest.importorskip("triton", reason="run with tox -e interp")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run with tox -e interp: TRITON_INTERPRET=1", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Every buffer that torch does not initialise is full of NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("holds", case.PROPERTIES, ids=lambda p: p.__name__)
def test_the_kernel_has_every_property(holds: object) -> None:
    assert holds(launch)


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_is_spoken_up_to_the_order_of_sums(name: str) -> None:
    arithmetic = DIALECTS[name].arithmetic
    X = case.normal(2, 12, 20)
    found = newton_schulz(X, arithmetic, "triton")
    exact = newton_schulz(X.double(), arithmetic.exact())
    assert found.dtype is getattr(torch, arithmetic.pre_cast or arithmetic.cpu_dtype)
    emulated = newton_schulz(X, arithmetic).double()
    unit = torch.finfo(found.dtype).eps / 2
    for block, seen, same, wanted in zip(X, found.double(), emulated, exact, strict=True):
        off, theirs = (float((x - wanted).norm() / wanted.norm()) for x in (seen, same))
        assert off <= rounding_bound(block, arithmetic)
        # The same roundings in another order of sums: as far off as the emulation, by and large.
        assert off <= 1.5 * theirs + unit


@settings(max_examples=12)
@given(
    heads=st.integers(2, 4),
    rows=st.integers(1, 40),
    cols=st.integers(1, 40),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_the_shard_of_the_result_is_the_result_of_the_shard(
    heads: int, rows: int, cols: int, seed: int, data: st.DataObject
) -> None:
    X = case.normal(heads, rows, cols, seed=seed)
    first = data.draw(st.integers(0, heads - 1))
    last = data.draw(st.integers(first + 1, heads))
    whole = newton_schulz(X, case.GRAM, "triton")
    shard = newton_schulz(X[first:last].clone(), case.GRAM, "triton")
    assert case.same_bits(shard, whole[first:last])


def test_strides_and_alignment_do_not_show() -> None:
    X = case.normal(3, 20, 36)
    wanted = newton_schulz(X, case.GRAM, "triton")
    off = torch.cat([torch.zeros(1), X.flatten()])[1:].view_as(X)
    padded = torch.zeros(3, 20, 52)
    padded[..., :36] = X
    for other in (off, padded[..., :36], X.mT.contiguous().mT):
        assert case.same_bits(newton_schulz(other, case.GRAM, "triton"), wanted)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_entry_of_the_table_gives_the_same_numbers(architecture: str) -> None:
    X = case.normal(2, 12, 20)
    wanted = newton_schulz(X.double(), case.GRAM.exact())
    entries = {tile(m, m, torch.float32, architecture) for m, _ in classes(architecture)}
    entries |= {
        tile(*s, torch.float16, architecture)
        for m, _ in classes(architecture)
        for s in ((m, m), (m + 1, m))
    }
    for entry in sorted(entries):
        found = case.run(launch, X, case.GRAM, entry=entry)
        for block, seen, exact in zip(X, found.double(), wanted, strict=True):
            assert (seen - exact).norm() <= rounding_bound(block, case.GRAM) * exact.norm()


def test_tiles_depend_on_nothing_but_shape_dtype_and_architecture() -> None:
    for architecture in ARCHITECTURES:
        for most, dtype in classes(architecture):
            entry = tile(most, most, dtype, architecture)
            assert entry.rows % entry.inner == 0
            assert entry.cols % entry.inner == 0
            assert all(x & (x - 1) == 0 for x in entry[:4])


def test_a_zero_block_stays_zero_and_a_poisoned_one_stays_alone() -> None:
    X = case.normal(3, 8, 20)
    X[0], X[1, 2, 3] = 0.0, torch.inf
    found = newton_schulz(X, case.GRAM, "triton")
    assert not found[0].any()
    assert not found[1].isfinite().all()
    assert case.same_bits(found[2], newton_schulz(X[2:], case.GRAM, "triton")[0])


@pytest.mark.parametrize("size", [1e-10, 1e15])
def test_size_does_not_matter(size: float) -> None:
    X = case.normal(1, 8, 20)
    arithmetic = replace(case.GRAM, epsilon=0.0)
    wanted = newton_schulz(X.double(), arithmetic.exact())[0]
    found = newton_schulz(X * size, arithmetic, "triton")[0].double()
    assert (found - wanted).norm() <= rounding_bound(X[0], arithmetic) * wanted.norm()


def test_bfloat16_is_rounded_to_nearest_even_and_multiplied_as_numbers() -> None:
    # Both are what the interpreter itself does wrong: it truncates, and multiplies bit patterns.
    X = torch.tensor([[[1.0 + 2**-8, 1.0 + 3 * 2**-8, -1.0 - 2**-8, 1.0 + 2**-8 + 2**-16]]])
    ops = (case.Op(case.Kind.GRAM, 0), case.Op(case.Kind.APPLY, left=0, alpha=1.0, beta=1.0))
    around = case.ends(torch.bfloat16, **case.UNNORMALISED)
    found = launch(X, case.Program(ops, 1), around).double()
    x = X.to(torch.bfloat16).double()
    gram = (x @ x.mT).to(torch.bfloat16).double()
    assert torch.equal(found, (x + gram @ x).to(torch.bfloat16).double())


def test_the_operator_is_one_to_torch() -> None:
    from muonsplit.kernels import op

    X = case.normal(2, 8, 12)
    made = case.program(case.GRAM, 8, 12, torch.float32)
    integers = [int(x) for o in made.ops for x in o[:6]]
    floats = [float(x) for o in made.ops for x in o[6:]]
    arguments = (X, integers, floats, made.slots, *case.ends())
    torch.library.opcheck(op._run, arguments)  # pyright: ignore[reportPrivateUsage]


def test_it_compiles_without_a_break_in_the_graph() -> None:
    torch.use_deterministic_algorithms(False)
    X = case.normal(2, 8, 12)
    compiled = torch.compile(
        lambda x: newton_schulz(x, case.GRAM, "triton") * 2, fullgraph=True, backend="aot_eager"
    )
    assert case.same_bits(compiled(X), newton_schulz(X, case.GRAM, "triton") * 2)


def test_the_optimizer_launches_once_a_shape_and_weights_do_not_see_each_other() -> None:
    names = ["a", "b", "c"]
    layouts = {"a": Layout.heads("q", 4, 8), "b": Layout.heads("k", 2, 8), "c": None}
    weights = {
        n: torch.nn.Parameter(case.normal(s, 12, seed=s))
        for n, s in zip(names, (32, 16, 20), strict=True)
    }
    for weight in weights.values():
        weight.grad = case.normal(*weight.shape, seed=7)
    launches.clear()
    PerHeadMuon(weights.items(), layouts, backend="triton").step()
    assert sorted((ran.short, ran.long) for ran in launches.elements()) == [(8, 12), (12, 20)]
    assert {ran.architecture for ran in launches} == {"interpreter"}
    alone = torch.nn.Parameter(case.normal(16, 12, seed=16))
    alone.grad = case.normal(16, 12, seed=7)
    PerHeadMuon([("b", alone)], {"b": layouts["b"]}, backend="triton").step()
    assert case.same_bits(alone.detach(), weights["b"].detach())


@pytest.mark.parametrize(
    "dialect", ["deepspeed-0.19.8", "torch-2.13+per-head", "optimuon-0.1.1", "muonium-0.2.0"]
)
def test_scales_are_those_of_the_reference(dialect: str) -> None:
    arithmetic = dialect_named(dialect).arithmetic
    update, layout = case.normal(48, 20), Layout.heads("q", 2, 24)
    ours, theirs = (
        directions([update], [layout], arithmetic, backend)[0].scaled.double()
        for backend in ("torch", "triton")
    )
    # Both are off the exact one by no more than rounding.
    bound = max(rounding_bound(block, arithmetic) for block in update.split(24))
    assert (ours - theirs).norm() <= 2 * bound * ours.norm()


def test_it_is_certified_as_any_optimizer_is() -> None:
    # Three checks: the interpreter takes minutes for all of them.
    only = ["arithmetic.direction", "arithmetic.scale", "independence.copies"]
    with Worker("builtin:triton", timeout=120) as worker:
        found = certify(worker, Question(models=["llama"], only=only, profile="smoke"))
    statuses = {r.check: r.status for r in found.models[0].results}
    assert {statuses.pop(check) for check in only} == {"passed"}
    assert "failed" not in statuses.values()


def test_it_is_not_certified_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with (
        Worker("builtin:triton") as worker,
        pytest.raises(SubjectError, match="needs a GPU or Triton's interpreter"),
    ):
        certify(worker, Question(models=["llama"], profile="smoke"))


WRONG = {
    "float64": (torch.zeros(1, 8, 8, dtype=torch.float64), case.GRAM, InputError, "torch.float64"),
    "wide": (torch.zeros(1, LARGEST + 1, LARGEST + 2), case.GRAM, InputError, "577 × 578"),
    "scaled": (
        torch.zeros(1, 8, 8),
        replace(case.GRAM, normalize="scaled"),
        InputError,
        "'scaled'",
    ),
    "no steps": (torch.zeros(1, 8, 8), replace(case.STANDARD, steps=0), InputError, "steps=0"),
    "exact": (torch.zeros(1, 8, 8), case.GRAM.exact(), InputError, "torch.float64"),
    "empty": (torch.zeros(0, 8, 8), case.GRAM, InputError, "empty"),
}


@pytest.mark.parametrize(("X", "arithmetic", "kind", "said"), WRONG.values(), ids=WRONG)
def test_what_it_cannot_take_is_refused_by_name(
    X: torch.Tensor, arithmetic: object, kind: type[MuonsplitError], said: str
) -> None:
    with pytest.raises(kind, match=said.replace("(", r"\(")):
        newton_schulz(X, arithmetic, "triton")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    X = torch.zeros(1, 8, 8)

    def version(of: str) -> str:
        raise launching.metadata.PackageNotFoundError(of)

    launching.installed.cache_clear()
    monkeypatch.setattr(launching.metadata, "version", version)
    with pytest.raises(UsageError, match="not installed"):
        newton_schulz(X, case.GRAM, "triton")
    monkeypatch.setattr(launching.metadata, "version", lambda of: "3.5.1")
    with pytest.raises(UsageError, match=r"3\.6 or newer, got 3\.5\.1"):
        newton_schulz(X, case.GRAM, "triton")
    monkeypatch.undo()
    launching.installed.cache_clear()
    with pytest.raises(InputError, match="no tiles for sm_70"):
        tile(8, 8, torch.float32, "sm_70")
