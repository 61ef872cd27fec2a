"""Which dialect of the registry does a subject speak? By running it, whatever it declares."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from muonsplit.certificate.battery import Progress
from muonsplit.certificate.run import case_of
from muonsplit.checks import arithmetic, bias, state
from muonsplit.checks.case import Case
from muonsplit.checks.follow import spoken
from muonsplit.checks.registry import CHECKS, Findings, UndecidedError
from muonsplit.dialect import DIALECTS, Arithmetic, dialect_named
from muonsplit.models.load import resolve
from muonsplit.subjects.drive import Outcome, Task
from muonsplit.subjects.process import Driver

# In the order in which a step is computed; the first that finds something is where dialects part.
_STAGES = (arithmetic.direction, arithmetic.scale, state.momentum, state.decay, bias.bias)
_STEPS = 3


@dataclass(frozen=True, slots=True)
class Spoken:
    """How well one arithmetic explains a subject.

    Attributes:
        names: The dialects that have it.
        passed: How many stages agree, of direction, size, momentum, decay and coefficients.
        stage: Id of the check that parts it from the subject; empty if none does.
        said: What that check found.
        off: How far, relative to what is allowed; 0 if nothing was found.
        bits: Whether every bit of three steps agrees.
    """

    names: tuple[str, ...]
    passed: int
    stage: str
    said: str
    off: float
    bits: bool

    @property
    def explains(self) -> bool:
        """Whether nothing parts it from the subject."""
        return not self.stage


@dataclass(frozen=True, slots=True)
class Identified:
    """What a subject was found to speak.

    Attributes:
        cut: How it cuts the weights that have heads.
        ranked: The arithmetics that agree in every bit, or all of the registry, the best first.
    """

    cut: str
    ranked: tuple[Spoken, ...]

    @property
    def best(self) -> Spoken:
        """What explains it best."""
        return self.ranked[0]


def identify(driver: Driver, model: str, seed: int, progress: Progress) -> Identified:
    """Holds a subject to every arithmetic of the registry.

    The cut is observed first, and every arithmetic is asked under that cut. If some agree in every
    bit of three steps, they are the answer; else what agrees up to rounding comes first, and then
    whatever parts from it latest.

    Args:
        driver: Runs the subject.
        model: Model to run it on.
        seed: Root of every random draw.
        progress: Told the model and the dialect that is tried.

    Raises:
        SubjectFaultError: If the subject does not take a step.
        MuonsplitError: If there is no such subject or model.
    """
    described = driver.describe()
    dialect = dialect_named(described["dialect"]).asked_per_head()
    case = case_of(resolve(model), driver, described, dialect, seed)
    progress(model, "cut")
    whole = bool(case.plan.split) and all(case.rows[d.name].whole for d in case.plan.split)
    as_planned = all(set(case.rows[d.name].blocks) == set(case.blocks(d)) for d in case.plan.split)
    cut = "whole" if whole else "per head, as planned" if as_planned else "otherwise than planned"
    decisions = case.plan.decisions
    if not as_planned:
        decisions = tuple(replace(d, layout=None) for d in decisions)
    layouts = case.plan.layouts()
    remembering = _Remembering(driver, layouts)
    plan = replace(case.plan, decisions=decisions)
    case = replace(case, driver=remembering, asked=plan)
    known = _arithmetics()
    progress(model, "bits")
    exact = [names for one, names in known.items() if _bits(_asked(case, names, one))]
    if exact:
        return Identified(
            cut, tuple(Spoken(names, len(_STAGES), "", "", 0.0, True) for names in exact)
        )
    found: list[Spoken] = []
    for one, names in known.items():
        progress(model, names[0])
        found.append(_spoken(_asked(case, names, one), names))
    return Identified(cut, tuple(sorted(found, key=_rank)))


def _rank(one: Spoken) -> tuple[int, float, tuple[str, ...]]:
    return -one.passed, one.off, one.names


def _arithmetics() -> dict[Arithmetic, tuple[str, ...]]:
    """Each arithmetic once with the dialects that have it; what a gradient becomes is no part."""
    found: dict[Arithmetic, tuple[str, ...]] = {}
    for dialect in DIALECTS.values():
        key = replace(dialect.arithmetic, gradient="kept", beta=Arithmetic().beta)
        found[key] = (*found.get(key, ()), dialect.name)
    return found


def _asked(case: Case, names: tuple[str, ...], arithmetic: Arithmetic) -> Case:
    dialect = replace(DIALECTS[names[0]], arithmetic=arithmetic)
    return replace(case, dialect=dialect, diverged={}, floor={})


def _spoken(case: Case, names: tuple[str, ...]) -> Spoken:
    for passed, stage in enumerate(_STAGES):
        first = next(_found(stage(case)), None)
        if first is not None:
            id = next(check.id for check in CHECKS.values() if check.run is stage)
            off = abs(first.numbers.get("off", float("inf"))) / first.numbers.get("allowed", 1.0)
            where = f"{first.weight}: " if first.weight else ""
            return Spoken(names, passed, id, f"{where}{first.message}", off, False)
    return Spoken(names, len(_STAGES), "", "", 0.0, False)


def _found(findings: Findings) -> Iterator[Any]:
    """What a check finds; what it cannot tell does not part two dialects."""
    try:
        yield from findings
    except UndecidedError:
        return


def _bits(case: Case) -> bool:
    steps = [case.conditioned("step", i) for i in range(_STEPS)]
    outcome = case.run(steps)
    return all(
        spoken(
            case,
            d,
            steps,
            case.start[d.name],
            [case.stated(d.name, settings) for settings in outcome.settings],
            outcome.after[-1][d.name],
        )
        for d in case.weights
    )


class _Remembering:
    """A driver that runs each task once; a subject that is told keeps being told the same."""

    def __init__(self, driver: Driver, layouts: Mapping[str, Any]) -> None:
        self._driver = driver
        self._layouts = layouts
        self._outcomes: dict[str, Outcome] = {}
        self.spec = driver.spec

    def describe(self) -> dict[str, Any]:
        return self._driver.describe()

    def run(self, task: Task) -> Outcome:
        task = replace(task, layouts=self._layouts)
        key = _digest([task.parameters, *task.gradients], task.hyper)
        if key not in self._outcomes:
            self._outcomes[key] = self._driver.run(task)
        return self._outcomes[key]


def _digest(tensors: list[Mapping[str, Tensor]], *rest: object) -> str:
    digest = hashlib.sha256(repr(rest).encode())
    for some in tensors:
        for name, tensor in some.items():
            digest.update(name.encode())
            digest.update(tensor.contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()
