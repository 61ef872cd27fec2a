"""One step of a run in one process: what is recorded, what is refused, what a failure leaves."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import muonsplit
from muonsplit import Layout, PerHeadMuon
from muonsplit.errors import EvidenceError
from muonsplit.evidence.captured import Captured, is_capture, open_capture
from muonsplit.evidence.saved import Saved
from tests_cpu.test_memory import peak

LR, DECAY = 0.05, 0.1


class Net(nn.Module):
    """Two matrices, a stack of experts, an embedding in half precision, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5, dtype=torch.bfloat16)
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 4, 5))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def reference(model: nn.Module) -> torch.optim.Optimizer:
    layouts = {"up.weight": Layout.heads("q", 3, 3), "down.weight": None, "experts": None}
    return PerHeadMuon(model.named_parameters(), layouts, lr=LR, weight_decay=DECAY)


def torchs(model: nn.Module) -> torch.optim.Optimizer:
    flat = [p for p in model.parameters() if p.dim() == 2]
    return torch.optim.Muon(flat, lr=LR, weight_decay=DECAY)


BOTH = pytest.mark.parametrize("build", [reference, torchs])
Build = Callable[[nn.Module], torch.optim.Optimizer]


def matrices(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    return {n: p for n, p in model.named_parameters() if p.dim() > 1 and p in stepped}


def copied(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in tensors.items()}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def assert_holds(saved: Saved, expected: dict[str, Tensor]) -> None:
    assert set(saved.entries) == set(expected)
    for name, x in expected.items():
        assert saved.entries[name] == (tuple(x.shape), x.dtype)
        found = saved.read(name)
        assert found.dtype == x.dtype
        assert torch.equal(bits(found), bits(x)), name


@BOTH
def test_what_a_step_was_given_and_what_it_left(tmp_path: Path, build: Build) -> None:
    model = net()
    optimizer = build(model)
    named = matrices(model, optimizer)
    for step in range(2):
        folder = tmp_path / str(step)
        give_gradients(model, step)
        before, gradients = copied(named), copied({n: p.grad for n, p in named.items()})
        held = {
            n: optimizer.state[p].get("momentum_buffer", optimizer.state[p].get("exp_avg"))
            for n, p in named.items()
            if p in optimizer.state
        }
        momentum_before = copied(held)
        with muonsplit.capture(optimizer, folder, model):
            optimizer.step()
        found = open_capture(folder, verify=True)
        states = {n: optimizer.state[p] for n, p in named.items()}
        momentum = {n: s.get("momentum_buffer", s.get("exp_avg")) for n, s in states.items()}
        assert found.steps == 1
        assert_holds(found.part("before"), before)
        assert_holds(found.part("gradients"), gradients)
        assert_holds(found.part("after"), named)
        assert_holds(found.part("momentum"), momentum)
        assert ("momentum_before" in found.parts) == (step == 1)
        if step:
            assert_holds(found.part("momentum_before"), momentum_before)
        assert found.momentum_key("up.weight") == "momentum_buffer"
        assert found.settings("up.weight")["lr"] == LR
        assert found.settings("up.weight")["weight_decay"] == DECAY
    assert not torch.equal(before["up.weight"], named["up.weight"])


def captured(folder: Path) -> Captured:
    model = net()
    optimizer = reference(model)
    give_gradients(model, 0)
    with muonsplit.capture(optimizer, folder):
        optimizer.step()
    return open_capture(folder)


def test_safetensors_reads_the_files_by_itself(tmp_path: Path) -> None:
    found = captured(tmp_path)
    with safe_open(tmp_path / "rank-00000-of-00001.before.safetensors", "pt") as file:
        assert set(file.keys()) == {"embed.weight", "up.weight", "down.weight", "experts"}
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            assert torch.equal(bits(file.get_tensor(name)), bits(found.part("before").read(name)))
        assert torch.equal(file.get_tensor("experts"), net().experts)


def test_a_strided_weight_is_recorded_row_by_row(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(6, 4).t())
    assert not weight.is_contiguous()
    optimizer, before = torch.optim.Muon([("w", weight)], lr=LR), weight.detach().clone()
    weight.grad = torch.randn(4, 6)
    with muonsplit.capture(optimizer, tmp_path):
        optimizer.step()
    assert torch.equal(open_capture(tmp_path).part("before").read("w"), before)


def test_clipping_inside_is_seen(tmp_path: Path) -> None:
    model = net()
    optimizer = reference(model)
    give_gradients(model, 0)
    with muonsplit.capture(optimizer, tmp_path):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        clipped = model.up.weight.grad.clone()
        optimizer.step()
        model.zero_grad()
    assert torch.equal(open_capture(tmp_path).part("gradients").read("up.weight"), clipped)


def test_gradients_of_a_closure_are_left_out_and_said_so(tmp_path: Path) -> None:
    model = net()
    optimizer = reference(model)

    def closure() -> float:
        give_gradients(model, 0)
        return 0.0

    give_gradients(model, 1)
    with muonsplit.capture(optimizer, tmp_path):
        optimizer.step(closure)
    found = open_capture(tmp_path)
    assert "gradients" not in found.parts
    assert "closure" in found.left_out("gradients")["up.weight"]


@pytest.mark.parametrize("steps", [0, 2])
@BOTH
def test_a_capture_is_of_one_step(tmp_path: Path, steps: int, build: Build) -> None:
    model, folder = net(), tmp_path / "capture"
    optimizer = build(model)
    give_gradients(model, 0)

    def run() -> None:
        with muonsplit.capture(optimizer, folder, model):
            for _ in range(steps):
                optimizer.step()

    with pytest.raises(EvidenceError, match="No steps of" if steps == 0 else "2 steps of"):
        run()
    assert not folder.exists()
    # Nothing hooks it any more.
    optimizer.step()
    assert not folder.exists()


def test_an_error_inside_leaves_nothing_and_is_the_one_that_is_seen(tmp_path: Path) -> None:
    model = net()
    optimizer = reference(model)
    give_gradients(model, 0)

    def run() -> None:
        with muonsplit.capture(optimizer, tmp_path):
            optimizer.step()
            assert len(list(tmp_path.iterdir())) == 4
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert list(tmp_path.iterdir()) == []


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    was = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, was[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, was)


@pytest.mark.parametrize("swallowed", [False, True])
def test_a_full_disk_leaves_nothing(tmp_path: Path, swallowed: bool) -> None:
    model, folder = net(), tmp_path / "capture"
    optimizer = reference(model)
    give_gradients(model, 0)

    def run() -> None:
        with muonsplit.capture(optimizer, folder), suppress(EvidenceError if swallowed else ()):
            optimizer.step()

    said = "cannot be written: File too large"
    with files_no_larger_than(700), pytest.raises(EvidenceError, match=said):
        run()
    assert not folder.exists()


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "rank-00000-of-00001.json",
        "rank-00000-of-00001.before.safetensors",
        "rank-00001-of-00002.json",
    ],
)
def test_a_directory_of_something_else_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("kept")
    optimizer = reference(net())
    with pytest.raises(EvidenceError, match="already"), muonsplit.capture(optimizer, tmp_path):
        pytest.fail("entered")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(name, "kept")]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    optimizer = reference(net())
    with (
        pytest.raises(EvidenceError, match="cannot be written"),
        muonsplit.capture(optimizer, tmp_path / "file"),
    ):
        pytest.fail("entered")


