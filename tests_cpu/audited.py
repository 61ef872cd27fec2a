"""Runs to audit: real models trained by an optimizer whose cut is known, and what they leave."""

import copy
import functools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

import muonsplit
from muonsplit import Decision, Layout, PerHeadMuon
from muonsplit.audit.asked import asked
from muonsplit.audit.result import Audit, AuditedWeight
from muonsplit.audit.run import audit
from muonsplit.dialect import Dialect, dialect_named
from muonsplit.errors import LayoutError
from muonsplit.models.load import Config, build, resolve

LR, DECAY = 2e-2, 0.1
RATES = (2e-2, 2e-3, 2e-4)
_HALF = torch.bfloat16
VOCABULARY = 512
_MIXED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
_LLAMA = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4}
_ODD = {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 3}
_GLM = {
    "hidden_size": 384,
    "intermediate_size": 768,
    "moe_intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "q_lora_rank": 128,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 128,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 64,
    "indexer_types": ["full", "full"],
}
_DEEPSEEK = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 192,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}


def _of(base: Mapping[str, object], layers: int = 2, **sizes: object) -> Config:
    return {**base, "num_hidden_layers": layers, "vocab_size": VOCABULARY, **sizes}


# Wide and tall weights: q_b and kv_b of multi-head latent attention have more rows than columns.
MODELS: Mapping[str, Callable[[], Config]] = {
    "llama-512": lambda: _of(_LLAMA, 1, hidden_size=512, intermediate_size=1376, head_dim=64),
    "llama-256": lambda: _of(_LLAMA, hidden_size=256, intermediate_size=688, head_dim=32),
    # Neither two nor four ranks divide its heads, nor four its rows.
    "odd": lambda: _of(_ODD, hidden_size=258, intermediate_size=690, head_dim=34),
    "deepseek": lambda: _of(resolve("deepseek-v2-lite").config, **_DEEPSEEK, **_MIXED),
    "glm": lambda: _of(resolve("glm-5.2").config, **_GLM, **_MIXED),
}


def right(d: Decision) -> Layout | None:
    return d.layout


def whole(d: Decision) -> Layout | None:
    return None


def pairs(d: Decision) -> Layout | None:
    try:
        return d.layout and d.layout.per_block(2)
    except LayoutError:
        return d.layout


