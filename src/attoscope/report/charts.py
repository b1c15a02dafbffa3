"""Charts as inline SVG: curves along the depth and layer × head maps, drawn by Altair.

Colours are placeholders (see svg.py), so that one drawing serves light and dark.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from attoscope.report import colours, picture
from attoscope.report.svg import PLACEHOLDER, finish, scale_colour
from attoscope.report.tracks import Array, Track
from attoscope.report.words import interval, number, quantity, spelt

if TYPE_CHECKING:
    import altair as alt

CURVE_WIDTH, CURVE_HEIGHT = 452, 210
# A cell that says its number when pointed at takes six times the bytes of one that does not.
MOST_TOLD = 600
# Above this a drawing of cells gets heavy for a browser, and a picture says as much.
MOST_DRAWN = 2_000
_FONT = "Helvetica, Arial, sans-serif"


def _svg(chart: alt.TopLevelMixin) -> str:
    import vl_convert

    svg: str = vl_convert.vegalite_to_svg(chart.to_dict(validate=False))
    return svg


def _themed(chart: Any, **config: Any) -> Any:
    ink, soft, line = (PLACEHOLDER[name] for name in ("ink", "soft", "line"))
    return (
        chart.configure(background="transparent", font=_FONT, padding=2, **config)
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=soft,
            titleColor=soft,
            gridColor=line,
            domainColor=line,
            tickColor=line,
            labelFontSize=12,
            titleFontSize=12,
            titleFontWeight="normal",
            titlePadding=8,
            labelPadding=6,
            labelLimit=400,
            titleLimit=600,
        )
        .configure_text(color=ink)
    )


def _ticks(labels: tuple[str, ...], most: int) -> list[int]:
    """Which labels to write: every one, or every second, fifth, … so that they do not touch."""
    amount = len(labels)
    for stride in (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 25, 50, 100, 200, 500, 1000):
        if amount / stride <= most:
            break
    digits = [
        i for i, label in enumerate(labels) if label.isdigit() and int(label) % stride == 0
    ]
    named = [i for i, label in enumerate(labels) if not label.isdigit()]
    # A name ("in", "final") wins over the number beside it.
    near = max(1 if amount > 9 else 0, stride // 2)
    return sorted(named + [i for i in digits if all(abs(i - n) > near for n in named)])


# ---- curves


def curve(track: Track, title: str, unit: str, logarithmic: bool) -> Markup:
    """One track along the depth: line, band of the 95 % interval, the null dashed."""
    import altair as alt

    rows = _curve_rows(track)
    texts = [_text(track, i, unit) for i in range(len(rows))]
    scale = (
        alt.Scale(type="log", nice=True) if logarithmic else alt.Scale(zero=False, nice=True)
    )
    shown = _ticks(track.ticks, 14)
    axis = alt.Axis(
        values=shown,
        labelExpr=f"{json.dumps(list(track.ticks))}[datum.value]",
        grid=False,
        title="layer",
        labelOverlap=False,
    )
    last = len(rows) - 1
    x = alt.X("i:Q", axis=axis, scale=alt.Scale(domain=[0, max(last, 1)], nice=False))
    y_axis = alt.Axis(
        title=unit or "value",
        domain=False,
        ticks=False,
        **({"values": _powers(track)} if logarithmic else {"tickCount": 5}),
    )
    y = alt.Y("value:Q", scale=scale, axis=y_axis)
    base = alt.Chart(alt.Data(values=rows))
    accent, null = PLACEHOLDER["accent"], PLACEHOLDER["null"]
    layers: list[Any] = []
    if track.low is not None and track.high is not None:
        band = base.mark_area(color=accent, fillOpacity=0.2)
        layers.append(band.encode(x=x, y=alt.Y("low:Q", scale=scale, axis=y_axis), y2="high:Q"))
    if track.null is not None:
        dashed = base.mark_line(color=null, strokeDash=[5, 4], strokeWidth=1.75)
        layers.append(dashed.encode(x=x, y=alt.Y("null:Q", scale=scale, axis=y_axis)))
    layers.append(base.mark_line(color=accent, strokeWidth=2.25).encode(x=x, y=y))
    points = base.mark_point(filled=True, color=accent, size=26)
    layers.append(points.encode(x=x, y=y, description="i:N"))
    chart = alt.layer(*layers).properties(
        width=CURVE_WIDTH, height=CURVE_HEIGHT, autosize=alt.AutoSizeParams(type="fit")
    )
    label = f"{title}, {track.label}: {_range_text(track.values, unit)}"
    return finish(_svg(_themed(chart)), label, texts, "curve")


def _powers(track: Track) -> list[float]:
    """The powers of ten that a logarithmic axis needs."""
    arrays = (track.values, track.low, track.high, track.null)
    finite = np.concatenate([a[np.isfinite(a) & (a > 0)] for a in arrays if a is not None])
    low, high = np.floor(np.log10(finite.min())), np.ceil(np.log10(finite.max()))
    return [float(10.0**power) for power in np.arange(low, high + 1)]


def _curve_rows(track: Track) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for i in range(len(track.values)):
        row: dict[str, float | None] = {"i": i}
        for name in ("value", "low", "high", "null"):
            array = track.values if name == "value" else getattr(track, name)
            row[name] = None if array is None or not np.isfinite(array[i]) else float(array[i])
        rows.append(row)
    return rows


def _text(track: Track, index: Any, unit: str) -> str:
    """ "encoder 3: 0.52, (0.50–0.54), null 0.31": what a mark says when pointed at."""
    text = spelt(track.places[index[0] if isinstance(index, tuple) else index])
    if isinstance(index, tuple):
        text += f", head {track.heads[index[1]]}"
    text = f"{text}: {quantity(float(track.values[index]), unit)}"
    if track.low is not None and track.high is not None:
        between = interval(float(track.low[index]), float(track.high[index]))
        text += f" ({between})" if between else ""
    if track.null is not None and np.isfinite(track.null[index]):
        text += f", null {number(float(track.null[index]))}"
    return text


def _range_text(values: Array, unit: str) -> str:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "not computed"
    return (
        f"from {quantity(float(finite.min()), unit)} to {quantity(float(finite.max()), unit)}"
    )


def wants_log(values: list[Array], bounds: tuple[float | None, float | None]) -> bool:
    """True where an unbounded reading, all positive, spans two powers of ten or more."""
    if bounds[1] is not None:
        return False
    finite = np.concatenate([v[np.isfinite(v)] for v in values]) if values else np.zeros(0)
    return bool(finite.size and finite.min() > 0 and finite.max() / finite.min() >= 100)


# ---- maps


@dataclass(frozen=True, slots=True)
class Shading:
    """From values to steps of a colour scale, the same for all tracks of a reading."""

    scale: str
    low: float
    high: float
    logarithmic: bool = False

    def steps(self, values: Array) -> NDArray[np.int64]:
        """Step numbers, −1 where not computed."""
        low, high = self.low, self.high
        if self.logarithmic:
            with np.errstate(invalid="ignore", divide="ignore"):
                values = np.log10(values)
            low, high = np.log10(low), np.log10(high)
        return colours.step((values - low) / ((high - low) or 1.0))


def shading(tracks: list[Track], bounds: tuple[float | None, float | None]) -> Shading:
    """The shading for values: from the reading's lower bound if it has one, to the largest."""
    finite = np.concatenate([t.values[np.isfinite(t.values)] for t in tracks])
    low, high = float(finite.min()), float(finite.max())
    if wants_log([t.values for t in tracks], bounds):
        return Shading("s", low, high, logarithmic=True)
    low = low if bounds[0] is None else min(bounds[0], low)
    if bounds[1] is not None and high - low > 0.5 * (bounds[1] - low):
        high = max(bounds[1], high)
    return Shading("s", low, high if high > low else low + 1.0)


