"""What there is, and what each of it means."""

from contextlib import suppress
from dataclasses import asdict

from muonsplit.checks import CHECKS
from muonsplit.dialect import DIALECTS, Dialect, dialect_named
from muonsplit.errors import UsageError
from muonsplit.faulty import CHEATS, FAULTS, LEGAL
from muonsplit.models.load import golden_models
from muonsplit.report.tables import Table, table
from muonsplit.subjects.connect import ADAPTERS


def explain(id: str) -> str:
    """The text of a check, fault, cheat, legal variant or dialect.

    Raises:
        UsageError: If there is none of that id.
    """
    if id in CHECKS:
        check = CHECKS[id]
        planted = [f"faulty:{f.name} — {f.summary}" for f in FAULTS.values() if f.check == id]
        caught = "\n".join(["Catches first:", *planted]) if planted else ""
        return f"{id}: {check.title}\n\n{check.explain}\n\n{caught}".rstrip()
    if id in FAULTS:
        fault = FAULTS[id]
        caught = f"Caught by: {fault.check}, on {fault.place}"
        return f"{id}: {fault.summary}\nOrigin: {fault.origin}\n{caught}"
    if id in CHEATS:
        return f"{id}: {CHEATS[id].summary}\nA cheat: it must not conform."
    if id in LEGAL:
        return (
            f"{id}: {LEGAL[id].summary}\nA legal variant of {LEGAL[id].dialect}: it must conform."
        )
    with suppress(UsageError):
        return _dialect(dialect_named(id))
    raise UsageError(
        f"There is nothing called {id!r} to explain.",
        "Use an id of muonsplit list checks or dialects, or a fault of muonsplit faults.",
    )


def listing(what: str) -> Table:
    """The table of checks, dialects, models or subjects."""
    if what == "checks":
        return table(
            "checks", ("id", "holds if it passes"), [(c.id, c.title) for c in CHECKS.values()]
        )
    if what == "dialects":
        rows = [(d.name, _block(d), d.arithmetic.scale, _form(d)) for d in DIALECTS.values()]
        return table("dialects", ("name", "one block", "scale", "iteration"), rows)
    if what == "models":
        known = golden_models().items()
        rows = [(name, m["model"], m["status"], m["source"]) for name, m in known]
        return table("models", ("name", "model", "status", "source"), rows)
    forms = {
        "builtin": "builtin:reference|fast",
        "faulty": "faulty:NAME",
        "deepspeed": "deepspeed[:stage=0…3,…]",
        "muon-optimizer": "muon-optimizer",
    }
    rows = [
        (forms.get(name, f"{name}[:option=value,…]"), package)
        for name, (_, package) in ADAPTERS.items()
    ]
    rows += [("package.module:factory", "yours"), ("file:path.py:factory", "yours")]
    return table("subjects", ("subject", "from"), rows)


def _block(dialect: Dialect) -> str:
    split = dialect.split
    if split.heads_per_block is None:
        return "the whole weight"
    heads = "a head" if split.heads_per_block == 1 else f"{split.heads_per_block} heads"
    return heads if split.mla_key_value == "joint" else f"{heads}, MLA's K and V apart"


def _form(dialect: Dialect) -> str:
    a = dialect.arithmetic
    iteration = f"{a.coefficients} ×{a.steps}, {a.iteration} {a.form}"
    return f"{iteration}, {a.compute_dtype} ({a.cpu_dtype} on a CPU)"


def _dialect(dialect: Dialect) -> str:
    """Its fields, those from one source together."""
    values = asdict(dialect.split) | asdict(dialect.arithmetic)
    by_source: dict[str, list[str]] = {}
    for name, value in values.items():
        by_source.setdefault(dialect.sources[name], []).append(f"    {name} = {value!r}")
    parts = ["\n".join([f"  from {source}:", *lines]) for source, lines in by_source.items()]
    return "\n".join([dialect.name, *parts])