def halves(d: Decision) -> Layout | None:
    if d.layout is None:
        return None
    each = tuple(s._replace(heads=2 * s.heads, width=s.width // 2) for s in d.layout.segments)
    return replace(d.layout, segments=each)


def columns(d: Decision) -> Layout | None:
    return d.layout and _equal(d, d.heads or 1, 1)


def output_rows(d: Decision) -> Layout | None:
    return _equal(d, d.heads or 1, 0) if d.leaf == "o_proj" else d.layout


def output_columns(d: Decision) -> Layout | None:
    return _equal(d, d.heads or 1, 1) if d.leaf == "o_proj" else d.layout


def shards(d: Decision) -> Layout | None:
    """What two ranks do that take the rows they hold for the whole."""
    return _equal(d, 2, 0) if len(d.shape) == 2 else None


def shifted(d: Decision) -> Layout | None:
    """Heads that begin half a head too late: a cut that the audit does not try."""
    if d.layout is None:
        return None
    width, rows = d.layout.rows // (d.heads or 1), d.layout.rows
    each = (("x", 1, width // 2), ("y", rows // width - 1, width), ("x", 1, width // 2))
    return Layout(each, axis=d.layout.axis)  # pyright: ignore[reportArgumentType]


def _equal(d: Decision, parts: int, axis: int) -> Layout:
    assert d.shape[axis] % parts == 0
    return Layout.heads("part", parts, d.shape[axis] // parts, axis)


class Fault(NamedTuple):
    """How an optimizer cuts, and whether it scales each block like the whole weight."""

    cut: Callable[[Decision], Layout | None]
    by_matrix: bool = False


CUTS: Mapping[str, Fault] = {
    "right": Fault(right),
    "whole": Fault(whole),
    "head pairs": Fault(pairs),
    "half heads": Fault(halves),
    "columns": Fault(columns),
    "o_proj, rows": Fault(output_rows),
    "o_proj, columns": Fault(output_columns),
    "shards of two ranks": Fault(shards),
    "scale of the matrix": Fault(right, by_matrix=True),
    "shifted heads": Fault(shifted),
}
# The audit has no such hypothesis.
UNTRIED = "shifted heads"


class Data(NamedTuple):
    """What a model is trained on: sequences drawn from a pool of random ones."""

    batch: int = 4
    tokens: int = 64


_DATA = Data()
# Master: weights are float32, and gradients those of a bfloat16 copy.
Kind = Literal["fp32", "bf16", "master"]


class Run:
    """A model in training, all of whose matrices but embeddings are trained by Muon.

    Attributes:
        plan: What the dialect's rules say.
        optimizer: The reference, or what :meth:`by` made of it.
    """

    def __init__(self, model: str, dialect: str, data: Data = _DATA, kind: Kind = "fp32") -> None:
        torch.manual_seed(0)
        self.config, self.dialect, self.data = MODELS[model](), dialect_named(dialect), data
        self.model = build(self.config, "cpu").to(torch.bfloat16 if kind == "bf16" else None)
        self.kind = kind
        self.plan = muonsplit.plan(self.model, self.dialect)
        self.layouts = self.plan.layouts()
        self.optimizer: torch.optim.Optimizer = self._reference(self.layouts, self.dialect, LR)
        self._source = torch.Generator().manual_seed(0)
        size = (32, data.tokens)
        self._pool = torch.randint(VOCABULARY, size, generator=self._source)

    def _reference(
        self, layouts: Mapping[str, Layout | None], dialect: Dialect, lr: float
    ) -> PerHeadMuon:
        named = self.model.named_parameters()
        return PerHeadMuon(named, layouts, dialect=dialect, lr=lr, weight_decay=DECAY)

    def by(self, fault: Fault, lr: float = LR) -> "Run":
        """A copy that goes on with another cut, and the momentum that there is."""
        other = copy.deepcopy(self)
        other.layouts = {d.name: _no_whole(fault.cut(d)) for d in self.plan.decisions}
        other.dialect = self.dialect
        if fault.by_matrix:
            matrix = replace(self.dialect.arithmetic, scale_per="matrix")
            other.dialect = replace(self.dialect, arithmetic=matrix)
        kept = self.optimizer.state_dict()
        for group in kept["param_groups"]:
            group["lr"] = lr
        other.optimizer = other._reference(other.layouts, other.dialect, lr)
        other.optimizer.load_state_dict(copy.deepcopy(kept))
        return other

    def stepped(self, fault: Fault, lr: float = LR) -> "Run":
        """A copy that has taken one step on the gradients that there are, with another cut."""
        other = self.by(fault, lr)
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        for mine, theirs in pairs:
            theirs.grad = None if mine.grad is None else mine.grad.clone()
        other.optimizer.step()
        return other

    def instead(self, build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> "Run":
        """A copy whose matrices but embeddings another optimizer goes on with."""
        other = self.by(CUTS["whole"])
        named = dict(other.model.named_parameters())
        other.optimizer = build([named[name] for name in other.layouts])
        return other

    def backward(self) -> None:
        """Gradients of the loss on some sequences."""
        drawn = torch.randint(len(self._pool), (self.data.batch,), generator=self._source)
        ids = self._pool[drawn]
        self.model.zero_grad()
        model = copy.deepcopy(self.model).bfloat16() if self.kind == "master" else self.model
        model(input_ids=ids, labels=ids).loss.backward()
        for p, low in zip(self.model.parameters(), model.parameters(), strict=True):
            if low is not p and low.grad is not None:
                p.grad = low.grad.float()

    def train(self, steps: int = 1) -> "Run":
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
        return self

    def save(self, folder: Path, name: str, dtype: torch.dtype | None = None) -> Path:
        """Writes a checkpoint, and the config beside it."""
        path = folder / f"{name}.safetensors"
        named = self.model.named_parameters()
        save_file({n: p.detach().to(dtype or p.dtype).clone() for n, p in named}, path)
        (folder / "config.json").write_text(json.dumps(self.config))
        return path

    def truth(self) -> dict[str, "Truth"]:
        """What became of every Muon weight that got a gradient, by name."""
        declared = dialect_named(self.plan.dialect).arithmetic
        by_matrix = self.dialect.arithmetic.scale_per == "matrix"
        found: dict[str, Truth] = {}
        for d in self.plan.decisions:
            if self.model.get_parameter(d.name).grad is None:
                continue
            layout = self.layouts[d.name]
            same = _alike(layout, _no_whole(d.layout))
            scaled = not by_matrix or _unscaled(declared.scale, layout, d.shape)
            per = "matrix" if by_matrix else declared.scale_per
            found[d.name] = Truth(layout, same and scaled, f"{declared.scale}, of the {per}")
        return found


class Truth(NamedTuple):
    """What became of a weight.

    Attributes:
        layout: How it was cut; None for whole.
        as_planned: Whether that, and its scale, are as planned.
        scale: The scale rule, as an audit names it.
    """

    layout: Layout | None
    as_planned: bool
    scale: str


def _no_whole(layout: Layout | None) -> Layout | None:
    return None if layout is None or layout.is_whole else layout


def _alike(one: Layout | None, other: Layout | None) -> bool:
    return one is other if one is None or other is None else one.same_cut(other)


# What dialects write in their sources, for a block of r rows and c columns.
_SCALES: Mapping[str, Callable[[float, float], float]] = {
    "jordan": lambda r, c: max(1.0, r / c) ** 0.5,
    "moonlight": lambda r, c: 0.2 * max(r, c) ** 0.5,
    "bernstein": lambda r, c: (r / c) ** 0.5,
}


def _unscaled(scale: str, layout: Layout | None, shape: tuple[int, ...]) -> bool:
    """Whether the scale of the matrix is that of its blocks."""
    if layout is None:
        return True
    rows, cols = (shape[1], shape[0]) if layout.axis else shape
    sizes = {_SCALES[scale](block.rows, cols) for block in layout.blocks()}
    return sizes == {_SCALES[scale](rows, cols)}


@functools.cache
def trained(model: str, dialect: str, data: Data = _DATA, kind: Kind = "fp32") -> Run:
    """A run after two steps as they should be, with gradients for a third; to be copied."""
    run = Run(model, dialect, data, kind).train(2)
    run.backward()
    return run


def audited(
    before: Path,
    after: Path | None,
    dialect: str,
    lr: float | None = None,
    decay: float | None = None,
    steps: int = 1,
    recorded: Mapping[str, Path | None] | None = None,
    config: Path | None = None,
) -> Audit:
    """What an audit says of files that a run left."""
    model = str(config or before.parent)
    told = (lr, decay, None)
    question = asked(before, after, model, dialect, recorded=recorded, told=told, steps=steps)
    return audit(question)


# Right: the cut, and whether that is the plan. Scale open: the cut, and of several scale rules that
# are named as fitting it is not the planned one. Excluded: rightly said not to be the plan, without
# the cut. Undecided. Wrong: another cut than it was, or the plan where it was not or the reverse.
OUTCOMES = ("right", "scale open", "excluded", "undecided", "wrong")


def judged(row: AuditedWeight, truth: Truth) -> str:
    """Which of :data:`OUTCOMES` an audit of one weight is."""
    if row.outcome == "undecided":
        return "undecided"
    if row.outcome not in ("as planned", "otherwise"):
        raise AssertionError(f"{row.weight} is {row.outcome}: {row.reason}")
    observed = None if row.observed in ("", "whole") else Layout.parse(row.observed)
    cut = bool(row.observed) and _alike(observed, truth.layout)
    if row.outcome == "as planned" and not truth.as_planned:
        named = row.scale.split(" or ")
        return "scale open" if cut and len(named) > 1 and truth.scale in named else "wrong"
    if (row.outcome == "as planned") != truth.as_planned:
        return "wrong"
    if not row.observed:
        return "excluded"
    return "right" if cut else "wrong"


def judgement(found: Audit, truth: Mapping[str, Truth]) -> Counter[str]:
    """How many weights are judged which way, of those that got a gradient."""
    return Counter(judged(row, truth[row.weight]) for row in found.weights if row.weight in truth)


def mistakes(found: Audit, truth: Mapping[str, Truth]) -> list[tuple[Any, ...]]:
    """Every wrong answer, with what it rests on."""
    return [
        (
            *(row.weight, row.shape, "was", str(truth[row.weight].layout or "whole")),
            *("read as", row.outcome, row.observed, row.scale, row.reason),
            *("margin", row.margin, "sigma", row.sigma, "next", row.next, found.settings.lr),
        )
        for row in found.weights
        if row.weight in truth and judged(row, truth[row.weight]) == "wrong"
    ]


class Seen(NamedTuple):
    """What audits of one run came to under one condition."""

    condition: str
    judged: Counter[str]
    mistakes: list[tuple[Any, ...]]


def one_step(run: Run, fault: Fault, folder: Path) -> Iterator[Seen]:
    """One step in float32, with the learning rate and without."""
    after = run.stepped(fault)
    pair = run.save(folder, "before"), after.save(folder, "after")
    yield _seen("float32, 1 step, learning rate given", run, after, pair, LR, DECAY)
    yield _seen("float32, 1 step, learning rate fitted", run, after, pair)


def rounded(run: Run, fault: Fault, folder: Path) -> Iterator[Seen]:
    """What bfloat16 leaves of one step of a float32 run."""
    for lr in RATES:
        after = run.stepped(fault, lr)
        pair = run.save(folder, "before", _HALF), after.save(folder, "after", _HALF)
        said = f"rounded to bfloat16, 1 step of {lr:g}, learning rate"
        yield _seen(f"{said} given", run, after, pair, lr, DECAY)
        yield _seen(f"{said} fitted", run, after, pair)


def several_steps(run: Run, fault: Fault, folder: Path) -> Iterator[Seen]:
    """Two, five and ten steps in float32."""
    after, done = run.by(fault), 0
    before = after.save(folder, "before")
    for steps in (2, 5, 10):
        after.train(steps - done)
        done = steps
        pair = before, after.save(folder, "after")
        said = f"float32, {steps} steps"
        given = f"{said}, learning rate given"
        yield _seen(given, run, after, pair, LR, DECAY, steps=steps)
        yield _seen(f"{said}, learning rate fitted", run, after, pair, steps=steps)


def in_bfloat16(run: Run, fault: Fault, folder: Path) -> Iterator[Seen]:
    """One step of a run whose weights, or whose gradients, are bfloat16."""
    said = {"bf16": "trained in bfloat16", "master": "float32 master of a bfloat16 model"}
    for lr in RATES:
        after = run.stepped(fault, lr)
        pair = run.save(folder, "before"), after.save(folder, "after")
        name = f"{said[run.kind]}, 1 step of {lr:g}, learning rate given"
        yield _seen(name, run, after, pair, lr, DECAY)


def _seen(
    condition: str,
    run: Run,
    after: Run,
    pair: tuple[Path, Path],
    lr: float | None = None,
    decay: float | None = None,
    steps: int = 1,
) -> Seen:
    found, truth = audited(*pair, run.plan.dialect, lr, decay, steps), after.truth()
    return Seen(condition, judgement(found, truth), mistakes(found, truth))


PER_HEAD = {
    "llama-256": ["moonlight+per-head", "deepspeed-0.19.8", "dion", "deepseek-v4+per-head"],
    "llama-512": ["moonlight+per-head", "deepspeed-0.19.8"],
    "deepseek": ["deepspeed-0.19.8", "kimi-k3", "dion"],
    "glm": ["glm-5", "deepspeed-0.19.8"],
}
MATRIX = [(model, dialect) for model, dialects in PER_HEAD.items() for dialect in dialects]
SEVERAL = [("llama-512", "moonlight+per-head"), ("deepseek", "deepspeed-0.19.8"), ("glm", "glm-5")]


def everything(model: str, dialect: str, fault: Fault, folder: Path) -> Iterator[Seen]:
    """All conditions on one run."""
    yield from one_step(trained(model, dialect), fault, folder)
    if (model, dialect) in SEVERAL:
        yield from rounded(trained(model, dialect), fault, folder)
        yield from several_steps(trained(model, dialect), fault, folder)
        for kind in ("bf16", "master"):
            yield from in_bfloat16(trained(model, dialect, kind=kind), fault, folder)


def table(seen: Iterable[Seen]) -> str:
    """How many weights were read right, by condition."""
    counts: dict[str, Counter[str]] = {}
    for one in seen:
        counts.setdefault(one.condition, Counter()).update(one.judged)
    lines = [f"| condition | {' | '.join(OUTCOMES)} |", f"|---|{'--:|' * len(OUTCOMES)}"]
    for condition, count in counts.items():
        lines.append(f"| {condition} | {' | '.join(str(count[o]) for o in OUTCOMES)} |")
    return "\n".join(lines)


def _main() -> None:
    torch.set_num_threads(1)
    seen: list[Seen] = []
    for model, dialect in MATRIX:
        for name in (name for name in CUTS if name != UNTRIED):
            with tempfile.TemporaryDirectory() as folder:
                for one in everything(model, dialect, CUTS[name], Path(folder)):
                    seen.append(one)
                    for mistake in one.mistakes:
                        print(
                            model,
                            dialect,
                            name,
                            one.condition,
                            *mistake,
                            file=sys.stderr,
                            flush=True,
                        )
        print(f"{model}, {dialect}", table(seen), sep="\n", file=sys.stderr, flush=True)
    print(table(seen))


if __name__ == "__main__":
    _main()
