"""Curves along the depth as inline SVG: the reading, its interval, its null dashed.

With a curve of a baseline both are drawn over each other.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from markupsafe import Markup

from attoscope.report.svg import PLACEHOLDER, finish
from attoscope.report.tracks import Track
from attoscope.report.vega import extent, quick, said, shown_labels, spans, to_svg
from attoscope.report.words import quantity

WIDTH, HEIGHT = 452, 210
_LOG_FROM = 15.0


def logarithmic(tracks: list[Track], bounds: tuple[float | None, float | None]) -> bool:
    """Whether these curves want a logarithmic axis."""
    return spans([t.values for t in tracks], bounds, _LOG_FROM)


def draw(track: Track, title: str, unit: str, log: bool, before: Track | None = None) -> Markup:
    """One track along the depth, as SVG; `before` is the same at the same places, earlier."""
    import altair as alt

    rows = _rows(track, log, before)
    with quick():
        x, y_of = _axes(track, unit, _log_axis(rows) if log else None)
        base = alt.Chart(alt.NamedData("rows"))
        layers = [*(_earlier(base, before, x, y_of) if before else ()),
                  *_layers(base, track, x, y_of)]  # fmt: skip
        chart = alt.layer(*layers).properties(
            width=WIDTH, height=HEIGHT, autosize=alt.AutoSizeParams(type="fit")
        )
        svg = to_svg(chart, rows=rows)
    texts = [said(track, (i,), unit) + _was(before, i, unit) for i in range(len(rows))]
    label = f"{title}, {track.label}: {extent(track.values, unit)}"
    return finish(svg, label, texts, "curve")


def _was(before: Track | None, index: int, unit: str) -> str:
    """ ", before 0.910", for a mark when pointed at."""
    if before is None or not np.isfinite(before.values[index]):
        return ""
    return f", before {quantity(float(before.values[index]), unit)}"


def _rows(track: Track, log: bool, before: Track | None) -> list[dict[str, Any]]:
    """The points as plain data; what cannot be drawn is None, and leaves a gap."""
    fields = {name: getattr(track, name) for name in ("values", "low", "high", "null")}
    if before is not None:
        fields |= {f"was_{name}": getattr(before, name) for name in ("values", "low", "high")}
    rows: list[dict[str, Any]] = []
    for i in range(len(track.values)):
        row: dict[str, Any] = {"i": i}
        for name, array in fields.items():
            value = np.nan if array is None else float(array[i])
            row[name] = value if np.isfinite(value) and (value > 0 or not log) else None
        rows.append(row)
    return rows


def _log_axis(rows: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Domain and ticks: 1, 2, 5, 10 … over less than two powers of ten, else the powers."""
    values = [v for row in rows for k, v in row.items() if k != "i" and v is not None]
    powers = np.arange(np.floor(np.log10(min(values))), np.ceil(np.log10(max(values))) + 1)
    steps = sorted(float(f"{m}e{int(p)}") for p in powers for m in (1, 2, 5))
    low = max(s for s in steps if s <= min(values))
    high = min(s for s in steps if s >= max(values))
    within = [s for s in steps if low <= s <= high]
    few = within if len(within) <= 6 else [s for s in within if f"{s:e}".startswith("1.0")]
    return [low, high], few


def _axes(track: Track, unit: str, log: tuple[list[float], list[float]] | None) -> Any:
    """The x channel, and a function that gives the y channel of a field."""
    import altair as alt

    bottom = alt.Axis(
        values=shown_labels(track.ticks, 14),
        labelExpr=f"{json.dumps(list(track.ticks))}[datum.value]",
        grid=False,
        title="layer",
        labelOverlap=False,
    )
    across = alt.Scale(domain=[0, max(len(track.values) - 1, 1)], nice=False)
    if log:
        scale = alt.Scale(type="log", domain=log[0], nice=False)
        ticks: dict[str, Any] = {"values": log[1]}
    else:
        scale, ticks = alt.Scale(zero=False, nice=True), {"tickCount": 5}
    side = alt.Axis(title=unit or "value", domain=False, ticks=False, **ticks)
    return (
        alt.X("i:Q", axis=bottom, scale=across),
        lambda field: alt.Y(f"{field}:Q", scale=scale, axis=side),
    )


def _earlier(base: Any, before: Track, x: Any, y_of: Any) -> list[Any]:
    """The curve of the baseline, behind the other: a thinner line without points."""
    colour, layers = PLACEHOLDER["before"], []
    if before.low is not None and before.high is not None:
        band = base.mark_area(color=colour, fillOpacity=0.2)
        layers.append(band.encode(x=x, y=y_of("was_low"), y2="was_high:Q"))
    line = base.mark_line(color=colour, strokeWidth=1.75)
    layers.append(line.encode(x=x, y=y_of("was_values")))
    return layers


def _layers(base: Any, track: Track, x: Any, y_of: Any) -> list[Any]:
    accent, null = PLACEHOLDER["accent"], PLACEHOLDER["null"]
    layers = []
    if track.low is not None and track.high is not None:
        band = base.mark_area(color=accent, fillOpacity=0.2)
        layers.append(band.encode(x=x, y=y_of("low"), y2="high:Q"))
    if track.null is not None:
        dashed = base.mark_line(color=null, strokeDash=[5, 4], strokeWidth=1.75)
        layers.append(dashed.encode(x=x, y=y_of("null")))
    line = base.mark_line(color=accent, strokeWidth=2.25)
    points = base.mark_point(filled=True, color=accent, size=26)
    layers.append(line.encode(x=x, y=y_of("values")))
    layers.append(points.encode(x=x, y=y_of("values"), description="i:N"))
    return layers
