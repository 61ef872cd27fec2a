"""The command group, and what its commands share. Nothing here imports torch."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from muonsplit.certificate.run import Progress
    from muonsplit.report.tables import Table

_FORMATS = click.Choice(["table", "json", "markdown"])
form_option = click.option("--format", "form", type=_FORMATS, default="table", help="How to print.")
dialect_option = click.option(
    "--dialect",
    help="Dialect, NAME:heads_per_block=N or NAME+per-head; see `muonsplit list dialects`.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="muonsplit")
def cli() -> None:
    """Is each attention head really orthogonalised on its own?

    Exit codes: 0 conforms, 1 violates, 2 inconclusive, 64 and above for usage and harness errors.
    """


def show(tables: "list[Table]", form: str) -> None:
    """Prints tables on the terminal or in Markdown."""
    if form == "markdown":
        from muonsplit.report.markdown import render

        click.echo(render(tables))
    else:
        from muonsplit.report.terminal import show as draw

        draw(tables)


def make(directory: Path | None) -> None:
    """Makes the folder of a report before any work is done for it."""
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(
            f"--report: no folder can be made at {directory}: {error}."
        ) from None


def one_thread() -> None:
    """Makes torch use one thread, so that bits and times do not depend on the machine's load."""
    import torch

    torch.set_num_threads(1)


@contextmanager
def progress() -> "Generator[Progress]":
    """Says on a terminal what is being done; says nothing in a log."""
    from muonsplit.report.terminal import console

    out = console(stderr=True)
    if not out.is_terminal:
        yield lambda model, check: None
        return
    with out.status("starting the subject") as status:
        yield lambda model, check: status.update(f"{model}: {check}")


@contextmanager
def counted(what: str, every: int = 50) -> "Generator[Callable[[int, int, str], None]]":
    """A bar on a terminal, a line now and then in a log."""
    from rich.progress import Progress as Bar

    from muonsplit.report.terminal import console

    out = console(stderr=True)
    with Bar(console=out, disable=not out.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def told(done: int, of: int, name: str) -> None:
            bar.update(task, completed=done, total=of, description=name)
            if not out.is_terminal and done and (done % every == 0 or done == of):
                click.echo(f"{done} of {of}, last {name}", err=True)

        yield told
