"""Commands on models: plan, truth, sweep."""

import json
from pathlib import Path
from typing import Literal

import click

from muonsplit.cli.group import cli, counted, dialect_option, form_option, make, show


@cli.command("plan")
@click.argument("model")
@dialect_option
@click.option("--arbiter", type=click.Choice(["views"]), help="Settles what the rules leave open.")
@click.option("--export", "framework", metavar="FRAMEWORK", help="Print it in a framework's form.")
@form_option
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
        show(plan_tables(spec.name, made), form)
        click.echo(plan_summary(made))
    if chosen.per_head:
        made.raise_if_nothing()
        if missed := made.missed():
            listed = "\n  ".join(missed)
            click.echo(f"warning: attention weights that stay whole:\n  {listed}", err=True)


@cli.command("truth")
@click.argument("model")
@dialect_option
@form_option
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
        show(truth_tables(spec.name, judged), form)
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
    make(report)
    with counted("sweep") as progress:
        rows = sweep(wanted, report / "rows", processes, fresh, progress)
    for path in write_sweep(rows, report):
        click.echo(f"Written: {path}", err=True)
    lines, wrong = sweep_summary(rows)
    click.echo("\n".join(lines))
    context.exit(1 if wrong else 0)
