"""The application that the commands register with."""

from __future__ import annotations

from typing import Annotated

import typer

from attoscope import __version__
from attoscope.cli.check import check
from attoscope.cli.diagnose import diagnose

app = typer.Typer(
    name="attoscope",
    help="See what attention selects in a transformer, and why.",
    no_args_is_help=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)
app.command()(diagnose)
app.command()(check)


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """See what attention selects in a transformer, and why."""
    if version:
        typer.echo(f"attoscope {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
