"""Which dialect a subject speaks, whatever it declares."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from muonsplit.certificate.identify import Identified, identify
from muonsplit.cli import cli
from muonsplit.subjects.process import InProcess

SPEAKING = Path(__file__).parent / "subjects" / "dialects.py"


def identified(spec: str) -> Identified:
    return identify(InProcess(spec), "llama", 0, lambda model, what: None)


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        ("moonlight", "moonlight"),
        ("gram_newton_schulz_0_1_6", "gram-newton-schulz-0.1.6"),
        ("dion", "dion"),
        ("emerging_optimizers_0_3_0_highest", "emerging-optimizers-0.3.0-highest"),
        ("muonium_0_2_0", "muonium-0.2.0"),
    ],
)
def test_a_dialect_is_known_by_its_bits(factory: str, name: str) -> None:
    found = identified(f"file:{SPEAKING}:{factory}")
    assert found.cut == "per head, as planned"
    assert found.best.bits
    assert any(name in one.names for one in found.ranked)


def test_what_is_declared_does_not_matter(tmp_path: Path) -> None:
    text = SPEAKING.with_name("good.py").read_text()
    (tmp_path / "liar.py").write_text(
        text.replace(
            '@muonsplit.subject(dialect="moonlight"', '@muonsplit.subject(dialect="jordan"'
        )
    )
    found = identified(f"file:{tmp_path / 'liar.py'}:build")
    assert "moonlight" in found.best.names


def test_torchs_own_is_whole() -> None:
    found = identified("torch")
    assert found.cut == "whole"
    assert any("torch-2.13" in one.names for one in found.ranked)


@pytest.mark.slow
def test_the_same_numbers_in_other_bits_are_the_same_up_to_rounding() -> None:
    found = identified("builtin:fast")
    assert not found.best.bits
    assert "deepspeed-0.19.8" in found.best.names
    assert found.best.explains


@pytest.mark.slow
def test_where_the_nearest_parts_is_named() -> None:
    found = identified("faulty:nesterov-missing")
    assert not found.best.explains
    assert found.best.stage == "state.momentum"


@pytest.mark.slow
def test_the_command_answers_in_one_line_and_in_json() -> None:
    arguments = ["identify", f"file:{SPEAKING}:moonlight", "--in-process"]
    said = CliRunner().invoke(cli, arguments)
    assert said.exit_code == 0
    same = "moonlight and glm-5 and kimi-k3"  # their arithmetic is one
    assert said.output.rstrip().endswith(f"speaks {same} in every bit, per head, as planned.")
    told = json.loads(CliRunner().invoke(cli, [*arguments, "--format", "json"]).output)
    assert told["ranked"][0]["names"][0] == "moonlight"
