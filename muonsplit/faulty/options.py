"""Faults of options and of what a subject is told: ignored, inert, misread."""

from typing import Any

from torch import Tensor, nn

from muonsplit.dialect import DEFAULT_DIALECT, Arithmetic, dialect_named
from muonsplit.faulty.base import Broken, Layouts, broken, choosing
from muonsplit.faulty.registry import fault
from muonsplit.geometry import plan
from muonsplit.layout import Layout, Segment
from muonsplit.muon import orthogonalize
from muonsplit.subjects.protocol import Hyper


def _recognised(model: nn.Module) -> Layouts:
    """What the rules say about a model; nothing is an error."""
    made = plan(model, dialect_named(DEFAULT_DIALECT))
    made.raise_if_nothing()
    return made.layouts()


@fault(
    check="recognition.nothing",
    model="llama",
    origin="Megatron-LM: split_qkv logged at DEBUG; VeOmni",
    recognises=True,
)
def nothing_found_and_nothing_said(model: nn.Module, hyper: Hyper) -> Broken:
    """On a model without a head that it knows, everything is trained whole without a word."""
    return broken(model, plan(model, dialect_named(DEFAULT_DIALECT)).layouts(), hyper)


@fault(check="recognition.misfit", model="llama", origin="xtuner _muonsplit: trailing rows")
def rows_beyond_the_layout_frozen(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """A list of sizes that is a head short leaves the last rows where they are."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    missing = {
        name: shapes[name][layout.axis] - layout.rows
        for name, layout in layouts.items()
        if layout is not None and layout.rows < shapes[name][layout.axis]
    }
    extended = {name: _extended(x, missing.get(name, 0)) for name, x in layouts.items()}

    def how(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
        result = orthogonalize(update, layout, arithmetic)
        if layout is not None and layout.segments[-1].role == "rest":
            rows = result.mT if layout.axis else result
            rows[-layout.segments[-1].rows :] = 0
        return result

    return broken(model, extended, hyper, how)


def _extended(layout: Layout | None, rows: int) -> Layout | None:
    if layout is None or not rows:
        return layout
    blocks = tuple(Segment(block.role, 1, block.rows) for block in layout.blocks())
    return Layout((*blocks, Segment("rest", 1, rows)), axis=layout.axis)


@fault(
    check="recognition.misfit",
    model="llama",
    origin="DeepSpeed #8384, tensor parallelism; dion's README example",
)
def rows_divided_by_the_count(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Only the count is believed: rows are divided by it, and the last head takes what is left."""
    cut: dict[str, Layout | None] = dict(layouts)
    for name, p in model.named_parameters():
        layout = layouts.get(name)
        if layout is not None and layout.rows != p.shape[layout.axis]:
            rows, earlier = p.shape[layout.axis], len(layout.blocks()) - 1
            width = rows // (earlier + 1)
            last = Segment("last", 1, rows - earlier * width)
            cut[name] = Layout((Segment("q", earlier, width), last), axis=layout.axis)
    return broken(model, cut, hyper)


@fault(check="options.off", model="llama")
def still_cut_when_off(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """Told to keep every weight whole, it cuts by what it finds itself."""
    on = any(layout is not None for layout in layouts.values())
    return broken(model, layouts if on else {**layouts, **_recognised(model)}, hyper)


@fault(check="options.off", model="llama", origin="DeepSpeed #8384 before its merge")
def another_scale_when_off(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """With the split off, the old path is taken, whose scale is another."""
    on = any(layout is not None for layout in layouts.values())
    dialect = dialect_named(DEFAULT_DIALECT) if on else choosing(scale="spectral")
    return broken(model, layouts, hyper, dialect=dialect)


@fault(
    check="options.off",
    model="llama",
    origin="Primus _as_bool",
    recognises=True,
    off={"per_head": "false"},
)
def false_is_a_string(model: nn.Module, hyper: Hyper, per_head: str = "true") -> Broken:
    """Any text but none is true, and so is "false"."""
    found = _recognised(model)
    return broken(model, found if bool(per_head) else dict.fromkeys(found), hyper)


def _ignoring(model: nn.Module, layouts: Layouts, hyper: Hyper, **own: Any) -> Broken:
    """The reference with hyperparameters of its own, which its param groups state."""
    given = {"lr": hyper.lr, "momentum": hyper.momentum, "weight_decay": hyper.weight_decay}
    return broken(model, layouts, Hyper(**{**given, **own}))


@fault(check="options.inert", model="llama", kind="any Muon", origin="VeOmni #1093; prime-rl #1754")
def rate_not_passed_on(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The learning rate that is asked for is not passed on, and the default is used and stated."""
    return _ignoring(model, layouts, hyper, lr=0.03)


@fault(check="options.inert", model="llama", kind="any Muon", origin="VeOmni #1093")
def momentum_not_passed_on(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The momentum coefficient that is asked for is not passed on."""
    return _ignoring(model, layouts, hyper, momentum=0.9)


@fault(check="options.inert", model="llama", kind="any Muon", origin="VeOmni #1093")
def decay_not_passed_on(model: nn.Module, layouts: Layouts, hyper: Hyper) -> Broken:
    """The weight decay that is asked for is not passed on."""
    return _ignoring(model, layouts, hyper, weight_decay=0.0)


@fault(
    check="options.inert",
    model="llama",
    kind="any Muon",
    origin="Emerging-Optimizers #239: use_syrk not forwarded",
    options={"steps": ("5", "7")},
)
def option_not_forwarded(
    model: nn.Module, layouts: Layouts, hyper: Hyper, steps: str = "5"
) -> Broken:
    """The number of steps is accepted and never read."""
    return broken(model, layouts, hyper)
