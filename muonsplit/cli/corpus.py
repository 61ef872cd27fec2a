"""Commands on what muonsplit holds: faults, goldens, explanations, lists."""

import json

import click

from muonsplit.cli.group import cli, form_option, one_thread, progress, show


@cli.command("faults")
@click.option("--matrix", is_flag=True, help="Every check that fails on each, not the first only.")
@click.option("--families", is_flag=True, help="The gradients in which one step does not show it.")
@click.option("--floor", is_flag=True, help="The smallest fault of each kind that is caught.")
@form_option
@click.pass_context
def faults_command(
    context: click.Context, matrix: bool, families: bool, floor: bool, form: str
) -> None:
    """Runs the corpus of faulty subjects: is each caught by its own check?

    With an option, that table is made instead.
    """
    from muonsplit.faulty import shown, trial
    from muonsplit.faulty.floor import floors
    from muonsplit.faulty.visibility import visibilities
    from muonsplit.report.tables import table
    from muonsplit.subjects.process import Worker

    one_thread()
    tables: list[shown.Shown] = []
    with progress() as told:
        if matrix:
            tables += [shown.matrix_table(trial.matrix(told)), shown.check_table()]
        if families:
            with Worker("faulty:none") as worker:
                tables.append(shown.family_table(visibilities(worker)))
        if floor:
            tables.append(shown.floor_table(floors()))
        tried = [] if tables else list(trial.trials(told))
    if tables and form == "json":
        rows = {t.title: [dict(zip(t.columns, row, strict=True)) for row in t.rows] for t in tables}
        click.echo(json.dumps(rows, ensure_ascii=False, indent=1))
    elif form == "json":
        caught = [{**t.fault_json(), "first": t.first, "caught": t.caught} for t in tried]
        click.echo(json.dumps(caught, ensure_ascii=False, indent=1))
    else:
        show([table(*found) for found in tables or [shown.trial_table(tried)]], form)
        for line in trial.summary(tried):
            click.echo(line)
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
@form_option
def list_command(what: str, form: str) -> None:
    """What there is: checks, dialects, models or subjects."""
    from muonsplit.report.explain import listing

    found = listing(what)
    if form == "json":
        rows = [dict(zip(found.columns, row, strict=True)) for row in found.rows]
        click.echo(json.dumps(rows, ensure_ascii=False, indent=1))
    else:
        show([found], form)
