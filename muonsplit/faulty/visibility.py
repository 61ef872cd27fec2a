"""In which families of gradients a fault shows in one step, and in which it is invisible."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from muonsplit.checks.case import Case
from muonsplit.checks.compare import judged
from muonsplit.dialect import dialect_named
from muonsplit.errors import SubjectFaultError
from muonsplit.faulty.registry import FAULTS, Fault
from muonsplit.geometry import plan
from muonsplit.models.load import build, resolve
from muonsplit.models.miniature import miniature
from muonsplit.observe.families import FAMILIES, of_family
from muonsplit.observe.gradients import draw
from muonsplit.subjects.process import Driver

Seen = Literal["visible", "invisible"]


@dataclass(frozen=True, slots=True)
class Visibility:
    """Where one step shows a fault.

    Attributes:
        fault: The fault.
        seen: For each family, whether a block of a weight is off by more than rounding can be.
    """

    fault: Fault
    seen: dict[str, Seen]

    @property
    def hidden_in(self) -> list[str]:
        """The families in which it is invisible."""
        return [family for family, seen in self.seen.items() if seen == "invisible"]


def visibilities(driver: Driver, names: Iterator[str] | None = None) -> Iterator[Visibility]:
    """Takes one step of every fault in every family.

    Args:
        driver: Runs them; its subject is set to each.
        names: Faults to look at; by default all that one process can have.
    """
    for name in names or (name for name, fault in FAULTS.items() if fault.world == 1):
        driver.spec = f"faulty:{name}"
        yield visibility(driver, FAULTS[name])


def visibility(driver: Driver, fault: Fault) -> Visibility:
    """Takes one step of a fault in every family.

    Args:
        driver: Runs it.
        fault: The fault.
    """
    case = _case(driver, fault)
    return Visibility(fault, {family: _seen(case, family) for family in FAMILIES})


def _case(driver: Driver, fault: Fault) -> Case:
    small = miniature(resolve(fault.model).config)
    model = build(small)
    dialect = dialect_named(fault.dialect)
    planned = plan(model, dialect)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return Case(driver, small, shapes, planned, planned, dialect, 0, driver.describe(), {})


def _seen(case: Case, family: str) -> Seen:
    drawn = draw(case.shapes, case.seed, "family")
    drawn |= {d.name: _drawn(case, family, d.name, d.shape) for d in case.plan.decisions}
    try:
        after = case.probe(drawn)
        blocks = [b for weight in judged(case, drawn, after) for b in weight if b.legible]
    except SubjectFaultError:
        return "visible"
    return "visible" if any(b.turned or b.resized for b in blocks) else "invisible"


def _drawn(case: Case, family: str, name: str, shape: tuple[int, ...]) -> Tensor:
    layout = case.plan.layouts()[name]
    return of_family(family, shape, layout, case.seed, name)
