"""Dialects: the named, sourced choices on what frameworks do not agree about.

There is no single per-head Muon. Which rows make one block (`SplitRule`) and what is computed
on a block (`Arithmetic`) differ from framework to framework; a certificate therefore names a
dialect. Every field of a registered dialect says where it was read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from muonsplit.errors import UsageError

_PER_HEAD = "+per-head"
_HEADS = re.compile(r"[1-9][0-9]{0,4}")

DTypeName = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """Which rows of a weight are one block.

    Attributes:
        heads_per_block: Heads orthogonalised together; None keeps every weight whole.
        mla_key_value: Whether a head's K and V rows of an MLA up-projection are one block.
        fused_qkv: What a fused QKV weight is cut into.
        gated_query: Whether a head's queries and output gate in one projection are one block.
        cut_heads: What happens to a shard that cuts a head.
    """

    heads_per_block: int | None = 1
    mla_key_value: Literal["joint", "apart"] = "joint"
    fused_qkv: Literal["whole", "projections", "heads"] = "whole"
    gated_query: Literal["joint", "apart"] = "joint"
    cut_heads: Literal["drop", "raise", "gather"] = "drop"


_CHOICES: dict[str, tuple[str, ...]] = {
    name: get_args(hint)
    for name, hint in get_type_hints(SplitRule).items()
    if get_origin(hint) is Literal
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What is computed on one block, and where it is rounded.

    Attributes:
        momentum: ``ema`` is m ← βm + (1−β)g; ``sum`` is m ← βm + g.
        nesterov: Whether the update is one more momentum step ahead of the buffer.
        beta: Default momentum coefficient.
        coefficients: Name in :data:`muonsplit.newton_schulz.COEFFICIENTS`.
        steps: Newton–Schulz steps.
        form: Order of the products: ``matmul`` (c·A)·A, ``paren`` c·(A·A), ``addmm`` fused
            multiply-adds, ``gram`` on the Gram matrix.
        restarts: Steps before which the Gram form goes back to the full matrix.
        tall: What is done with more rows than columns: ``transpose`` it, or multiply from the
            ``right``.
        compute_dtype: Dtype of the iteration on an accelerator.
        cpu_dtype: Dtype of the iteration on a CPU.
        cast: Whether the cast to it comes ``before`` or ``after`` the normalisation.
        pre_cast: Dtype the update is rounded to before everything else, or None.
        normalize: ``add`` is X / (‖X‖·f + ε); ``clamp`` is X / max(‖X‖·f, ε).
        norm_factor: The f above, a safety factor.
        epsilon: The ε above.
        scale: Factor on a block of r rows and c columns: ``jordan`` max(1, r/c)^½,
            ``moonlight`` 0.2·max(r, c)^½, ``spectral`` max(r, c)^½, ``bernstein`` (r/c)^½.
        scale_on: Whether the factor multiplies the ``update`` in the dtype of the iteration, or
            the learning ``rate``, where it is not rounded.
    """

    momentum: Literal["ema", "sum"] = "ema"
    nesterov: bool = True
    beta: float = 0.95
    coefficients: str = "jordan"
    steps: int = 5
    form: Literal["matmul", "paren", "addmm", "gram"] = "matmul"
    restarts: tuple[int, ...] = ()
    tall: Literal["transpose", "right"] = "transpose"
    compute_dtype: DTypeName = "bfloat16"
    cpu_dtype: DTypeName = "bfloat16"
    cast: Literal["before", "after"] = "before"
    pre_cast: DTypeName | None = None
    normalize: Literal["add", "clamp"] = "add"
    norm_factor: float = 1.0
    epsilon: float = 1e-7
    scale: Literal["jordan", "moonlight", "spectral", "bernstein", "none"] = "jordan"
    scale_on: Literal["update", "rate"] = "update"

    @property
    def roundoff(self) -> float:
        """Unit roundoff of the iteration on a CPU, or of the pre-cast where that is coarser."""
        names = (self.cpu_dtype, self.pre_cast or self.cpu_dtype)
        return max(torch.finfo(getattr(torch, name)).eps for name in names) / 2

    def exact(self) -> "Arithmetic":
        """The same arithmetic in float64 throughout, without Gram restarts' rounding."""
        return replace(
            self, compute_dtype="float64", cpu_dtype="float64", pre_cast=None, form="matmul"
        )


