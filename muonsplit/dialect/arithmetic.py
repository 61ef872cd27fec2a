"""Arithmetic: every choice of what is computed on one block, and where it is rounded.

Two dialects that differ only in the order of products agree up to rounding; bits agree where
every field does.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch

from muonsplit.dialect.fields import check
from muonsplit.errors import UsageError

DTypeName = Literal["float64", "float32", "bfloat16", "float16"]

# The longest run of Gram steps without a restart that stays stable below float32: Gram squares
# singular values before it rounds, and without restarts bfloat16 was seen to diverge to 10⁶.
_LONGEST_RUN = {"float16": 3, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What is computed on one block, and where it is rounded.

    Attributes:
        momentum: m ← βm + (1−β)g as ``ema`` (one lerp) or ``ema_muladd`` (a product and a
            multiply-add); m ← βm + g as ``sum`` or ``sum_alpha``, which differ in how the Nesterov
            step is rounded; ``ema_plus_g`` adds the average to the gradient instead;
            ``ema_debiased`` divides both by what they have seen, as Adam does.
        nesterov: Whether the update is one more momentum step ahead of the buffer.
        beta: Default momentum coefficient.
        buffer_dtype: Dtype of the momentum buffer: the ``parameter``'s or ``float32``.
        step_dtype: Dtype in which momentum and the step are computed; the parameter and its buffer
            are rounded when they are stored.
        coefficients: Name in :data:`muonsplit.newton_schulz.COEFFICIENTS`.
        steps: Newton–Schulz steps.
        past_end: Whether a coefficient set shorter than the steps begins anew or repeats its last.
        iteration: ``standard`` on the block, ``gram`` on its Gram matrix where the block is not
            square, ``gram_always`` where it is too, ``auto`` whichever takes fewer operations.
        restarts: Steps before which the Gram iteration goes back to the full matrix.
        form: Order of the products: ``matmul`` (c·A)·A, ``paren`` c·(A·A), ``addmm`` fused
            multiply-adds, ``addmm_diagonal`` these with aI added in a Gram iteration as numbers,
            ``paren_gram`` ``paren`` on blocks and multiply-adds on Gram matrices, ``factored``
            (aI + (bI + cA)A)X, ``fast`` whatever is quickest: the same numbers up to rounding, but
            nobody's bits.
        tall: What is done with more rows than columns: ``transpose`` it, with a
            ``transpose_copy`` before the iteration, or multiply from the ``right``.
        compute_dtype: Dtype of the iteration on an accelerator.
        cpu_dtype: Dtype of the iteration on a CPU.
        halves: Whether half precision on a CPU is ``emulated``, operands rounded and multiplied in
            float32, or ``native``, with the sums of this CPU's own instructions.
        norm_dtype: Dtype of the normalisation: that of the ``input`` (float32 for float16), of the
            iteration (``compute``), or ``float32``.
        pre_cast: Dtype the update is rounded to before everything else, or None.
        normalize: ``add`` is X / (‖X‖·f + ε); ``clamp`` is X / max(‖X‖·f, ε); ``scaled`` is
            X / (‖X‖·f) with neither overflow nor ε, and zero for zero.
        norm_factor: The f above, a safety factor.
        epsilon: The ε above.
        scale: Factor on a block of r rows and c columns: ``jordan`` max(1, r/c)^½,
            ``moonlight`` 0.2·max(r, c)^½, ``spectral`` max(r, c)^½, ``bernstein`` (r/c)^½.
        extra_scale: A further factor.
        scale_on: Where the factor is applied: the ``update`` in the dtype of the iteration; the
            ``result`` in the parameter's; the learning ``rate``, where it is not rounded; or with
            the learning rate on the update, rounded as one ``step``.
        scale_per: Whether the shape is that of the ``block`` or of the whole ``matrix``, or the
            block's over the matrix's on the update and the matrix's on the rest.
        rate_tensor: Whether learning rates are float32 tensors, not numbers; a product rounds them
            to the dtype of the update.
        decay: p ← p·(1 − rate·decay) as ``mul`` or ``add``, or the update has decay·p
            ``folded`` in, or ``folded_rounded`` in the dtype of the iteration.
        decay_rate: Whether that rate is the ``base`` learning rate or ``adjusted`` by the scale.
        gradient: Whether a step leaves gradients as they were, or may have ``overwritten`` them.
        foreach: Whether ``momentum`` or ``all`` of the step is done on lists of tensors. On a CPU
            that rounds factors to the dtype of bfloat16 tensors.
    """

    momentum: Literal["ema", "ema_muladd", "sum", "sum_alpha", "ema_plus_g", "ema_debiased"] = "ema"
    nesterov: bool = True
    beta: float = 0.95
    buffer_dtype: Literal["parameter", "float32"] = "parameter"
    step_dtype: Literal["parameter", "float32"] = "parameter"
    coefficients: str = "jordan"
    steps: int = 5
    past_end: Literal["cycle", "repeat_last"] = "cycle"
    iteration: Literal["standard", "gram", "gram_always", "auto"] = "standard"
    restarts: tuple[int, ...] = ()
    form: Literal[
        "matmul", "paren", "addmm", "addmm_diagonal", "paren_gram", "factored", "fast"
    ] = "matmul"
    tall: Literal["transpose", "transpose_copy", "right"] = "transpose"
    compute_dtype: DTypeName = "bfloat16"
    cpu_dtype: DTypeName = "bfloat16"
    halves: Literal["emulated", "native"] = "emulated"
    norm_dtype: Literal["input", "compute", "float32"] = "compute"
    pre_cast: DTypeName | None = None
    normalize: Literal["add", "clamp", "scaled"] = "add"
    norm_factor: float = 1.0
    epsilon: float = 1e-7
    scale: Literal["jordan", "moonlight", "spectral", "bernstein", "none"] = "jordan"
    extra_scale: float = 1.0
    scale_on: Literal["update", "result", "rate", "step"] = "update"
    scale_per: Literal["block", "matrix", "block_on_matrix"] = "block"
    rate_tensor: bool = False
    decay: Literal["mul", "add", "folded", "folded_rounded"] = "mul"
    decay_rate: Literal["base", "adjusted"] = "base"
    gradient: Literal["kept", "overwritten"] = "kept"
    foreach: Literal["none", "momentum", "all"] = "none"

    def __post_init__(self) -> None:
        check(self)
        if self.form == "fast" and self.cpu_dtype not in ("float32", "float64"):
            raise UsageError(
                f"The fast form has no rounding points to emulate {self.cpu_dtype} with on a CPU.",
                "Use cpu_dtype=float32, or name the order of the products.",
            )
        if self.iteration != "standard":
            self._check_restarts()

    def _check_restarts(self) -> None:
        if self.form == "factored":
            raise UsageError("The Gram iteration has no factored form.", "Use matmul or addmm.")
        starts = sorted({0, *(r for r in self.restarts if r < self.steps), self.steps})
        run = max((b - a for a, b in pairwise(starts)), default=0)
        for dtype in (self.compute_dtype, self.cpu_dtype):
            longest = _LONGEST_RUN.get(dtype, run)
            if run > longest:
                raise UsageError(
                    f"Gram in {dtype} diverges over {run} steps without a restart; at most "
                    f"{longest} are stable, got restarts={self.restarts} for {self.steps} steps.",
                    "Restart more often, iterate in float32, or use the standard iteration.",
                )

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """The dtype the iteration runs in on a device."""
        return getattr(torch, self.cpu_dtype if device.type == "cpu" else self.compute_dtype)

    @property
    def roundoff(self) -> float:
        """Unit roundoff of the iteration on a CPU, or of the pre-cast where that is coarser."""
        names = (self.cpu_dtype, self.pre_cast or self.cpu_dtype)
        return max(torch.finfo(getattr(torch, name)).eps for name in names) / 2

    def exact(self) -> "Arithmetic":
        """The same arithmetic in float64 throughout, without Gram restarts' rounding."""
        return replace(
            self,
            compute_dtype="float64",
            cpu_dtype="float64",
            pre_cast=None,
            iteration="standard",
            form="matmul",
            buffer_dtype="parameter",
            step_dtype="parameter",
            rate_tensor=False,
            foreach="none",
        )

    def fastest(self) -> "Arithmetic":
        """The same arithmetic in float32, in whatever order is quickest; not the same bits."""
        return replace(
            self,
            compute_dtype="float32",
            cpu_dtype="float32",
            pre_cast=None,
            iteration="auto",
            form="fast",
            restarts=tuple(range(2, self.steps, 3)),
        )
