"""Dialects of optimizers that do not split: KellerJordan's, torch's, and what follows them."""

from dataclasses import replace

from muonsplit.dialect.arithmetic import Arithmetic
from muonsplit.dialect.cite import ARITHMETIC, SPLIT, WHOLE, cite
from muonsplit.dialect.rules import Dialect

# Its Nesterov step is a lerp into the gradient itself.
JORDAN = Arithmetic(gradient="overwritten")
MOONLIGHT = Arithmetic(momentum="sum_alpha", scale="moonlight", scale_on="rate")
TORCH = Arithmetic(form="addmm", normalize="clamp", scale_on="rate")

MOONLIGHT_SOURCE = "Moonlight, arXiv:2502.16982, section 2.2, and its toy_train example c2ad5b2"


def _whole(name: str, arithmetic: Arithmetic, source: str) -> Dialect:
    split = f"{source}: 2-D weights are never split"
    return Dialect(name, WHOLE, arithmetic, cite((ARITHMETIC, source), (SPLIT, split)))


PLAIN = (
    _whole("jordan", JORDAN, "KellerJordan/Muon commit 857d1ad, muon.py; muon-optimizer 0.1.0"),
    _whole("torch-2.13", TORCH, "torch 2.13.0, torch/optim/_muon.py"),
    _whole("moonlight", MOONLIGHT, MOONLIGHT_SOURCE),
    _whole(
        "muon-fsdp2-0.3.0",
        replace(JORDAN, scale="moonlight", scale_on="result"),
        "muon-fsdp2 0.3.0, muon_fsdp2.py: `rms_scale` is on by default, after the scatter",
    ),
    _whole(
        "pytorch-optimizer-4.1.0",
        replace(
            TORCH,
            gradient="overwritten",
            foreach="all",
            past_end="repeat_last",
            tall="transpose_copy",
        ),
        "pytorch-optimizer 4.1.0, optimizer/muon/base.py and utils/matrix.py",
    ),
    _whole(
        "pytorch-optimizer-4.1.0-gram",
        replace(
            TORCH,
            gradient="overwritten",
            foreach="all",
            past_end="repeat_last",
            iteration="gram_always",
            restarts=(2,),
            form="addmm_diagonal",
            tall="transpose_copy",
            compute_dtype="float16",
            cpu_dtype="float16",
            norm_dtype="float32",
        ),
        "pytorch-optimizer 4.1.0, `use_gram_newton_schulz` in utils/matrix.py",
    ),
    _whole(
        "heavyball-3.2.1",
        Arithmetic(
            momentum="ema_plus_g",
            coefficients="you",
            form="factored",
            norm_dtype="input",
            normalize="clamp",
        ),
        "heavyball 3.2.1, heavyball/utils.py; its rounding to bfloat16 is stochastic, ours is not",
    ),
)