@dataclass(frozen=True, slots=True)
class Dialect:
    """A split rule and an arithmetic under one name.

    Attributes:
        name: Name in the registry.
        split: Which rows are one block.
        arithmetic: What is computed on one.
        sources: Where each field of both was read.
    """

    name: str
    split: SplitRule
    arithmetic: Arithmetic
    sources: Mapping[str, str] = field(repr=False, hash=False)

    @property
    def per_head(self) -> bool:
        """Whether the dialect cuts weights by heads at all."""
        return self.split.heads_per_block is not None

    def asked_per_head(self) -> "Dialect":
        """This dialect's arithmetic under the default per-head split, unless it already splits."""
        if self.per_head:
            return self
        split = DIALECTS[DEFAULT_DIALECT].split
        asked = "asked per head; the dialect itself is whole-matrix"
        sources = {**self.sources, **{f.name: asked for f in fields(SplitRule)}}
        return Dialect(self.name + _PER_HEAD, split, self.arithmetic, sources)


def _cite(**texts: str) -> dict[str, str]:
    """One source for several fields: ``momentum__nesterov='…'`` covers both."""
    return {name: text for names, text in texts.items() for name in names.split("__")}


_FORM_FIELDS = "form__restarts__tall"
_DTYPE_FIELDS = "compute_dtype__cpu_dtype__cast__pre_cast"
_NORM_FIELDS = "normalize__norm_factor__epsilon"
_SET_FIELDS = "coefficients__steps"
_SCALE_FIELDS = "scale__scale_on"
_MOMENTUM_FIELDS = "momentum__nesterov__beta"
_SPLIT_FIELDS = "heads_per_block__mla_key_value__fused_qkv__gated_query__cut_heads"
_ALL_ARITHMETIC = "__".join(
    [_MOMENTUM_FIELDS, _SET_FIELDS, _FORM_FIELDS, _DTYPE_FIELDS, _NORM_FIELDS, _SCALE_FIELDS]
)

_WHOLE = SplitRule(heads_per_block=None)
_JORDAN = Arithmetic()
_DS = "deepspeed 0.19.8, deepspeed/runtime/zero/muon/original_muon.py"
_DS_SPLIT = _cite(
    heads_per_block="deepspeed 0.19.8, `_per_head_orthogonalize`: one head a block",
    mla_key_value="deepspeed pull request #8384: kv_b_proj in blocks of qk_nope + v rows",
    fused_qkv="deepspeed pull request #8580: fused QKV is left whole in 0.19.8",
    gated_query="deepspeed 0.19.8 can tag equal blocks only: a head's queries and its gate",
    cut_heads="deepspeed 0.19.8, `resolve_per_head_muon_after_sharding`: drop and warn",
)
_DION_SOURCE = "dion commit 0a059a4, dion/muon.py and dion/polar_express.py"
_GLM = "GLM-5 report, arXiv:2602.15763, section 2.1 (Muon Split)"
_K3 = "Kimi K3 report, arXiv:2607.24653, section 2.5"
_MOONLIGHT_SOURCE = "Moonlight, arXiv:2502.16982, section 2.2, and its toy_train example"
_NOT_STATED = "not stated in the report; taken from Moonlight, arXiv:2502.16982"

_MOONLIGHT = replace(_JORDAN, momentum="sum", scale="moonlight", scale_on="rate")
_DION = Arithmetic(
    momentum="sum",
    nesterov=False,
    coefficients="polar-express-5",
    form="paren",
    tall="right",
    pre_cast="bfloat16",
    norm_factor=1.02,
    epsilon=1e-8,
    scale="bernstein",
    scale_on="rate",
)

