"""Commands on subjects and certificates: certify, identify, verify, schema, matrix."""

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from muonsplit.cli.group import cli, dialect_option, form_option, make, one_thread, progress, show

if TYPE_CHECKING:
    from muonsplit.certificate.run import Certificate
    from muonsplit.subjects.ranks import Launch

_PROFILES = click.Choice(["smoke", "ci", "thorough"])


@cli.command("certify")
@click.argument("subject", default="builtin:reference")
@click.option("--model", "models", multiple=True, help="Model to certify on; may be repeated.")
@dialect_option
@click.option(
    "--profile", type=_PROFILES, default="ci", show_default=True, help="How much is asked."
)
@click.option("--seed", type=click.IntRange(0), help="Root of all draws; drawn by default.")
@click.option("--only", multiple=True, metavar="ID", help="Run this check only; may be repeated.")
@click.option("--report", type=click.Path(path_type=Path), help="Write certificate, reports there.")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds a run may take.")
@click.option("--memory", default=8.0, show_default=True, help="GiB the subject may take.")
@click.option("--world-size", default=1, show_default=True, help="Ranks it runs on.")
@click.option(
    "--sharding", "ways", multiple=True, metavar="WAY", help="How they divide it; may be repeated."
)
@click.option("--in-process", is_flag=True, help="Without a process of its own, to debug.")
@click.option("--details", is_flag=True, help="Numbers, output and commands of every finding.")
@form_option
@click.pass_context
def certify_command(
    context: click.Context,
    subject: str,
    models: tuple[str, ...],
    dialect: str | None,
    profile: Literal["smoke", "ci", "thorough"],
    seed: int | None,
    only: tuple[str, ...],
    report: Path | None,
    timeout: float,
    memory: float,
    world_size: int,
    ways: tuple[str, ...],
    in_process: bool,
    details: bool,
    form: str,
) -> None:
    """Whether SUBJECT does per-head Muon, weight by weight.

    SUBJECT is builtin:reference, torch, deepspeed:stage=1 and the like, package.module:factory or
    file:path.py:factory. Without --dialect it is held to the one it declares, asked per head.
    WAY is ddp, tp, fsdp, hsdp, tp-fsdp or engine; without it, those that SUBJECT declares. Under
    torchrun the ranks are the launcher's, and rank 0 reports.
    """
    from muonsplit.certificate.run import Question, certify
    from muonsplit.certificate.statement import write
    from muonsplit.report.files import write_reports
    from muonsplit.subjects.ranks import driver_for

    _positive("--timeout", "seconds", timeout)
    _positive("--memory", "GiB", memory)
    make(report)
    one_thread()
    launch = _launch(context)
    with progress() as told:
        question = Question(
            models=models,
            dialect=dialect,
            profile=profile,
            # Drawn when it is needed, so that no subject can know what it will be asked.
            seed=secrets.randbelow(1 << 32) if seed is None else seed,
            ways=ways,
            only=only,
            progress=told,
        )
        with driver_for(
            subject,
            launch.world if launch else world_size,
            timeout=timeout,
            memory=memory,
            in_process=in_process,
            launch=launch,
        ) as driver:
            certificate = certify(driver, question)
    _show(certificate, form, details)
    if report is not None:
        for path in (write(certificate, report), *write_reports(certificate, report)):
            click.echo(f"Written: {path}", err=True)
    context.exit(certificate.verdict.value)


def _launch(context: click.Context) -> "Launch | None":
    """Where the ranks are, on rank 0 of a launcher; every other rank is served here to its end."""
    from muonsplit.subjects.launched import Launched, is_launched, launched_world, leads, serve

    if not is_launched():
        return None
    world, asked = launched_world(), context.params["world_size"]
    if asked not in (1, world):
        raise click.UsageError(f"--world-size {asked}, but the launcher started {world} ranks.")
    arguments = [f"{name}={value}" for name, value in context.params.items() if name != "report"]
    if leads():
        return Launched(arguments)
    serve(arguments)
    raise click.exceptions.Exit(0)


def _show(certificate: "Certificate", form: str, details: bool) -> None:
    """Prints a certificate."""
    if form == "json":
        from muonsplit.certificate.statement import statement

        click.echo(json.dumps(statement(certificate), ensure_ascii=False, indent=1))
        return
    if form == "markdown":
        from muonsplit.report.markdown import page

        click.echo(page(certificate), nl=False)
        return
    from muonsplit.report.summary import notes
    from muonsplit.report.tables import certificate_tables

    show(certificate_tables(certificate, details), form)
    for note in notes(certificate, details):
        click.echo(note)


