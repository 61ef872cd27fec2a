"""What cannot be computed is refused by an error that names the parameter and its value.

And a refused step has changed nothing: no parameter, no buffer, no count.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import product
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from muonsplit.dialect import DIALECTS, Arithmetic, Dialect, SplitRule, dialect_named
from muonsplit.errors import InputError, LayoutError, MuonsplitError, UsageError
from muonsplit.layout import Layout, Segment
from muonsplit.muon import (
    Direction,
    PerHeadMuon,
    advance_momentum,
    apply_,
    directions,
    orthogonalize,
)
from muonsplit.newton_schulz import COEFFICIENTS, newton_schulz

PLAIN = Arithmetic()
FAST = DIALECTS["deepspeed-0.19.8"].arithmetic.fastest()
QUERY = Layout.heads("q", 2, 2)

forms = pytest.mark.parametrize("arithmetic", [PLAIN, FAST], ids=["plain", "fast"])


def refused(call: Callable[[], object], kind: type[MuonsplitError], *said: str) -> None:
    """Refused by that very error, whose text holds all that is to be said."""
    with pytest.raises(MuonsplitError) as caught:
        call()
    assert type(caught.value) is kind
    assert [text for text in said if text not in str(caught.value)] == []


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# What Newton–Schulz and the layouts are given.

BAD_MATRICES: dict[str, tuple[Any, str]] = {
    "1-D": (torch.zeros(4), "(4,)"),
    "4-D": (torch.zeros(1, 2, 3, 4), "(1, 2, 3, 4)"),
    "int": (torch.zeros(4, 4, dtype=torch.int32), "torch.int32"),
    "bool": (torch.zeros(4, 4, dtype=torch.bool), "torch.bool"),
    "complex": (torch.zeros(4, 4, dtype=torch.complex64), "torch.complex64"),
    "sparse": (torch.eye(4).to_sparse(), "torch.sparse_coo"),
    "list": ([[1.0, 2.0], [3.0, 4.0]], "list"),
    "none": (None, "None"),
}


@forms
@pytest.mark.parametrize("layout", [None, QUERY], ids=["whole", "heads"])
@pytest.mark.parametrize(("update", "said"), BAD_MATRICES.values(), ids=BAD_MATRICES)
def test_an_update_that_is_no_dense_matrix(
    update: Any, said: str, layout: Layout | None, arithmetic: Arithmetic
) -> None:
    refused(lambda: orthogonalize(update, layout, arithmetic), InputError, "update", said)


@forms
@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (torch.zeros(4, 4), "(4, 4)"),
        (torch.zeros(1, 2, 3, 4), "(1, 2, 3, 4)"),
        (torch.zeros(0, 4, 4), "(0, 4, 4)"),
        (torch.zeros(2, 0, 4), "(2, 0, 4)"),
        (torch.zeros(2, 4, 0), "(2, 4, 0)"),
        (torch.zeros(2, 4, 4, dtype=torch.int64), "torch.int64"),
        (torch.zeros(2, 4, 4, dtype=torch.complex64), "torch.complex64"),
        (torch.ones(2, 4, 4).to_sparse(), "torch.sparse_coo"),
        ([[[1.0]]], "list"),
    ],
    ids=["2-D", "4-D", "no-blocks", "no-rows", "no-columns", "int", "complex", "sparse", "list"],
)
def test_a_batch_that_is_none(batch: Any, said: str, arithmetic: Arithmetic) -> None:
    refused(lambda: newton_schulz(batch, arithmetic), InputError, "X_BMN", said)


@pytest.mark.parametrize(
    ("update", "layout", "said"),
    [
        (torch.zeros(5, 4), QUERY, ("q 2×2", "(5, 4)")),
        (torch.zeros(4, 5), replace(QUERY, axis=1), ("q 2×2, axis 1", "(4, 5)")),
        (torch.zeros(3, 4, 4), QUERY, ("q 2×2", "(3, 4, 4)")),
        (torch.zeros(0, 4), QUERY, ("q 2×2", "(0, 4)")),
        (torch.zeros(4, 4), "q 2×2", ("layout", "'q 2×2'")),
        (torch.zeros(4, 4), 2, ("layout", "2")),
        (torch.zeros(4, 4), False, ("layout", "False")),
    ],
    ids=["rows", "columns", "stack", "empty", "text", "number", "false"],
)
def test_a_layout_that_does_not_fit_or_is_none(
    update: Tensor, layout: Any, said: tuple[str, ...]
) -> None:
    refused(lambda: orthogonalize(update, layout, PLAIN), LayoutError, *said)


def test_as_many_layouts_as_updates() -> None:
    both = [torch.zeros(4, 4)] * 2
    refused(lambda: directions(both, [None], PLAIN), InputError, "layouts", "2", "1")


@pytest.mark.parametrize(
    "layout",
    [
        Layout.heads("q", 4, 1),
        Layout.heads("q", 4, 1, axis=1),
        Layout((Segment("q", 1, 3), Segment("k", 1, 1))),
        Layout((Segment("q", 3, 1), Segment("k", 1, 1)), joined=True),
    ],
    ids=str,
)
def test_blocks_of_one_row(layout: Layout) -> None:
    refused(lambda: orthogonalize(torch.ones(4, 4), layout, PLAIN), InputError, str(layout), "row")
    weight = [("w", Parameter(torch.zeros(4, 4)))]
    refused(lambda: PerHeadMuon(weight, {"w": layout}), InputError, "w", str(layout), "row")


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 4), (2, 0, 4)], ids=str)
@forms
def test_an_empty_shard_has_an_empty_update(shape: tuple[int, ...], arithmetic: Arithmetic) -> None:
    assert orthogonalize(torch.zeros(shape), None, arithmetic).shape == shape
    empty, other = (Parameter(torch.zeros(s)) for s in (shape, (4, 4)))
    optimizer = PerHeadMuon([("w", empty), ("v", other)], {"w": None, "v": None})
    empty.grad, other.grad = torch.zeros(shape), normal(4, 4)
    optimizer.step()
    assert empty.shape == shape
    assert bool((other != 0).all())


@pytest.mark.parametrize(
    "arithmetic", ["jordan", DIALECTS["jordan"], None], ids=["str", "dialect", "none"]
)
def test_an_arithmetic_that_is_none(arithmetic: Any) -> None:
    said = ("arithmetic", type(arithmetic).__name__)
    refused(lambda: orthogonalize(torch.ones(4, 4), None, arithmetic), UsageError, *said)
    refused(lambda: newton_schulz(torch.ones(1, 4, 4), arithmetic), UsageError, *said)


# Gradients, and what is stepped by hand.


def given(**arguments: Any) -> dict[str, Any]:
    """A momentum step that would be taken, but for some arguments."""
    return {"gradient": normal(4, 4), "buffer": torch.ones(4, 4), "beta": 0.9} | arguments


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("gradient", normal(1, 4), "(1, 4)"),
        ("gradient", normal(4, 3), "(4, 3)"),
        ("gradient", torch.zeros(4, 4, dtype=torch.int64), "torch.int64"),
        ("gradient", torch.zeros(4, 4, dtype=torch.complex64), "torch.complex64"),
        ("gradient", torch.eye(4).to_sparse(), "torch.sparse_coo"),
        ("gradient", normal(4, 4).requires_grad_(), "requires grad"),
        ("beta", math.nan, "nan"),
        ("beta", -0.1, "-0.1"),
        ("beta", 1.0, "1.0"),
        ("beta", "0.9", "'0.9'"),
    ],
    ids=str,
)
def test_momentum_refuses_and_keeps_its_buffer(name: str, value: Any, said: str) -> None:
    arguments = given(**{name: value})
    step = lambda: advance_momentum(arithmetic=PLAIN, **arguments)  # noqa: E731
    refused(step, InputError, name, said)
    assert torch.equal(arguments["buffer"], torch.ones(4, 4))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("lr", math.nan, "nan"),
        ("lr", math.inf, "inf"),
        ("lr", -0.1, "-0.1"),
        ("lr", "0.1", "'0.1'"),
        ("decay", math.nan, "nan"),
        ("decay", -1.0, "-1.0"),
        ("direction", Direction(torch.ones(1, 4), 1.0), "(1, 4)"),
        ("direction", Direction(torch.ones(4, 3), 1.0), "(4, 3)"),
        ("parameter", torch.zeros(4, 4, dtype=torch.int64), "torch.int64"),
        ("parameter", Parameter(torch.zeros(4, 4)), "requires grad"),
    ],
    ids=str,
)
def test_a_step_by_hand_is_refused_before_it_is_taken(name: str, value: Any, said: str) -> None:
    arguments = {
        "parameter": torch.zeros(4, 4),
        "direction": Direction(torch.ones(4, 4), 1.0),
        "lr": 0.1,
        "decay": 0.5,
    } | {name: value}
    refused(lambda: apply_(arithmetic=PLAIN, **arguments), InputError, name, said)
    assert not bool(arguments["parameter"].any())


@forms
def test_what_requires_grad_is_not_orthogonalised_under_autograd(arithmetic: Arithmetic) -> None:
    """Its result would be cut off from the graph, or hold the graph of every product."""
    update = normal(4, 4).requires_grad_()
    batch = update.unsqueeze(0)
    refused(lambda: newton_schulz(batch, arithmetic), InputError, "X_BMN", "requires grad")
    refused(lambda: orthogonalize(update, None, arithmetic), InputError, "update", "requires grad")
    with torch.no_grad():
        assert not newton_schulz(batch, arithmetic).requires_grad
        assert not orthogonalize(update, QUERY, arithmetic).requires_grad


# The optimizer's arguments.

NUMBERS = ("lr", "adamw_lr", "weight_decay", "eps")
NOT_NUMBERS: tuple[Any, ...] = ("0.1", None, 1j, (0.9,), 10**400, torch.ones(2))


def built(params: Any = None, layouts: Any = None, **arguments: Any) -> PerHeadMuon:
    named = [("w", Parameter(torch.zeros(4, 4)))]
    params = named if params is None else params
    return PerHeadMuon(params, {} if layouts is None else layouts, **arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *product(NUMBERS, (math.nan, math.inf, -math.inf, -1, *NOT_NUMBERS)),
        *product(("momentum",), (math.nan, -0.1, 1.0, *NOT_NUMBERS)),
        *product(("betas",), (math.nan, None, 0.9, (), (0.9,), (0.9,) * 3, "99", (0.9, "0.9"))),
        *product(("betas",), ((0.9, math.nan), (1.0, 0.9), (-0.1, 0.9), (0.9, None))),
    ],
    ids=lambda value: str(value)[:20],
)
def test_hyperparameters(name: str, value: Any) -> None:
    said = (name, repr(value)[:40])
    refused(lambda: built(**{name: value}), InputError, *said)
    group = {"params": [("w", Parameter(torch.zeros(4, 4)))], name: value}
    refused(lambda: built([group]), InputError, *said)
    optimizer = built()
    added = {"params": [("v", Parameter(torch.zeros(3)))], name: value}
    refused(lambda: optimizer.add_param_group(added), InputError, *said)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("layouts", "kind", "said"),
    [
        (3, UsageError, ("layouts", "3")),
        ("w", UsageError, ("layouts", "'w'")),
        (["w"], UsageError, ("layouts", "['w']")),
        ({"w": "q 2×2"}, LayoutError, ("w", "'q 2×2'")),
        ({"w": 2}, LayoutError, ("w", "2")),
        ({"w": 0}, LayoutError, ("w", "0")),
        ({"nobody": None}, InputError, ("'nobody'",)),
        ({"w": Layout.heads("q", 2, 3)}, InputError, ("w", "q 2×3", "(4, 4)")),
    ],
    ids=str,
)
def test_layouts(layouts: Any, kind: type[MuonsplitError], said: tuple[str, ...]) -> None:
    refused(lambda: built(layouts=layouts), kind, *said)


@pytest.mark.parametrize(
    "dialect", [None, 3, PLAIN, b"jordan", "nobody"], ids=lambda d: str(d)[:10]
)
def test_dialects(dialect: Any) -> None:
    said = "nobody" if dialect == "nobody" else type(dialect).__name__
    refused(lambda: built(dialect=dialect), UsageError, "dialect", said)


def zeros(*shape: int, **options: Any) -> Parameter:
    return Parameter(torch.zeros(shape, **options), requires_grad=not options)


SAME = zeros(4, 4)
BAD_PARAMETERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "none-at-all": ([], ("params", "empty")),
    "tensor": (torch.zeros(4, 4), ("params", "FloatTensor")),
    "number": (3, ("params", "int")),
    "numbers": ([1], ("params", "int")),
    "named-number": ([("w", 1)], ("params", "int")),
    "unnamed": ([zeros(4, 4)], ("named_parameters",)),
    "some-unnamed": ([("w", zeros(4, 4)), zeros(4)], ("params", "names")),
    "set": ([{"params": {("w", SAME)}}], ("params", "set")),
    "no-leaf": ([("w", zeros(4, 4) * 1)], ("w", "leaf")),
    "complex": ([("w", zeros(4, 4, dtype=torch.complex64))], ("w", "torch.complex64")),
    "int": ([("w", zeros(4, 4, dtype=torch.int64))], ("w", "torch.int64")),
    "bool": ([("w", zeros(4, 4, dtype=torch.bool))], ("w", "torch.bool")),
    "sparse": ([("w", Parameter(torch.eye(4).to_sparse()))], ("w", "torch.sparse_coo")),
    "one-name-twice": ([("w", zeros(4, 4)), ("w", zeros(4, 4))], ("'w'",)),
    "one-name-in-two-groups": (
        [{"params": [("w", zeros(4, 4))]}, {"params": [("w", zeros(4, 4))]}],
        ("'w'",),
    ),
    "one-parameter-twice": ([("w", SAME), ("v", SAME)], ("'v'",)),
    "one-parameter-in-two-groups": (
        [{"params": [("w", SAME)]}, {"params": [("v", SAME)]}],
        ("params", "more than one"),
    ),
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("layouts", [{}, {"w": None}], ids=["adamw", "muon"])
@pytest.mark.parametrize(("params", "said"), BAD_PARAMETERS.values(), ids=BAD_PARAMETERS)
def test_parameters(params: Any, said: tuple[str, ...], layouts: Any) -> None:
    params = (
        [dict(p) if isinstance(p, dict) else p for p in params] if type(params) is list else params
    )
    refused(lambda: built(params, layouts), InputError, *said)


# Steps.


class Run:
    """Two Muon weights of one batch and two of AdamW's, after one good step."""

    def __init__(self) -> None:
        shapes = {"v": (4, 4), "w": (4, 4), "a": (5,), "b": (5,)}
        self.named = {n: Parameter(torch.ones(s)) for n, s in shapes.items()}
        # In two groups, so that a step refused for the second would have taken the first.
        groups = [{"params": [(n, self.named[n]) for n in names]} for names in ("va", "wb")]
        self.optimizer = PerHeadMuon(groups, {"v": QUERY, "w": QUERY}, weight_decay=0.1)
        self.give(1)
        self.optimizer.step()
        self.give(2)

    def give(self, seed: int) -> None:
        for i, p in enumerate(self.named.values()):
            p.grad = normal(*p.shape, seed=10 * seed + i)

    def kept(self) -> list[Any]:
        """All that a step may change, and no more."""
        state = [dict(self.optimizer.state[p]) for p in self.named.values()]
        return copy.deepcopy([*(p.detach() for p in self.named.values()), *state])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return one == other


