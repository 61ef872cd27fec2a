"""What an audit comes to: plain values, as they stand on its certificate."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from muonsplit.certificate.verdict import Verdict
from muonsplit.dialect import Dialect

Outcome = Literal["as planned", "otherwise", "undecided", "unread"]


def digits(number: float) -> float:
    """Four significant digits: what is beyond them depends on the machine."""
    return float(f"{number:.4g}")


@dataclass(frozen=True, slots=True)
class Tried:
    """One way a weight may have been cut and scaled, held against what it became.

    Largest singular values are given in units of the size that a block has under this hypothesis,
    so that the iteration could have given ``low`` to ``high``.

    Attributes:
        cut: What the hypothesis is called: ``heads``, ``whole matrix`` and so on.
        layout: The layout as it is written, or ``whole``.
        scale: The scale rule.
        blocks: How many blocks it has.
        least: The smallest of the blocks' largest singular values; of blocks that moved at all.
        most: The largest.
        low: The least the iteration can give, less what rounding of the checkpoints hides.
        high: The most, with that rounding.
        off: How far outside, as a factor; 1 if inside.
        against: Why it is not the cut although it fits; empty if it does not fit, or nothing is.
    """

    cut: str
    layout: str
    scale: str
    blocks: int
    least: float
    most: float
    low: float
    high: float
    off: float
    against: str

    @property
    def fits(self) -> bool:
        """Whether the sizes of its blocks are possible."""
        return self.off == 1.0


@dataclass(frozen=True, slots=True)
class Explained:
    """How well a hypothesis explains a step whose input was recorded.

    Attributes:
        cut: What the hypothesis is called.
        input: What was orthogonalised: gradient, momentum, or a sum of both.
        coefficients: The coefficient set and its number of steps.
        off: Error of direction, ‖U − s·O‖ / ‖s·O‖.
        size: How much larger the update is than the hypothesis says.
    """

    cut: str
    input: str
    coefficients: str
    off: float
    size: float


@dataclass(frozen=True, slots=True)
class Picture:
    """Part of the Gram matrix ΔW·ΔWᵀ, each row over its norm: absolute cosines between rows.

    Attributes:
        rows: The rows that are shown, as stretches from start to stop; columns if ``axis`` is 1.
        axis: The axis of the rows.
        cosines: For each shown row its absolute cosine with each shown row, as one byte from 0
            to 255; row after row, in base64.
        boundaries: Where, among the shown rows, planned blocks begin.
        spectrum: Singular values of a planned block, over the size it is given; at most 64.
        whole: Those of the whole matrix, likewise.
    """

    rows: tuple[tuple[int, int], ...]
    axis: int
    cosines: str
    boundaries: tuple[int, ...]
    spectrum: tuple[float, ...]
    whole: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class AuditedWeight:
    """What became of one Muon weight of a run.

    Attributes:
        weight: Parameter name.
        leaf: Owner's class and leaf, as ``Owner.leaf``.
        shape: Its shape.
        planned: The planned cut.
        observed: The observed cut; empty if it is undecided.
        outcome: Whether that is as planned.
        reason: Why it is undecided or unread, or what parts it from the plan.
        margin: How far the hypothesis that comes next is from possible, as a factor; 1 if it is
            possible, 0 if nothing was decided.
        sigma: By how many standard errors, where that one is possible by its sizes and was ruled
            out by how rows overlap; else 0.
        next: That hypothesis.
        scale: The scale rules that the observed cut fits under, which the width of the band cannot
            tell apart; empty if none was decided.
        tried: Every hypothesis.
        explained: The best hypotheses on the recorded input, the best first; none without input.
        picture: For the reader's eye; only of some weights.
    """

    weight: str
    leaf: str
    shape: tuple[int, ...]
    planned: str
    observed: str
    outcome: Outcome
    reason: str
    margin: float
    sigma: float
    next: str
    scale: str
    tried: tuple[Tried, ...]
    explained: tuple[Explained, ...]
    picture: Picture | None


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run was taken to be.

    Attributes:
        steps: Optimizer steps between the two.
        lr: Interval of the learning rate, given or fitted.
        lr_given: Whether it was given.
        decay: Weight decay times learning rate that was taken off.
        decay_given: Whether it was given.
        scale: Scale rules that explain most weights.
        dtype: Coarsest dtype of the checkpoints.
    """

    steps: int
    lr: tuple[float, float]
    lr_given: bool
    decay: float
    decay_given: bool
    scale: tuple[str, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an audit rests on.

    Attributes:
        kind: What it was: ``checkpoints`` or ``capture``.
        before: SHA-256 of all that was read of the earlier one.
        after: SHA-256 of all that was read of the later one.
        inputs: The recorded inputs: ``gradients``, ``momentum``.
        unknown: Tensors of the checkpoint that are no parameters of the model.
        missing: Muon weights of the model that the checkpoint lacks.
        asked: Pattern of the names of the weights that were asked about.
        muon: Muon weights of the model, asked about or not.
    """

    kind: str
    before: str
    after: str
    inputs: tuple[str, ...]
    unknown: int
    missing: tuple[str, ...]
    asked: str = "*"
    muon: int = 0


@dataclass(frozen=True, slots=True)
class Audit:
    """What a run was found to do.

    Attributes:
        model: Name of the model.
        config: SHA-256 of its config in canonical form.
        dialect: The dialect it was held to.
        evidence: What it rests on.
        settings: What the run was taken to be.
        weights: One for each Muon weight, in model order.
        findings: What is wrong with the whole of it.
    """

    model: str
    config: str
    dialect: Dialect
    evidence: Evidence
    settings: Settings
    weights: tuple[AuditedWeight, ...]
    findings: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """Violates if a weight does; conforms only if every weight is as planned."""
        outcomes = Counter(weight.outcome for weight in self.weights)
        if outcomes["otherwise"] or self.findings:
            return Verdict.VIOLATES
        decided = outcomes["as planned"] == len(self.weights) > 0
        return Verdict.CONFORMS if decided else Verdict.INCONCLUSIVE