_REGISTERED = (
    Dialect(
        "jordan",
        _WHOLE,
        _JORDAN,
        _cite(
            **{
                _SPLIT_FIELDS: "KellerJordan/Muon commit 857d1ad: 2-D weights are never split",
                _ALL_ARITHMETIC: "KellerJordan/Muon commit 857d1ad, muon.py",
            }
        ),
    ),
    Dialect(
        "torch-2.13",
        _WHOLE,
        replace(_JORDAN, form="addmm", normalize="clamp", scale_on="rate"),
        _cite(
            **{
                _SPLIT_FIELDS: "torch.optim.Muon takes 2-D weights only and does not split them",
                _ALL_ARITHMETIC: "torch 2.13.0, torch/optim/_muon.py",
            }
        ),
    ),
    Dialect(
        "moonlight",
        _WHOLE,
        _MOONLIGHT,
        _cite(
            **{
                _SPLIT_FIELDS: f"{_MOONLIGHT_SOURCE}: no split",
                _ALL_ARITHMETIC: _MOONLIGHT_SOURCE,
            }
        ),
    ),
    Dialect(
        "deepspeed-0.19.8",
        SplitRule(),
        replace(
            _JORDAN,
            form="gram",
            restarts=(2,),
            compute_dtype="float16",
            cpu_dtype="float32",
            cast="after",
        ),
        _DS_SPLIT | _cite(**{_ALL_ARITHMETIC: f"{_DS}, ns_method='gram' (the default)"}),
    ),
    Dialect(
        "deepspeed-0.19.8-standard",
        SplitRule(),
        _JORDAN,
        _DS_SPLIT | _cite(**{_ALL_ARITHMETIC: f"{_DS}, ns_method='standard'"}),
    ),
    Dialect(
        "dion",
        SplitRule(cut_heads="raise"),
        _DION,
        _cite(
            heads_per_block__cut_heads="dion commit 0a059a4, `num_heads` must divide the shards",
            mla_key_value__fused_qkv__gated_query="dion has no recogniser: its caller gives sizes",
            **{_ALL_ARITHMETIC: _DION_SOURCE},
        ),
    ),
    Dialect(
        "prime-rl",
        SplitRule(cut_heads="gather"),
        replace(_DION, scale="moonlight"),
        _cite(
            heads_per_block="prime-rl pull request #4114: optim.heads_per_block, any divisor",
            mla_key_value="prime-rl pull request #4119: kv_b_proj in blocks of nope + v rows",
            fused_qkv__gated_query="prime-rl pull request #4119: the module names its partitions",
            cut_heads="prime-rl runs dion's whole-weight path, which gathers",
            scale__scale_on="prime-rl pull request #4119: adjust_lr='rms_norm'",
            **{_ALL_ARITHMETIC.removesuffix(f"__{_SCALE_FIELDS}"): _DION_SOURCE},
        ),
    ),
    Dialect(
        "glm-5",
        SplitRule(mla_key_value="apart", cut_heads="gather"),
        _MOONLIGHT,
        _cite(
            heads_per_block=_GLM,
            mla_key_value=f"{_GLM} names W_UK and W_UV as separate matrices",
            fused_qkv__gated_query__cut_heads="not stated in the report",
            **{_ALL_ARITHMETIC: _NOT_STATED},
        ),
    ),
    Dialect(
        "kimi-k3",
        SplitRule(cut_heads="gather"),
        _MOONLIGHT,
        _cite(
            heads_per_block=f"{_K3}: the momentum is partitioned along the head dimension",
            mla_key_value="not stated in the report; DeepSpeed pull request #8436 takes both",
            fused_qkv__gated_query="not stated; Kimi K3 has neither",
            cut_heads=f"{_K3}, 5.2.2: shards are fetched by their owners",
            **{_ALL_ARITHMETIC: f"{_K3}: as in Kimi K2, which follows arXiv:2502.16982"},
        ),
    ),
)

DIALECTS: Mapping[str, Dialect] = {dialect.name: dialect for dialect in _REGISTERED}

DEFAULT_DIALECT = "deepspeed-0.19.8"


def dialect_named(name: str) -> Dialect:
    """Looks a dialect up.

    ``NAME:heads_per_block=2,fused_qkv=heads`` sets fields of its split rule, and ``NAME+per-head``
    asks a whole-matrix dialect's arithmetic per head.

    Raises:
        UsageError: If there is no such dialect, no such option, or it has no such value.
    """
    if name.endswith(_PER_HEAD):
        return dialect_named(name.removesuffix(_PER_HEAD)).asked_per_head()
    base, colon, option = name.partition(":")
    if base not in DIALECTS:
        raise UsageError(f"There is no dialect {base!r}.", f"Known: {', '.join(DIALECTS)}.")
    dialect = DIALECTS[base]
    if not colon:
        return dialect
    items = [_option(item) for item in option.split(",")]
    asked = dict(items)
    if len(asked) < len(items):
        raise UsageError(f"{option!r} gives one option twice.", "Give each once.")
    sources = {**dialect.sources, **dict.fromkeys(asked, f"asked for as {option}")}
    return Dialect(name, replace(dialect.split, **asked), dialect.arithmetic, sources)


def _option(item: str) -> tuple[str, Any]:
    """A field of the split rule and the value asked for."""
    field, _, value = item.partition("=")
    if field == "heads_per_block" and _HEADS.fullmatch(value):
        return field, int(value)
    if value in _CHOICES.get(field, ()):
        return field, value
    choices = "; ".join(f"{name}={'|'.join(values)}" for name, values in _CHOICES.items())
    raise UsageError(
        f"{item!r} is no option of a dialect.",
        f"Use heads_per_block=N, N from 1 to 99999; {choices}; several with commas between.",
    )
