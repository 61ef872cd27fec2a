"""One subject on one model: what the plan says, and observations made once, on first use."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic, Dialect
from muonsplit.geometry import Decision, Plan
from muonsplit.geometry.shard import tensor_parallel_axes
from muonsplit.layout import Layout
from muonsplit.models.load import Config
from muonsplit.muon import Direction, advance_momentum, directions
from muonsplit.observe import gradients
from muonsplit.observe.cut import Cut, differing_lines, scan, turned_lines
from muonsplit.observe.tolerance import bounds
from muonsplit.recognition.judge import Judgement
from muonsplit.sharding.pieces import cuts
from muonsplit.sharding.ways import Sharding
from muonsplit.subjects.drive import Outcome, Settings, Task
from muonsplit.subjects.process import Driver
from muonsplit.subjects.protocol import Hyper

# Small enough that the step decides the parameter's bits, large enough to be no special case.
_START = 1e-3
# Enough to trip any clipping by a global norm.
_MUCH_LOUDER = 1024.0


class Stated(NamedTuple):
    """Hyperparameters of one weight in one step.

    Attributes:
        lr: Learning rate.
        momentum: Momentum coefficient.
        weight_decay: Decoupled decay coefficient.
        known: Whether the learning rate was given or stated, so that sizes can be judged.
    """

    lr: float
    momentum: float
    weight_decay: float
    known: bool


@dataclass
class Case:
    """A subject on a model.

    Attributes:
        driver: Runs the subject.
        config: Config of the miniature it is run on.
        shapes: Shape of every parameter.
        asked: What the rules say about the miniature.
        full: What they say about the full-size model.
        dialect: The dialect it is held to.
        seed: Root of every random draw.
        described: What the subject declares.
        truths: What the miniature's own computation says of each weight, beside single heads.
        way: How it is divided among the driver's ranks; empty on one process.
        diverged: Weights already reported, with the check that did.
        floor: The largest bound used so far, by kind of comparison.
        alone: How far each update is from that of one process; 0 if it has its bits.
        ended: Why nothing more is asked; empty while there is something.
    """

    driver: Driver
    config: Config
    shapes: Mapping[str, tuple[int, ...]]
    asked: Plan
    full: Plan
    dialect: Dialect
    seed: int | str
    described: Mapping[str, Any]
    truths: Mapping[str, Judgement]
    way: str = ""
    diverged: dict[str, str] = field(default_factory=dict)
    floor: dict[str, float] = field(default_factory=dict)
    alone: dict[str, float] = field(default_factory=dict)
    ended: str = ""

    @cached_property
    def sharding(self) -> Sharding | None:
        """How a run is divided among ranks; None on one process."""
        if not self.way:
            return None
        return Sharding(self.way, self.driver.world, tensor_parallel_axes(self.asked))

    @cached_property
    def cut_heads(self) -> dict[str, Decision]:
        """The weights of which some shard cuts a head, by name."""
        sharding = self.sharding
        if sharding is None:
            return {}
        return {
            d.name: d
            for d in self.asked.split
            if cuts(d.layout, d.shape, sharding.regions(d.name, d.shape))
        }

    @cached_property
    def plan(self) -> Plan:
        """What is expected: what is asked, less what the dialect drops where a shard cuts heads."""
        if not self.cut_heads or self.dialect.split.cut_heads != "drop":
            return self.asked
        said = f"the dialect drops the split where a shard of {self.sharding} cuts a head"
        decisions = tuple(
            replace(d, layout=None, reason=said) if d.name in self.cut_heads else d
            for d in self.asked.decisions
        )
        return replace(self.asked, decisions=decisions)

    @property
    def weights(self) -> list[Decision]:
        """The Muon weights that nothing has been found against yet."""
        return [d for d in self.plan.decisions if d.name not in self.diverged]

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """The gradient that observations start from."""
        return gradients.draw_uneven(self.shapes, self.seed, "gradient")

    @cached_property
    def start(self) -> dict[str, Tensor]:
        """Parameters that observations start from."""
        return gradients.draw(self.shapes, self.seed, "start", size=_START)

    @cached_property
    def base(self) -> Outcome:
        """One step with the gradient."""
        return self.run([self.gradients])

    def conditioned(self, *key: object) -> dict[str, Tensor]:
        """Gradients in which no planned block has a small singular value; blocks differ in size.

        For the arithmetic alone, whose expectation comes from the plan anyway.
        """
        drawn = gradients.draw(self.shapes, self.seed, "conditioned", *key)
        for d in self.plan.decisions:
            sizes = gradients.generator(self.seed, "sizes", *key, d.name)

            def sized(batch: Tensor, sizes: torch.Generator = sizes) -> Tensor:
                return gradients.conditioned(batch) * _sizes(batch, sizes)

            drawn[d.name] = mapped(drawn[d.name], d.layout, sized)
        return drawn

    @cached_property
    def first_step(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Conditioned gradients, and the parameters that one step with them leaves."""
        drawn = self.conditioned("first")
        return drawn, self.probe(drawn)

    @cached_property
    def three_steps(self) -> tuple[list[dict[str, Tensor]], Outcome]:
        """Three steps' gradients, and what they leave."""
        drawn = [self.conditioned("ranks", i) for i in range(3)]
        return drawn, self.run(drawn)

    @cached_property
    def rows(self) -> dict[str, Cut]:
        """The observed row blocks of every matrix."""
        return scan(0, self.gradients, self.probe, self._moved, self.seed)

    @property
    def seen_rows(self) -> Mapping[str, Cut]:
        """:attr:`rows` if anything has looked at them, else nothing."""
        return self.__dict__.get("rows", {})

    @cached_property
    def columns(self) -> dict[str, Cut]:
        """The observed column blocks of every matrix."""
        return scan(1, self.gradients, self.probe, self._moved, self.seed)

    @cached_property
    def coupled(self) -> dict[str, float]:
        """Weights whose update changes with other weights' gradients, and by how much.

        Half of the parameters get another gradient, much louder and nearly of rank one, so that
        norms of gradients and of orthogonalised updates change; the halves are such that every
        two parameters are apart in one of them.
        """
        base, changes = self.base.after[0], dict[str, float]()
        limits = self.rounding()
        names = list(self.shapes)
        for half in separating(len(names)):
            other = {names[i]: _loud_rank_one(self.gradients[names[i]]) for i in half}
            after = self.probe({**self.gradients, **other})
            for d in self.plan.decisions:
                update = self.update(d.name, base)
                change = self.update(d.name, after) - update
                if d.name not in other and change.norm() > 2 * limits[d.name] * update.norm():
                    changes[d.name] = float(change.norm() / update.norm())
        return changes

    def _moved(self, weight: str, after: Tensor, axis: int) -> frozenset[int]:
        base = self.base.after[0]
        if not self.coupled:
            return differing_lines(after, base[weight], axis)
        update, before = (self.update(weight, x) for x in ({weight: after}, base))
        # What the parameter's own rounding leaves of an update that clipping made small.
        held = torch.finfo(torch.float32).eps * self.start[weight].norm() / Hyper().lr
        roundoff = self.dialect.arithmetic.roundoff + float(held / before.norm().clamp(min=1e-300))
        return turned_lines(update, before, axis, roundoff)

    def run(
        self,
        steps: Sequence[Mapping[str, Tensor]],
        start: Mapping[str, Tensor] | None = None,
        hyper: Hyper | None = None,
        **how: Any,
    ) -> Outcome:
        """Drives a fresh subject through steps with the given gradients.

        Args:
            steps: One gradient a parameter, for each step.
            start: Parameters to start from; by default :attr:`start`.
            hyper: By default :attr:`hyper`.
            **how: Other fields of a :class:`~muonsplit.subjects.drive.Task`, and ``driver`` for
                another one than the case's.
        """
        layouts = how.pop("layouts", self.asked.layouts())
        how.setdefault("sharding", self.sharding)
        driver = how.pop("driver", self.driver)
        given = hyper or self.hyper
        return driver.run(Task(self.config, start or self.start, steps, layouts, given, **how))

    def probe(self, changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters after one step with other gradients."""
        return self.run([changed]).after[0]

    @property
    def knows_hyper(self) -> bool:
        """Whether the subject takes the hyperparameters it is given."""
        return "hyper" in self.described["takes"]

    @property
    def hyper(self) -> Hyper:
        """The hyperparameters that a subject which takes any is given."""
        return Hyper(momentum=self.dialect.arithmetic.beta)

    def stated(self, weight: str, settings: Settings, weight_decay: float = 0.0) -> Stated:
        """The hyperparameters of a weight in one step.

        Args:
            weight: Parameter name.
            settings: What the subject's param groups said before the step; they come first.
            weight_decay: What was given to a subject that takes hyperparameters.
        """
        own = settings.get(weight, {})
        given = replace(self.hyper, weight_decay=weight_decay if self.knows_hyper else 0.0)
        return Stated(
            own.get("lr", given.lr),
            own.get("momentum", given.momentum),
            own.get("weight_decay", given.weight_decay),
            self.knows_hyper or "lr" in own,
        )

    def stated_by(self, outcome: Outcome, weight_decay: float = 0.0) -> dict[str, list[Stated]]:
        """The hyperparameters of each weight in each step of a run; see :meth:`stated`."""
        return {
            d.name: [self.stated(d.name, each, weight_decay) for each in outcome.settings]
            for d in self.weights
        }

    def update(self, weight: str, after: Mapping[str, Tensor]) -> Tensor:
        """What one step from :attr:`start` subtracted, in units of the learning rate; float64."""
        stated = self.stated(weight, self.base.settings[0])
        decayed = self.start[weight].double() * (1 - stated.lr * stated.weight_decay)
        return (decayed - after[weight].double()) / stated.lr

    def blocks(self, decision: Decision, axis: int = 0) -> tuple[frozenset[int], ...]:
        """The lines of an axis that the plan wants to move together; a stack's rows run through."""
        lines = _lines(decision.shape, axis)
        if decision.layout is not None and decision.layout.axis == axis:
            return tuple(
                frozenset(i for a, b in block.spans for i in range(a, b))
                for block in decision.layout.blocks()
            )
        if len(decision.shape) == 3 and axis == 0:
            rows = decision.shape[1]
            return tuple(frozenset(range(i, i + rows)) for i in range(0, lines, rows))
        return (frozenset(range(lines)),)

    def direction(self, weight: str, drawn: Mapping[str, Tensor] | None = None) -> Tensor:
        """What a first step orthogonalises, from zero state; float64.

        Args:
            weight: Parameter name.
            drawn: The step's gradients; by default :attr:`gradients`.
        """
        gradient = (self.gradients if drawn is None else drawn)[weight].double()
        beta = self.stated(weight, self.base.settings[0]).momentum
        return advance_momentum(gradient, torch.zeros_like(gradient), self.dialect.arithmetic, beta)

    def first_direction(self, decision: Decision) -> Direction:
        """What the dialect makes of a weight's first gradient, exactly."""
        update = self.direction(decision.name)
        return directions([update], [decision.layout], self.dialect.arithmetic.exact())[0]

    def allow(self, kind: str, limit: float) -> float:
        """Notes a bound that a comparison of some kind uses, for the detection floor."""
        self.floor[kind] = max(limit, self.floor.get(kind, 0.0))
        return limit

    def rounding(self, drawn: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """The largest relative error that rounding may cause in one block of each first update.

        Args:
            drawn: The step's gradients; by default :attr:`gradients`.
        """
        found = self.plan.decisions
        updates = [(d, self.direction(d.name, drawn)) for d in found]
        limits = largest_bounds(updates, self.dialect.arithmetic)
        return dict(zip((d.name for d in found), limits, strict=True))


def largest_bounds(
    updates: Sequence[tuple[Decision, Tensor]], arithmetic: Arithmetic
) -> list[float]:
    """The largest relative error that rounding may cause in one block of each update.

    Args:
        updates: Weights, and what is orthogonalised.
        arithmetic: How.
    """
    blocks = [matrices(update, d.layout) for d, update in updates]
    found = iter(bounds([(block, arithmetic) for each in blocks for block in each]))
    return [max(bound.rounding for bound in islice(found, len(each))) for each in blocks]


def separating(count: int) -> list[list[int]]:
    """Halves of ``count`` things: for every two of them, one has the first without the second."""
    halves: list[list[int]] = []
    for bit in range(max(1, (count - 1).bit_length())):
        one = [i for i in range(count) if i >> bit & 1]
        halves += [one, [i for i in range(count) if i not in one]]
    return halves


def _sizes(batch: Tensor, source: torch.Generator) -> Tensor:
    """A random factor for each block, from ½ to 2, so that norms are rounded either way."""
    return 4.0 ** (torch.rand(len(batch), 1, 1, generator=source) - 0.5)


def _loud_rank_one(gradient: Tensor) -> Tensor:
    rows = gradient.view(-1, gradient.shape[-1])
    return ((rows[:1] + 1e-3 * rows) * _MUCH_LOUDER).view(gradient.shape)


def batches(weight: Tensor, layout: Layout | None) -> list[Tensor]:
    """The blocks of a weight, or the matrices of a stack, equal ones together."""
    if layout is not None:
        return layout.batches(weight)
    return [weight if weight.ndim == 3 else weight.unsqueeze(0)]


def mapped(weight: Tensor, layout: Layout | None, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A weight of the same shape with each of its batches of blocks changed."""
    changed = [change(batch) for batch in batches(weight, layout)]
    if layout is None:
        return changed[0].view(weight.shape)
    result = torch.empty_like(weight)
    layout.write(changed, result)
    return result


def cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The same tensors in another dtype."""
    return {name: x.to(dtype) for name, x in tensors.items()}


def axis_of(layout: Layout | None) -> int:
    """The axis that blocks lie along: rows, unless a layout says otherwise."""
    return 0 if layout is None else layout.axis


def lines_first(weight: Tensor, axis: int) -> Tensor:
    """A view of a weight whose first axis is that of its blocks; a stack's rows run through."""
    return weight.mT if axis else weight.view(-1, weight.shape[-1])


def matrices(weight: Tensor, layout: Layout | None) -> list[Tensor]:
    """The blocks of a weight, or the matrices of a stack, one by one."""
    return [block for batch in batches(weight, layout) for block in batch]


def _lines(shape: Sequence[int], axis: int) -> int:
    columns = shape[-1]
    total = 1
    for size in shape:
        total *= size
    return columns if axis else total // columns