def test_names_have_to_be_known(tmp_path: Path) -> None:
    model = net()
    for optimizer, given in (
        (torchs(model), {}),
        (torchs(model), {"model": net()}),
        (torchs(model), {"names": [("up", model.up.weight)]}),
    ):
        with (
            pytest.raises(EvidenceError, match=r"shape \(\d+, \d+\) has no name"),
            muonsplit.capture(optimizer, tmp_path, **given),
        ):
            pytest.fail("entered")
    assert list(tmp_path.iterdir()) == []


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("by", ["model", "names", "groups"])
def test_names_are_those_of_the_model_inside_its_wrappers(tmp_path: Path, by: str) -> None:
    model = net()
    layer: Any = torch.compile(model.up)
    model.up = layer
    outer = Wrapped(model)
    assert "module.up._orig_mod.weight" in dict(outer.named_parameters())
    given: dict[str, Any] = {}
    if by == "groups":
        flat = [(n, p) for n, p in outer.named_parameters() if p.dim() == 2]
        optimizer = torch.optim.Muon(flat, lr=LR)
    else:
        optimizer = torchs(outer)
        given = {by: outer if by == "model" else outer.named_parameters()}
    give_gradients(outer, 0)
    with muonsplit.capture(optimizer, tmp_path, **given):
        optimizer.step()
    assert set(open_capture(tmp_path).weights) == {"embed.weight", "up.weight", "down.weight"}