def difference(track: Track) -> Track:
    """The track minus its null."""
    assert track.null is not None
    return Track(
        track.label,
        track.places,
        track.ticks,
        track.heads,
        track.values - track.null,
        None,
        None,
        None,
    )


def difference_shading(tracks: list[Track]) -> Shading:
    """Even to both sides of zero, over all tracks."""
    finite = np.concatenate([np.abs(t.values[np.isfinite(t.values)]) for t in tracks])
    most = float(finite.max()) or 1.0
    return Shading("d", -most, most)


def heat(
    track: Track, title: str, unit: str, shade: Shading, upright: bool, told: bool
) -> Markup:
    """A layer × head map. `upright` puts the layers down the page, for narrow screens.

    With `told`, each cell says its number when pointed at.
    """
    rows, columns = (track.ticks, _names(track)) if upright else (_names(track), track.ticks)
    values = track.values if upright else track.values.T
    step_x, step_y = _cell(len(columns), len(rows), upright)
    axes = _heat_axes(rows, columns, step_x, step_y, upright)
    label = f"{title}, {track.label}, by layer and head: {_range_text(track.values, unit)}"
    css = "upright" if upright else "lying"
    size = (step_x * len(columns), step_y * len(rows))
    if values.size > MOST_DRAWN:
        return _picture(values, shade, axes, size, label, css)
    told = told and values.size <= MOST_TOLD
    texts, cells = [], []
    steps = shade.steps(values)
    for r, c in np.ndindex(values.shape):
        texts.append(_text(track, (r, c) if upright else (c, r), unit) if told else "")
        if steps[r, c] >= 0:
            colour = scale_colour(shade.scale, int(steps[r, c]))
            cells.append({"r": r, "c": c, "k": colour, "n": len(texts) - 1})
    return finish(
        _svg(_themed(_cells(cells, values, axes, size))), label, texts if told else (), css
    )


