"""Does the subject answer, and always the same? Without that nothing else means anything."""

import torch
from torch import Tensor

from muonsplit.checks.case import Case
from muonsplit.checks.registry import Findings, UndecidedError, check


@check(
    "subject.answers", "the subject takes a step and leaves finite parameters of the same shapes"
)
def answers(case: Case) -> Findings:
    """One step from zero state with an ordinary gradient.

    Fails if the subject raises, hangs, ends its process, drops or reshapes a parameter, or leaves
    NaN or infinity behind. Nothing else can be judged then.
    """
    _ = case.base
    yield from ()


@check("subject.repeatable", "the same step twice gives the same bits")
def repeatable(case: Case) -> Findings:
    """Two fresh subjects take the same step; every bit of every parameter is compared.

    Undecided if they differ: the observations below compare bits, and rounding that is drawn at
    random (as HeavyBall's) would look like rows that move together.
    """
    again = case.run([case.gradients]).after[0]
    base = case.base.after[0]
    differing = [n for n in base if not torch.equal(_bits(again[n]), _bits(base[n]))]
    if differing:
        raise UndecidedError(
            f"two identical steps differ in {len(differing)} parameters, first in {differing[0]}"
        )
    yield from ()


@check("model.miniature", "the miniature is decided as the full-size model is")
def miniature(case: Case) -> Findings:
    """Compares, kind by kind, what the plans of both split and keep whole.

    Undecided if they differ: what is observed on the miniature would say nothing of the model.
    """
    small, full = (
        {(d.owner, d.leaf, d.kind, d.layout is None, len(d.shape)) for d in p.decisions}
        for p in (case.asked, case.full)
    )
    if small != full:
        one = sorted(small ^ full)[0]
        raise UndecidedError(f"the miniature decides otherwise than the model on {one[0]}.{one[1]}")
    yield from ()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)
