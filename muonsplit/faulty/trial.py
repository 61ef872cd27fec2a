"""Trying the corpus: which check is the first to fail on each fault."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from muonsplit.certificate.run import Certificate, Progress, Question, certify
from muonsplit.faulty.registry import FAULTS, Fault
from muonsplit.subjects.process import Worker


@dataclass(frozen=True, slots=True)
class Trial:
    """A fault and what caught it.

    Attributes:
        fault: The fault.
        first: Id of the first check that failed or could not tell; empty if none did.
    """

    fault: Fault
    first: str

    @property
    def caught(self) -> bool:
        """Whether that is the check the fault names."""
        return self.first == self.fault.check

    def fault_json(self) -> dict[str, Any]:
        """The fault as plain values."""
        return asdict(self.fault)


def trials(progress: Progress = lambda model, check: None) -> Iterator[Trial]:
    """Certifies every fault on the model it names, in one worker process."""
    with Worker("faulty:none") as worker:
        for fault in FAULTS.values():
            worker.spec = f"faulty:{fault.name}"
            progress("faulty", fault.name)
            yield Trial(fault, first_to_fail(certify(worker, Question())))


def first_to_fail(certificate: Certificate) -> str:
    """The first check, in the order they run, that did not pass and was not skipped."""
    results = (result for model in certificate.models for result in model.results)
    return next((r.check for r in results if r.status in ("failed", "undecided")), "")


def summary(tried: Sequence[Trial]) -> list[str]:
    """How many were caught, for each kind of fault."""
    kinds = dict.fromkeys(t.fault.kind for t in tried)
    groups = {kind: [t for t in tried if t.fault.kind == kind] for kind in kinds}
    return [
        f"{kind}: {sum(t.caught for t in group)} of {len(group)} caught, each by its named check"
        for kind, group in groups.items()
    ]
