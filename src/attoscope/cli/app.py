"""The application that the commands register with."""

from __future__ import annotations

import typer

from attoscope.cli.check import check
from attoscope.cli.diagnose import diagnose
from attoscope.cli.papers import papers
from attoscope.cli.predict import predict
from attoscope.cli.reproduce import reproduce
from attoscope.cli.svm import svm

app = typer.Typer(
    name="attoscope",
    help="See what attention selects in a transformer, and why. (--version prints the version.)",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)
app.command()(diagnose)
app.command()(check)
app.command()(predict)
app.command()(svm)
app.command()(papers)
app.command()(reproduce)
