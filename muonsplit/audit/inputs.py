"""What a step made of its recorded input: direction, size, coefficients, and which input it was."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from muonsplit.audit.result import Explained, digits
from muonsplit.dialect import DIALECTS, Arithmetic
from muonsplit.errors import EvidenceError
from muonsplit.evidence.saved import Saved
from muonsplit.layout import Layout
from muonsplit.muon import orthogonalize
from muonsplit.observe.fit import Fit, compare

T = TypeVar("T")

# Elements up to which the iteration is done in float64.
_EXACT = 1 << 20
# Chosen: how much worse than the best every other hypothesis has to be.
AHEAD = 3.0
# Chosen: how far the best may be off. Every faulty cut is off by more than half of this many.
MOST_OFF = 0.5


def explained(
    change: Tensor,
    recorded: Mapping[str, Saved],
    name: str,
    cuts: Mapping[str, Layout | None],
    arithmetic: Arithmetic,
    beta: float,
    rate: float,
) -> tuple[Explained, ...]:
    """The hypotheses on a step with its input, the best first.

    Cuts differ most, so the best is sought first; under it, which input it was; and then, which
    coefficients. Every cut is held to both once more.

    Args:
        change: What the weight lost by the update.
        recorded: The parts that were recorded, each like a checkpoint.
        name: The weight.
        cuts: Layouts by name, the planned one first.
        arithmetic: The dialect's.
        beta: Momentum coefficient.
        rate: Learning rate; 1 if it is not known.
    """
    update = change / rate
    directions = {k: d for k, d in _directions(recorded, name, arithmetic, beta) if d.any()}
    if not directions:
        return ()
    for direction in directions.values():
        if direction.shape != change.shape:
            raise EvidenceError(
                f"{name} has shape {tuple(change.shape)}, and what was recorded of its input "
                f"{tuple(direction.shape)}."
            )

    def best_of(hypotheses: Iterable[T], fit: Callable[[T], Fit]) -> T:
        return min(hypotheses, key=lambda each: fit(each).residual)

    some = next(iter(directions.values()))
    layout = best_of(cuts.values(), lambda each: _fit(update, some, each, arithmetic))
    kind = best_of(directions, lambda each: _fit(update, directions[each], layout, arithmetic))
    direction = directions[kind]
    best = best_of(_schedules(arithmetic), lambda each: _fit(update, direction, layout, each))
    said = f"{best.coefficients}, {best.steps} steps"
    fits = ((cut, _fit(update, direction, each, best)) for cut, each in cuts.items())
    ranked = sorted(fits, key=lambda found: found[1].residual)
    return tuple(
        Explained(cut, kind, said, digits(fit.residual), digits(fit.size)) for cut, fit in ranked
    )


def backwards(found: tuple[Explained, ...]) -> bool:
    """Whether an update goes along the gradient, not against it."""
    return bool(found) and all(e.size < 0 for e in found)


def _fit(update: Tensor, direction: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Fit:
    if update.numel() <= _EXACT:
        expected = orthogonalize(direction.double(), layout, arithmetic.exact())
    else:
        expected = orthogonalize(direction.float(), layout, arithmetic.fastest())
    return compare("", update, expected)


def _directions(
    recorded: Mapping[str, Saved], name: str, arithmetic: Arithmetic, beta: float
) -> Iterator[tuple[str, Tensor]]:
    """What may have been orthogonalised, up to its size."""
    held = {
        part: saved.read(name).float() for part, saved in recorded.items() if name in saved.entries
    }
    gradient, momentum = held.get("gradients"), held.get("momentum")
    earlier = held.get("momentum_before")
    averaged = arithmetic.momentum.startswith("ema")
    if gradient is None and momentum is not None and earlier is not None:
        gradient = (momentum - beta * earlier) / ((1 - beta) if averaged else 1.0)
    if momentum is not None:
        yield "momentum", momentum
    if gradient is None:
        return
    yield "gradient", gradient
    if momentum is not None:
        yield "Nesterov step, averaged", (1 - beta) * gradient + beta * momentum
        yield "Nesterov step", gradient + beta * momentum
        yield "gradient plus momentum", gradient + momentum


def _schedules(arithmetic: Arithmetic) -> list[Arithmetic]:
    """The dialect's coefficients, and those of every other one."""
    found = {(arithmetic.coefficients, arithmetic.steps): arithmetic}
    for other in (dialect.arithmetic for dialect in DIALECTS.values()):
        swapped = replace(
            arithmetic,
            coefficients=other.coefficients,
            steps=other.steps,
            norm_factor=other.norm_factor,
            past_end=other.past_end,
            iteration="standard",
        )
        found.setdefault((other.coefficients, other.steps), swapped)
    return list(found.values())