def _positive(option: str, unit: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise click.UsageError(f"{option} must be a positive number of {unit}, got {value}.")


@cli.command("identify")
@click.argument("subject")
@click.option("--model", default="llama", show_default=True, help="Model to run it on.")
@click.option("--seed", default=0, show_default=True, help="Root of every random draw.")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds a run may take.")
@click.option("--in-process", is_flag=True, help="Without a process of its own, to debug.")
@form_option
@click.pass_context
def identify_command(
    context: click.Context,
    subject: str,
    model: str,
    seed: int,
    timeout: float,
    in_process: bool,
    form: str,
) -> None:
    """Which dialect SUBJECT speaks, by running it; else the nearest, and where they part.

    Exits 0 if a dialect explains every bit or all but rounding, 1 if none does.
    """
    from muonsplit.certificate.identify import identify
    from muonsplit.report.identity import identity_json, identity_table, sentence
    from muonsplit.subjects.process import InProcess, Worker

    _positive("--timeout", "seconds", timeout)
    one_thread()
    with (
        progress() as told,
        InProcess(subject) if in_process else Worker(subject, timeout) as driver,
    ):
        found = identify(driver, model, seed, told)
    if form == "json":
        click.echo(json.dumps(identity_json(subject, found), ensure_ascii=False, indent=1))
    else:
        show([identity_table(subject, found)], form)
        click.echo(sentence(subject, found))
    context.exit(0 if found.best.explains else 1)


@cli.command("verify")
@click.argument("certificate", type=click.Path(path_type=Path))
@click.option("--replay", is_flag=True, help="Run what it names again, and compare.")
@click.pass_context
def verify_command(context: click.Context, certificate: Path, replay: bool) -> None:
    """Whether CERTIFICATE is whole, unedited, and says what its own results come to.

    Exits 0 if it does, whatever its verdict, and 65 if it is refused; with --replay 1 if anything
    comes out otherwise.
    """
    from muonsplit.audit import statement as audits
    from muonsplit.certificate.read import sound
    from muonsplit.certificate.verify import notes, replayed, vouched
    from muonsplit.report.tables import table

    one_thread()
    if audits.is_audit(certificate):
        _verify_audit(certificate, replay)
        return
    document = sound(certificate)
    show([table(f"{certificate} is sound", ("what", "says"), vouched(document))], "table")
    click.echo("\n".join(notes(document)))
    if replay:
        with progress() as told:
            lines = list(replayed(document, told))
        click.echo("\n".join(lines[:20]) if lines else "Replayed: it comes out the same.")
        context.exit(1 if lines else 0)


def _verify_audit(path: Path, replay: bool) -> None:
    from muonsplit.audit.statement import sound
    from muonsplit.report.audit import audit_tables

    if replay:
        raise click.UsageError("An audit holds no checkpoints: run `muonsplit audit` again.")
    show(audit_tables(sound(path), details=False), "table")
    click.echo("It is sound, and unsigned: it vouches for its content, not for its author.")


@cli.command("schema")
@click.option("--audit", is_flag=True, help="Of an audit of a run instead.")
def schema_command(audit: bool) -> None:
    """The JSON Schema of a certificate."""
    from muonsplit.certificate.schema import schema

    if not audit:
        click.echo(schema())
        return
    from muonsplit.audit.statement import AuditStatement

    click.echo(schema(AuditStatement, "muonsplit audit"))


@cli.command("matrix")
@click.argument("certificates", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["table", "markdown", "html"]), default="table")
@click.option("--badge", type=click.Path(path_type=Path), help="Write a shields endpoint there.")
def matrix_command(certificates: tuple[Path, ...], form: str, badge: Path | None) -> None:
    """Certificates beside each other: subjects by checks. Exits 0 whatever their verdicts."""
    from muonsplit.certificate.read import read
    from muonsplit.report import matrix

    found = [read(path) for path in certificates]
    if badge is not None:
        matrix.write_badge(found, badge)
    if form == "html":
        click.echo(matrix.page(found), nl=False)
    else:
        table = matrix.matrix(found)
        show(matrix.numbered(table) if form == "table" else [table], form)