def test_nothing_of_two_axes_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([("bias", nn.Parameter(torch.ones(3)))])
    with pytest.raises(EvidenceError, match="no parameter"), muonsplit.capture(optimizer, tmp_path):
        pytest.fail("entered")


class Duck:
    """An optimizer that is none of torch's."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups = [{"params": list(model.parameters()), "lr": 1}]

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-1)


def test_an_optimizer_of_its_own_kind(tmp_path: Path) -> None:
    model = net()
    give_gradients(model, 0)
    before = copied(dict(model.named_parameters()))
    optimizer = Duck(model)
    with (
        pytest.raises(EvidenceError, match="No steps"),
        muonsplit.capture(optimizer, tmp_path / "none", model),
    ):
        pass
    with muonsplit.capture(optimizer, tmp_path / "one", model):
        optimizer.step()
    found = open_capture(tmp_path / "one")
    assert found.steps is None
    assert found.parts == ("before", "gradients", "after")
    assert "no state" in found.left_out("momentum")["up.weight"]
    delta = found.part("after").read("up.weight") - found.part("before").read("up.weight")
    assert torch.equal(delta, (before["up.weight"] - model.up.weight.grad) - before["up.weight"])


def test_a_state_without_momentum_is_named(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    optimizer = torch.optim.Adagrad([("w", weight)], lr=LR)
    weight.grad = torch.ones(3, 3)
    with muonsplit.capture(optimizer, tmp_path):
        optimizer.step()
    assert "step, sum" in open_capture(tmp_path).left_out("momentum")["w"]


def test_no_copy_of_a_weight_is_made(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(512, 512))
    optimizer = torch.optim.SGD([("w", weight)], lr=LR, momentum=0.9)
    weight.grad = torch.randn(512, 512)

    def step() -> None:
        with muonsplit.capture(optimizer, tmp_path):
            optimizer.step()

    optimizer.step()  # momentum is there now
    assert peak(step) < 100_000 < weight.numel()


def test_writing_takes_torch_alone(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('msgspec', 'safetensors', 'deepspeed'): sys.modules[name] = None\n"
        "import torch, muonsplit\n"
        "w = torch.nn.Parameter(torch.ones(3, 2)); w.grad = torch.ones(3, 2)\n"
        "o = torch.optim.SGD([('w', w)], lr=1.0)\n"
        f"with muonsplit.capture(o, {str(tmp_path / 'here')!r}): o.step()\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(muonsplit.__file__).parents[1]
    )
    assert torch.equal(open_capture(tmp_path / "here").part("after").read("w"), torch.zeros(3, 2))


def test_what_is_a_capture(tmp_path: Path) -> None:
    captured(tmp_path / "one")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_text("")
    assert is_capture(tmp_path / "one")
    assert not is_capture(tmp_path / "other")
    assert not is_capture(tmp_path / "absent")
    for name in ("other", "absent"):
        with pytest.raises(EvidenceError):
            open_capture(tmp_path / name)


def test_what_there_is_not(tmp_path: Path) -> None:
    found = captured(tmp_path)
    with pytest.raises(EvidenceError, match="no 'momentum_before'; it has before"):
        found.part("momentum_before")
    with pytest.raises(EvidenceError, match=r"no 'up\.bias'"):
        found.part("before").read("up.bias")
    with pytest.raises(EvidenceError, match=r"no weight 'up\.bias'"):
        found.settings("up.bias")


Said = dict[str, Any]


def rank_said(folder: Path) -> tuple[Path, Said]:
    path = folder / "rank-00000-of-00001.json"
    return path, json.loads(path.read_text())


def up(said: Said) -> Said:
    return said["files"]["before"]["pieces"]["up.weight"]


def put(key: str, value: object) -> Callable[[Said], None]:
    return lambda said: said.update({key: value})


def put_up(key: str, value: object) -> Callable[[Said], None]:
    return lambda said: up(said).update({key: value})


def vast(said: Said) -> None:
    up(said).update(shape=[1 << 40, 1 << 20], spans=[[[0, 1 << 40]], [[0, 1 << 20]]])
    said["weights"]["up.weight"]["shape"] = [1 << 40, 1 << 20]


ALTERED: list[tuple[str, Callable[[Said], None], str]] = [
    ("format", put("format", 2), "format"),
    ("rank", put("rank", 1), "describes rank 1 of 1"),
    ("world", put("world", 2), "describes rank 0 of 2"),
    ("negative", put("rank", -1), "describes rank -1"),
    ("not a number", put("steps", "one"), "no description"),
    ("missing", lambda said: said.pop("weights"), "no description"),
    ("part", lambda said: said["files"].update({"../x": said["files"]["after"]}), "which is none"),
    ("size", lambda said: said["files"]["before"].update(size=5), "its description says 5"),
    ("stranger", lambda said: said["weights"].pop("up.weight"), "none of its weights"),
    ("dtype", put_up("dtype", "int7"), "cannot be"),
    ("other dtype", put_up("dtype", "float16"), "holds 'up.weight' as torch.float32"),
    ("other shape", put_up("shape", [9, 7]), "cannot be"),
    ("huge", vast, "and its description"),
    ("no rows", put_up("spans", [[], [[0, 6]]]), "none of"),
    ("rows beyond", put_up("spans", [[[0, 10]], [[0, 6]]]), "none of"),
    ("rows backwards", put_up("spans", [[[9, 0]], [[0, 6]]]), "none of"),
    ("fewer axes", put_up("spans", [[[0, 9]]]), "none of"),
    ("rows missing", put_up("spans", [[[0, 4], [5, 9]], [[0, 6]]]), "rows 4–4, columns 0–5 is m"),
    ("rows twice", put_up("spans", [[[0, 9], [2, 3]], [[0, 6]]]), "rows 2–2.*more than once"),
]


@pytest.mark.parametrize(("alter", "said"), [x[1:] for x in ALTERED], ids=[x[0] for x in ALTERED])
def test_a_description_that_lies_is_refused(
    tmp_path: Path, alter: Callable[[Said], object], said: str
) -> None:
    captured(tmp_path)
    path, description = rank_said(tmp_path)
    alter(description)
    path.write_text(json.dumps(description))
    with pytest.raises(EvidenceError, match=said):
        open_capture(tmp_path).part("before").read("up.weight")


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a":'])
def test_a_description_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    captured(tmp_path)
    rank_said(tmp_path)[0].write_bytes(content)
    with pytest.raises(EvidenceError, match="no description"):
        open_capture(tmp_path)


def test_a_changed_byte_is_found_by_those_who_ask(tmp_path: Path) -> None:
    captured(tmp_path)
    path = tmp_path / "rank-00000-of-00001.after.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    open_capture(tmp_path)
    with pytest.raises(EvidenceError, match="changed since"):
        open_capture(tmp_path, verify=True)


def test_a_damaged_file_is_no_traceback(tmp_path: Path) -> None:
    captured(tmp_path)
    path = tmp_path / "rank-00000-of-00001.after.safetensors"
    size = path.stat().st_size
    path.write_bytes(b"\xff" * size)
    with pytest.raises(EvidenceError, match="damaged"):
        open_capture(tmp_path).part("after").read("up.weight")
    path.unlink()
    with pytest.raises(EvidenceError, match="cannot be read"):
        open_capture(tmp_path)
    os.truncate(tmp_path / "rank-00000-of-00001.before.safetensors", 100)
    with pytest.raises(EvidenceError, match="has 100 bytes"):
        open_capture(tmp_path)
