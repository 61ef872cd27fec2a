"""What the results of every certificate keep to, whoever wrote it."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from muonsplit.certificate.canonical import digest
from muonsplit.certificate.made import Made, check_set_digest, golden_models_digest
from muonsplit.certificate.run import Certificate
from muonsplit.certificate.schema import OURS
from muonsplit.certificate.verdict import CheckResult, ModelResult
from muonsplit.checks import CHECKS
from muonsplit.models.load import golden_models, resolve


def broken_rules(certificate: Certificate, made: Made) -> Iterator[str]:
    """A line for each rule that a certificate breaks, naming where."""
    if made.digests.check_set == check_set_digest():
        yield from _in_order(f"{OURS}/check_set", made.check_set, tuple(CHECKS))
    known = [check for check in made.check_set if check in certificate.checks]
    yield from _in_order(f"{OURS}/checks", certificate.checks, known)
    names = {model.model for model in certificate.models}
    labels = [model.label for model in certificate.models]
    if len(set(labels)) < len(labels):
        yield f"{OURS}/models: a model occurs twice in {', '.join(labels)}"
    if certificate.profile == "smoke" and len(names) > 1:
        yield f"{OURS}/models: the smoke profile asks on one model, found {len(names)}"
    if any(bool(model.way) != (certificate.world > 1) for model in certificate.models):
        yield f"{OURS}/world: {certificate.world}, with the models {', '.join(labels)}"
    own = made.digests.golden_models == golden_models_digest(names)
    for m, model in enumerate(certificate.models):
        if own:
            yield from _config(f"{OURS}/models/{m}/config", model)
        checked = [result.check for result in model.results]
        yield from _in_order(f"{OURS}/models/{m}/results", checked, certificate.checks)
        yield from _statuses(f"{OURS}/models/{m}/results", model.results)
        yield from _weights(f"{OURS}/models/{m}/weights", model)


def _config(where: str, model: ModelResult) -> Iterator[str]:
    """A config of one's own must not go by the name of a golden model."""
    if model.model in golden_models():
        expected = digest(resolve(model.model).config)
        if model.config != expected:
            yield f"{where}: expected {expected}, that of {model.model}, found {model.config}"


def _in_order(where: str, found: Sequence[str], expected: Sequence[str]) -> Iterator[str]:
    for i, (one, other) in enumerate(zip_longest(found, expected)):
        if one != other:
            yield f"{where}/{i}: expected {other or 'no more'}, found {one or 'no more'}"
            return


def _statuses(where: str, results: Iterable[CheckResult]) -> Iterator[str]:
    for r, result in enumerate(results):
        said = f"{where}/{r}: {result.check} {result.status}"
        if (result.status == "failed") != bool(result.findings):
            yield f"{said} with {len(result.findings)} findings"
        if (result.status in ("skipped", "undecided")) != bool(result.reason):
            yield f"{said} with the reason {result.reason!r}"


def _weights(where: str, model: ModelResult) -> Iterator[str]:
    first: dict[str, str] = {}
    for result in model.results:
        for finding in result.findings:
            first.setdefault(finding.weight, result.check)
    for w, weight in enumerate(model.weights):
        expected = first.get(weight.weight, "")
        if weight.diverged != expected:
            yield (
                f"{where}/{w}/diverged: expected {expected or 'no check'}, which first names it, "
                f"found {weight.diverged or 'none'}"
            )
    if model.split > model.full:
        yield f"{where}: {model.split} of {model.full} are split"
