"""Checkpoints of every format are read bit for bit, one tensor at a time, and nothing is run."""

import json
import pickle
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed._shard.sharded_tensor import metadata as earlier
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.state_dict import get_state_dict

from muonsplit.errors import EvidenceError
from muonsplit.evidence.opened import opened, prefix_of, under
from muonsplit.evidence.saved import Entry, Saved
from tests_cpu.ranks import run

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOATS += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16]
PACKED = torch.float4_e2m1fn_x2


def any_bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Every kind of value: infinities, NaNs with payloads, subnormal numbers, both zeros."""
    drawn = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    return (
        torch.randint(256, (size,), dtype=torch.uint8, generator=drawn).view(dtype).reshape(shape)
    )


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.tolist())


def of_file(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    save_file(dict(tensors), folder / "model.safetensors")
    return folder / "model.safetensors"


def of_files(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    for at, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, folder / f"part-{at}.safetensors")
    return folder


def of_index(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    of_files(folder, tensors)
    listed = {name: f"part-{at}.safetensors" for at, name in enumerate(tensors)}
    index(folder, listed)
    return folder


def of_distributed(folder: Path, tensors: Mapping[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save(dict(tensors), checkpoint_id=folder, no_dist=True)
    return folder


def index(folder: Path, listed: object) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": listed}))
    return path


WRITERS = [of_file, of_files, of_index, of_distributed]
each_format = pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
Writer = Callable[[Path, Mapping[str, Tensor]], Path]


@each_format
def test_every_bit_is_read(tmp_path: Path, write: Writer) -> None:
    dtypes = [*FLOATS, *INTEGERS, PACKED]
    tensors = {f"a.{d}.weight": any_bits(d, 5, 4, seed=at) for at, d in enumerate(dtypes)}
    tensors |= {"odd.bias": any_bits(torch.bfloat16, 3), "none": torch.empty(0, 3)}
    tensors |= {"scalar": torch.tensor(-0.0), "flags": torch.tensor([True, False])}
    saved = opened(write(tmp_path, tensors))
    assert saved.entries == {n: Entry(tuple(t.shape), t.dtype) for n, t in tensors.items()}
    for name, tensor in tensors.items():
        assert bits(saved.read(name)) == bits(tensor), name
    assert saved.step is None


@each_format
def test_what_is_read_may_be_changed(tmp_path: Path, write: Writer) -> None:
    saved = opened(write(tmp_path, {"a": torch.ones(3)}))
    saved.read("a").zero_()
    assert saved.read("a").tolist() == [1, 1, 1]


@each_format
def test_an_unknown_name_is_an_error(tmp_path: Path, write: Writer) -> None:
    saved = opened(write(tmp_path, {"a": torch.ones(3)}))
    with pytest.raises(EvidenceError, match="no tensor 'b'"):
        saved.read("b")


def test_shards_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    trained = dict(model.named_parameters())
    for saved in (opened(tmp_path), opened(tmp_path / "model.safetensors.index.json")):
        assert prefix_of(saved.entries, trained) == ""
        assert all(bits(saved.read(name)) == bits(p.detach()) for name, p in trained.items())


@pytest.mark.parametrize("write", [of_files, of_index])
def test_only_the_file_asked_for_is_opened(tmp_path: Path, write: Writer) -> None:
    saved = opened(write(tmp_path, {name: torch.ones(2) for name in "abc"}))
    (tmp_path / "part-0.safetensors").unlink()
    (tmp_path / "part-2.safetensors").write_bytes(b"cut short")
    assert saved.read("b").tolist() == [1, 1]
    for name in "ac":
        with pytest.raises(EvidenceError, match="cannot be read as safetensors"):
            saved.read(name)


# Bytes by which the most memory that a process held grows while it reads.
READ_ONE = """
import sys
from pathlib import Path
import torch, torch.distributed.checkpoint
from muonsplit.evidence.opened import opened


def most():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


saved = opened(Path(sys.argv[1]))
torch.ones(10).max()  # what torch needs itself
Path("/proc/self/clear_refs").write_text("5")
before = most()
for name in saved.entries:
    assert int(saved.read(name).max()) == 1