def _cells(
    cells: list[Any], values: Array, axes: tuple[Any, Any], size: tuple[int, int]
) -> Any:
    import altair as alt

    x, y = axes
    rect = alt.Chart(alt.Data(values=cells)).mark_rect(stroke=None)
    drawn = rect.encode(x=x, y=y, color=alt.Color("k:N", scale=None), description="n:N")
    gaps = [{"r": int(r), "c": int(c)} for r, c in np.argwhere(~np.isfinite(values))]
    if gaps:
        cross = alt.Chart(alt.Data(values=gaps)).mark_text(text="×", color=PLACEHOLDER["null"])
        drawn = drawn + cross.encode(x=x, y=y)
    return drawn.properties(width=size[0], height=size[1])


def _picture(
    values: Array,
    shade: Shading,
    axes: tuple[Any, Any],
    size: tuple[int, int],
    label: str,
    css: str,
) -> Markup:
    """The same axes round a picture; one for light, one for dark."""
    import altair as alt

    x, y = axes
    corner = [{"r": 0, "c": 0}]
    frame = alt.Chart(alt.Data(values=corner)).mark_rect(fillOpacity=0).encode(x=x, y=y)
    drawn = finish(
        _svg(_themed(frame.properties(width=size[0], height=size[1]))), label, (), css
    )
    steps = shade.steps(picture.down_sample(values))
    images = Markup("").join(
        Markup(
            '<image class="{}" width="{}" height="{}" preserveAspectRatio="none" href="{}"/>'
        ).format(theme, *size, picture.png(steps, colours.SCALES[theme][shade.scale]))
        for theme in ("light", "dark")
    )
    # The first group is the frame of the plot: the picture goes in at its origin.
    head, group, rest = drawn.partition('translate(0,0)">')
    return head + group + images + rest if group else drawn


def _names(track: Track) -> tuple[str, ...]:
    return tuple(str(head) for head in track.heads)


def _cell(columns: int, rows: int, upright: bool) -> tuple[int, int]:
    """Width and height of a cell in pixels, so that the map fits its column of the page."""
    room = 290 if upright else 388
    wide = min(26, max(room // columns, 1))
    high = min(18, wide, 420 // rows) if upright else min(18, 300 // rows)
    return wide, max(high, 2)


def _heat_axes(
    rows: tuple[str, ...], columns: tuple[str, ...], step_x: int, step_y: int, upright: bool
) -> tuple[Any, Any]:
    import altair as alt

    def axis(name: str, labels: tuple[str, ...], most: int, **more: Any) -> Any:
        kind = alt.X if name == "c" else alt.Y
        return kind(
            f"{name}:O",
            scale=alt.Scale(domain=list(range(len(labels))), paddingInner=0, paddingOuter=0),
            axis=alt.Axis(
                values=_ticks(labels, most),
                labelExpr=f"{json.dumps(list(labels))}[datum.value]",
                labelAngle=0,
                labelOverlap=False,
                domain=False,
                ticks=False,
                labelPadding=5,
                **more,
            ),
        )

    across, down = ("head", "layer") if upright else ("layer", "head")
    x = axis("c", columns, max(2, step_x * len(columns) // 20), title=across)
    y = axis("r", rows, max(2, step_y * len(rows) // 13), title=down)
    return x, y
