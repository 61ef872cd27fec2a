"""Asking a subject on several ranks, and reading what was found."""

from muonsplit.certificate.run import Certificate, Question, certify
from muonsplit.subjects.ranks import Ranks

# What sharding may break; the rest is asked in one process, and under two ranks.
OF_SHARDS = (
    "sharding.cut_heads",
    "sharding.agreement",
    "sharding.mean",
    "sharding.accumulation",
    "recognition.split",
    "recognition.whole",
    "cut.rows",
    "arithmetic.direction",
    "arithmetic.scale",
    "state.momentum",
    "state.resume",
    "sharding.uneven",
    "sharding.invariance",
    "sharding.resume",
)


def asked(ranks: Ranks, spec: str, way: str, model: str = "llama", **how: object) -> Certificate:
    ranks.spec = spec
    question = Question(models=[model], ways=[way], seed=1, **how)  # pyright: ignore[reportArgumentType]
    return certify(ranks, question)


def statuses(found: Certificate) -> dict[str, str]:
    return {r.check: r.status for r in found.models[0].results}


def wrong(found: Certificate) -> list[tuple[str, str, str]]:
    return [
        (r.check, f.weight, f.message) for m in found.models for r in m.results for f in r.findings
    ]
