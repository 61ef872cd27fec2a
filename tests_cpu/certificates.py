"""Certificates made by hand: what a reader sees must not depend on what a subject does."""

from collections.abc import Sequence

from muonsplit.certificate.run import Certificate
from muonsplit.certificate.verdict import CheckResult, ModelResult, Spectrum, WeightResult
from muonsplit.checks import CHECKS, Finding
from muonsplit.dialect import Dialect, dialect_named

Stretches = tuple[tuple[tuple[int, int], ...], ...]

DIGEST = "0" * 64
QUERY = "model.layers.{}.self_attn.q_proj.weight"
OUTPUT = "model.layers.{}.self_attn.o_proj.weight"


def certificate(
    subject: str,
    models: Sequence[ModelResult],
    described: dict[str, object] | None = None,
    dialect: Dialect | None = None,
) -> Certificate:
    said = {
        "dialect": "deepspeed-0.19.8",
        "recognises": True,
        "models": ["llama"],
        "takes": ["model"],
        "distribution": "example",
        "version": "1.2.3",
        "digest": "0f" * 32,
    }
    return Certificate(
        subject=subject,
        described=said | (described or {}),
        dialect=dialect or dialect_named("deepspeed-0.19.8"),
        profile="ci",
        seed=7,
        isolated=True,
        world=1,
        checks=tuple(CHECKS),
        models=tuple(models),
    )


def equal(count: int, rows: int) -> Stretches:
    return tuple(((i * rows, (i + 1) * rows),) for i in range(count))


def weights(
    observed: str = "q 4×8", blocks: Stretches | None = None, diverged: str = ""
) -> tuple[WeightResult, ...]:
    found: list[WeightResult] = []
    for layer in (0, 1):
        q = (QUERY.format(layer), "LlamaAttention.q_proj", (32, 16), "head 4×8", "q 4×8")
        o = (OUTPUT.format(layer), "LlamaAttention.o_proj", (16, 32), "none", "whole")
        found.append(WeightResult(*q, observed, blocks or equal(4, 8), diverged))
        found.append(WeightResult(*o, "whole", (((0, 16),),), ""))
    return tuple(found)


def spectra(name: str = QUERY.format(0)) -> tuple[Spectrum, ...]:
    return tuple(
        Spectrum(name, i, 0.25 + i, 2.5, (0.8, 0.5, 0.33), (1.1, 0.97, 0.7)) for i in range(4)
    )


def conforming() -> Certificate:
    results = tuple(CheckResult(id, "passed", judged=4) for id in CHECKS)
    floor = {"direction": 1e-5, "size": 2e-6}
    return certificate(
        "example:good",
        [ModelResult("llama", DIGEST, 64, 32, weights(), spectra(), floor, results)],
    )


def violating() -> Certificate:
    """The first boundary off by one; one check that cannot tell, and one that does not apply."""
    numbers = {"off if as planned": 0.0842, "off if whole matrix": 0.769}
    observed = "4 blocks of 9, 7, 8, 8"
    said = f"cut into {observed}; planned q 4×8"
    findings = tuple(
        Finding(QUERY.format(layer), said, "q 4×8", observed, numbers) for layer in (0, 1)
    )
    of_their_own = {
        "cut.rows": CheckResult("cut.rows", "failed", "", findings, 4),
        "independence.heads": CheckResult(
            "independence.heads", "skipped", "nothing is left", (), 2
        ),
        "arithmetic.bias": CheckResult(
            "arithmetic.bias", "undecided", "no coefficient shows", (), 2
        ),
    }
    results = tuple(of_their_own.get(id, CheckResult(id, "passed", judged=4)) for id in CHECKS)
    blocks = (((0, 9),), ((9, 16),), ((16, 24),), ((24, 32),))
    seen = weights(observed, blocks, "cut.rows")
    return certificate(
        "example:off", [ModelResult("llama", DIGEST, 64, 32, seen, spectra(), {}, results)]
    )


# Each acts in some format: a terminal, HTML, XML, Markdown, rich's markup, the reading order.
ACTS = (
    "\x1b[31mred\x1b[0m",
    "\x9b2J",
    "<script>document.title='ran'</script>",
    "<img src=x onerror=\"document.title='ran'\">",
    "\"><svg onload='1'>",
    "]]>&amp;&#x1b;",
    "[red]markup[/red]",
    "[link](javascript:1) ![image](http://example.invalid/x.png)",
    "`code` **bold** | cell | \\| cell",
    "{{ 7 * 7 }}{% raw %}",
    "NUL\x00, form feed\x0c, bell\x07, lone \ud800, \ufffe",
    "\u202eoverridden\u202c and \u2066isolated\u2069",
    "first\r\nsecond\nthird",
    "--only x; $(touch ran) 'quoted'",
)
HOSTILE = " ".join(ACTS)
LONG = "x" * 300_000


def hostile() -> Certificate:
    """Everything that a subject can say is out to act on its reader."""
    finding = Finding(
        HOSTILE,
        HOSTILE,
        HOSTILE,
        HOSTILE,
        {HOSTILE: float("inf"), "n": float("nan")},
        HOSTILE + LONG,
    )
    endless = Finding("", LONG)
    ids = list(CHECKS)
    results = (
        CheckResult(ids[0], "failed", "", (finding, endless), 1),
        CheckResult(ids[1], "undecided", HOSTILE),
        CheckResult(ids[2], "skipped", HOSTILE),
        CheckResult(HOSTILE, "failed", HOSTILE, (finding,), 1),
    )
    weight = WeightResult(
        HOSTILE, HOSTILE, (8, 4), HOSTILE, HOSTILE, HOSTILE, (((0, 8),),), HOSTILE
    )
    model = ModelResult(
        HOSTILE, DIGEST, 1, 1, (weight,), spectra(HOSTILE), {HOSTILE: 1e-3}, results
    )
    plain = dialect_named("deepspeed-0.19.8")
    dialect = Dialect(HOSTILE, plain.split, plain.arithmetic, dict.fromkeys(plain.sources, HOSTILE))
    said = dict.fromkeys(("dialect", "distribution", "version", "digest"), HOSTILE)
    return certificate(HOSTILE, [model], said, dialect)  # pyright: ignore[reportArgumentType]


def first_asked(found: Certificate) -> CheckResult:
    """The first check of the first model that was not skipped."""
    return next(r for r in found.models[0].results if r.status != "skipped")
