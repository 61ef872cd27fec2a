"""The command on what a real run left behind."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from muonsplit.cli.group import cli, counted, dialect_option, form_option, make, show

if TYPE_CHECKING:
    from muonsplit.audit.question import Question
    from muonsplit.audit.result import Audit

_PATH = click.Path(path_type=Path)


@cli.command("audit")
@click.argument("before", type=_PATH)
@click.argument("after", type=_PATH, required=False)
@click.option("--model", required=True, help="Its config: as for plan.")
@dialect_option
@click.option("--lr", type=float, help="Learning rate of the step; fitted by default.")
@click.option("--weight-decay", type=float, help="Weight decay of the step; fitted by default.")
@click.option("--beta", type=float, help="Momentum coefficient; the dialect's by default.")
@click.option("--steps", type=click.IntRange(1), default=1, help="Optimizer steps between them.")
@click.option("--weights", default="*", metavar="PATTERN", help="Only weights named so.")
@click.option("--gradients", type=_PATH, help="The step's gradients, like a checkpoint.")
@click.option("--momentum", type=_PATH, help="Momentum after the step, like a checkpoint.")
@click.option("--trust-pickles", is_flag=True, help="Let DeepSpeed load its own pickled files.")
@click.option("--state", type=_PATH, help="Keep what is known there, and go on from it.")
@click.option("--report", type=_PATH, help="Write certificate and reports there.")
@click.option("--details", is_flag=True, help="Every hypothesis on every weight.")
@form_option
@click.pass_context
def audit_command(context: click.Context, report: Path | None, form: str, **asked: object) -> None:
    """What a real run did with each Muon weight, from two checkpoints of consecutive steps.

    BEFORE and AFTER are safetensors, or torch.distributed.checkpoint or DeepSpeed folders. What
    muonsplit.capture wrote is given alone, as BEFORE. Exits 0 if every weight is as planned, 1 if
    one is not, 2 if that cannot be told.
    """
    from muonsplit.audit.run import audit
    from muonsplit.audit.statement import write
    from muonsplit.report.audit_page import write_audit_reports

    details = bool(asked.pop("details"))
    make(report)
    with counted("audit", every=50) as told:
        found = audit(_question(told, **asked))  # pyright: ignore[reportArgumentType]
    _show(found, form, details)
    if report is not None:
        for path in (write(found, report), *write_audit_reports(found, report)):
            click.echo(f"Written: {path}", err=True)
    context.exit(found.verdict.value)


def _question(
    progress: "object",
    *,
    before: Path,
    after: Path | None,
    model: str,
    dialect: str | None,
    lr: float | None,
    weight_decay: float | None,
    beta: float | None,
    steps: int,
    weights: str,
    gradients: Path | None,
    momentum: Path | None,
    trust_pickles: bool,
    state: Path | None,
) -> "Question":
    from muonsplit.audit.asked import asked

    for option, value in (("--lr", lr), ("--weight-decay", weight_decay), ("--beta", beta)):
        if value is not None and not 0 <= value < float("inf"):
            raise click.UsageError(f"{option} must be a finite number of 0 or more, got {value}.")
    return asked(
        before,
        after,
        model,
        dialect,
        recorded={"gradients": gradients, "momentum": momentum},
        told=(lr, weight_decay, beta),
        steps=steps,
        only=weights,
        trust_pickles=trust_pickles,
        state=state,
        progress=progress,  # pyright: ignore[reportArgumentType]
    )


def _show(found: "Audit", form: str, details: bool) -> None:
    from muonsplit.audit.statement import statement
    from muonsplit.report.audit import audit_markdown, audit_notes, audit_tables

    if form == "json":
        click.echo(json.dumps(statement(found), ensure_ascii=False, indent=1))
    elif form == "markdown":
        click.echo(audit_markdown(found), nl=False)
    else:
        show(audit_tables(found, details), form)
        for note in audit_notes(found):
            click.echo(note)
