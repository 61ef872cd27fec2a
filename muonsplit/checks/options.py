"""Does every option do what it says, the split's own switch first?"""

from collections.abc import Mapping
from dataclasses import replace

from muonsplit.checks.case import Case
from muonsplit.checks.compare import judged, wrong
from muonsplit.checks.registry import Finding, Findings, SkipError, check
from muonsplit.checks.variants import unsplit
from muonsplit.errors import SubjectFaultError
from muonsplit.layout import Layout
from muonsplit.models.load import build
from muonsplit.observe import gradients
from muonsplit.subjects.drive import Outcome
from muonsplit.subjects.protocol import Hyper

# State space only: matrices enough for Muon, and not one attention head among them.
_HEADLESS = {
    "model_type": "mamba",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "state_size": 4,
    "time_step_rank": 4,
    "vocab_size": 16,
}
# Large enough that a step shows its decay, and no update hides it.
_START = 0.05


@check("recognition.nothing", "where no head is found at all, the subject says so")
def nothing(case: Case) -> Findings:
    """Builds the subject on a model without attention: it must raise.

    A feature that is on and finds nothing to do trains on as if it were off. Seen in public:
    Megatron logs it at debug level, and for MLA its `split_qkv` never applies (#5015).
    """
    if not case.described["recognises"]:
        raise SkipError("the subject is told where the heads are")
    if turned := case.described["off"].items() & case.described["given"].items():
        raise SkipError(f"the split is turned off: {'='.join(min(turned))}")
    model = build(_HEADLESS)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    headless = replace(case, config=_HEADLESS, shapes=shapes)
    try:
        headless.run([headless.gradients])
    except SubjectFaultError as fault:
        if not fault.raised:
            raise
        return
    said = "a model without attention was accepted without a word"
    yield Finding("", said, "an error that names what was looked for", "a step")


@check("recognition.misfit", "a layout that does not cover its weight is refused")
def misfit(case: Case) -> Findings:
    """Gives one weight the layout of a head less than it has: the subject must raise.

    Seen in public: rows that a list of sizes leaves out are frozen for ever (xtuner), or heads are
    cut by dividing what rows there are (DeepSpeed #8384 on a shard).
    """
    if case.described["recognises"]:
        raise SkipError("the subject finds the heads itself")
    for d in case.weights:
        if d.layout is not None and len(d.layout.segments) == 1 and d.layout.segments[0].heads > 1:
            (role, heads, width), *_ = d.layout.segments
            short = replace(d.layout, segments=(d.layout.segments[0]._replace(heads=heads - 1),))
            break
    else:
        raise SkipError("no weight of this model has a layout of equal heads")
    layouts: dict[str, Layout | None] = {**case.plan.layouts(), d.name: short}
    try:
        case.run([case.gradients], layouts=layouts)
    except SubjectFaultError as fault:
        if not fault.raised:
            raise
        return
    said = f"{short.rows} of {d.layout.rows} rows were laid out, and nothing was said"
    yield Finding(d.name, said, "an error", f"a step with {heads - 1} × {width} {role}")


@check("options.inert", "every option and hyperparameter changes something")
def inert(case: Case) -> Findings:
    """Two steps with another learning rate, momentum, decay, and value of each declared option.

    Every Muon weight must end elsewhere for a hyperparameter, some weight for an option. Seen in
    public: settings read from the config and passed on to nobody (VeOmni #1093, prime-rl #1754),
    "false" taken for true (Primus).
    """
    steps = [case.conditioned("options", i) for i in range(2)]
    start = gradients.draw(case.shapes, case.seed, "options", size=_START)
    base = case.run(steps, start)
    for name, hyper in _others(case).items():
        changed = case.run(steps, start, hyper)
        for d in case.weights:
            if d.name not in _moved(case, base, changed):
                said = f"another {name} changes nothing"
                yield Finding(d.name, said, f"{name} matters", f"{name} is not read")
    for name, values in case.described["options"].items():
        runs = [case.run(steps, start, options={name: value}) for value in values]
        if not _moved(case, *runs):
            said = f"{name}={values[0]} and {name}={values[1]} are the same in every bit"
            yield Finding("", said, f"{name} matters", f"{name} is not read")


def _others(case: Case) -> Mapping[str, Hyper]:
    if not case.knows_hyper:
        return {}
    given = case.hyper
    return {
        "learning rate": replace(given, lr=2 * given.lr),
        "momentum": replace(given, momentum=given.momentum / 2),
        "weight decay": replace(given, weight_decay=0.5),
    }


def _moved(case: Case, one: Outcome, other: Outcome) -> set[str]:
    """The Muon weights that two runs leave in different places."""
    pairs = {d.name: (one.after[-1][d.name], other.after[-1][d.name]) for d in case.weights}
    return {name for name, (a, b) in pairs.items() if not a.equal(b)}


@check("options.off", "with the split off, every weight is whole")
def off(case: Case) -> Findings:
    """Turns the split off and compares with the dialect's arithmetic on whole matrices.

    A switch that does not switch makes every comparison of with and without a comparison of the
    same with itself.
    """
    whole = unsplit(case)
    drawn = whole.conditioned("off")
    after = whole.run([drawn], options=case.described["off"]).after[0]
    yield from wrong(whole, judged(whole, drawn, after), "with the split off")
