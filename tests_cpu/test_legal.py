"""What is right in another way than the reference conforms under the dialect that it declares."""

import pytest

from muonsplit.certificate.run import Question, certify
from muonsplit.certificate.verdict import Verdict
from muonsplit.faulty import LEGAL
from muonsplit.subjects.process import InProcess

_QUICK = ("rows-sliced-in-place", "finds-heads-itself")
_NAMES = [n if n in _QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LEGAL]


@pytest.mark.parametrize("name", _NAMES)
def test_legal_variant_conforms(name: str) -> None:
    found = certify(InProcess(f"faulty:{name}"), Question())
    accused = {
        r.check: [f.message for f in r.findings] or r.reason
        for model in found.models
        for r in model.results
        if r.status in ("failed", "undecided")
    }
    assert found.verdict is Verdict.CONFORMS, accused
    assert any(weight.observed == weight.planned for weight in found.models[0].weights)


def test_every_variant_says_what_is_different() -> None:
    assert all(variant.summary.endswith(".") for variant in LEGAL.values())
