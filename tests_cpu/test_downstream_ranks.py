"""Released frameworks on two ranks: what is certified there, and what is wrong."""

from collections.abc import Iterator

import pytest

from muonsplit.subjects.ranks import Ranks
from tests_cpu.sharded import OF_SHARDS, asked, statuses, wrong

pytestmark = [pytest.mark.downstream, pytest.mark.slow]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks("torch", 2, timeout=200) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("spec", "model"),
    [
        ("deepspeed:stage=1", "llama"),
        ("deepspeed:stage=2", "deepseek-v2-lite"),
        ("deepspeed:stage=3", "llama"),
        ("deepspeed:stage=3,zero_init=true", "deepseek-v2-lite"),
        ("deepspeed:stage=2,round_robin_gradients=true", "llama"),
        ("deepspeed:stage=1,reduce_scatter=false", "llama"),
        ("deepspeed:stage=2,reduce_scatter=false", "llama"),
    ],
)
def test_zero_keeps_heads_on_two_ranks_and_the_bits_of_one(
    two: Ranks, spec: str, model: str
) -> None:
    pytest.importorskip("deepspeed")
    found = asked(two, spec, "engine", model, only=OF_SHARDS)
    assert wrong(found) == []
    assert statuses(found)["sharding.mean"] == statuses(found)["sharding.accumulation"] == "passed"
    assert set(found.models[0].alone.values()) == {0.0}
    assert all(w.observed == w.planned for w in found.models[0].weights)


@pytest.mark.parametrize(
    ("spec", "model", "weights"),
    [
        ("deepspeed:stage=0", "llama", 6),
        ("deepspeed:stage=1,parameter_alignment=true", "llama-odd", 6),
    ],
)
def test_dropped_tags_are_found_on_two_ranks_as_well(
    two: Ranks, spec: str, model: str, weights: int
) -> None:
    pytest.importorskip("deepspeed")
    found = asked(two, spec, "engine", model, only=OF_SHARDS)
    assert {(check, said.split()[0]) for check, _, said in wrong(found)} == {
        ("recognition.split", "whole")
    }
    assert len(wrong(found)) == weights


def test_the_indexer_is_split_on_two_ranks_as_well(two: Ranks) -> None:
    pytest.importorskip("deepspeed")
    found = asked(two, "deepspeed:stage=1", "engine", "glm-5.2", only=["recognition.whole"])
    assert {(check, weight.split(".")[-2]) for check, weight, _ in wrong(found)} == {
        ("recognition.whole", "wq_b")
    }


@pytest.mark.parametrize("way", ["fsdp", "tp"])
def test_pytorch_optimizer_has_the_bits_of_one_process(two: Ranks, way: str) -> None:
    pytest.importorskip("pytorch_optimizer")
    dialect = "pytorch-optimizer-4.1.0"
    found = asked(two, "pytorch-optimizer", way, dialect=dialect, only=OF_SHARDS)
    assert wrong(found) == []
    assert set(found.models[0].alone.values()) == {0.0}


@pytest.mark.parametrize(
    ("spec", "dialect"),
    [("muonium", "muonium-0.2.0"), ("dtensor-muon", "dtensor-muon-0.1.0")],
)
def test_dtensors_are_gathered_whole(two: Ranks, spec: str, dialect: str) -> None:
    pytest.importorskip(spec.replace("-", "_"))
    # That a bfloat16 state is not what was saved is known of one process.
    only = [check for check in OF_SHARDS if check != "state.resume"]
    found = asked(two, spec, "fsdp", dialect=dialect, only=only)
    assert {check for check, *_ in wrong(found)} <= {"sharding.resume"}
    assert set(found.models[0].alone.values()) == {0.0}


def test_muon_fsdp2_ends_the_process_on_uneven_shards(two: Ranks) -> None:
    pytest.importorskip("muon_fsdp2")
    found = asked(two, "muon-fsdp2", "fsdp", dialect="muon-fsdp2-0.3.0", only=OF_SHARDS)
    assert {check for check, *_ in wrong(found)} == {"sharding.uneven"}
    # Fifteen rows, three, one and nine on two ranks; thirty are even.
    assert [weight[0] for _, weight, _ in wrong(found)] == ["a", "c", "d", "e"]
    assert all("ended by itself" in said for *_, said in wrong(found))
    assert set(found.models[0].alone.values()) == {0.0}
