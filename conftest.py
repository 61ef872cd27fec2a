"""Hypothesis profiles and what a report has to say of where it ran."""

import os

import hypothesis
import pytest
import torch

import muonsplit

# One thread: kernels split work by thread count, and the goldens were made with one.
torch.set_num_threads(1)

hypothesis.settings.register_profile("dev", max_examples=25, deadline=None)
hypothesis.settings.register_profile(
    "ci", max_examples=100, deadline=None, derandomize=True, print_blob=True, database=None
)
hypothesis.settings.register_profile("thorough", max_examples=2000, deadline=None)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev")
hypothesis.settings.load_profile(PROFILE)


def pytest_report_header(config: pytest.Config) -> list[str]:
    variables = {key: os.environ[key] for key in sorted(os.environ) if key.startswith("MUONSPLIT_")}
    derandomized = hypothesis.settings.get_profile(PROFILE).derandomize
    seed = config.getoption("hypothesis_seed") or ("fixed" if derandomized else "random")
    return [
        f"muonsplit {muonsplit.__version__}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread, CUDA {torch.cuda.is_available()}",
        f"hypothesis profile {PROFILE}, seed {seed}, {variables or 'no MUONSPLIT_ variables'}",
    ]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "gpu" in item.keywords and not torch.cuda.is_available():
        # Asked for by marker, all skipped would read as all well.
        refuse = pytest.fail if "gpu" in item.config.option.markexpr else pytest.skip
        refuse("needs a CUDA device, and torch sees none")
