"""Momentum, orthogonalisation by layout, and the reference optimizer."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.dialect import DEFAULT_DIALECT, Arithmetic, Dialect, dialect_named
from muonsplit.errors import InputError
from muonsplit.layout import Layout
from muonsplit.newton_schulz import newton_schulz, rounded, scale_factor

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def advance_momentum(
    gradient: Tensor, buffer: Tensor, arithmetic: Arithmetic, beta: float
) -> Tensor:
    """Takes one momentum step.

    Args:
        gradient: Any shape; read only.
        buffer: Same shape; updated in place.
        arithmetic: Its ``momentum`` and ``nesterov`` choose the form.
        beta: Momentum coefficient in [0, 1).

    Returns:
        What is to be orthogonalised; a new tensor, or the buffer itself without Nesterov.
    """
    if arithmetic.momentum == "ema":
        buffer.lerp_(gradient, 1 - beta)
        return gradient.lerp(buffer, beta) if arithmetic.nesterov else buffer
    buffer.mul_(beta).add_(gradient)
    return gradient.add(buffer, alpha=beta) if arithmetic.nesterov else buffer


def orthogonalize(update: Tensor, layout: Layout | None, arithmetic: Arithmetic) -> Tensor:
    """Orthogonalises one weight's update block by block, each scaled by its own shape.

    Args:
        update: Shape ``[rows, cols]``, or ``[experts, rows, cols]`` without a layout: every
            expert is then a block.
        layout: How the weight is cut; None keeps it whole.
        arithmetic: What is computed on a block.

    Returns:
        Same shape; float32 or the dtype of the iteration.

    Raises:
        InputError: If the update is not a floating-point matrix or stack of matrices.
        LayoutError: If the layout does not fit.
    """
    return orthogonalize_all([update], [layout], arithmetic)[0]


def orthogonalize_all(
    updates: Sequence[Tensor], layouts: Sequence[Layout | None], arithmetic: Arithmetic
) -> list[Tensor]:
    """:func:`orthogonalize` on many weights; equal blocks of all of them are one batch."""
    batches = [_batches(u, layout) for u, layout in zip(updates, layouts, strict=True)]
    alike: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for i, found in enumerate(batches):
        for j, batch in enumerate(found):
            key = (*batch.shape[-2:], batch.dtype, batch.device)
            alike.setdefault(key, []).append((i, j))
    for places in alike.values():
        done = _scaled(torch.cat([batches[i][j] for i, j in places]), arithmetic)
        sizes = [batches[i][j].size(0) for i, j in places]
        for (i, j), part in zip(places, done.split(sizes), strict=True):
            batches[i][j] = part
    return [
        _assemble(found, update, layout)
        for found, update, layout in zip(batches, updates, layouts, strict=True)
    ]


def _batches(update: Tensor, layout: Layout | None) -> list[Tensor]:
    if not update.is_floating_point() or update.ndim not in (2, 3):
        raise InputError(
            "Muon orthogonalises a floating-point matrix, or a stack of them, got shape "
            f"{tuple(update.shape)} and dtype {update.dtype}."
        )
    if layout is not None:
        return layout.batches(update)
    return [update if update.ndim == 3 else update.unsqueeze(0)]


def _scaled(batch: Tensor, arithmetic: Arithmetic) -> Tensor:
    factor = scale_factor(arithmetic.scale, batch.size(-2), batch.size(-1))
    scaled = newton_schulz(batch, arithmetic) * factor
    return rounded(scaled, arithmetic) if arithmetic.scale_on == "update" else scaled


def _assemble(batches: list[Tensor], update: Tensor, layout: Layout | None) -> Tensor:
    if layout is None:
        return batches[0].reshape(update.shape)
    result = torch.empty(update.shape, dtype=batches[0].dtype, device=update.device)
    layout.write(batches, result)
    return result


class PerHeadMuon(torch.optim.Optimizer):
    """The reference optimizer: Muon by layout, AdamW for everything else.

    Parameters named in ``layouts`` are trained by Muon, cut as their layout says (None: whole,
    or whole per expert for a stack); all others by AdamW. The layouts are not part of the
    state: a resumed run is cut as it is built, not as it was saved.

    Args:
        params: ``(name, parameter)`` pairs, or param groups whose ``params`` are such pairs.
        layouts: How each Muon weight is cut, by parameter name.
        dialect: A dialect or its name; its arithmetic is used.
        lr: Learning rate of the Muon weights.
        momentum: Momentum coefficient in [0, 1).
        weight_decay: Decoupled decay: p ← p·(1 − lr·weight_decay) before the update.
        adamw_lr: Learning rate of the other parameters.
        betas: AdamW coefficients.
        eps: AdamW's ε.

    Raises:
        InputError: If a hyperparameter is out of range, a parameter has no name, a name in
            ``layouts`` is no parameter, or a layout does not fit its weight.
    """

    def __init__(
        self,
        params: NamedParameters | Iterable[dict[str, Any]],
        layouts: Mapping[str, Layout | None],
        *,
        dialect: Dialect | str = DEFAULT_DIALECT,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        adamw_lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        chosen = dialect_named(dialect) if isinstance(dialect, str) else dialect
        self.arithmetic = chosen.arithmetic
        self.layouts = dict(layouts)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "adamw_lr": adamw_lr,
            "betas": betas,
            "eps": eps,
        }
        super().__init__(params, defaults)  # pyright: ignore[reportArgumentType]
        self._check()

    def _check(self) -> None:
        named: dict[str, Tensor] = {}
        for group in self.param_groups:
            _check_hyperparameters(group)
            if "param_names" not in group:
                raise InputError(
                    "PerHeadMuon finds layouts by name; give model.named_parameters(), not "
                    "model.parameters()."
                )
            named.update(zip(group["param_names"], group["params"], strict=True))
        for name, layout in self.layouts.items():
            if name not in named:
                raise InputError(f"A layout is given for {name!r}, which is no parameter here.")
            shape = tuple(named[name].shape)
            wanted = "2-D" if layout else "2-D or 3-D"
            if len(shape) not in ((2,) if layout else (2, 3)):
                raise InputError(f"{name} has shape {shape}; Muon needs it {wanted}.")
            if layout and layout.rows != shape[layout.axis]:
                raise InputError(f"{name} has shape {shape}, its layout {layout} does not fit.")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes one step; parameters without a gradient are left alone.

        Args:
            closure: Re-evaluates the model and returns the loss, as torch's optimizers take it.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            pairs = zip(group["param_names"], group["params"], strict=True)
            ready = [(name, p) for name, p in pairs if p.grad is not None]
            self._muon([(n, p) for n, p in ready if n in self.layouts], group)
            for _, p in ((n, p) for n, p in ready if n not in self.layouts):
                self._adamw(p, group)
        return loss

    def orthogonalized(self, names: Sequence[str], updates: Sequence[Tensor]) -> list[Tensor]:
        """The scaled, orthogonalised updates of named weights, as a step subtracts them.

        Args:
            names: Weights in ``layouts``.
            updates: What momentum made of their gradients, one a name.
        """
        return orthogonalize_all(updates, [self.layouts[n] for n in names], self.arithmetic)

    def _muon(self, named: list[tuple[str, Tensor]], group: dict[str, Any]) -> None:
        updates: list[Tensor] = []
        for _, p in named:
            assert p.grad is not None
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            buffer = state["momentum_buffer"]
            updates.append(advance_momentum(p.grad, buffer, self.arithmetic, group["momentum"]))
        results = self.orthogonalized([name for name, _ in named], updates)
        for (_, p), result in zip(named, results, strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(result.to(p.dtype), alpha=-group["lr"])

    def _adamw(self, p: Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        state["exp_avg"].lerp_(p.grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(p.grad.square(), 1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** state["step"])
        root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt()
        p.mul_(1 - group["adamw_lr"] * group["weight_decay"])
        p.addcdiv_(mean, root.add_(group["eps"]), value=-group["adamw_lr"])


def _check_hyperparameters(group: Mapping[str, Any]) -> None:
    for name in ("lr", "adamw_lr", "weight_decay", "eps"):
        if not (math.isfinite(group[name]) and group[name] >= 0):
            raise InputError(f"{name} must be a finite number ≥ 0, got {group[name]!r}.")
    for name, value in (("momentum", group["momentum"]), *(("betas", b) for b in group["betas"])):
        if not 0 <= value < 1:
            raise InputError(f"{name} must lie in [0, 1), got {value!r}.")
