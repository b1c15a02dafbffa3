"""What all charts share: the house style, axis labels, and the way from Altair to an SVG."""

from __future__ import annotations

from typing import Any

import numpy as np

from attoscope.report.svg import PLACEHOLDER
from attoscope.report.tracks import Array, Track
from attoscope.report.words import interval, number, quantity, spelt

_FONT = "Helvetica, Arial, sans-serif"
_STRIDES = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 25, 50, 100, 200, 500, 1000)


def to_svg(chart: Any, **data: list[dict[str, Any]]) -> str:
    """The chart, in the house style, drawn with its named data.

    The data go round Altair, which would copy them several times over.
    """
    import vl_convert

    specification = _styled(chart).to_dict(validate=False)
    specification["datasets"] = data
    svg: str = vl_convert.vegalite_to_svg(specification)
    return svg


def quick() -> Any:
    """Altair without checks of every part against its schema, which take most of its time."""
    from altair.utils.schemapi import debug_mode

    return debug_mode(False)


def _styled(chart: Any) -> Any:
    soft, line = PLACEHOLDER["soft"], PLACEHOLDER["line"]
    return (
        chart.configure(background="transparent", font=_FONT, padding=2)
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
    )


def shown_labels(labels: tuple[str, ...], most: int) -> list[int]:
    """Which labels to write: every one, or every second, fifth, … so that they do not touch."""
    amount = len(labels)
    stride = next((s for s in _STRIDES if amount / s <= most), _STRIDES[-1])
    digits = [
        i for i, label in enumerate(labels) if label.isdigit() and int(label) % stride == 0
    ]
    named = [i for i, label in enumerate(labels) if not label.isdigit()]
    # A name ("in", "final") wins over the number beside it.
    near = max(1 if amount > 9 else 0, stride // 2)
    return sorted(named + [i for i in digits if all(abs(i - n) > near for n in named)])


def said(track: Track, index: tuple[int, ...], unit: str) -> str:
    """What a mark says when pointed at: "encoder 3, head 4: 0.520 (0.500–0.540)"."""
    text = spelt(track.places[index[0]])
    if len(index) > 1:
        text += f", head {track.heads[index[1]]}"
    text += f": {quantity(float(track.values[index]), unit)}"
    if track.low is not None and track.high is not None:
        between = interval(float(track.low[index]), float(track.high[index]))
        text += f" ({between})" if between else ""
    if track.null is not None and np.isfinite(track.null[index]):
        text += f", null {number(float(track.null[index]))}"
    return text


def extent(values: Array, unit: str) -> str:
    """ "from 0.100 to 0.900", for those who hear a chart."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "not computed"
    return (
        f"from {quantity(float(finite.min()), unit)} to {quantity(float(finite.max()), unit)}"
    )


def spans(values: list[Array], bounds: tuple[float | None, float | None], ratio: float) -> bool:
    """Whether an unbounded, positive reading spans this ratio and wants a log scale."""
    if bounds[1] is not None:
        return False
    finite = np.concatenate([v[np.isfinite(v)] for v in values] or [np.zeros(0)])
    return bool(finite.size and finite.min() > 0 and finite.max() / finite.min() >= ratio)
