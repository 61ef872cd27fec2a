"""Dialects of frameworks that can split by heads, or are asked to."""

from dataclasses import replace

from muonsplit.dialect.arithmetic import Arithmetic
from muonsplit.dialect.cite import ARITHMETIC, SCALE, SPLIT, WHOLE, cite
from muonsplit.dialect.plain import JORDAN, TORCH
from muonsplit.dialect.rules import Dialect, SplitRule

_DS = "deepspeed 0.19.8, deepspeed/runtime/zero/muon/original_muon.py"
_DS_SPLIT = (
    ("heads_per_block", "deepspeed 0.19.8, `_per_head_orthogonalize`: one head a block"),
    ("mla_key_value", "deepspeed pull request #8384: kv_b_proj in blocks of qk_nope + v rows"),
    ("fused_qkv", "deepspeed pull request #8580: fused QKV is left whole in 0.19.8"),
    ("gated_query", "deepspeed 0.19.8 can tag equal blocks only: a head's queries and its gate"),
    ("cut_heads", "deepspeed 0.19.8, `resolve_per_head_muon_after_sharding`: drop and warn"),
)
_DION_SOURCE = "dion commit 0a059a4, dion/muon.py and dion/polar_express.py"
_DION_SPLIT = (
    (SPLIT, "dion has no recogniser: its caller gives sizes"),
    (
        ("heads_per_block", "cut_heads"),
        "dion commit 0a059a4: `num_heads` must divide the shards",
    ),
)
_PRIME = "prime-rl pull request #4119"
_GNS = "gram-newton-schulz 0.1.6, gram_newton_schulz.py and muon/muon.py"
_EO = "Emerging-Optimizers 0.3.0, orthogonalized_optimizers/muon.py and muon_utils.py"
_TOLD = "no recogniser: the caller gives the split"

DION = Arithmetic(
    momentum="sum",
    nesterov=False,
    coefficients="polar-express-5",
    form="paren",
    tall="right",
    pre_cast="bfloat16",
    norm_factor=1.02,
    epsilon=1e-8,
    scale="bernstein",
    scale_on="step",
)
_DION_NS = replace(
    DION,
    nesterov=True,
    coefficients="you",
    tall="transpose",
    norm_factor=1.0,
    scale="moonlight",
)
_GRAM = replace(
    DION,
    nesterov=True,
    foreach="momentum",
    coefficients="polar-express-5-safe",
    iteration="gram",
    restarts=(2,),
    form="addmm",
    compute_dtype="float16",
    cpu_dtype="float16",
    norm_dtype="float32",
    norm_factor=1.0,
    epsilon=1e-7,
    scale="moonlight",
)
_EMERGING = Arithmetic(
    nesterov=False,
    coefficients="you",
    form="addmm",
    norm_dtype="float32",
    normalize="clamp",
    scale="spectral",
    scale_on="result",
    decay="add",
)
_MUONIUM = Arithmetic(
    momentum="sum",
    form="paren",
    scale_on="step",
    scale_per="block_on_matrix",
    buffer_dtype="float32",
    step_dtype="float32",
    rate_tensor=True,
    decay="folded",
    decay_rate="adjusted",
)


def _told(name: str, arithmetic: Arithmetic, source: str, rule: SplitRule | None = None) -> Dialect:
    """A framework that splits as its caller says, or not at all."""
    sources = cite((ARITHMETIC, source), (SPLIT, f"{source}: {_TOLD}"))
    return Dialect(name, rule or SplitRule(cut_heads="raise"), arithmetic, sources)


