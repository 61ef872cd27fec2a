"""The command line. ``--help`` imports neither torch nor anything that does."""

import json
import signal
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

if TYPE_CHECKING:
    from muonsplit.certificate.run import Progress
    from muonsplit.report.tables import Table

_FORMATS = click.Choice(["table", "json", "markdown"])
_format = click.option("--format", "form", type=_FORMATS, default="table", help="How to print.")
_dialect = click.option(
    "--dialect",
    help="Dialect, NAME:heads_per_block=N or NAME+per-head; see `muonsplit list dialects`.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="muonsplit")
def cli() -> None:
    """Is each attention head really orthogonalised on its own?

    Exit codes: 0 conforms, 1 violates, 2 inconclusive, 64 and above for usage and harness errors.
    """


@cli.command("plan")
@click.argument("model")
@_dialect
@click.option("--arbiter", type=click.Choice(["views"]), help="Settles what the rules leave open.")
@click.option("--export", "framework", metavar="FRAMEWORK", help="Print it in a framework's form.")
@_format
def plan_command(
    model: str,
    dialect: str | None,
    arbiter: Literal["views"] | None,
    framework: str | None,
    form: str,
) -> None:
    """What is split, into what, why, and what not.

    MODEL is a golden name, a config.json or its directory, or transformers:MODEL_TYPE. Without
    --dialect the rules are those of deepspeed-0.19.8. --export prints JSON.
    """
    from muonsplit.dialect import DEFAULT_DIALECT, dialect_named
    from muonsplit.geometry.export import export
    from muonsplit.models.load import build, resolve
    from muonsplit.recognition import planned
    from muonsplit.report.tables import plan_summary, plan_tables

    chosen = dialect_named(dialect or DEFAULT_DIALECT)
    spec = resolve(model)
    made = planned(build(spec.config), chosen, arbiter)
    if framework is not None:
        made.raise_if_nothing()
        click.echo(json.dumps(export(made, framework), ensure_ascii=False, indent=1))
    elif form == "json":
        click.echo(json.dumps({"model": spec.name, **made.to_json()}, ensure_ascii=False, indent=1))
    else:
        _print(plan_tables(spec.name, made), form)
        click.echo(plan_summary(made))
    if chosen.per_head:
        made.raise_if_nothing()
        if missed := made.missed():
            listed = "\n  ".join(missed)
            click.echo(f"warning: attention weights that stay whole:\n  {listed}", err=True)


@cli.command("truth")
@click.argument("model")
@_dialect
@_format
@click.pass_context
def truth_command(context: click.Context, model: str, dialect: str | None, form: str) -> None:
    """What the model's own computation says, beside the plan; exits 1 where they differ.

    The model is built at full size without memory and its forward pass followed row by row.
    """
    from muonsplit.dialect import DEFAULT_DIALECT, dialect_named
    from muonsplit.geometry import plan
    from muonsplit.models.load import build, resolve
    from muonsplit.recognition import judge
    from muonsplit.report.recognition import truth_json, truth_summary, truth_tables
    from muonsplit.truth.views import views

    spec = resolve(model)
    built = build(spec.config)
    made = plan(built, dialect_named(dialect or DEFAULT_DIALECT))
    judged = list(judge(made, views(built)))
    if form == "json":
        click.echo(json.dumps(truth_json(spec.name, judged), ensure_ascii=False, indent=1))
    else:
        _print(truth_tables(spec.name, judged), form)
        click.echo(truth_summary(judged))
    if any(j.differs for j in judged):
        context.exit(1)
    context.exit(0 if any(j.outcome == "right" for j in judged) else 2)


@cli.command("sweep")
@click.argument("types", nargs=-1)
@click.option("--report", type=click.Path(path_type=Path), default="sweep", show_default=True)
@click.option("--processes", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--fresh", is_flag=True, help="Make every row anew.")
@click.pass_context
def sweep_command(
    context: click.Context, types: tuple[str, ...], report: Path, processes: int, fresh: bool
) -> None:
    """Plan against truth on every architecture that transformers can build.

    TYPES are model types; all by default. Rows that stand in --report are not made again. Writes
    sweep.json and sweep.md there and exits 1 if anything is recognised wrongly.
    """
    from muonsplit.recognition.sweep import architectures, sweep
    from muonsplit.report.recognition import sweep_summary, write_sweep

    wanted = architectures(types)
    if not wanted:
        raise click.UsageError(f"transformers has no language model of type {', '.join(types)}.")
    _make(report)
    with _counted() as progress:
        rows = sweep(wanted, report / "rows", processes, fresh, progress)
    for path in write_sweep(rows, report):
        click.echo(f"Written: {path}", err=True)
    lines, wrong = sweep_summary(rows)
    click.echo("\n".join(lines))
    context.exit(1 if wrong else 0)


@cli.command("certify")
@click.argument("subject", default="builtin:reference")
@click.option("--model", "models", multiple=True, help="Model to certify on; may be repeated.")
@_dialect
@click.option("--seed", default=0, show_default=True, help="Root of every random draw.")
@click.option("--only", multiple=True, metavar="ID", help="Run this check only; may be repeated.")
@click.option("--report", type=click.Path(path_type=Path), help="Write certificate.json there.")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds a run may take.")
@click.option("--in-process", is_flag=True, help="Without a process of its own, to debug.")
@_format
@click.pass_context
def certify_command(
    context: click.Context,
    subject: str,
    models: tuple[str, ...],
    dialect: str | None,
    seed: int,
    only: tuple[str, ...],
    report: Path | None,
    timeout: float,
    in_process: bool,
    form: str,
) -> None:
    """Whether SUBJECT does per-head Muon, weight by weight.

    SUBJECT is builtin:reference, torch, deepspeed:stage=1 and the like, package.module:factory or
    file:path.py:factory. Without --dialect it is held to the one it declares, asked per head.
    """
    from muonsplit.certificate.run import Question, certify
    from muonsplit.certificate.statement import statement, write
    from muonsplit.report.tables import certificate_tables, notes
    from muonsplit.subjects.process import InProcess, Worker

    if not 0 < timeout < float("inf"):
        raise click.UsageError(f"--timeout must be a positive number of seconds, got {timeout}.")
    _make(report)
    _one_thread()
    with _progress() as progress:
        question = Question(models=models, dialect=dialect, seed=seed, only=only, progress=progress)
        with InProcess(subject) if in_process else Worker(subject, timeout) as driver:
            certificate = certify(driver, question)
    if form == "json":
        click.echo(json.dumps(statement(certificate), ensure_ascii=False, indent=1))
    else:
        _print(certificate_tables(certificate), form)
        for note in notes(certificate):
            click.echo(note)
    if report is not None:
        click.echo(f"Written: {write(certificate, report)}", err=True)
    context.exit(certificate.verdict.value)


@cli.command("faults")
@_format
@click.pass_context
def faults_command(context: click.Context, form: str) -> None:
    """Runs the corpus of faulty subjects: is each caught by its own check?"""
    from muonsplit.faulty.trial import summary, trials
    from muonsplit.report.tables import table

    _one_thread()
    with _progress() as progress:
        tried = list(trials(progress))
    if form == "json":
        rows = [{**t.fault_json(), "first": t.first, "caught": t.caught} for t in tried]
        click.echo(json.dumps(rows, ensure_ascii=False, indent=1))
    else:
        columns = (
            "fault",
            "on",
            "named check",
            "first to fail",
            "caught",
            "origin",
            "what is wrong",
        )
        cells = [
            (f.name, f.model, f.check, t.first, "yes" if t.caught else "NO", f.origin, f.summary)
            for t in tried
            for f in [t.fault]
        ]
        _print([table("faulty subjects", columns, cells)], form)
        click.echo("\n".join(summary(tried)))
    context.exit(0 if all(t.caught for t in tried) else 1)


@cli.group("golden")
def golden_group() -> None:
    """Goldens: what was reviewed, and the step that reviews a change."""


_names = click.argument("names", nargs=-1)


@golden_group.command("check")
@_names
@click.pass_context
def golden_check(context: click.Context, names: tuple[str, ...]) -> None:
    """Computes goldens anew; what differs is written beside the old and fails."""
    from muonsplit import goldens

    problems = goldens.check(names)
    for problem in problems:
        click.echo(problem)
    if problems:
        click.echo(
            "Look at them with 'muonsplit golden diff', then 'muonsplit golden accept NAME'."
        )
    else:
        click.echo(f"{len(names or goldens.goldens())} goldens agree.")
    context.exit(1 if problems else 0)


@golden_group.command("diff")
@_names
def golden_diff(names: tuple[str, ...]) -> None:
    """Shows what the values that wait for review would change."""
    from muonsplit import goldens

    lines = goldens.diff(names)
    click.echo("\n".join(lines) or "Nothing waits for review.")


@golden_group.command("accept")
@click.argument("names", nargs=-1, required=True)
def golden_accept(names: tuple[str, ...]) -> None:
    """Puts reviewed values in place of the old."""
    from muonsplit import goldens

    for name in goldens.accept(names):
        click.echo(f"{name} accepted.")


@cli.command("explain")
@click.argument("id")
def explain_command(id: str) -> None:
    """What a check does, a fault is, or a dialect chooses, and where that comes from."""
    from muonsplit.report.explain import explain

    click.echo(explain(id))


@cli.command("list")
@click.argument("what", type=click.Choice(["checks", "dialects", "models", "subjects"]))
@_format
def list_command(what: str, form: str) -> None:
    """What there is: checks, dialects, models or subjects."""
    from muonsplit.report.explain import listing

    found = listing(what)
    if form == "json":
        rows = [dict(zip(found.columns, row, strict=True)) for row in found.rows]
        click.echo(json.dumps(rows, ensure_ascii=False, indent=1))
    else:
        _print([found], form)


def _print(tables: "list[Table]", form: str) -> None:
    if form == "markdown":
        from muonsplit.report.markdown import render

        click.echo(render(tables))
    else:
        from muonsplit.report.terminal import show

        show(tables)


def _make(directory: Path | None) -> None:
    """Makes the folder of a report before any work is done for it."""
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(
            f"--report: no folder can be made at {directory}: {error}."
        ) from None


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@contextmanager
def _progress() -> "Generator[Progress]":
    """Says on a terminal what is being done; says nothing in a log."""
    from muonsplit.report.terminal import console

    out = console(stderr=True)
    if not out.is_terminal:
        yield lambda model, check: None
        return
    with out.status("starting the subject") as status:
        yield lambda model, check: status.update(f"{model}: {check}")


@contextmanager
def _counted() -> "Generator[Callable[[int, int, str], None]]":
    """A bar on a terminal, a line for every fiftieth in a log."""
    from rich.progress import Progress as Bar

    from muonsplit.report.terminal import console

    out = console(stderr=True)
    with Bar(console=out, disable=not out.is_terminal) as bar:
        task = bar.add_task("sweep", total=None)

        def told(done: int, of: int, name: str) -> None:
            bar.update(task, completed=done, total=of, description=name)
            if not out.is_terminal and (done % 50 == 0 or done == of):
                click.echo(f"{done} of {of}, last {name}", err=True)

        yield told


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; every error a caller can cause ends in one line and an exit code."""
    from muonsplit.errors import MuonsplitError

    # Ending by SIGTERM must end the subject's process too.
    signal.signal(signal.SIGTERM, _end)
    try:
        code = cli.main(arguments, prog_name="muonsplit", standalone_mode=False)
    except click.UsageError as error:
        error.show()
        code = 64
    except click.ClickException as error:
        error.show()
        code = 70
    except MuonsplitError as error:
        click.echo(f"error: {error.message}", err=True)
        if error.hint:
            click.echo(f"       {error.hint}", err=True)
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except BrokenPipeError:
        sys.stderr.close()
        code = 141  # as a shell reports it; the verdict was not read to its end
    except Exception as error:
        traceback.print_exc()
        click.echo(f"internal error, please report it: {type(error).__name__}: {error}", err=True)
        code = 70
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
