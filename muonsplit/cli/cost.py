"""The command on what a step costs."""

import json
from typing import Literal

import click

from muonsplit.cli.group import cli, dialect_option, form_option, show


@cli.command("cost")
@click.argument("model")
@click.option("--ranks", type=int, required=True, help="Ranks; FSDP has what tp × pp leaves.")
@click.option("--tp", type=int, default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--pp", type=int, default=1, show_default=True, help="Pipeline stages.")
@dialect_option
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of the updates that are sent.",
)
@click.option(
    "--backend",
    type=click.Choice(["torch", "triton"]),
    default="torch",
    show_default=True,
    help="Whose batches are counted.",
)
@form_option
def cost_command(
    model: str,
    ranks: int,
    tp: int,
    pp: int,
    dialect: str | None,
    dtype: str,
    backend: Literal["torch", "triton"],
    form: str,
) -> None:
    """What one sharded step of the reference costs on paper: operations and bytes of each rank.

    MODEL is as for plan, at full size; nothing is run. Weights are divided as tensor parallelism
    and FSDP2 usually divide them, layers over pipeline stages.
    """
    import torch

    from muonsplit.cost import AT_ONCE, Grid, cost
    from muonsplit.dialect import DEFAULT_DIALECT, dialect_named
    from muonsplit.geometry import plan
    from muonsplit.models.load import build, resolve
    from muonsplit.report.cost import cost_summary, cost_tables

    grid = Grid(ranks, tp, pp)
    chosen = dialect_named(dialect or DEFAULT_DIALECT)
    spec = resolve(model)
    found = cost(
        plan(build(spec.config), chosen),
        grid,
        chosen.arithmetic,
        dtype=getattr(torch, dtype),
        at_once=AT_ONCE[backend],
    )
    if form == "json":
        told = {"model": spec.name, "dialect": chosen.name, "dtype": dtype, "backend": backend}
        click.echo(json.dumps({**told, **found.to_json()}, ensure_ascii=False, indent=1))
    else:
        show(cost_tables(spec.name, chosen.name, found), form)
        click.echo("\n".join(cost_summary(found)))
