"""The diagnosis in a terminal: verdict, ranked findings, one table. Plain in a pipe, too."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attoscope.findings import Finding
from attoscope.measures.base import Reading
from attoscope.report.choice import TERMINAL
from attoscope.report.since import lines
from attoscope.report.summary import facts, notes
from attoscope.report.tracks import is_curve, is_map
from attoscope.report.words import (
    count,
    interval,
    missing,
    number,
    place,
    quantity,
    spelt,
    tracks,
    visible,
    where,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from attoscope.diagnosis import Diagnosis

_STYLE = {"severe": "bold red", "warning": "yellow", "note": "cyan"}
MOST_ROWS = 36
MOST_FINDINGS = 10
_COLUMN = len("0.123 (0.456)")


def show(diagnosis: Diagnosis, console: Console | None = None) -> None:
    """Print the diagnosis: what was read, the verdict, findings, and one table by layer."""
    from rich.console import Console

    console = console or Console(highlight=False)
    for part in _parts(diagnosis, console.width):
        console.print(part, soft_wrap=False)


def text(diagnosis: Diagnosis, width: int = 80) -> str:
    """The same as plain text without colour."""
    from rich.console import Console

    file = io.StringIO()
    show(diagnosis, Console(file=file, width=width, no_color=True, highlight=False))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _parts(diagnosis: Diagnosis, width: int) -> list[RenderableType]:
    from rich.text import Text

    name = visible(str(diagnosis.model.get("name", "model")))
    parts: list[RenderableType] = [
        Text(name, style="bold"),
        Text(" · ".join(facts(diagnosis)), style="dim"),
        Text(""),
        Text(visible(diagnosis.verdict), style="bold"),
        Text(""),
    ]
    for amount, finding in enumerate(diagnosis.findings[:MOST_FINDINGS], start=1):
        parts += [_finding(amount, finding), Text("")]
    more = len(diagnosis.findings) - MOST_FINDINGS
    if more > 0:
        parts += [Text(f"{count(more, 'further finding')} in the report."), Text("")]
    parts += _table(diagnosis, width)
    if diagnosis.baseline is not None:
        parts += [Text(""), *(Text(line) for line in lines(diagnosis.baseline)), Text("")]
    said = [*notes(diagnosis.data), *notes(diagnosis.model)]
    parts += [Text(line, style="dim") for line in said]
    return parts


def _finding(amount: int, finding: Finding) -> Table:
    """Number, severity and title; below, indented, the evidence and what to do."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column()
    head = Text()
    head.append(finding.severity, style=_STYLE[finding.severity])
    head.append("  ")
    head.append(visible(finding.title), style="bold")
    grid.add_row(f"{amount}.", head)
    grid.add_row("", Text(visible(finding.sentence)))
    grid.add_row("", _numbers(finding))
    if finding.remedy.text:
        grid.add_row("", Text(f"What to do: {visible(finding.remedy.text)}"))
    return grid


def _numbers(finding: Finding) -> Text:
    from rich.text import Text

    parts = []
    if not missing(finding.measured):
        parts.append(f"measured {quantity(finding.measured, finding.unit)}")
    if finding.interval and interval(*finding.interval):
        parts.append(f"95 % interval {interval(*finding.interval)}")
    if not missing(finding.null):
        meaning = f" ({visible(finding.null_meaning)})" if finding.null_meaning else ""
        parts.append(f"null {quantity(finding.null, finding.unit)}{meaning}")
    parts.append(visible(where(finding.sites, finding.heads)))
    return Text(" · ".join(parts), style="dim")


def _table(diagnosis: Diagnosis, width: int) -> list[RenderableType]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    readings = _columns(diagnosis.reading_list, len(diagnosis.reading_list))
    rows = _rows(readings)
    if not readings or not rows:
        return []
    # The stack is said only where there are several.
    many = len(tracks(rows)) > 1
    names = [visible(spelt(row) if many else place(row)[1] or row) for row in rows]
    first = max(map(len, [*names, "layer"]))
    readings = readings[: max(1, (width - first - 1) // (_COLUMN + 2))]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("layer", no_wrap=True, min_width=first)
    for reading in readings:
        heading = Text(visible(reading.title), overflow="fold")
        table.add_column(heading, justify="right", min_width=_COLUMN)
    shown = _thinned(rows)
    for row in shown:
        entries = (_entry(reading, row) for reading in readings)
        table.add_row(Text(names[rows.index(row)]), *entries)
    notes = "Value (null), mean over heads where there are heads."
    if len(shown) < len(rows):
        notes += f" {len(shown)} of {count(len(rows), 'layer')} shown; report.json has all."
    return [table, Text(notes, style="dim")]


def _columns(readings: tuple[Reading, ...], most: int) -> list[Reading]:
    """The readings that the table shows, at most `most`."""
    usable = [r for r in readings if (is_curve(r) or is_map(r)) and np.isfinite(r.values).any()]
    by_name = {r.name: r for r in usable}
    chosen = [by_name[name] for name in TERMINAL if name in by_name]
    chosen += [r for r in usable if not any(r is c for c in chosen)]
    return chosen[:most]


def _rows(readings: list[Reading]) -> list[str]:
    """All places of these readings, stack by stack, in the order in which the model runs."""
    places = dict.fromkeys(str(label) for r in readings for label in r.coords[r.dims[0]])
    tracks = list(dict.fromkeys(place(p)[0] for p in places))
    order = {"in": -1.0, "final": float("inf")}

    def key(name: str) -> tuple[int, float]:
        track, index = place(name)
        return tracks.index(track), order.get(index, float(index) if index.isdigit() else 0.0)

    return sorted(places, key=key)


def _thinned(rows: list[str]) -> list[str]:
    """At most `MOST_ROWS`, evenly, with the first and the last."""
    if len(rows) <= MOST_ROWS:
        return rows
    return [rows[i] for i in np.linspace(0, len(rows) - 1, MOST_ROWS).round().astype(int)]


def _entry(reading: Reading, row: str) -> Text:
    from rich.text import Text

    labels = [str(label) for label in reading.coords[reading.dims[0]]]
    if row not in labels:
        return Text("")
    i = labels.index(row)
    entry = Text(number(_mean(np.atleast_1d(reading.values[i]))))
    if reading.null is not None and np.isfinite(reading.null[i]).any():
        entry.append(f" ({number(_mean(np.atleast_1d(reading.null[i])))})", style="dim")
    return entry


def _mean(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")
