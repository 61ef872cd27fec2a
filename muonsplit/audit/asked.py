"""Paths and options to a question."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from muonsplit.audit.matched import match
from muonsplit.audit.question import Progress, Question, Told
from muonsplit.audit.state import State
from muonsplit.certificate.canonical import digest
from muonsplit.dialect import DEFAULT_DIALECT, dialect_named
from muonsplit.errors import EvidenceError, UsageError
from muonsplit.evidence.captured import Captured, is_capture, open_capture
from muonsplit.evidence.opened import opened, prefix_of, under
from muonsplit.evidence.saved import Saved
from muonsplit.models.load import build, resolve

_INPUTS = ("gradients", "momentum", "momentum_before")


def asked(
    before: Path,
    after: Path | None,
    model: str,
    dialect: str | None = None,
    *,
    recorded: Mapping[str, Path | None] | None = None,
    told: tuple[float | None, float | None, float | None] = (None, None, None),
    steps: int = 1,
    only: str = "*",
    trust_pickles: bool = False,
    state: Path | None = None,
    progress: Progress = lambda done, of, name: None,
) -> Question:
    """Opens what is to be audited.

    Args:
        before: The earlier checkpoint, or a capture.
        after: The later checkpoint; None with a capture.
        model: As :func:`muonsplit.models.load.resolve` takes it.
        dialect: Dialect to hold the run to; the default one by default.
        recorded: Folders of ``gradients`` and ``momentum``.
        told: Learning rate, weight decay and momentum coefficient, as far as they are known.
        steps: Optimizer steps between the checkpoints.
        only: Pattern of the weights that are asked about.
        trust_pickles: Whether DeepSpeed may load its pickled files.
        state: File to keep what is known in.
        progress: Told how far it is.

    Raises:
        MuonsplitError: If anything cannot be opened or does not belong together.
    """
    chosen = dialect_named(dialect or DEFAULT_DIALECT)
    spec = resolve(model)
    capture = _capture(before, after)
    if capture is not None:
        pair: tuple[Saved, Saved] = capture.part("before"), capture.part("after")
        inputs: dict[str, Saved] = {k: capture.part(k) for k in _INPUTS if k in capture.parts}
    else:
        pair = _opened(before, trust_pickles), _opened(_both(before, after), trust_pickles)
        given = {kind: path for kind, path in (recorded or {}).items() if path is not None}
        inputs = {kind: _opened(path, trust_pickles) for kind, path in given.items()}
    built = build(spec.config)
    wanted = [name for name, _ in built.named_parameters()]
    matched = match(spec.name, digest(spec.config), built, chosen, *pair, only)
    _refuse_far(matched.both, steps)
    read = {"before": before, "after": after, **(recorded or {})}
    files = {kind: _stamps(path) for kind, path in read.items() if path is not None}
    key = digest([files, spec.config, chosen.name, *told, steps, only])
    return Question(
        matched=matched,
        dialect=chosen,
        recorded={kind: under(s, prefix_of(s.entries, wanted)) for kind, s in inputs.items()},
        told=_told(capture, told, wanted),
        steps=steps,
        kind="capture" if capture else "checkpoints",
        state=State(state, key),
        progress=progress,
    )


def _opened(path: Path, trust_pickles: bool) -> Saved:
    return opened(path, trust_pickles=trust_pickles)


def _both(before: Path, after: Path | None) -> Path:
    if after is None:
        raise UsageError(
            f"{before} is no capture: a checkpoint alone shows no step.",
            "Give the checkpoint of the next step too.",
        )
    return after


def _capture(before: Path, after: Path | None) -> Captured | None:
    if not is_capture(before):
        return None
    if after is not None:
        raise UsageError(
            f"{before} is a capture, which holds both sides of a step.", f"Leave {after} out."
        )
    return open_capture(before)


def _told(
    capture: Captured | None,
    given: tuple[float | None, float | None, float | None],
    wanted: Sequence[str],
) -> Callable[[str], Told]:
    if capture is None:
        return lambda name: Told(*given)
    prefix = prefix_of(capture.weights, wanted)

    def of(name: str) -> Told:
        held = prefix + name
        settings = capture.settings(held) if held in capture.weights else {}
        known = (settings.get("lr"), settings.get("weight_decay"), settings.get("momentum"))
        return Told(*(g if g is not None else k for g, k in zip(given, known, strict=True)))

    return of


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Sizes and times of the files at a path: what was known of others is no answer."""
    found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in found]


def _refuse_far(both: tuple[Saved, Saved], steps: int) -> None:
    first, last = (saved.step for saved in both)
    if first is not None and last is not None and last - first != steps:
        raise EvidenceError(
            f"{both[0].path} is of step {first} and {both[1].path} of step {last}: they are "
            f"{last - first} steps apart, not {steps}.",
            f"Give consecutive ones, or --steps {last - first}.",
        )
