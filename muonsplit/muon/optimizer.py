"""The reference optimizer: Muon by layout, AdamW for everything else."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from muonsplit.dialect import DEFAULT_DIALECT, Dialect
from muonsplit.errors import InputError, MuonsplitError
from muonsplit.layout import Layout
from muonsplit.muon import checked
from muonsplit.muon.blocks import Direction
from muonsplit.muon.momentum import advance_momentum
from muonsplit.muon.sharded import directions_together, owners_together
from muonsplit.muon.step import apply_
from muonsplit.newton_schulz import Backend, refuse
from muonsplit.sharding import CutHeads, aligned, holding, local_of

NamedParameters = Iterable[tuple[str, nn.Parameter]]

# Elements whose updates are held at once; more weights than that are stepped in turn. A kernel is
# launched once for each shape among them.
_AT_ONCE: Mapping[Backend, int] = {"torch": 1 << 26, "triton": 1 << 31}


class PerHeadMuon(torch.optim.Optimizer):
    """The reference optimizer: Muon by layout, AdamW for everything else.

    Parameters named in ``layouts`` are trained by Muon, cut as their layout says (None: whole,
    or whole per expert for a stack); all others by AdamW. The layouts are not part of the
    state: a resumed run is cut as it is built, not as it was saved.

    A parameter may be a DTensor, divided by tensor parallelism, ``fully_shard`` or both. Its state
    is placed as it is, and a step on a CPU gives the bits that it would give in one process; in
    half precision, where what a rank holds is a multiple of 64 elements, since torch rounds x + a·y
    differently behind the last whole vector. Only pieces of blocks that a shard cuts travel, to a
    rank that holds most of the block, and back. The ranks that hold a weight together have to step
    it together, or leave it without a gradient.

    Args:
        params: ``(name, parameter)`` pairs, or param groups whose ``params`` are such pairs.
        layouts: How each Muon weight is cut, by parameter name.
        dialect: A dialect or its name; its arithmetic is used.
        fast: Whether to compute in float32 and in whatever order is quickest: the dialect's
            numbers up to rounding, not its bits.
        backend: ``torch``, or ``triton``: one launch for all blocks of one shape, whose bits are a
            block's own on every device; see :mod:`muonsplit.kernels`.
        cut_heads: What becomes of a layout whose blocks are cut by the shard of any rank:
            ``gather`` puts each block together on one rank; ``drop`` leaves the weight whole, with
            a warning; ``raise`` refuses it.
        lr: Learning rate of the Muon weights.
        momentum: Momentum coefficient in [0, 1).
        weight_decay: Decoupled decay: p ← p·(1 − lr·weight_decay) before the update.
        adamw_lr: Learning rate of the other parameters.
        betas: AdamW coefficients.
        eps: AdamW's ε.

    Raises:
        InputError: If a hyperparameter is out of range, a parameter has no name, a name in
            ``layouts`` is no parameter, a layout does not fit its weight, or a parameter is
            complex, integer, sparse, no leaf, or on a mesh without this rank.
        LayoutError: If a parameter is a partial sum.
        CutHeadError: If heads are cut and ``cut_heads`` is ``raise``, or those of every weight
            that is split are dropped.
        UsageError: If the dialect, the backend or ``cut_heads`` is unknown.
    """

    def __init__(
        self,
        params: NamedParameters | Iterable[dict[str, Any]],
        layouts: Mapping[str, Layout | None],
        *,
        dialect: Dialect | str = DEFAULT_DIALECT,
        fast: bool = False,
        backend: Backend = "torch",
        cut_heads: CutHeads = "gather",
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        adamw_lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        arithmetic = checked.dialect(dialect).arithmetic
        self.arithmetic = arithmetic.fastest() if fast else arithmetic
        refuse.backend(backend)
        self.backend: Backend = backend
        checked.cut_heads(cut_heads)
        self.cut_heads: CutHeads = cut_heads
        self.layouts = checked.layouts(layouts)
        self._built = False
        self._owners: dict[str, list[int]] | None = None
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "adamw_lr": adamw_lr,
            "betas": betas,
            "eps": eps,
        }
        try:
            super().__init__(params, defaults)  # pyright: ignore[reportArgumentType]
        except MuonsplitError:
            raise
        except (TypeError, ValueError) as error:
            raise InputError(f"torch refuses params: {error}") from error
        self._settle()
        self._built = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds named parameters, as torch's optimizers do.

        Args:
            param_group: ``params``, pairs of name and parameter, and hyperparameters of their own.

        Raises:
            InputError: As for the constructor; nothing is then added.
        """
        checked.hyperparameters({**self.defaults, **param_group})
        params = param_group.get("params")
        if isinstance(params, Iterator):
            param_group["params"] = params = list(params)
        checked.pairs(params, (name for name, _ in self._named()))
        super().add_param_group(param_group)
        if "param_names" not in self.param_groups[-1]:
            self.param_groups.pop()
            raise InputError(
                "PerHeadMuon finds layouts by name; give model.named_parameters(), not "
                "model.parameters()."
            )
        if self._built:
            try:
                self._settle()
            except MuonsplitError:
                self.param_groups.pop()
                raise

    def _settle(self) -> None:
        """Refuses layouts that do not fit, and decides what becomes of heads that are cut."""
        named = dict(self._named())
        for name, layout in self.layouts.items():
            if name not in named:
                raise InputError(f"A layout is given for {name!r}, which is no parameter here.")
            checked.weight(name, named[name].shape, layout)
        self.layouts = checked.uncut(named, self.layouts, self.cut_heads)
        self._agreed, self._owners = False, None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state; momentum keeps the dtype it was saved in.

        Args:
            state_dict: As ``state_dict()`` gives it.
        """
        super().load_state_dict(state_dict)
        # torch rounds what it restores to the dtype of the parameter.
        saved = [state_dict["state"].get(i) for i in chain(*_indices(state_dict))]
        for (_, p), kept in zip(self._named(), saved, strict=True):
            if kept is not None and "momentum_buffer" in kept:
                buffer = kept["momentum_buffer"]
                self.state[p]["momentum_buffer"] = buffer.clone().to(p.device)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for group in self.param_groups:
            yield from zip(group["param_names"], group["params"], strict=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes one step; parameters without a gradient are left alone.

        Args:
            closure: Re-evaluates the model and returns the loss, as torch's optimizers take it.

        Returns:
            What the closure returned, or None.

        Raises:
            InputError: If a hyperparameter, gradient or state cannot be used, or ranks that hold
                weights together were given other optimizers; nothing is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_step()
        for group in self.param_groups:
            pairs = zip(group["param_names"], group["params"], strict=True)
            ready = [(name, p) for name, p in pairs if p.grad is not None]
            self._muon([(n, p) for n, p in ready if n in self.layouts], group)
            for _, p in ((n, p) for n, p in ready if n not in self.layouts):
                self._adamw(p, group)
        return loss

    def _check_step(self) -> None:
        for group in self.param_groups:
            checked.hyperparameters(group)
        for name, p in self._named():
            if p.grad is None:
                continue
            if name in self.layouts:
                checked.weight(name, p.shape, self.layouts[name])
            checked.gradient(name, p, self.state.get(p, {}))
        if not self._agreed:
            checked.alike(self.param_groups, self.layouts, f"{self.arithmetic}, {self.backend}")
            self._agreed = True

    def orthogonalized(
        self, names: Sequence[str], updates: Sequence[Tensor]
    ) -> Sequence[Direction]:
        """What a step subtracts from named weights, but for the learning rate.

        Args:
            names: Weights in ``layouts``.
            updates: What momentum made of their gradients, one a name; local tensors.
        """
        weights = dict(self._named())
        if self._owners is None:
            trained = [name for name in weights if name in self.layouts]
            held = [holding(name, weights[name], self.layouts[name]) for name in trained]
            self._owners = dict(zip(trained, owners_together(held), strict=True))
        holdings = [holding(name, weights[name], self.layouts[name]) for name in names]
        owned = [self._owners[name] for name in names]
        return directions_together(updates, holdings, owned, self.arithmetic, self.backend)

    def _muon(self, named: list[tuple[str, Tensor]], group: dict[str, Any]) -> None:
        for some in _batched(named, _AT_ONCE[self.backend]):
            updates = [self._advanced(p, group["momentum"]) for _, p in some]
            found = self.orthogonalized([name for name, _ in some], updates)
            for (_, p), direction in zip(some, found, strict=True):
                local, decay = local_of(p), group["weight_decay"]
                apply_(local, direction, self.arithmetic, group["lr"], decay)

    def _advanced(self, p: Tensor, beta: float) -> Tensor:
        assert p.grad is not None
        state = self.state[p]
        if not state:
            wide = self.arithmetic.buffer_dtype == "float32" and p.dtype is not torch.float64
            dtype = torch.float32 if wide else p.dtype
            state.update(step=0, momentum_buffer=torch.zeros_like(p, dtype=dtype))
        state["step"] += 1
        gradient, buffer = aligned(p.grad.detach(), p), local_of(state["momentum_buffer"])
        return advance_momentum(gradient, buffer, self.arithmetic, beta, state["step"])

    def _adamw(self, p: Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        local, gradient = local_of(p), aligned(p.grad.detach(), p)
        average, square = local_of(state["exp_avg"]), local_of(state["exp_avg_sq"])
        average.lerp_(gradient, 1 - beta1)
        square.lerp_(gradient.square(), 1 - beta2)
        mean = average / (1 - beta1 ** state["step"])
        root = (square / (1 - beta2 ** state["step"])).sqrt()
        local.mul_(1 - group["adamw_lr"] * group["weight_decay"])
        local.addcdiv_(mean, root.add_(group["eps"]), value=-group["adamw_lr"])


def _indices(state_dict: dict[str, Any]) -> Iterator[list[int]]:
    return (group["params"] for group in state_dict["param_groups"])


def _batched(
    named: Sequence[tuple[str, Tensor]], at_once: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive weights whose updates may be held at once."""
    some: list[tuple[str, Tensor]] = []
    for name, p in named:
        if some and sum(q.numel() for _, q in some) + p.numel() > at_once:
            yield some
            some = []
        some.append((name, p))
    if some:
        yield some
