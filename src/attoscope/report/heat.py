"""Layer × head maps as inline SVG, lying for wide screens and upright for narrow ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from attoscope.report import colours, picture
from attoscope.report.svg import PLACEHOLDER, finish, scale_colour
from attoscope.report.tracks import Array, Track
from attoscope.report.vega import extent, quick, said, shown_labels, spans, to_svg

# A cell that says its number when pointed at takes six times the bytes of one that does not.
MOST_TOLD = 600
# Above this a drawing of cells gets heavy for a browser, and a picture says as much.
MOST_DRAWN = 2_000
_LOG_FROM = 50.0
# Above this multiple of the 98th percentile, a few cells would leave the others one colour.
_STRAY = 2.0


@dataclass(frozen=True, slots=True)
class Shading:
    """From values to steps of a colour scale, the same for all tracks of a reading.

    `clipped`: some values lie beyond the ends, and are drawn as the ends.
    """

    scale: str
    low: float
    high: float
    log: bool = False
    clipped: bool = False

    def steps(self, values: Array) -> NDArray[np.int64]:
        """Step numbers, −1 where not computed."""
        low, high = self.low, self.high
        if self.log:
            with np.errstate(invalid="ignore", divide="ignore"):
                values = np.log10(values)
            low, high = float(np.log10(low)), float(np.log10(high))
        return colours.step((values - low) / ((high - low) or 1.0))


def shading(tracks: list[Track], bounds: tuple[float | None, float | None]) -> Shading:
    """The shading for values: from the reading's lower bound if it has one, to the largest."""
    finite = np.concatenate([t.values[np.isfinite(t.values)] for t in tracks])
    low, high = float(finite.min()), float(finite.max())
    if spans([t.values for t in tracks], bounds, _LOG_FROM):
        return Shading("s", low, high, log=True)
    low = low if bounds[0] is None else min(bounds[0], low)
    if bounds[1] is not None and high - low > 0.5 * (bounds[1] - low):
        return Shading("s", low, max(bounds[1], high))
    most = float(np.quantile(finite, 0.98))
    if low < most and high - low > _STRAY * (most - low):
        return Shading("s", low, most, clipped=True)
    return Shading("s", low, high if high > low else low + 1.0)


def difference(track: Track) -> Track:
    """The track minus its null."""
    assert track.null is not None
    return replace(track, values=track.values - track.null, low=None, high=None, null=None)


def difference_shading(tracks: list[Track]) -> Shading:
    """Even to both sides of zero, over all tracks."""
    finite = np.concatenate([np.abs(t.values[np.isfinite(t.values)]) for t in tracks])
    high, most = float(finite.max()), float(np.quantile(finite, 0.98))
    if 0 < most < high / _STRAY:
        return Shading("d", -most, most, clipped=True)
    return Shading("d", -(high or 1.0), high or 1.0)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a map is laid out: its values by row and column, their labels, the size of a cell."""

    values: Array
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    upright: bool
    wide: int
    high: int

    @property
    def size(self) -> tuple[int, int]:
        return self.wide * len(self.columns), self.high * len(self.rows)


def _plan(track: Track, upright: bool) -> _Plan:
    heads = tuple(str(head) for head in track.heads)
    rows, columns = (track.ticks, heads) if upright else (heads, track.ticks)
    room = 290 if upright else 388
    wide = min(26, max(room // len(columns), 1))
    high = min(18, wide, 420 // len(rows)) if upright else min(18, 300 // len(rows))
    values = track.values if upright else track.values.T
    return _Plan(values, rows, columns, upright, wide, max(high, 2))


def draw(
    track: Track,
    title: str,
    unit: str,
    shade: Shading,
    upright: bool,
    told: Mapping[tuple[str, int], str] | None,
) -> Markup:
    """A layer × head map. `upright` puts the layers down the page.

    With `told`, each cell says its number when pointed at, and leads to the anchor that `told`
    has for its site and head.
    """
    plan = _plan(track, upright)
    label = f"{title}, {track.label}, by layer and head: {extent(track.values, unit)}"
    css = "upright" if upright else "lying"
    if plan.values.size > MOST_DRAWN:
        return _picture(plan, shade, label, css)
    steps = shade.steps(plan.values)
    cells: list[dict[str, Any]] = []
    texts: list[str] = []
    links: list[str] = []
    for r, c in np.argwhere(steps >= 0).tolist():
        colour = scale_colour(shade.scale, int(steps[r, c]))
        cells.append({"r": r, "c": c, "k": colour, "n": len(cells)})
        if told is not None and plan.values.size <= MOST_TOLD:
            layer, head = (r, c) if upright else (c, r)
            texts.append(said(track, (layer, head), unit))
            links.append(told.get((track.places[layer], track.heads[head]), ""))
    gaps = [{"r": r, "c": c} for r, c in np.argwhere(steps < 0).tolist()]
    with quick():
        svg = to_svg(_cells(plan, bool(gaps)), cells=cells, gaps=gaps)
    return finish(svg, label, texts, css, links)


def _cells(plan: _Plan, gaps: bool) -> Any:
    import altair as alt

    x, y = _axes(plan)
    rect = alt.Chart(alt.NamedData("cells")).mark_rect(stroke=None)
    chart: Any = rect.encode(x=x, y=y, color=alt.Color("k:N", scale=None), description="n:N")
    if gaps:
        cross = alt.Chart(alt.NamedData("gaps")).mark_text(text="×", color=PLACEHOLDER["null"])
        chart = chart + cross.encode(x=x, y=y)
    return chart.properties(width=plan.size[0], height=plan.size[1])


def _picture(plan: _Plan, shade: Shading, label: str, css: str) -> Markup:
    """The same axes round a picture; one for light, one for dark."""
    import altair as alt

    with quick():
        x, y = _axes(plan)
        frame = alt.Chart(alt.NamedData("corner")).mark_rect(fillOpacity=0).encode(x=x, y=y)
        chart = frame.properties(width=plan.size[0], height=plan.size[1])
        svg = to_svg(chart, corner=[{"r": 0, "c": 0}])
    steps = shade.steps(picture.down_sample(plan.values))
    images = Markup("").join(
        Markup(
            '<image class="{}" width="{}" height="{}" preserveAspectRatio="none" href="{}"/>'
        ).format(theme, *plan.size, picture.png(steps, colours.SCALES[theme][shade.scale]))
        for theme in ("light", "dark")
    )
    # The first group at the origin is the frame of the plot: the picture goes in there.
    head, group, rest = finish(svg, label, (), css).partition('translate(0,0)">')
    return head + group + images + rest


def _axes(plan: _Plan) -> tuple[Any, Any]:
    import altair as alt

    def axis(channel: Any, name: str, labels: tuple[str, ...], most: int, title: str) -> Any:
        return channel(
            f"{name}:O",
            scale=alt.Scale(domain=list(range(len(labels))), paddingInner=0, paddingOuter=0),
            axis=alt.Axis(
                values=shown_labels(labels, max(2, most)),
                labelExpr=f"{json.dumps(list(labels))}[datum.value]",
                labelAngle=0,
                labelOverlap=False,
                domain=False,
                ticks=False,
                title=title,
            ),
        )

    across, down = ("head", "layer") if plan.upright else ("layer", "head")
    width, height = plan.size
    return (
        axis(alt.X, "c", plan.columns, width // 20, across),
        axis(alt.Y, "r", plan.rows, height // 13, down),
    )