print(most() - before)
"""


def of_chunks(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Each tensor in four chunks of rows, as four ranks save it."""
    parts = {f"{n}/{at}": part for n, t in tensors.items() for at, part in enumerate(t.chunk(4))}
    of_distributed(folder, {name: part.clone() for name, part in parts.items()})

    def joined(found: Any) -> None:
        places = {key.fqn: place for key, place in found.storage_data.items()}
        found.storage_data = {}
        for name, tensor in tensors.items():
            held = [found.state_dict_metadata.pop(f"{name}/{at}") for at in range(4)]
            rest = [0] * (tensor.dim() - 1)
            first = 0
            for at, piece in enumerate(held):
                offsets = torch.Size([first, *rest])
                key = metadata.MetadataIndex(name, offsets)
                found.storage_data[key] = places[f"{name}/{at}"]
                first += piece.size[0]
                piece.chunks[0].offsets = offsets
            held[0].size = tensor.shape
            # In no order.
            held[0].chunks = [piece.chunks[0] for piece in held[::-1]]
            found.state_dict_metadata[name] = held[0]

    changed_index(folder, joined)
    return folder


def test_chunks_are_put_together(tmp_path: Path) -> None:
    tensors = {"a": any_bits(torch.bfloat16, 11, 3), "b": any_bits(torch.float8_e5m2, 7)}
    saved = opened(of_chunks(tmp_path, tensors))
    assert saved.entries == {n: Entry(tuple(t.shape), t.dtype) for n, t in tensors.items()}
    assert {n: bits(saved.read(n)) for n in tensors} == {n: bits(t) for n, t in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "most"), [(of_file, 1.0), (of_distributed, 1.0), (of_chunks, 1.25)]
)
def test_memory_holds_one_tensor_and_a_shard(tmp_path: Path, write: Writer, most: float) -> None:
    size = 128 << 20
    path = write(tmp_path, {f"w{at}": torch.ones(size, dtype=torch.uint8) for at in range(2)})
    done = subprocess.run(
        [sys.executable, "-c", READ_ONE, str(path)], capture_output=True, text=True, check=True
    )
    assert 0.9 * size <= int(done.stdout) <= (most + 0.15) * size


# Steps.


@pytest.mark.parametrize(
    ("metadata", "step"),
    [
        ({"step": "12"}, 12),
        ({"global_step": "0"}, 0),
        ({"step": "twelve"}, None),
        ({"step": "-3"}, None),
        ({"step": "9" * 5000}, None),
        ({"format": "pt"}, None),
    ],
)
def test_step_of_a_header(tmp_path: Path, metadata: dict[str, str], step: int | None) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors", metadata=metadata)
    assert opened(tmp_path).step == step


@pytest.mark.parametrize(
    ("written", "step"),
    [('{"global_step": 500}', 500), ('{"global_step": "5"}', None), ("[", None), ("[]", None)],
)
def test_step_of_a_trainer(tmp_path: Path, written: str, step: int | None) -> None:
    path = of_file(tmp_path, {"a": torch.ones(1)})
    (tmp_path / "trainer_state.json").write_text(written)
    assert opened(path).step == opened(tmp_path).step == step


def test_shards_of_two_steps_are_no_checkpoint(tmp_path: Path) -> None:
    for at in (4, 5):
        save_file(
            {f"w{at}": torch.ones(1)}, tmp_path / f"{at}.safetensors", metadata={"step": str(at)}
        )
    with pytest.raises(EvidenceError, match=r"different steps: \[4, 5\]"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("state", "step"),
    [
        ({"step": 7}, 7),
        ({"train_state": {"step": torch.tensor(9, dtype=torch.int32)}}, 9),
        ({"app": {"global_step": 3, "step": torch.tensor([3])}}, 3),
        ({"step": 7, "global_step": 8}, None),
        ({"step": 7.5}, None),
        ({"step": torch.tensor(7.0)}, None),
        ({"step": torch.tensor([7, 7])}, None),
        ({"step": True}, None),
        ({"optim": {"state": {"weight": {"step": torch.tensor(5)}}}}, None),
    ],
)
def test_step_of_a_distributed_checkpoint(
    tmp_path: Path, state: dict[str, Any], step: int | None
) -> None:
    assert opened(of_distributed(tmp_path, {"w": torch.ones(2), **state})).step == step


# torch.distributed.checkpoint.


