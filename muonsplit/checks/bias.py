"""Are the coefficients those of the dialect, beyond what one rounded update can show?"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, get_args, get_type_hints

from torch import Tensor

from muonsplit.checks.case import Case, batches
from muonsplit.checks.registry import Finding, Findings, UndecidedError, check
from muonsplit.dialect import Arithmetic
from muonsplit.errors import UsageError
from muonsplit.geometry import Decision
from muonsplit.muon import apply_, directions
from muonsplit.observe.bias import Bias, Observed, biases, observe

# In bfloat16 2¹⁴ singular values tell 2.0310 from 2.0315; noise, and so the number that is needed,
# goes with the roundoff's square.
_VALUES = 2.0**14
_COARSEST = 2.0**-8
# The statistic of N blocks is at most √N; twice the limit's square leaves room above it.
_BLOCKS = 96
# Where few weights are left to judge, they are judged less sharply.
_STEPS = 64


class _Seen(NamedTuple):
    """One weight in one step.

    Attributes:
        weight: The weight.
        given: What was to be orthogonalised.
        observed: Each batch of its blocks, with what the subject made of it.
    """

    weight: Decision
    given: Tensor
    observed: list[Observed]


@check("arithmetic.bias", "singular values are mapped by the dialect's coefficients on average")
def bias(case: Case) -> Findings:
    """Reads each coefficient off many first updates, in which rounding averages out.

    Each update's components along the singular directions of its gradient are compared with the
    exact polynomial, its size apart, and with the dialect's own rounding points on the same
    gradients. Sees 2.0310 for 2.0315 through the noise of bfloat16, where one direction is known
    to 5 to 13 %. Fails for a coefficient that is off, in all weights or most, and for rounding
    points that no order of the dialect's products has. Undecided if another order explains it.
    """
    seen = list(_seen(case))
    arithmetic = case.dialect.arithmetic
    found = _biases(case, seen, arithmetic)
    if not found:
        raise UndecidedError("no coefficient shows through rounding")
    case.allow("coefficient", max(b.allowed for b in found))
    failing = [b for b in found if not b.passes]
    # A CPU's own half-precision products sum in another order than emulated ones; both are legal.
    native = replace(arithmetic, halves="native")
    if not failing or all(b.passes for b in _biases(case, seen, native)):
        return
    worst = max(failing, key=lambda b: b.off**2 * b.energy)
    for order, rounded in _orders(arithmetic):
        if all(b.passes for b in _biases(case, seen, rounded)):
            raise UndecidedError(
                f"singular values come out as if {_read(worst)}, or as if the products were taken "
                f"in another order: the dialect with {order} would explain them"
            )
    said = f"singular values come out as if {_read(worst)}"
    numbers = {"off": worst.off, "allowed": worst.allowed, "legal": worst.legal}
    yield Finding("", said, case.dialect.name, "other coefficients or rounding points", numbers)


def _seen(case: Case) -> Iterator[_Seen]:
    """As many first steps as it takes."""
    shapes = [b.shape for d in case.weights for b in batches(case.gradients[d.name], d.layout)]
    blocks = sum(shape[0] for shape in shapes)
    values = sum(shape[0] * min(shape[1:]) for shape in shapes)
    needed = _VALUES * (case.dialect.arithmetic.roundoff / _COARSEST) ** 2
    for i in range(min(_STEPS, math.ceil(max(needed / values, _BLOCKS / blocks)))):
        drawn = case.conditioned("bias", i)
        after = case.probe(drawn)
        for d in case.weights:
            given = case.direction(d.name, drawn).float()
            update = case.update(d.name, after)
            pairs = zip(batches(given, d.layout), batches(update, d.layout), strict=True)
            observed = [observe(*pair, case.dialect.arithmetic) for pair in pairs]
            yield _Seen(d, given, observed)


def _biases(case: Case, seen: Sequence[_Seen], rounded: Arithmetic) -> list[Bias]:
    """The biases against a step that rounds as given."""
    observed = [blocks for each in seen for blocks in each.observed]
    legal = (
        batch
        for weight, given, _ in seen
        for batch in batches(_update(case, weight, given, rounded), weight.layout)
    )
    return biases(observed, legal, case.dialect.arithmetic)


def _update(case: Case, weight: Decision, given: Tensor, rounded: Arithmetic) -> Tensor:
    """What the dialect's own step subtracts, in units of the learning rate; float64."""
    start, lr = case.start[weight.name], case.stated(weight.name, case.base.settings[0]).lr
    after = start.clone()
    apply_(after, directions([given], [weight.layout], rounded)[0], rounded, lr, 0.0)
    return (start.double() - after.double()) / lr


def _orders(arithmetic: Arithmetic) -> Iterator[tuple[str, Arithmetic]]:
    """Other orders of the same products, and float32 inside, as options of a dialect."""
    forms = get_args(get_type_hints(Arithmetic)["form"])
    iterations = dict.fromkeys((arithmetic.iteration, "standard"))
    options: list[dict[str, Any]] = [
        {"form": form, "iteration": iteration} for form in forms for iteration in iterations
    ]
    if arithmetic.cpu_dtype in ("float16", "bfloat16"):
        options.append({"cpu_dtype": "float32", "pre_cast": arithmetic.cpu_dtype})
    for option in options:
        changed = {k: v for k, v in option.items() if getattr(arithmetic, k) != v}
        # Some do not exist: no order of products is named in half precision for the fast form.
        with suppress(UsageError):
            if changed:
                said = ",".join(f"{name}={value}" for name, value in changed.items())
                yield said, replace(arithmetic, **changed)


def _read(bias: Bias) -> str:
    """A bias as a coefficient, with as many digits as its error leaves."""
    digits = max(0, 1 - math.floor(math.log10(bias.allowed)))
    value, declared = (f"{x:.{digits}f}" for x in (bias.declared + bias.off, bias.declared))
    return f"{bias.coefficient} were {value} instead of {declared}, in {bias.where}"
