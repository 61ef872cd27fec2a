"""The command line. ``--help`` imports neither torch nor anything that does."""

import signal
import sys
import traceback

import click

from muonsplit.cli import audit, certificates, corpus, cost, models
from muonsplit.cli.group import cli

__all__ = ["audit", "certificates", "cli", "corpus", "cost", "main", "models"]


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
