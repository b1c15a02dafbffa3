"""`attoscope diagnose`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attoscope.cli import PARTIAL
from attoscope.cli.inputs import Inputs, gather, made, row_count, span, writable
from attoscope.cli.options import (
    Device,
    Dtype,
    Images,
    Model,
    More,
    ReadyBatch,
    Text,
    TrustRemoteCode,
)
from attoscope.errors import AttoscopeError
from attoscope.findings import SEVERITIES, Finding, rank

if TYPE_CHECKING:
    from attoscope.diagnosis import Comparison, Diagnosis

DEFAULT_OUT = Path("attoscope-report")


def diagnose(
    model: Model,
    more: More = None,
    text: Text = None,
    images: Images = None,
    batch: ReadyBatch = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line is a document.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help=f"Where report.html and report.json go [{DEFAULT_OUT}]."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Cut documents to N tokens [512].")
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Documents at a time.")] = 8,
    rows: Annotated[
        str,
        typer.Option(metavar="N", help="Query rows sampled per sequence and layer, or all."),
    ] = "128",
    dtype: Dtype = "auto",
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
    seed: Annotated[
        int, typer.Option(metavar="N", help="For samples, null and intervals.")
    ] = 0,
    layers: Annotated[
        str | None, typer.Option(metavar="A:B", help="Measure only layers A to B - 1.")
    ] = None,
    svm: Annotated[
        bool, typer.Option("--svm", help="Also compare heads with the max-margin selector.")
    ] = False,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="REPORT.json", help="Compare, and judge by what got worse since."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would take, and stop.")
    ] = False,
    fail_on: Annotated[
        str | None, typer.Option(help="Exit with 1 at this severity: note, warning or severe.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print findings only.")] = False,
) -> int:
    """Find what is wrong with a transformer's attention and residual stream, and where.

    Reads the model on texts, images or a ready batch; writes report.html and report.json.
    In Python: attoscope.diagnose(model, data).
    """
    if fail_on is not None and fail_on not in SEVERITIES:
        raise AttoscopeError(
            f"--fail-on: got {fail_on!r}; expected one of {', '.join(SEVERITIES)}"
        )
    if more and not text:
        raise AttoscopeError(
            f"got {' '.join(more[:3])} after the model; to read files, name them with --text"
        )
    inputs = gather([*(text or []), *(more or [])], images, batch, lines)
    options: dict[str, Any] = {
        "rows": row_count(rows), "max_tokens": max_tokens, "batch_size": batch_size,
        "layers": span(layers), "seed": seed, "dtype": dtype, "device": device,
        "trust_remote_code": trust_remote_code,
    }  # fmt: skip
    before = _baseline(baseline)
    if dry_run:
        return _dry_run(model, inputs, options)
    folder = None if as_json and out is None else writable(out or DEFAULT_OUT)
    diagnosis = _run(model, inputs, options | {"svm": svm}, show=not (quiet or as_json))
    if before is not None:
        diagnosis = diagnosis.since(before)
    _write(diagnosis, folder, as_json, quiet)
    if diagnosis.data["interrupted"]:
        return PARTIAL
    judged = diagnosis.findings
    if diagnosis.baseline is not None:
        judged = tuple(change.finding for change in diagnosis.baseline.worse)
    return int(fail_on is not None and _reaches(judged, fail_on))


def _run(model: str, inputs: Inputs | None, options: dict[str, Any], show: bool) -> Diagnosis:
    from attoscope.diagnosing import diagnose as run

    with _progress(inputs.total if inputs else None, show) as advance:
        return run(
            model, inputs.data if inputs else None, keep_finished=True, progress=advance,
            sources=inputs.sources if inputs else (), **options,
        )  # fmt: skip


def _write(diagnosis: Diagnosis, folder: Path | None, as_json: bool, quiet: bool) -> None:
    written = []
    if folder is not None:
        made(folder)
        written = [
            diagnosis.to_html(folder / "report.html"),
            diagnosis.to_json(folder / "report.json"),
        ]
    if as_json:
        from attoscope.report.json import dumps

        typer.echo(dumps(diagnosis))
        return
    if quiet:
        for finding in diagnosis.findings:
            typer.echo(f"{finding.severity}: {finding.sentence}")
        if diagnosis.baseline is not None:
            _say_worse(diagnosis.baseline)
    else:
        from attoscope.report.terminal import show

        show(diagnosis)
    if written and not quiet:
        typer.echo(f"Written: {written[0]} and {written[1].name}")


def _say_worse(comparison: Comparison) -> None:
    from attoscope.report.since import differing

    if comparison.differs:
        typer.echo(differing(comparison))
    if not comparison.worse:
        typer.echo("Nothing got worse since the baseline.")
        return
    typer.echo("Worse than the baseline:")
    for change in comparison.worse:
        typer.echo(f"  {change.finding.severity} ({change.why}): {change.finding.sentence}")


def _baseline(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    from attoscope.report.json import read

    return read(path)


def _reaches(findings: tuple[Finding, ...], severity: str) -> bool:
    return any(rank(f.severity) >= SEVERITIES.index(severity) for f in findings)


def _dry_run(model: str, inputs: Inputs | None, options: dict[str, Any]) -> int:
    from attoscope.estimating import estimate

    typer.echo(estimate(model, inputs.data if inputs else None, **options).sentence)
    return 0


@contextmanager
def _progress(total: int | None, show: bool) -> Iterator[Callable[[int], None] | None]:
    """A bar on the terminal; nothing in a pipe."""
    if not show or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), Remaining())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=total)
        yield lambda documents: bar.advance(task, documents)