def test_names_of_nested_states(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    saved = opened(of_distributed(tmp_path, {"app": {"model": weights, "optim": state}, "n": [1]}))
    assert {"app.model.weight", "app.model.bias"} < set(saved.entries)
    # What is no tensor is no entry.
    assert not any(name.endswith(".lr") or name.startswith("n") for name in saved.entries)
    moment = saved.read("app.optim.state.weight.exp_avg")
    assert bits(moment) == bits(optimizer.state[model.weight]["exp_avg"])
    assert prefix_of(saved.entries, ["weight", "bias"]) == "app.model."
    assert bits(under(saved, "app.model.").read("weight")) == bits(model.weight.detach())


def test_the_same_is_read_as_torch_reads(tmp_path: Path) -> None:
    tensors = {"a.b": torch.randn(4, 3), "c": torch.randn(5).to(torch.bfloat16)}
    saved = opened(of_distributed(tmp_path, tensors))
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load(read, checkpoint_id=tmp_path, no_dist=True)
    assert {n: bits(saved.read(n)) for n in read} == {n: bits(t) for n, t in read.items()}


def changed_index(folder: Path, change: Callable[[Any], None]) -> None:
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


def test_an_index_of_an_earlier_torch(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(4, 3).to(torch.bfloat16)}
    of_distributed(tmp_path, tensors)

    def older(found: Any) -> None:
        found.state_dict_metadata["a"].properties = earlier.TensorProperties(torch.bfloat16)
        del found.storage_meta, found.version

    changed_index(tmp_path, older)
    assert b"_shard.sharded_tensor" in (tmp_path / ".metadata").read_bytes()
    assert bits(opened(tmp_path).read("a")) == bits(tensors["a"])


def test_an_index_of_a_later_python(tmp_path: Path) -> None:
    of_distributed(tmp_path, {"a": torch.ones(2)})
    path = tmp_path / ".metadata"
    # Protocol 2 writes names as they are; Python 3.13 has paths in another module.
    content = pickle.dumps(pickle.loads(path.read_bytes()), protocol=2)
    assert content.count(b"cpathlib\nPosixPath") == 1
    for where in (b"cpathlib._local\nPosixPath", b"cpathlib\nWindowsPath"):
        path.write_bytes(content.replace(b"cpathlib\nPosixPath", where))
        assert opened(tmp_path).read("a").tolist() == [1, 1]


def saved_sharded(folder: str) -> dict[str, int]:
    """On each rank: saves weights that FSDP2 holds unevenly, and says how many rows are here."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = sharded_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    state = model.state_dict()
    checkpoint.save({"model": state, "train_state": {"step": 4}}, checkpoint_id=folder)
    return {name: len(weight.to_local()) for name, weight in state.items()}


def sharded_model() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 1, bias=False), nn.Linear(1, 8))
    return model.to(torch.bfloat16)


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3])
def test_uneven_shards_of_ranks(tmp_path: Path, world: int) -> None:
    rows = run(world, saved_sharded, str(tmp_path))
    # Seven rows, and one; a rank may hold none.
    assert sorted({r["0.weight"] for r in rows}) == ([3, 4] if world == 2 else [1, 3])
    assert [r["1.weight"] for r in rows] == [1, 0, 0][:world]
    assert len(list(tmp_path.glob("*.distcp"))) == world
    saved = opened(tmp_path)
    assert saved.step == 4
    found = under(saved, "model.")
    trained = sharded_model().state_dict()
    assert set(found.entries) == set(trained)
    assert {n: bits(found.read(n)) for n in trained} == {n: bits(t) for n, t in trained.items()}
    (tmp_path / f"__{world - 1}_0.distcp").unlink()
    with pytest.raises(EvidenceError, match=rf"__{world - 1}_0.distcp.*no such file"):
        opened(tmp_path)


# Nothing is run.


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    path = tmp_path / "sprung"
    pickle.loads(pickle.dumps(Trap(path)))
    assert path.is_file()  # so it would be, were it loaded
    path.unlink()
    return path


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".pkl"])
@pytest.mark.parametrize("trusted", [False, True])
def test_pickled_files_are_refused(
    tmp_path: Path, sprung: Path, suffix: str, trusted: bool
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    file = folder / f"pytorch_model{suffix}"
    torch.save({"a": torch.ones(1), "b": Trap(sprung)}, file)
    for path in (file, folder):
        with pytest.raises(EvidenceError, match=r"pickled file.*not loaded.*safetensors"):
            opened(path, trust_pickles=trusted)
    assert not sprung.exists()


def test_a_deepspeed_checkpoint_is_refused(tmp_path: Path, sprung: Path) -> None:
    states = tmp_path / "run" / "global_step7"
    states.mkdir(parents=True)
    torch.save(Trap(sprung), states / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save(Trap(sprung), states / "mp_rank_00_model_states.pt")
    for latest in (None, "global_step7\n"):
        if latest:
            (states.parent / "latest").write_text(latest)
        for path in (states, states.parent):
            with pytest.raises(EvidenceError, match=r"nothing was loaded.*zero_to_fp32\.py"):
                opened(path)
    assert not sprung.exists()


@pytest.mark.parametrize("hidden", ["whole", "field", "key"])
def test_an_index_that_would_run_something(tmp_path: Path, sprung: Path, hidden: str) -> None:
    folder = of_distributed(tmp_path / "run", {"a": torch.ones(2)})

    def planted(found: Any) -> None:
        if hidden == "field":
            found.planner_data = Trap(sprung)
        else:
            found.state_dict_metadata["b"] = Trap(sprung)

    changed_index(folder, planted)
    if hidden == "whole":
        (folder / ".metadata").write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(EvidenceError, match=r"names .*, which no index of torch"):
        opened(folder)
    assert not sprung.exists()


def test_a_chunk_that_would_run_something(tmp_path: Path, sprung: Path) -> None:
    folder = of_distributed(tmp_path / "run", {"a": torch.ones(2), "step": 5})
    torch.save(Trap(sprung), folder / "trap")

    def planted(found: Any) -> None:
        for place in found.storage_data.values():
            place.relative_path, place.offset = "trap", 0
            place.length = (folder / "trap").stat().st_size

    changed_index(folder, planted)
    saved = opened(folder)
    assert saved.step is None
    with pytest.raises(EvidenceError, match=r"trap cannot be read: UnpicklingError"):
        saved.read("a")
    assert not sprung.exists()


@pytest.mark.parametrize(
    "named", ["os\nsystem", "builtins\neval", "torch\nload", "torch.distributed.checkpoint\nload"]
)
def test_names_that_no_index_needs(tmp_path: Path, named: str) -> None:
    (tmp_path / ".metadata").write_bytes(f"c{named}\n.".encode())
    with pytest.raises(EvidenceError, match=named.replace("\n", r"\.")):
        opened(tmp_path)


@pytest.mark.parametrize(
    "named", ["torch.distributed.checkpoint.metadata\nStorageMeta", "torch\nSize"]
)
def test_an_index_cannot_change_torch(tmp_path: Path, named: str) -> None:
    # Protocol 2: push the class, (None, {"changed": 1}), and set that as its state.
    state = b"N}X\x07\x00\x00\x00changedK\x01s\x86b."
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + f"c{named}\n".encode() + state)
    with pytest.raises(EvidenceError, match="no index"):
        opened(tmp_path)
    assert not hasattr(checkpoint.metadata.StorageMeta, "changed")


# Bad input.


def folder_of(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "which is empty"),
        (["a.txt", "b.txt"], r"which has a\.txt, b\.txt.*Give a \.safetensors file"),
        (["__0_0.distcp"], r"no \.metadata, which is written last"),
        (["__0.metadata"], r"no \.metadata, which is written last"),
        (["rank-0-of-2.json", "rank-0-of-2.safetensors"], "muonsplit audit "),
        (["a.safetensors.index.json", "b.safetensors.index.json"], "several indices: a.*, b"),
        (["model.safetensors.index.json"], "not readable JSON"),
        (["model.safetensors"], "model.safetensors cannot be read as safetensors"),
        ([".metadata"], r"\.metadata is no index.*EOFError"),
        (["latest"], "latest names ''"),
    ],
)
def test_folders_that_are_no_checkpoint(tmp_path: Path, names: list[str], said: str) -> None:
    with pytest.raises(EvidenceError, match=said):
        opened(folder_of(tmp_path, *names))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.txt", "no checkpoint that can be read here"),
        ("__0_0.distcp", "Give its folder"),
        (".metadata", "Give its folder"),
        ("a.safetensors", "cannot be read as safetensors"),
    ],
)
def test_files_that_are_no_checkpoint(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(EvidenceError, match=said):
        opened(folder_of(tmp_path, name) / name)


@pytest.mark.parametrize("name", ["nothing", "n" * 300, "a\0b"])
def test_a_missing_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(EvidenceError, match=r"no checkpoint at|cannot be read"):
        opened(tmp_path / name)


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(EvidenceError, match=r"cannot be read.*Permission denied"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (None, "has no weight_map"),
        ({}, "has no weight_map"),
        ([["a", "part-0.safetensors"]], "has no weight_map"),
        ({"a": 3}, "names 3 as a file"),
        ({"a": None}, "names None as a file"),
        ({"a": ""}, "expected the name of a file"),
        ({"a": "a\0b"}, "expected the name of a file"),
        ({"a": "../outside.safetensors"}, "leads out of its folder"),
        ({"a": "sub/../../outside.safetensors"}, "leads out of its folder"),
        ({"a": "..\\outside.safetensors"}, "leads out of its folder"),
        ({"a": "/etc/passwd"}, "leads out of its folder"),
        ({"a": "C:/x.safetensors"}, "leads out of its folder"),
        ({"a": "part-9.safetensors"}, "part-9.*no such file.*Copy all shards"),
        ({"a": "."}, "no such file|leads out"),
        ({"a": "part-0.safetensors", "b": "part-0.safetensors"}, "has 'b' in .*part-0"),
    ],
)
def test_indices_that_name_what_they_may_not(tmp_path: Path, listed: object, said: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "outside.safetensors")
    of_files(folder, {"a": torch.ones(1)})
    index(folder, listed)
    with pytest.raises(EvidenceError, match=said):
        opened(folder)


@pytest.mark.parametrize("content", ["", "[]", "3", '{"weight_map": {"a": ', "[" * 100_000, "\xff"])
def test_indices_that_are_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(EvidenceError, match=r"not readable JSON|no weight_map"):
        opened(path)


def test_shards_may_be_links(tmp_path: Path) -> None:
    # As in the cache of a hub, where a snapshot links to blobs.
    (tmp_path / "blobs").mkdir()
    (tmp_path / "run").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "blobs" / "3f2a")
    (tmp_path / "run" / "part.safetensors").symlink_to("../blobs/3f2a")
    index(tmp_path / "run", {"a": "part.safetensors"})
    assert opened(tmp_path / "run").read("a").tolist() == [1]


def test_a_name_in_two_files(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({"a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(EvidenceError, match=r"'a' is in x\.safetensors and in y\.safetensors"):
        opened(tmp_path)


def with_header(header: object, size: int | None = None, data: bytes = bytes(16)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


def described(shape: list[int], dtype: str = "F32", end: int = 16) -> dict[str, object]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04",
        with_header({}, size=1 << 63),
        with_header({}, size=(1 << 64) - 1),
        with_header({}, size=50_000_000),
        with_header(described([2, 2])["a"]),
        with_header(described([2**62, 4])),
        with_header(described([-2, -2])),
        with_header(described([2, 3])),
        with_header(described([2, 2], "F99")),
        with_header(described([2, 2], end=1 << 60)),
        with_header(described([2, 2]), data=bytes(15)),
        with_header(described([2, 2]), data=bytes(17)),
        with_header(b"\xff\xfe"),
        with_header(b"[" * 5000),
    ],
)
def test_headers_that_are_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(EvidenceError, match=r"a\.safetensors cannot be read as safetensors"):
        opened(tmp_path)


def test_a_dtype_that_torch_has_not(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(
        with_header(described([8], "F6_E2M3", 6), data=bytes(6))
    )
    with pytest.raises(EvidenceError, match=r"'a' in .* F6_E2M3"):
        opened(tmp_path)


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_file(tmp_path, {"a": torch.ones(1)})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(EvidenceError, match=r"Install muonsplit\[check\]"):
        opened(tmp_path)


def place_of(found: Any) -> Any:
    return next(iter(found.storage_data.values()))


def _elsewhere(found: Any) -> None:
    place_of(found).relative_path = "../outside"


def _absolute(found: Any) -> None:
    place_of(found).relative_path = "/etc/passwd"


def _no_text(found: Any) -> None:
    place_of(found).relative_path = 7


def _lost(found: Any) -> None:
    place_of(found).relative_path = "__5_0.distcp"


def _long(found: Any) -> None:
    place_of(found).length = 1 << 40


def _negative(found: Any) -> None:
    place_of(found).offset = -5


def _transformed(found: Any) -> None:
    place_of(found).transform_descriptors = ["stream.zstd"]


def _unplaced(found: Any) -> None:
    found.storage_data.clear()


def _no_storage(found: Any) -> None:
    found.storage_data = None


def _no_dtype(found: Any) -> None:
    found.state_dict_metadata["a"].properties.dtype = "float32"


def _negative_size(found: Any) -> None:
    found.state_dict_metadata["a"].size = torch.Size([-4, 3])


def _no_sizes(found: Any) -> None:
    found.state_dict_metadata["a"].size = [4, 3]


def _no_entry(found: Any) -> None:
    found.state_dict_metadata["a"] = found.storage_meta


def _no_name(found: Any) -> None:
    found.state_dict_metadata[3] = found.state_dict_metadata.pop("a")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_elsewhere, "leads out of its folder"),
        (_absolute, "leads out of its folder"),
        (_no_text, "names 7 as a file"),
        (_lost, r"__5_0\.distcp.*no such file"),
        (_long, r"cut short or of another checkpoint"),
        (_negative, "is no index .* as sizes"),
        (_transformed, "without extensions"),
        (_unplaced, "no file for the chunk of 'a'"),
        (_no_storage, "is no index"),
        (_no_dtype, "'float32' as the dtype of 'a'"),
        (_negative_size, "is no index .* as sizes"),
        (_no_sizes, "is no index .* as sizes"),
        (_no_entry, "StorageMeta where a TensorStorageMetadata belongs"),
        (_no_name, "3 as the name of a tensor"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_indices_that_no_save_wrote(
    tmp_path: Path, change: Callable[[Any], None], said: str
) -> None:
    of_distributed(tmp_path, {"a": torch.ones(4, 3)})
    changed_index(tmp_path, change)
    with pytest.raises(EvidenceError, match=said):
        opened(tmp_path)


def cut_in(*spans: tuple[int, int], rows: int = 4) -> Callable[[Any], None]:
    """An index that has a tensor in chunks of rows, each of them wherever the first lies."""

    def change(found: Any) -> None:
        held, place = found.state_dict_metadata["a"], place_of(found)
        assert held.chunks[0].sizes == (4, 3)
        held.size = torch.Size([rows, 3])
        held.chunks = [
            metadata.ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([size, 3]))
            for at, size in spans
        ]
        found.storage_data = {metadata.MetadataIndex("a", [at, 0]): place for at, _ in spans}

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut_in((0, 2)), "1 chunks of 'a' do not make up its shape"),
        (cut_in((0, 2), (3, 1)), "do not make up"),
        (cut_in((0, 3), (1, 1)), "do not make up"),
        (cut_in((0, 2), (1, 2)), "do not make up"),
        (cut_in((0, 2), (3, 2)), "do not make up"),
        (cut_in(), "0 chunks of 'a' do not make up"),
        (cut_in((0, 1 << 40), rows=1 << 40), "do not make up"),
        (cut_in((0, 2), (2, 2)), r"of shape \[4, 3\]; the index says .* of shape \[2, 3\]"),
        (cut_in((0, 5), rows=5), r"of shape \[4, 3\]; the index says .* of shape \[5, 3\]"),
    ],
)
def test_chunks_that_are_not_the_tensor(
    tmp_path: Path, change: Callable[[Any], None], said: str
) -> None:
    of_distributed(tmp_path, {"a": torch.ones(4, 3)})
    changed_index(tmp_path, change)
    saved = opened(tmp_path)
    with pytest.raises(EvidenceError, match=said):
        saved.read("a")


def test_a_chunk_of_another_dtype(tmp_path: Path) -> None:
    of_distributed(tmp_path, {"a": torch.ones(4, 3)})

    def halved(found: Any) -> None:
        found.state_dict_metadata["a"].properties.dtype = torch.bfloat16

    changed_index(tmp_path, halved)
    with pytest.raises(EvidenceError, match=r"is torch.float32 .*says torch.bfloat16"):
        opened(tmp_path).read("a")


def test_damage_costs_only_its_own_tensor(tmp_path: Path) -> None:
    of_distributed(tmp_path, {"a": torch.ones(4, 3), "b": torch.ones(5)})
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    place = next(p for key, p in found.storage_data.items() if key.fqn == "a")
    content = bytearray((tmp_path / place.relative_path).read_bytes())
    content[place.offset : place.offset + place.length] = bytes(place.length)
    (tmp_path / place.relative_path).write_bytes(content)
    saved = opened(tmp_path)
    assert saved.read("b").tolist() == [1] * 5
    with pytest.raises(EvidenceError, match=r"byte \d+ of .*distcp cannot be read"):
        saved.read("a")


@each_format
@pytest.mark.parametrize("kept", [0, 1, 40])
def test_cut_short_is_found_at_once(tmp_path: Path, write: Writer, kept: int) -> None:
    write(tmp_path, {"a": torch.ones(64, 64), "b": torch.ones(64)})
    largest = max((f for f in tmp_path.iterdir() if f.is_file()), key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:kept])
    with pytest.raises(EvidenceError, match=largest.name):
        opened(tmp_path)


@each_format
def test_files_that_vanish(tmp_path: Path, write: Writer) -> None:
    saved = opened(
        write(tmp_path / "run" if write is of_distributed else tmp_path, {"a": torch.ones(2)})
    )
    shutil.rmtree(tmp_path)
    with pytest.raises(EvidenceError, match="cannot be read"):
        saved.read("a")


# Names.

BLOCK = ("0.q.weight", "0.k.weight", "1.q.weight", "1.k.weight", "norm.weight")


@pytest.mark.parametrize(
    "prefix", ["", "model.", "module.", "_orig_mod.", "model._orig_mod.", "a.b-c.model/", "état."]
)
def test_the_prefix_is_read_off_the_names(prefix: str) -> None:
    others = ["optim.state.0.q.weight.exp_avg", "ema.norm.weight", "weight", "step", "1.q"]
    assert prefix_of([*(prefix + name for name in BLOCK), *others], BLOCK) == prefix


def test_the_prefix_of_most_names_wins() -> None:
    names = [f"model.{name}" for name in BLOCK[:4]] + [f"ema.{name}" for name in BLOCK[:3]]
    assert prefix_of(names, BLOCK) == "model."
    assert prefix_of(["model.model.a.weight", "model.b.weight"], ["model.a.weight"]) == "model."


def test_two_prefixes_of_as_many_names() -> None:
    names = [f"{prefix}{name}" for prefix in ("model.", "ema.") for name in BLOCK]
    with pytest.raises(EvidenceError, match=r"5 of the model's 5 .* 'ema\.', 'model\.'"):
        prefix_of(names, BLOCK)


@pytest.mark.parametrize("names", [[], ["b.weight"], ["xa.weight"], ["a.weight.exp_avg"]])
def test_none_of_the_names(names: list[str]) -> None:
    with pytest.raises(EvidenceError, match=r"None of the model's 1 parameters .* a\.weight"):
        prefix_of(names, ["a.weight"])


def test_a_hundred_thousand_names() -> None:
    wanted = [f"model.layers.{at}.mlp.experts.{at % 64}.up.weight" for at in range(100_000)]
    began = time.perf_counter()
    assert prefix_of([f"app.model.{name}" for name in wanted], wanted) == "app.model."
    # Comparing each with each takes an hour.
    assert time.perf_counter() - began < 20


def test_under_a_prefix(tmp_path: Path) -> None:
    path = of_file(
        tmp_path, {"model.a": torch.ones(2), "model.b": torch.ones(1), "x": torch.ones(1)}
    )
    saved = opened(path)
    part: Saved = under(saved, "model.")
    assert set(part.entries) == {"a", "b"}
    assert part.read("a").tolist() == [1, 1]
    assert (part.path, part.step) == (path, None)
    for name in ("model.a", "x"):
        with pytest.raises(EvidenceError, match="no tensor"):
            part.read(name)
    assert under(saved, "") is saved
