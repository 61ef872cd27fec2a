"""The detection floor: the smallest fault of a kind that the checks catch, for each dtype."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from muonsplit.certificate.run import Question, certify
from muonsplit.dialect import Arithmetic, dialect_named
from muonsplit.faulty.base import Broken, Layouts, broken, by_block, choosing
from muonsplit.faulty.steps import JORDAN, quintic
from muonsplit.faulty.trial import first_to_fail
from muonsplit.layout import Layout, Segment
from muonsplit.muon import orthogonalize
from muonsplit.subjects.connect import Connection
from muonsplit.subjects.process import InProcess
from muonsplit.subjects.protocol import Hyper, SubjectInfo
from muonsplit.subjects.worker import described

DTYPES: Mapping[str, str] = {
    "float32": "deepspeed-0.19.8",
    "bfloat16": "deepspeed-0.19.8-standard",
}
_DECADES = range(1, 13)
_MODEL = "llama"

# Model, layouts, hyperparameters, dialect, size → a subject that is off by that size.
Off = Callable[[nn.Module, Layouts, Hyper, str, float], Broken]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault that comes in sizes.

    Attributes:
        unit: What the size is.
        checks: Ids of the checks that may catch it.
        off: Makes a subject that is off by a size.
    """

    unit: str
    checks: tuple[str, ...]
    off: Off


@dataclass(frozen=True, slots=True)
class Floor:
    """The smallest size of a kind that is caught.

    Attributes:
        kind: Name in :data:`KINDS`.
        dtype: Dtype of the iteration.
        unit: What the size is.
        smallest: The smallest decade that is caught, or None if none is.
        largest_missed: The decade below it, or None if all are caught.
        check: The check that catches the smallest.
    """

    kind: str
    dtype: str
    unit: str
    smallest: float | None
    largest_missed: float | None
    check: str


def _coefficient(
    model: nn.Module, layouts: Layouts, hyper: Hyper, dialect: str, size: float
) -> Broken:
    a, b, c = JORDAN

    wrong = (a, b * (1 + size), c)
    how = by_block(lambda batch, arithmetic: quintic(batch, arithmetic, wrong))
    return broken(model, layouts, hyper, how, dialect_named(dialect))


def _epsilon(model: nn.Module, layouts: Layouts, hyper: Hyper, dialect: str, size: float) -> Broken:
    epsilon = dialect_named(dialect).arithmetic.epsilon + size
    return broken(model, layouts, hyper, dialect=choosing(dialect, epsilon=epsilon))


def _scale(model: nn.Module, layouts: Layouts, hyper: Hyper, dialect: str, size: float) -> Broken:
    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        return orthogonalize(update, layout, arithmetic) * (1 + size)

    return broken(model, layouts, hyper, how, dialect_named(dialect))


def _boundary(
    model: nn.Module, layouts: Layouts, hyper: Hyper, dialect: str, size: float
) -> Broken:
    rows = round(size)

    def shifted(layout: Layout) -> Layout:
        first, second, *rest = (Segment(b.role, 1, b.rows) for b in layout.blocks())
        moved = (
            first._replace(width=first.width + rows),
            second._replace(width=second.width - rows),
        )
        return Layout((*moved, *rest))

    cut = {name: layout and shifted(layout) for name, layout in layouts.items()}
    return broken(model, cut, hyper, dialect=dialect_named(dialect))


class _Other(Broken):
    """Uses other hyperparameters than its param groups state."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.change: Callable[[dict[str, Any]], dict[str, Any]] = lambda group: {}

    def _muon(self, named: list[tuple[str, Tensor]], group: dict[str, Any]) -> None:
        super()._muon(named, {**group, **self.change(group)})


def _other(
    model: nn.Module, layouts: Layouts, hyper: Hyper, dialect: str, name: str, size: float
) -> Broken:
    made = broken(model, layouts, hyper, dialect=dialect_named(dialect), kind=_Other)
    assert isinstance(made, _Other)
    made.change = lambda group: {name: group[name] * (1 - size)}
    return made


def _decay(model: nn.Module, layouts: Layouts, hyper: Hyper, dialect: str, size: float) -> Broken:
    return _other(model, layouts, hyper, dialect, "weight_decay", size)


def _momentum(
    model: nn.Module, layouts: Layouts, hyper: Hyper, dialect: str, size: float
) -> Broken:
    return _other(model, layouts, hyper, dialect, "momentum", size)


KINDS: Mapping[str, Kind] = {
    "coefficient": Kind("of b", ("arithmetic.direction", "arithmetic.bias"), _coefficient),
    "ε": Kind(
        "beside the dialect's own",
        ("arithmetic.direction", "arithmetic.bias", "inputs.scale"),
        _epsilon,
    ),
    "row boundary": Kind("rows", ("cut.rows",), _boundary),
    "scale": Kind("of the update", ("arithmetic.scale",), _scale),
    "decay": Kind("of the coefficient", ("state.decay",), _decay),
    "momentum": Kind("of the coefficient", ("state.momentum", "state.buffer"), _momentum),
}


class _Given(InProcess):
    """Runs a factory that has no name."""

    def __init__(self, name: str, connection: Connection) -> None:
        super().__init__(name)
        self._given = connection

    def describe(self) -> dict[str, Any]:
        """See :meth:`~muonsplit.subjects.process.Worker.describe`."""
        self._connection = self._given
        return described(self._given)


def floors() -> Iterator[Floor]:
    """Finds the floor of every kind for every dtype, by bisection over decades."""
    for name, kind in KINDS.items():
        for dtype in DTYPES:
            yield floor(name, kind, dtype)


def floor(name: str, kind: Kind, dtype: str) -> Floor:
    """Finds the floor of one kind for one dtype.

    Args:
        name: Name of the kind.
        kind: The kind.
        dtype: A dtype in :data:`DTYPES`.
    """
    sizes = [1.0] if name == "row boundary" else [10.0**-i for i in _DECADES]
    caught: dict[float, str] = {}
    low, high = 0, len(sizes)  # sizes before low are caught, those from high on are not
    while low < high:
        middle = (low + high) // 2
        check = caught_by(kind, dtype, sizes[middle])
        if check:
            caught[sizes[middle]], low = check, middle + 1
        else:
            high = middle
    smallest = sizes[low - 1] if low else None
    missed = sizes[low] if low < len(sizes) else None
    return Floor(name, dtype, kind.unit, smallest, missed, caught.get(smallest or 0.0, ""))


def caught_by(kind: Kind, dtype: str, size: float) -> str:
    """The first check that fails on a subject that is off by a size; empty if none does.

    Args:
        kind: What is off.
        dtype: A dtype in :data:`DTYPES`.
        size: By how much.
    """
    dialect = DTYPES[dtype]

    def build(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
        return kind.off(model, layouts, hyper, dialect, size)

    connection = Connection(build, SubjectInfo(dialect, False, (_MODEL,)))
    driver = _Given(f"off by {size:g}", connection)
    return first_to_fail(certify(driver, Question(only=kind.checks)))
