"""Truth by autograd: which rows of a weight reach which columns of the output projection's input.

    D[r, c] = does row r of W influence column c of what enters the next projection?

Every entry is exactly zero or not, so neither names nor shapes nor views are needed to say where
the heads are. A model is run once, small, in float64, with random weights.
"""

import copy
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from muonsplit.errors import InputError
from muonsplit.truth.answer import State, Truth
from muonsplit.truth.graph import Graph
from muonsplit.truth.influence import columns_of, influence, work
from muonsplit.truth.record import Record, Recorder
from muonsplit.truth.support import Reach, column_classes, judge

# How far a vector is moved from where it was initialised, at most one from zero: a norm's weight
# stays near one, none stays at zero, and a decay, often the exponential of an exponential of two
# of them, leaves of a state after one step what is well above rounding: exp(−e·softplus(2)) is
# 3e-3.
_JITTER = 0.2
# A residual stream carries its layers' rows on; what entered this many projections in one piece
# has told what it had to tell, and a deep model costs no more a layer than a shallow one.
_ENOUGH = 4
# A backward pass a column: more of them cost minutes, and no miniature needs them.
_MOST_COLUMNS = 1024


def gradients(
    model: nn.Module,
    call: Callable[[nn.Module], object],
    seed: int = 0,
    budget: float = math.inf,
) -> dict[str, Truth]:
    """Finds where a model's own computation puts the heads of each weight.

    Statistics of norms are held constant, or those taken over all heads would couple every head
    to every other; the evidence of an answer says where that was done.

    Args:
        model: On the CPU, small: each column of each projection costs a backward pass. It is
            copied, not changed; every parameter of the copy is drawn anew.
        call: Runs the forward pass of the module it is given, on several positions.
        seed: Of the draws.
        budget: How much work may be done, in elements of gradients (1e8 are about a second of one
            core); what is not reached by then is unknown. It is counted, so answers do not depend
            on the machine.

    Returns:
        An answer for each parameter of two or more dimensions, tied ones once; those of more
        than two are taken as matrices ``[all but the last, last]``.

    Raises:
        InputError: If a parameter is not on the CPU, or the forward pass fails.
    """
    model = _redrawn(model, seed)
    recorder = Recorder(model)
    with _float64(seed), recorder:
        try:
            returned = call(model)
        except Exception as error:
            raise InputError(
                f"The forward pass failed in float64: {type(error).__name__}: {error}",
                "The call must run on this model as it is; a module that needs another dtype or "
                "device has no answer here.",
            ) from error
    matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1 and p.requires_grad}
    return _answers(matrices, recorder.record, Graph.behind(_outputs(returned)), budget)


def _redrawn(model: nn.Module, seed: int) -> nn.Module:
    copied = copy.deepcopy(model).eval()
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in copied.named_parameters():
        if parameter.device.type != "cpu":
            raise InputError(
                f"{name} is on {parameter.device}; gradients are taken on the CPU.",
                "Build a miniature of the model there.",
            )
    copied = copied.double()
    with torch.no_grad():
        for parameter in filter(Tensor.is_floating_point, copied.parameters()):
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            if parameter.ndim > 1:
                # Outputs of unit size: neither softmax nor sigmoid saturates.
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
            else:
                parameter.nan_to_num_().clamp_(-1, 1).add_(_JITTER * noise)
            parameter.requires_grad_(True)
    return copied


@contextmanager
def _float64(seed: int) -> Generator[None]:
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _outputs(returned: object) -> Iterator[Tensor]:
    if isinstance(returned, Tensor):
        yield returned
    elif isinstance(returned, Mapping):
        for value in cast(Mapping[Any, Any], returned).values():
            yield from _outputs(value)
    elif isinstance(returned, tuple | list):
        for value in cast(list[Any], returned):
            yield from _outputs(value)


@dataclass(slots=True)
class _Seen:
    """What was seen of one weight, in order of execution."""

    heads: Truth | None = None
    axis: int | None = None
    reached: str = ""
    failed: str = ""
    dead: bool = False
    times: int = 0

    def note(self, reach: Reach, classes: list[int], held: int) -> None:
        """Takes in what a weight reaches at one projection."""
        if reach.is_empty:
            self.dead = True
            return
        self.axis = reach.axis if self.axis is None else self.axis
        if self.heads is None and (found := judge(reach, classes)):
            couples = held > max(columns.bit_count() for columns in classes)
            constant = f"; statistics of a norm over {held} channels held constant" * couples
            self.heads = replace(found, evidence=found.evidence + constant)
        if classes:
            self.reached = "rows that reach the heads reach all of them"
            return
        self.times += 1
        if not self.reached:
            single = all(support.bit_count() < 2 for support in reach.supports)
            self.reached = (
                "one column a row: the next projection mixes them all"
                if single
                else "no columns of the next projection are told apart"
            )


def _answers(
    weights: Mapping[str, Tensor], record: Record, outputs: Graph, budget: float
) -> dict[str, Truth]:
    seen = {name: _Seen() for name in weights}
    readers: set[str] = set()
    fed = {name: weight for name, weight in weights.items() if name not in record.tables}
    for entry in record.entries:
        try:
            if (many := columns_of(entry)) > _MOST_COLUMNS:
                raise ArithmeticError(f"{many} columns enter the next projection, too many to ask")
            budget -= work(entry, record, fed)
            if budget < 0:
                raise ArithmeticError("the model is too large to ask for more")
            found = influence(entry, record, fed)
        except (RuntimeError, ArithmeticError) as error:
            behind = Graph.behind([entry.value]).leaves
            for name in (name for name, weight in fed.items() if id(weight) in behind):
                seen[name].failed = f"{type(error).__name__}: {error}"
            continue
        classes = column_classes(found.reaches.values(), found.columns)
        readers |= entry.readers if classes else set()
        for name, reach in found.reaches.items():
            seen[name].note(reach, classes, found.held)
            if seen[name].times >= _ENOUGH:
                del fed[name]
    return {
        name: _answer(
            name, weight, seen[name], record, name in readers, id(weight) in outputs.leaves
        )
        for name, weight in weights.items()
    }


def _answer(
    name: str, weight: Tensor, seen: _Seen, record: Record, reads: bool, returned: bool
) -> Truth:
    if seen.heads:
        return seen.heads
    made = record.products.get(name, [])
    axis = seen.axis if seen.axis is not None else made[0].axis if made else 0
    rows = weight.numel() // weight.shape[-1] if axis == 0 else weight.shape[-1]
    state, evidence = _without_heads(name, seen, record, reads, returned)
    return Truth(state, axis, rows, (), evidence)


def _without_heads(
    name: str, seen: _Seen, record: Record, reads: bool, returned: bool
) -> tuple[State, str]:
    if name in record.tables:
        return "none", "a table: rows are looked up"
    if seen.failed:
        return "unknown", f"failed: {seen.failed}"
    if reads:
        return "none", "the heads enter here: they lie on the input axis"
    if seen.reached:
        return "none", seen.reached
    if seen.dead:
        return "unknown", "zero-initialised, or constant: a path is there, its gradient is zero"
    if returned:
        return "none", "rows are the model's output: no projection follows"
    if name in record.used:
        return "unknown", "no gradient path to any projection"
    return "unknown", "not used by this call"
