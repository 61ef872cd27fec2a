"""Dialects of models whose reports say what they do, and of recipes that train them."""

from dataclasses import replace

from muonsplit.dialect.arithmetic import Arithmetic
from muonsplit.dialect.cite import ARITHMETIC, MOMENTUM, SCALE, SPLIT, WHOLE, cite
from muonsplit.dialect.plain import MOONLIGHT
from muonsplit.dialect.rules import Dialect, SplitRule

_GLM = "GLM-5 report, arXiv:2602.15763, section 2.1 (Muon Split)"
_K3 = "Kimi K3 report, arXiv:2607.24653, section 2.5"
_NOT_STATED = "not stated in the report; taken from Moonlight, arXiv:2502.16982"
_V4 = "DeepSeek-V4 report, as Emerging-Optimizers 0.3.0 cites it"
_NANO = "KellerJordan/modded-nanogpt commit f411b3d, train_gpt.py"

REPORTS = (
    Dialect(
        "glm-5",
        SplitRule(mla_key_value="apart", cut_heads="gather"),
        MOONLIGHT,
        cite(
            (ARITHMETIC, _NOT_STATED),
            (SPLIT, "not stated in the report"),
            ("heads_per_block", _GLM),
            ("mla_key_value", f"{_GLM} names W_UK and W_UV as separate matrices"),
        ),
    ),
    Dialect(
        "kimi-k3",
        SplitRule(cut_heads="gather"),
        MOONLIGHT,
        cite(
            (ARITHMETIC, f"{_K3}: as in Kimi K2, which follows arXiv:2502.16982"),
            (SPLIT, "not stated; Kimi K3 has neither"),
            ("heads_per_block", f"{_K3}: the momentum is partitioned along the head dimension"),
            ("mla_key_value", "not stated in the report; DeepSpeed pull request #8436 takes both"),
            ("cut_heads", f"{_K3}, 5.2.2: shards are fetched by their owners"),
        ),
    ),
    Dialect(
        "deepseek-v4",
        WHOLE,
        replace(MOONLIGHT, coefficients="deepseek-v4", steps=10, past_end="repeat_last"),
        cite(
            (ARITHMETIC, _NOT_STATED.replace("the report", "what is cited of it")),
            (("coefficients", "steps", "past_end"), f"{_V4}: eight Jordan steps, two that settle"),
            (SPLIT, "not stated"),
        ),
    ),
    Dialect(
        "modded-nanogpt",
        SplitRule(heads_per_block=2, cut_heads="raise"),
        Arithmetic(
            coefficients="polar-express-5",
            form="addmm",
            tall="right",
            norm_factor=1.02,
            epsilon=1e-6,
            scale_on="rate",
            buffer_dtype="float32",
            step_dtype="float32",
        ),
        cite(
            (ARITHMETIC, f"{_NANO}, without NorMuon's second moment and without cautious decay"),
            (SPLIT, f"{_NANO}: its banks are what they are"),
            ("heads_per_block", f"{_NANO}: `qk_bank` holds two heads a matrix; its V is whole"),
            (SCALE, f"{_NANO}: the chunk's shape"),
            (MOMENTUM, f"{_NANO}, `polar_express`"),
        ),
    ),
)