def sparse_muon(run: Run) -> None:
    run.named["w"].grad = torch.eye(4).to_sparse()


def sparse_adamw(run: Run) -> None:
    run.named["b"].grad = torch.ones(5).to_sparse()


def another_dtype(run: Run) -> None:
    run.named["w"].grad_dtype = None
    run.named["w"].grad = normal(4, 4).to(torch.complex64)


def another_shape_of_momentum(run: Run) -> None:
    run.optimizer.state[run.named["w"]]["momentum_buffer"] = torch.zeros(1, 4)


def another_layout(run: Run) -> None:
    run.optimizer.layouts["w"] = Layout.heads("q", 2, 3)


def no_matrix(run: Run) -> None:
    run.optimizer.layouts["b"] = None


def scheduled(name: str, value: Any) -> Callable[[Run], None]:
    def spoil(run: Run) -> None:
        run.optimizer.param_groups[1][name] = value

    return spoil


def loaded(run: Run) -> None:
    saved = run.optimizer.state_dict()
    saved["param_groups"][1]["lr"] = math.nan
    run.optimizer.load_state_dict(saved)


BAD_STEPS: dict[str, tuple[Callable[[Run], None], type[MuonsplitError], tuple[str, ...]]] = {
    "sparse-muon": (sparse_muon, InputError, ("w", "torch.sparse_coo")),
    "sparse-adamw": (sparse_adamw, InputError, ("b", "torch.sparse_coo")),
    "dtype": (another_dtype, InputError, ("w", "torch.complex64")),
    "momentum-shape": (another_shape_of_momentum, InputError, ("w", "momentum_buffer", "(1, 4)")),
    "layout": (another_layout, InputError, ("w", "q 2×3", "(4, 4)")),
    "rank": (no_matrix, InputError, ("b", "(5,)")),
    "loaded": (loaded, InputError, ("lr", "nan")),
    "betas": (scheduled("betas", (0.9,)), InputError, ("betas", "(0.9,)")),
    **{
        f"{name}={value}": (scheduled(name, value), InputError, (name, str(value)))
        for name in (*NUMBERS, "momentum")
        for value in (math.nan, -1.0)
    },
}


