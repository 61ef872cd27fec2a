"""Subjects that are right in another way than the reference, and must not be accused."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.dialect import DEFAULT_DIALECT, Arithmetic, dialect_named
from muonsplit.faulty.base import Broken, Layouts, broken, by_block, choosing, sound
from muonsplit.faulty.gathering import GATHER, RAISE, Engine, Gathering
from muonsplit.faulty.registry import Factory, summary_of
from muonsplit.faulty.steps import JORDAN, five_steps
from muonsplit.geometry import plan
from muonsplit.layout import Layout
from muonsplit.muon import PerHeadMuon, advance_momentum, orthogonalize
from muonsplit.subjects.protocol import Hyper, subject

_BFLOAT16 = "deepspeed-0.19.8-standard"
_FLOAT16 = "deepspeed-0.19.8:cpu_dtype=float16"
_LOSS_SCALE = 1024.0


@dataclass(frozen=True, slots=True)
class LegalVariant:
    """A subject that is right.

    Attributes:
        name: Name on the command line, as ``faulty:NAME``.
        dialect: The dialect it speaks.
        summary: In what it differs from the reference, in one line.
        ways: Ways of sharding it works under.
    """

    name: str
    dialect: str
    summary: str
    ways: tuple[str, ...] = ("ddp",)


LEGAL: dict[str, LegalVariant] = {}


def _legal(
    dialect: str = DEFAULT_DIALECT,
    recognises: bool = False,
    off: Mapping[str, str] | None = None,
    options: Mapping[str, tuple[str, str]] | None = None,
    ways: tuple[str, ...] = ("ddp",),
) -> Callable[[Factory], Factory]:
    """Registers a factory as a legal variant; see :func:`~muonsplit.subjects.protocol.subject`."""

    def register(factory: Factory) -> Factory:
        name = factory.__name__.replace("_", "-")
        LEGAL[name] = LegalVariant(name, dialect, summary_of(factory), ways)
        return subject(
            dialect=dialect,
            recognises=recognises,
            models=("llama",),
            off=off,
            options=options,
            ways=ways,
        )(factory)

    return register


@_legal()
def head_by_head(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Loops over heads instead of batching them."""
    how = by_block(lambda batch, a: torch.cat([sound(x[None], a) for x in batch]))
    return broken(model, layouts, hyper, how)


