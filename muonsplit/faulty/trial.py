"""Trying the corpus: which check is the first to fail on each fault."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from muonsplit.certificate.run import Certificate, Progress, Question, certify
from muonsplit.certificate.verdict import Status
from muonsplit.checks import CHECKS
from muonsplit.checks.registry import check_named
from muonsplit.faulty.registry import FAULTS, Fault
from muonsplit.subjects.process import Driver
from muonsplit.subjects.ranks import driver_for


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
    """Certifies every fault on the model it names, on the ranks it needs."""
    for driver, fault in _driven(progress):
        yield Trial(fault, tried(driver, fault))


def _driven(progress: Progress) -> Iterator[tuple[Driver, Fault]]:
    """Every fault with what runs it: one driver for each number of ranks."""
    with ExitStack() as stack:
        drivers: dict[int, Driver] = {}
        for fault in FAULTS.values():
            if fault.world not in drivers:
                made = driver_for("faulty:none", fault.world)
                drivers[fault.world] = stack.enter_context(made)
            driver = drivers[fault.world]
            driver.spec = f"faulty:{fault.name}"
            progress("faulty", fault.name)
            yield driver, fault


def tried(driver: Driver, fault: Fault, seed: int = 0) -> str:
    """The first check that fails on a fault; those after its own are asked only if it does not.

    Args:
        driver: Runs the fault.
        fault: The fault.
        seed: Root of every random draw.
    """
    ways = _ways(fault)
    asked = Question(seed=seed, ways=ways, only=up_to(fault.check))
    return first_to_fail(certify(driver, asked)) or first_to_fail(
        certify(driver, Question(seed=seed, ways=ways))
    )


def _ways(fault: Fault) -> tuple[str, ...]:
    return (fault.way,) if fault.way else ()


def up_to(check: str) -> list[str]:
    """Ids of the checks that run before one, and its own."""
    ids = list(CHECKS)
    return ids[: ids.index(check_named(check).id) + 1]


@dataclass(frozen=True, slots=True)
class Row:
    """A fault beside every check.

    Attributes:
        fault: The fault.
        found: For each check what it came to, asked about every weight and not only about those
            that no check before found anything against.
    """

    fault: Fault
    found: dict[str, Status]

    @property
    def failing(self) -> list[str]:
        """The checks that fail on it."""
        return [check for check, status in self.found.items() if status == "failed"]


def matrix(progress: Progress = lambda model, check: None) -> Iterator[Row]:
    """Asks every check about every fault, on the ranks it needs."""
    for driver, fault in _driven(progress):
        yield row(driver, fault)


def row(driver: Driver, fault: Fault) -> Row:
    """Asks every check about one fault, each apart from what the others found.

    Args:
        driver: Runs the fault.
        fault: The fault.
    """
    certificate = certify(driver, Question(apart=True, ways=_ways(fault)))
    results = (result for model in certificate.models for result in model.results)
    return Row(fault, {result.check: result.status for result in results})


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
