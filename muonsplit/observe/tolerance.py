"""How far a legal update may be from the exact one: derived, with two stated constants.

Noise is followed through the iteration entry by entry (:mod:`muonsplit.observe.noise`,
:mod:`muonsplit.observe.gram_noise`). The squared error is then a sum of independent squares with
variances v, which exceeds

    Σv + 2·√(t·Σv²) + 2·t·max v

with probability e⁻ᵗ at most (Laurent and Massart, Annals of Statistics 28, 2000, lemma 1).

The norm is one number: its error is a common factor, which does not average out. It moves each
singular value by σ·F′(σ), F being all steps, and its largest value is allowed beside the noise. So
is the error of a where a Gram iteration holds aI as a matrix.

On directions below the noise floor the gains are large and the bound grows by itself.

docs/tolerances.md has every budget of the package in one table, with what was measured.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.newton_schulz import Coefficients, schedule
from muonsplit.newton_schulz.gram import segments
from muonsplit.observe.gram_noise import Order, take_run
from muonsplit.observe.noise import Noise, Roundings, energy, take_step

# Chosen: one false alarm in 10⁹ blocks.
TAIL = math.log(1e9)
# Assumed: roundings are not quite independent, those of a symmetric product come in pairs.
_DEPENDENT = 2.0
_DIGITS = 2.0**17


class Bounds(NamedTuple):
    """What rounding may do to one block's update.

    Attributes:
        rounding: ‖computed − exact‖ / ‖exact‖ that one block in 10⁹ exceeds.
        size: Likewise the error in the size of the update, ⟨U, O⟩ / ⟨O, O⟩. A size is one
            projection of all the noise, on the update itself, which has only its singular values in
            that basis; it is far sharper. What noise does to the second order, by the curvature
            of F, has one sign and is about the square of ``rounding``.
    """

    rounding: float
    size: float


class _Asked(NamedTuple):
    """What bounds depend on: equal ones are derived once.

    Attributes:
        shape: Rows and columns.
        arithmetic: With a norm factor of one.
        values: Normalised singular values to five digits, so that equal spectra are equal.
    """

    shape: tuple[int, int]
    arithmetic: Arithmetic
    values: tuple[float, ...]


# Derived already; the oldest are forgotten.
_known: dict[_Asked, Bounds] = {}
_MOST_KNOWN = 1 << 14


def bounds(asked: Sequence[tuple[Tensor, Arithmetic]]) -> list[Bounds]:
    """The bounds of many blocks, derived together: one takes nearly as long as a hundred.

    Args:
        asked: What is orthogonalised, each of shape ``[rows, cols]``, and by which arithmetic: its
            CPU dtype sets the roundoff, its coefficients the gains.
    """
    spectra = [_spectrum(*each) for each in asked]
    alike = dict[tuple[tuple[int, int], Arithmetic], list[_Asked]]()
    for each in dict.fromkeys(spectra):
        if each not in _known:
            alike.setdefault((each.shape, each.arithmetic), []).append(each)
    for group in alike.values():
        _known.update(zip(group, _derived(group), strict=True))
    answer = [_known[each] for each in spectra]
    for oldest in list(_known)[: max(0, len(_known) - _MOST_KNOWN)]:
        del _known[oldest]
    return answer


def rounding_bound(block: Tensor, arithmetic: Arithmetic) -> float:
    """The relative Frobenius error that rounding may cause in one block: see :class:`Bounds`."""
    return bounds([(block, arithmetic)])[0].rounding


def _spectrum(block: Tensor, arithmetic: Arithmetic) -> _Asked:
    S = torch.linalg.svdvals(block.double())
    mantissas, exponents = torch.frexp(S / S.square().sum().sqrt().clamp(min=1e-300))
    rounded = torch.ldexp((mantissas * _DIGITS).round() / _DIGITS, exponents)
    values = rounded / arithmetic.norm_factor
    shape = block.shape[0], block.shape[1]
    return _Asked(shape, replace(arithmetic, norm_factor=1.0), tuple(values.tolist()))


def _derived(alike: Sequence[_Asked]) -> list[Bounds]:
    shape, arithmetic, _ = alike[0]

    def derive(values: Tensor) -> tuple[Tensor, Tensor]:
        noises = _noises(values, shape, arithmetic)
        distances = [_distance(noise) for noise in noises]
        sizes = [_projection(n) + d**2 for n, d in zip(noises, distances, strict=True)]
        return torch.stack(distances).amax(), torch.stack(sizes).amax()

    both = torch.vmap(derive)(torch.tensor([each.values for each in alike], dtype=torch.float64))
    return [Bounds(*pair) for pair in zip(*(x.tolist() for x in both), strict=True)]


def _distance(noise: Noise) -> Tensor:
    shared = noise.shared.square().sum(1)
    total = noise.inside.sum() + noise.copies * noise.outside.sum() + shared.sum()
    squares = energy(noise.inside) + noise.copies * energy(noise.outside) + energy(shared)
    largest = torch.cat((noise.inside.flatten(), noise.outside, shared)).max()
    tail = total + 2 * (TAIL * squares).sqrt() + 2 * TAIL * largest
    return ((_DEPENDENT * tail).sqrt() + noise.common.norm()) / _size(noise)


def _projection(noise: Noise) -> Tensor:
    shares = noise.result / _size(noise)
    variance = noise.inside.diagonal().dot(shares.square()) + energy(noise.shared @ shares)
    random = (_DEPENDENT * 2 * TAIL * variance).sqrt()
    return (random + noise.common.dot(shares.abs())) / _size(noise)


def _size(noise: Noise) -> Tensor:
    return noise.result.norm().clamp(min=1e-300)


def _noises(S: Tensor, shape: tuple[int, int], arithmetic: Arithmetic) -> list[Noise]:
    """The noise of each road that an arithmetic may take with a block of a spectrum."""
    steps = schedule(arithmetic)
    # The fast form takes no step on the block itself either, it multiplies it by a Q.
    runs = [steps[i : i + 1] for i in range(len(steps))]
    standard = _propagate(S, shape, arithmetic, runs, gram=arithmetic.form == "fast")
    square = shape[0] == shape[1]
    if arithmetic.iteration == "standard" or (arithmetic.iteration == "gram" and square):
        return [standard]
    gram = _propagate(S, shape, arithmetic, segments(steps, arithmetic.restarts), gram=True)
    return [standard, gram] if arithmetic.iteration == "auto" else [gram]


def _propagate(
    S: Tensor,
    shape: tuple[int, int],
    arithmetic: Arithmetic,
    runs: Sequence[Sequence[Coefficients]],
    *,
    gram: bool,
) -> Noise:
    rows, cols = sorted(shape)
    unit = _roundoff(arithmetic.cpu_dtype)
    sums = _roundoff("float64" if arithmetic.cpu_dtype == "float64" else "float32")
    roundings = Roundings(unit, sums, rows, cols)
    outer = Roundings(_roundoff(arithmetic.pre_cast or arithmetic.cpu_dtype), sums, rows, cols)
    single = Roundings(sums, sums, rows, cols)
    # Momentum and its Nesterov step, four roundings; the cast and the division.
    entering = (4 * single.of(S) + outer.of(S) + roundings.of(S)) / (rows * cols)
    inside = entering.expand(rows, rows)
    # The norm's own rounding, those of the factor and ε, and its sum of squares.
    in_norm = 3 * (unit if arithmetic.norm_dtype == "compute" else sums)
    norm_error = in_norm + sums * (rows * cols / 3) ** 0.5
    noise = Noise(inside, inside[0], cols - rows, norm_error * S, S.new_zeros(0, rows), S)
    for run in runs:
        if gram:
            order = Order.of(arithmetic, shape[0] > shape[1])
            take_run(noise, run, order, roundings)
        else:
            take_step(noise, run[0], roundings, factored=arithmetic.form == "factored")
    # The result as it leaves, times its scale, times the learning rate, off the parameter.
    leaving = 2 * outer.of(noise.result) + 2 * single.of(noise.result)
    noise.add(leaving / (rows * cols), torch.zeros(()), S.new_zeros(0, rows))
    return noise


def _roundoff(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).eps / 2