FRAMEWORKS = (
    Dialect(
        "deepspeed-0.19.8",
        SplitRule(),
        replace(
            JORDAN,
            iteration="gram",
            restarts=(2,),
            compute_dtype="float16",
            cpu_dtype="float32",
            norm_dtype="input",
        ),
        cite((ARITHMETIC, f"{_DS}, ns_method='gram' (the default)"), *_DS_SPLIT)
        | {
            "cpu_dtype": f"{_DS}: float32 on a CPU without float16 products; one that has them, "
            "such as AVX512-FP16, takes float16: deepspeed-0.19.8:cpu_dtype=float16"
        },
    ),
    Dialect(
        "deepspeed-0.19.8-standard",
        SplitRule(),
        JORDAN,
        cite((ARITHMETIC, f"{_DS}, ns_method='standard'"), *_DS_SPLIT),
    ),
    Dialect(
        "dion",
        SplitRule(cut_heads="raise"),
        DION,
        cite((ARITHMETIC, _DION_SOURCE), *_DION_SPLIT),
    ),
    Dialect(
        "dion-newton-schulz",
        SplitRule(cut_heads="raise"),
        _DION_NS,
        cite(
            (ARITHMETIC, f"{_DION_SOURCE}, use_polar_express=False, nesterov, adjust_lr=rms_norm"),
            *_DION_SPLIT,
        ),
    ),
    Dialect(
        "prime-rl",
        SplitRule(cut_heads="gather"),
        replace(DION, scale="moonlight"),
        cite(
            (ARITHMETIC, _DION_SOURCE),
            (SPLIT, f"{_PRIME}: the module names its partitions"),
            ("heads_per_block", "prime-rl pull request #4114: optim.heads_per_block, any divisor"),
            ("mla_key_value", f"{_PRIME}: kv_b_proj in blocks of nope + v rows"),
            ("cut_heads", "prime-rl runs dion's whole-weight path, which gathers"),
            (SCALE, f"{_PRIME}: adjust_lr='rms_norm'"),
        ),
    ),
    _told("gram-newton-schulz-0.1.6", _GRAM, _GNS),
    _told(
        "gram-newton-schulz-0.1.6-standard",
        replace(_GRAM, iteration="standard", restarts=()),
        f"{_GNS}, use_gram_newton_schulz=False",
    ),
    _told("emerging-optimizers-0.3.0", _EMERGING, f"{_EO}, fp32_matmul_prec='medium'"),
    _told(
        "emerging-optimizers-0.3.0-highest",
        replace(_EMERGING, compute_dtype="float32", cpu_dtype="float32"),
        f"{_EO}, fp32_matmul_prec='highest'",
    ),
    Dialect(
        "megatron",
        SplitRule(fused_qkv="projections", cut_heads="gather"),
        replace(_EMERGING, nesterov=True, coefficients="you"),
        cite(
            (ARITHMETIC, f"{_EO}, as Megatron-LM calls it"),
            (SPLIT, "Megatron-LM pull request #7085: per-head blocks of MLA and QKV"),
            ("fused_qkv", "Megatron-LM pull request #6326: `muon_split_qkv`, Q | K | V"),
        ),
    ),
    _told(
        "torchtitan-0.3.0",
        TORCH,
        "torchtitan 0.3.0, distributed/flex_shard/dist_muon.py, `BlockShard`",
    ),
    _told(
        "optimuon-0.1.1",
        Arithmetic(
            momentum="ema_muladd",
            coefficients="polar-express-5",
            iteration="gram",
            restarts=(3,),
            form="paren_gram",
            tall="right",
            compute_dtype="float16",
            cpu_dtype="float16",
            norm_factor=1.02,
            epsilon=1e-6,
            scale_on="result",
            scale_per="matrix",
            foreach="all",
        ),
        "optimuon 0.1.1, _muon.py and _newton_schulz.py, gram_ns=True",
    ),
    _told(
        "optimuon-0.1.1-standard",
        Arithmetic(
            momentum="ema_muladd",
            form="paren",
            tall="right",
            epsilon=1e-6,
            scale_on="result",
            scale_per="matrix",
            foreach="all",
        ),
        "optimuon 0.1.1, _muon.py and _newton_schulz.py, gram_ns=False, Jordan's coefficients",
    ),
    _told("muonium-0.2.0", _MUONIUM, "muonium 0.2.0, optim/algorithms/muon.py, no cautious decay"),
    _told(
        "dtensor-muon-0.1.0",
        replace(
            _MUONIUM,
            momentum="sum_alpha",
            gradient="overwritten",
            scale_on="rate",
            scale_per="block",
            decay="folded_rounded",
        ),
        "dtensor-muon 0.1.0, optim/optim.py, without cautious decay; it does not split",
        WHOLE,
    ),
    _told(
        "xtuner",
        _DION_NS,
        "xtuner commit b934f46, v1/optim/muon.py and v1/config/optim.py",
        SplitRule(cut_heads="gather"),
    ),
    _told(
        "optax-0.2.8",
        Arithmetic(
            momentum="ema_debiased",
            compute_dtype="float32",
            cpu_dtype="float32",
            epsilon=1e-8,
        ),
        "optax 0.2.8, contrib/_muon.py: axes that are not named are batch axes",
    ),
)