@_legal()
def heads_in_reverse(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Takes the last head first, and puts each where it belongs."""
    how = by_block(lambda batch, arithmetic: sound(batch.flip(0), arithmetic).flip(0))
    return broken(model, layouts, hyper, how)


@_legal()
def rows_sliced_in_place(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Writes each head's result into a slice of the update, without a layout's help."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        if layout is None or layout.joined:
            return orthogonalize(update, layout, arithmetic)
        result = update.clone(memory_format=torch.contiguous_format)
        rows = result.mT if layout.axis else result
        for block in layout.blocks():
            for start, stop in block.spans:
                rows[start:stop] = sound(rows[start:stop][None], arithmetic)[0]
        return result

    return broken(model, layouts, hyper, how)


@_legal()
def by_the_textbook(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Writes the iteration down as a paper does, from the left for wide and for tall blocks."""
    return broken(model, layouts, hyper, by_block(lambda batch, arithmetic: _textbook(batch)))


def _textbook(batch: Tensor) -> Tensor:
    X = five_steps(batch / (batch.norm(dim=(1, 2), keepdim=True) + 1e-7), JORDAN)
    return X * max(1.0, batch.shape[1] / batch.shape[2]) ** 0.5


@_legal()
def compiled(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Traces the iteration with torch.compile, for every shape it meets."""
    traced = torch.compile(_textbook, backend="eager", dynamic=True)

    how = by_block(lambda batch, arithmetic: traced(batch.contiguous()))
    return broken(model, layouts, hyper, how)


@_legal()
def without_gram(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Iterates on the blocks themselves where the dialect does on Gram matrices."""
    return broken(model, layouts, hyper, dialect=choosing(iteration="standard"))


@_legal(_BFLOAT16)
def in_bfloat16(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Rounds operands to bfloat16 and multiplies them in float32."""
    return broken(model, layouts, hyper, dialect=dialect_named(_BFLOAT16))


@_legal(_BFLOAT16)
def in_native_bfloat16(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Multiplies in bfloat16 as this CPU does it."""
    return broken(model, layouts, hyper, dialect=choosing(_BFLOAT16, halves="native"))


@_legal(_FLOAT16)
def in_float16(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Rounds operands to float16 and multiplies them in float32."""
    return broken(model, layouts, hyper, dialect=dialect_named(_FLOAT16))


@_legal(_FLOAT16)
def in_native_float16(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Multiplies in float16 as this CPU does it."""
    return broken(model, layouts, hyper, dialect=choosing(_FLOAT16, halves="native"))


@_legal()
def in_float64(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Computes each update in float64, which is closer to the exact one than it has to be."""

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        return orthogonalize(update.double(), layout, arithmetic.exact()).to(update.dtype)

    return broken(model, layouts, hyper, how)


@_legal()
def multiplied_from_the_right(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Multiplies tall blocks from the right instead of transposing them."""
    return broken(model, layouts, hyper, dialect=choosing(tall="right"))


@_legal()
def on_lists_of_tensors(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Takes the step by torch's foreach functions."""
    return broken(model, layouts, hyper, dialect=choosing(foreach="all"))


@_legal()
def sum_of_gradients(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Keeps momentum as a sum, twenty times the average and of the same direction."""
    return broken(model, layouts, hyper, dialect=choosing(momentum="sum"))


@_legal()
def buffer_in_float32(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Keeps momentum in float32 whatever the parameter is."""
    return broken(model, layouts, hyper, dialect=choosing(buffer_dtype="float32"))


class _Scaled(Broken):
    """Keeps momentum of gradients that a loss scale made larger, and takes it out again."""

    def _advanced(self, p: Tensor, beta: float) -> Tensor:
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        larger = p.grad.detach() * _LOSS_SCALE
        buffer = state["momentum_buffer"]
        return advance_momentum(larger, buffer, self.arithmetic, beta) / _LOSS_SCALE


@_legal()
def loss_scaled(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Carries gradients times a power of two, which changes no bit of an update."""
    return broken(model, layouts, hyper, kind=_Scaled)


class _Reassigned(Broken):
    """Gives each parameter new memory in every step."""

    @torch.no_grad()
    def step(self, closure: object = None) -> object:
        """The reference's step, in memory of its own."""
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data.clone()
        return super().step(closure)


@_legal()
def parameters_reassigned(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Writes the result of a step to new memory instead of in place."""
    return broken(model, layouts, hyper, kind=_Reassigned)


class _Telling(Broken):
    """Returns a loss from each step."""

    @torch.no_grad()
    def step(self, closure: object = None) -> object:
        """The reference's step, and a loss."""
        super().step(closure)
        return torch.tensor(1.0)


@_legal()
def step_returns_a_loss(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Returns a number from each step, as one with a closure does."""
    return broken(model, layouts, hyper, kind=_Telling)


@_legal(options={"steps": ("5", "6")})
def with_an_option(model: nn.Module, layouts: Layouts, hyper: Hyper, steps: str = "5") -> Broken:
    """Declares an option, and reads it."""
    return broken(model, layouts, hyper, dialect=choosing(steps=int(steps), restarts=(2, 4)))


@_legal(recognises=True, off={"per_head": "false"})
def finds_heads_itself(model: nn.Module, hyper: Hyper, per_head: str = "true") -> Broken:
    """Is given the model only, raises where it finds no head, and can be turned off."""
    made = plan(model, dialect_named(DEFAULT_DIALECT))
    made.raise_if_nothing()
    found = made.layouts()
    return broken(model, found if per_head == "true" else dict.fromkeys(found), hyper)


@_legal(GATHER, ways=("ddp", "tp", "fsdp", "hsdp", "tp-fsdp"))
def gathers_whole_weights(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Gathering:
    """Gathers every weight on every rank, and keeps the rank's own part of the result."""
    return Gathering(model, layouts, hyper)


@_legal(RAISE, ways=("fsdp",))
def refuses_cut_heads(model: nn.Module, layouts: Layouts, hyper: Hyper) -> PerHeadMuon:
    """Refuses shards that cut heads, as it declares."""
    return PerHeadMuon(
        model.named_parameters(),
        layouts,
        cut_heads="raise",
        lr=hyper.lr,
        momentum=hyper.momentum,
        weight_decay=hyper.weight_decay,
    )


@_legal(ways=("engine",))
def reduces_by_itself(
    model: nn.Module, layouts: Layouts, hyper: Hyper, micro_batches: int
) -> Engine:
    """Sums gradients over micro-batches and ranks itself."""
    return Engine(model, layouts, hyper, micro_batches)


def _speaking(name: str) -> Callable[..., Any]:
    """The reference in another dialect, which it declares."""

    def build(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
        return broken(model, layouts, hyper, dialect=dialect_named(name))

    build.__doc__ = f"Speaks {name}, and says so."
    build.__name__ = f"in_{name.partition('-')[0]}s_dialect"
    return _legal(name)(build)


in_jordans_dialect = _speaking("jordan")
in_moonlights_dialect = _speaking("moonlight")
in_torchs_dialect = _speaking("torch-2.13")
