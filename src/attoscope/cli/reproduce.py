"""`attoscope reproduce`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attoscope.cli import PARTIAL
from attoscope.cli.inputs import writable

if TYPE_CHECKING:
    from attoscope.papers import Claim, Ledger, Outcome

DEFAULT_OUT = Path("attoscope-papers")


def reproduce(
    slug: Annotated[str, typer.Argument(metavar="SLUG", help="See attoscope papers.")],
    claim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this claim; may be given several times."),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="quick, or paper: as many trials as the paper has.")
    ] = "quick",
    seed: Annotated[int, typer.Option(metavar="N", help="For all random numbers.")] = 0,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Processes at a time [all cores].")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=f"Where evidence.json and figures go [{DEFAULT_OUT}/SLUG].",
        ),
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on this Dask cluster.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget the items that were finished earlier.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print evidence.json.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of a claim's error.")
    ] = False,
) -> int:
    """Measure a paper's claims, each against a control that must fail; print the ledger.

    Writes evidence.json and figures; an interrupted run goes on where it was. Exit code 1 when a
    claim did not come out as declared, a control did not fail, or there was an error.
    In Python: attoscope.papers.reproduce(slug).
    """
    from attoscope.papers import reproduce as run
    from attoscope.papers.registry import find

    paper = find(slug).load()
    folder = None if as_json and out is None else writable(out or DEFAULT_OUT / slug)
    with _progress() as progress:
        ledger = run(
            paper, scale=scale, seed=seed, claims=claim or None, jobs=jobs, out=folder,
            scheduler=scheduler, fresh=fresh, keep_finished=True, progress=progress,
        )  # fmt: skip
    if not ledger.claims and not progress.done:
        raise KeyboardInterrupt  # before there was anything to keep
    if debug:
        for outcome in ledger.claims:
            if outcome.exception is not None:
                traceback.print_exception(outcome.exception)
    _show(ledger, folder, as_json)
    if not ledger.complete:
        return _interrupted(ledger, progress, folder)
    return int(not ledger.as_expected)


def _show(ledger: Ledger, folder: Path | None, as_json: bool) -> None:
    if as_json:
        typer.echo(ledger.dumps(), nl=False)
        return
    from attoscope.papers.ledger import show

    show(ledger)
    if folder is not None and ledger.claims:
        typer.echo(f"Written: {folder / 'evidence.json'}")
    if any(outcome.exception for outcome in ledger.claims):
        typer.echo("With --debug the tracebacks of the errors are shown.")


def _interrupted(ledger: Ledger, progress: Lines, folder: Path | None) -> int:
    """Says what was kept, and how to go on."""
    if folder is None:
        said = "nothing is kept on disk: with --out finished items are"
    else:
        said = (
            f"kept in {folder}: {len(ledger.claims)} of {progress.total} claims in evidence.json"
            f", and {progress.done} finished items of {progress.claim}; the same command goes on "
            "from there"
        )
    print(f"attoscope: interrupted; {said}", file=sys.stderr)
    return PARTIAL


class Lines:
    """A line on standard error for each claim; on a terminal a bar below them."""

    def __init__(self, bar: Any = None) -> None:
        self.bar = bar
        self.total = self.done = 0
        self.claim = ""
        self._tasks: dict[str, Any] = {}
        self._finished: dict[str, int] = {}

    def started(self, claim: Claim, number: int, total: int) -> None:
        self.claim, self.total, self.done, self._finished = claim.name, total, 0, {}
        if self.bar is not None:
            self._tasks = {"": self.bar.add_task(f"{claim.name}", total=None)}

    def items(self, label: str, done: int, total: int, kept: int) -> None:
        self._finished[label] = done
        self.done = sum(self._finished.values())
        if self.bar is None:
            return
        if label not in self._tasks:
            self._tasks[label] = self.bar.add_task(f"  {label}", total=total)
        self.bar.update(self._tasks[label], completed=done)

    def finished(self, outcome: Outcome, number: int, total: int) -> None:
        line = f"[{number}/{total}] {outcome.name}: {outcome.verdict} ({outcome.seconds:.1f} s)"
        if self.bar is None:
            print(line, file=sys.stderr)
            return
        for task in self._tasks.values():
            self.bar.remove_task(task)
        self._tasks = {}
        self.bar.console.print(line, markup=False, highlight=False)


@contextmanager
def _progress() -> Iterator[Lines]:
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        Remaining(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield Lines(bar)
