"""Coefficient sets of the quintic X ← aX + b(XXᵀ)X + c(XXᵀ)²X, each with its source."""

from collections.abc import Mapping
from itertools import chain, cycle, islice, repeat

from muonsplit.dialect.arithmetic import Arithmetic
from muonsplit.errors import UsageError

Coefficients = tuple[float, float, float]

_JORDAN = (3.4445, -4.7750, 2.0315)

# Polar Express for 5 steps, as gram-newton-schulz 0.1.6 lists it before its safety factor.
_POLAR_EXPRESS_BARE = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)


def safer(coefficients: Coefficients, factor: float) -> Coefficients:
    """A step on X / factor: rounding may then push singular values up by that much.

    Source: Polar Express, arXiv:2505.16932, algorithm 1.
    """
    a, b, c = coefficients
    return a / factor, b / factor**3, c / factor**5


COEFFICIENTS: Mapping[str, tuple[Coefficients, ...]] = {
    # Keller Jordan, https://kellerjordan.github.io/posts/muon/
    "jordan": (_JORDAN,),
    # You Jiacheng, in KellerJordan/modded-nanogpt commit 0674386; "quintic" in
    # Emerging-Optimizers, "dion" in optax.
    "you": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Polar Express, arXiv:2505.16932, for 5 steps with a 1.02 safety factor folded in, as dion
    # commit 0a059a4, modded-nanogpt, muonium and optimuon ship it; the last step is bare.
    "polar-express-5": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    # The same paper's 5 steps with a 1.05 safety factor in every step: gram-newton-schulz 0.1.6.
    "polar-express-5-safe": tuple(safer(step, 1.05) for step in _POLAR_EXPRESS_BARE),
    # Eight steps with a 1.01 safety factor, four decimals: Emerging-Optimizers 0.3.0.
    "polar-express-8": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    # CANS, arXiv:2506.10935: Remez with adaptive intervals, as Emerging-Optimizers 0.3.0 lists it.
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    # thib-s/flash-newton-schulz, for inputs rescaled as in AOL (arXiv:2208.03160).
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
    # DeepSeek-V4: eight Jordan steps, then two that pin the singular values at 1.
    "deepseek-v4": (_JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2,
    # The classical cubic, 1.5X − 0.5XXᵀX: converges for any ‖X‖₂ < √3, slowly.
    "cubic": ((1.5, -0.5, 0.0),),
}


def schedule(arithmetic: Arithmetic) -> tuple[Coefficients, ...]:
    """The coefficients of every step; a set shorter than the steps goes on as ``past_end`` says.

    Raises:
        UsageError: If there is no coefficient set of that name.
    """
    if arithmetic.coefficients not in COEFFICIENTS:
        known = ", ".join(COEFFICIENTS)
        raise UsageError(f"There is no coefficient set {arithmetic.coefficients!r}.", known)
    steps = COEFFICIENTS[arithmetic.coefficients]
    endless = cycle(steps) if arithmetic.past_end == "cycle" else chain(steps, repeat(steps[-1]))
    return tuple(islice(endless, arithmetic.steps))
