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


def pytest_report_header() -> list[str]:
    variables = {key: os.environ[key] for key in sorted(os.environ) if key.startswith("MUONSPLIT_")}
    return [
        f"muonsplit {muonsplit.__version__}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread, CUDA {torch.cuda.is_available()}",
        f"hypothesis profile {PROFILE}, {variables or 'no MUONSPLIT_ variables'}",
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = "gpu" in (config.option.markexpr or "")
    if asked and not torch.cuda.is_available():
        # All skipped would read as all well.
        raise pytest.UsageError("the gpu tests need a CUDA device, and torch sees none")
    if not asked:
        skip = pytest.mark.skip(reason="needs a CUDA device; run with -m gpu")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
