"""What rounding adds in a Gram iteration, which forms the block itself once a run only.

Noise of R and Q is followed as the covariance of the two, entry by entry in the basis of the
singular vectors, in the order in which the products are taken: RZ and ZR are equal, but pass noise
on differently. It reaches X = QX as noise of Q times σⱼ.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonsplit.dialect import Arithmetic
from muonsplit.newton_schulz import Coefficients
from muonsplit.newton_schulz.products import PRODUCTS
from muonsplit.observe.noise import Noise, Roundings, shifts


class Order(NamedTuple):
    """On which side Gram matrices are multiplied, for blocks that are multiplied from the left.

    Attributes:
        r_first: RZ rather than ZR.
        last_first: (RZ)Z rather than Z(RZ).
        q_first: QZ rather than ZQ.
        identity: Whether aI is a matrix of the dtype, so that a is rounded.
    """

    r_first: bool
    last_first: bool
    q_first: bool
    identity: bool

    @classmethod
    def of(cls, arithmetic: Arithmetic, tall: bool) -> "Order":
        """The order under an arithmetic.

        Args:
            arithmetic: Its form and what it does with tall blocks decide.
            tall: Whether the block has more rows than columns.
        """
        fast = arithmetic.form == "fast"
        products = PRODUCTS["addmm_diagonal" if fast else arithmetic.form]
        right = tall and (arithmetic.tall == "right" or fast)
        flipped = tall and arithmetic.tall == "transpose"
        side = "right" if right else "flipped" if flipped else "left"
        q_first = side in products.q_first and not fast
        # A product from the right is one from the left of transposes, in the other order.
        return cls(products.r_first != right, right, q_first != right, products.identity)


def take_run(noise: Noise, run: Sequence[Coefficients], order: Order, roundings: Roundings) -> None:
    """The steps between two restarts.

    Args:
        noise: Updated in place.
        run: Their coefficients.
        order: On which side matrices are multiplied.
        roundings: What they add.
    """
    S, rows, cols = noise.result, roundings.rows, roundings.cols
    pair = _Pair(S, roundings)
    for i, coefficients in enumerate(run):
        pair.step(coefficients, order, roundings, first=i == 0)
        noise.pass_on(coefficients)
    everywhere = roundings.product(pair.Q, S, rows) / (rows * cols)
    noise.add(everywhere, pair.QQ * S.square().unsqueeze(0), pair.Q_shared * S)
    if order.identity and run:
        a, b, c = run[0]
        first = a + b * S.square() + c * S**4
        noise.common = noise.common + abs(roundings.error(a)) * (noise.result / first).abs()


class _Gains(NamedTuple):
    """By entry, what multiplies noise of R and Z in R, and noise of R, Q and Z in Q."""

    r_r: Tensor
    r_z: Tensor
    q_r: Tensor
    q_q: Tensor
    q_z: Tensor

    def of_eigenvalues(self) -> "_Gains":
        """The gains of the diagonal."""
        return _Gains(*(gain.diagonal() for gain in self))


class _Pair:
    """R and Q of a run: eigenvalues, covariances of their noise by entry, and what is shared."""

    def __init__(self, S: Tensor, roundings: Roundings) -> None:
        self.R, self.Q = S.square(), torch.ones_like(S)
        rows = roundings.rows
        self.RR = (roundings.gram(S) / rows**2).expand(rows, rows)
        self.RQ, self.QQ = torch.zeros_like(self.RR), torch.zeros_like(self.RR)
        self.R_shared = roundings.shift(self.R).expand(1, rows)
        self.Q_shared = torch.zeros_like(self.R_shared)

    def step(
        self, coefficients: Coefficients, order: Order, roundings: Roundings, *, first: bool
    ) -> None:
        """Z = bR + cR²; Q ← aQ + ZQ; T = aR + ZR; R ← aT + ZT."""
        (a, b, c), R, Q = coefficients, self.R, self.Q
        Z = b * R + c * R**2
        s = a + Z
        T = R * s
        z_r = b + c * (R.unsqueeze(0) + R.unsqueeze(1))
        q_q, q_z = _sides(s, Q, order.q_first)
        t_r, t_z = _sides(s, R, order.r_first)
        r_t, r_z = _sides(s, T, order.last_first)
        gains = _Gains(r_t * (t_r + t_z * z_r) + r_z * z_r, r_t * t_z + r_z, q_z * z_r, q_q, q_z)
        in_r = r_t**2 * roundings.sum(R, a, Z, R) + roundings.sum(T, a, Z, T)
        in_q = roundings.of(s) if first else roundings.sum(Q, a, Z, Q)
        in_z = roundings.square(R, coefficients)
        self._pass_on(gains, in_z, in_q, in_r, roundings.rows**2)
        t_moved = roundings.shift(a * R, Z * R, T) * r_t.diagonal()
        r_moved = roundings.shift(a * T, Z * T, T * s).expand_as(s)
        q_moved = roundings.alike(s) if first else roundings.shift(a * Q, Z * Q, Q * s)
        z_moved = torch.stack(shifts(roundings, R, coefficients, factored=False))
        self._move(gains.of_eigenvalues(), z_moved, (t_moved, r_moved), q_moved.expand_as(s))
        self.R, self.Q = T * s, Q * s

    def _pass_on(
        self, gains: _Gains, in_z: Tensor, in_q: Tensor, in_r: Tensor, entries: int
    ) -> None:
        """Covariances after the step, with the energies it adds over all entries."""
        r_r, r_z, q_r, q_q, q_z = gains
        RR, RQ, QQ = self.RR, self.RQ, self.QQ
        self.RR = r_r**2 * RR + (r_z**2 * in_z + in_r) / entries
        self.RQ = r_r * (q_r * RR + q_q * RQ) + r_z * q_z * in_z / entries
        known = q_r**2 * RR + 2 * q_r * q_q * RQ + q_q**2 * QQ
        self.QQ = known + (q_z**2 * in_z + in_q) / entries

    def _move(
        self, gains: _Gains, z_moved: Tensor, r_moved: Sequence[Tensor], q_moved: Tensor
    ) -> None:
        """What moves eigenvalues together after the step, with what it adds."""
        none = torch.zeros_like(q_moved)
        R, Q = self.R_shared, self.Q_shared
        self.R_shared = torch.cat(
            (R * gains.r_r, z_moved * gains.r_z, torch.stack((*r_moved, none)))
        )
        self.Q_shared = torch.cat(
            (
                R * gains.q_r + Q * gains.q_q,
                z_moved * gains.q_z,
                torch.stack((none, none, q_moved)),
            )
        )


def _sides(s: Tensor, M: Tensor, m_first: bool) -> tuple[Tensor, Tensor]:
    """For aM + ZM or aM + MZ with s = a + Z: what multiplies M's noise and Z's, by entry."""
    one, other = (s.unsqueeze(0), M.unsqueeze(1)) if m_first else (s.unsqueeze(1), M.unsqueeze(0))
    shape = (len(s), len(s))
    return one.expand(shape), other.expand(shape)