@pytest.mark.parametrize(("spoil", "kind", "said"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_refused_step_has_changed_nothing(
    spoil: Callable[[Run], None], kind: type[MuonsplitError], said: tuple[str, ...]
) -> None:
    run = Run()
    spoil(run)
    before = run.kept()
    refused(run.optimizer.step, kind, *said)
    assert all(map(same, run.kept(), before))


def test_a_good_step_changes_everything() -> None:
    run = Run()
    before = run.kept()
    run.optimizer.step()
    assert not any(map(same, run.kept(), before))


def test_gradients_that_require_grad_leave_no_graph() -> None:
    run = Run()
    for p in run.named.values():
        p.grad = normal(*p.shape).requires_grad_()
    run.optimizer.step()
    kept = [t for s in run.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    assert len(kept) == 6
    assert not any(t.requires_grad for t in kept)


# Dialects: the fields themselves.

KINDS = {"SplitRule": SplitRule, "Arithmetic": Arithmetic}
HINTS = {(kind, n): h for kind in KINDS.values() for n, h in get_type_hints(kind).items()}
FIELDS = {n: (kind, h) for (kind, n), h in HINTS.items()}


def choices(hint: Any) -> list[Any]:
    """The values that a Literal, or one of a union, may have; None is one of them."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [c for part in get_args(hint) for c in ([None] if part is NoneType else choices(part))]


WRONG: dict[Any, list[Any]] = {
    bool: [0, 1, "true", None],
    int: [-1, 100, 10**9, 2.5, math.nan, "5", True, None],
    float: [math.nan, math.inf, -1.0, "1.0", True, None],
    str: ["nobody", 3, None],
    tuple[int, ...]: [[2], 2, (2.5,), ("2",), (-1,), (True,), None],
    int | None: [0, -1, 2.5, "2", True],
}
OUTSIDE = [("beta", 1.0), ("norm_factor", 0.0), ("extra_scale", 0.0)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (n, v)
            for n, (_, h) in FIELDS.items()
            for v in WRONG.get(h, ["nobody", 3, torch.float32])
        ),
        *OUTSIDE,
    ],
    ids=str,
)
def test_a_field_that_cannot_have_a_value(name: str, value: Any) -> None:
    kind = FIELDS[name][0]

    def use() -> None:
        arithmetic = kind(**{name: value})
        # A coefficient set is looked up where it is used.
        assert name == "coefficients"
        orthogonalize(torch.ones(2, 3), None, arithmetic)

    refused(use, UsageError, name if name != "coefficients" else "coefficient", repr(value))


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize(
    "restarts", [(), (1,), (2,), (3,), (2, 4), (1, 3), (1, 2, 3, 4), (9,)], ids=str
)
@pytest.mark.parametrize("iteration", ["gram", "gram_always", "auto"])
@pytest.mark.parametrize("place", ["compute_dtype", "cpu_dtype"])
def test_gram_below_float32_needs_restarts(
    place: str, iteration: Any, restarts: tuple[int, ...], steps: int
) -> None:
    """Counted step by step: at most 3 in float16 since the last restart, and 2 in bfloat16."""
    run = longest = 0
    for i in range(steps):
        run = 1 if i in restarts else run + 1
        longest = max(longest, run)
    for dtype, most in (("float16", 3), ("bfloat16", 2), ("float32", 99), ("float64", 99)):
        chosen = {"compute_dtype": "float32", "cpu_dtype": "float32"} | {place: dtype}
        rest: dict[str, Any] = {"iteration": iteration, "restarts": restarts, "steps": steps}
        if longest > most:
            said = (dtype, f"{longest} steps", str(restarts))
            refused(lambda c=chosen, r=rest: Arithmetic(**c, **r), UsageError, *said)
        else:
            assert Arithmetic(**chosen, **rest).restarts == restarts
        assert Arithmetic(**chosen, **rest | {"iteration": "standard"}).steps == steps


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_fast_form_has_no_half_precision_on_a_cpu(dtype: Any) -> None:
    refused(lambda: Arithmetic(form="fast", cpu_dtype=dtype), UsageError, "fast", dtype)
    assert Arithmetic(form="fast", compute_dtype=dtype, cpu_dtype="float32").form == "fast"


@pytest.mark.parametrize("iteration", ["gram", "gram_always", "auto"])
def test_gram_has_no_factored_form(iteration: Any) -> None:
    wide: dict[str, Any] = {"compute_dtype": "float32", "cpu_dtype": "float32"}
    build = lambda: Arithmetic(form="factored", iteration=iteration, **wide)  # noqa: E731
    refused(build, UsageError, "factored", "Gram")


# Dialects: their options.

BASE = "deepspeed-0.19.8-standard"


def values(name: str, hint: Any) -> list[tuple[str, Any]]:
    """Every choice of a field, or a few of its numbers, as they are written."""
    if name == "coefficients":
        return [(c, c) for c in COEFFICIENTS]
    numbers: dict[Any, list[tuple[str, Any]]] = {
        bool: [("true", True), ("false", False)],
        int: [("0", 0), ("1", 1), ("12", 12)],
        float: [("0.5", 0.5), ("1e-3", 0.001), ("0.25", 0.25)],
        int | None: [("1", 1), ("16", 16), ("none", None)],
        tuple[int, ...]: [("", ()), ("2", (2,)), ("1+3", (1, 3))],
    }
    if hint in numbers:
        return numbers[hint]
    return [("none" if c is None else c, c) for c in choices(hint)]


def needed(name: str, value: Any) -> dict[str, Any]:
    """Other fields without which a choice has no sense."""
    if name == "iteration" and value != "standard":
        return {"restarts": (1, 3), "form": "matmul"}
    return {"cpu_dtype": "float32"} if (name, value) == ("form", "fast") else {}


def written(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [(n, text, value) for n, (_, h) in FIELDS.items() for text, value in values(n, h)],
    ids=str,
)
def test_every_field_can_be_set(name: str, text: str, value: Any) -> None:
    others = needed(name, value)
    options = ",".join([f"{name}={text}", *(f"{n}={written(v)}" for n, v in others.items())])
    found, base = dialect_named(f"{BASE}:{options}"), DIALECTS[BASE]
    assert isinstance(found, Dialect)
    wanted = {name: value, **others}
    for part, before in ((found.split, base.split), (found.arithmetic, base.arithmetic)):
        for f in fields(before):
            assert getattr(part, f.name) == wanted.get(f.name, getattr(before, f.name)), f.name
    assert type(getattr(found.split, name, getattr(found.arithmetic, name, None))) is type(value)
    changed = {n for n, said in found.sources.items() if said != base.sources[n]}
    assert changed == wanted.keys()


HOSTILE = (
    "",
    " ",
    "nobody",
    "None",
    "nan",
    "inf",
    "-1",
    "+1",
    "1 ",
    " 1",
    "1\n",
    "1_0",
    "0x1",
    "٣",
    "²",
)
NO_NUMBERS = ("1e999", "9" * 400, "1e", ".", "1.0.0", "1,5", "1e+-3")


@pytest.mark.parametrize("name", FIELDS)
def test_hostile_values_are_refused(name: str) -> None:
    hint = FIELDS[name][1]
    hostile = [
        *HOSTILE,
        *NO_NUMBERS,
        "TRUE",
        "true\n",
        "float32 ",
        f"{name}=1",
        "__class__",
        "x" * 9999,
    ]
    # No steps to restart before are written as nothing.
    hostile.remove("") if hint == tuple[int, ...] else None
    for value in hostile:
        refused(lambda v=value: dialect_named(f"{BASE}:{name}={v}"), UsageError, name)
    for option in (name, f"{name}:1", f" {name}=1", f"{name.upper()}=1", f"{name[:-1]}=1"):
        refused(lambda o=option: dialect_named(f"{BASE}:{o}"), UsageError, "option")
    text, _ = values(name, hint)[0]
    refused(lambda: dialect_named(f"{BASE}:{name}={text},{name}={text}"), UsageError, name, "twice")


@pytest.mark.parametrize(
    "option", ["beta=1", "beta=5", "norm_factor=0", "extra_scale=0", "epsilon=1e999"]
)
def test_numbers_outside_their_range_are_refused(option: str) -> None:
    refused(lambda: dialect_named(f"{BASE}:{option}"), UsageError, option.partition("=")[0])


@pytest.mark.parametrize(
    "name", ["name", "sources", "__class__", "split", "arithmetic", "dtype_on", ""]
)
def test_what_is_no_field_is_no_option(name: str) -> None:
    refused(lambda: dialect_named(f"{BASE}:{name}=1"), UsageError, f"{name}=1", "heads_per_block")
