"""The figures of the page: which readings are drawn, how, and what their captions say."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from markupsafe import Markup

from attoscope.measures.base import Reading
from attoscope.report import curves as curve
from attoscope.report import heat
from attoscope.report.tracks import Track, is_curve, is_map, split
from attoscope.report.words import number, quantity

# A difference map is drawn where at least this share of heads leaves its null.
TELLING = 0.1


@dataclass(frozen=True, slots=True)
class Panel:
    """One drawing (or a wide and a narrow one of the same), or why there is none."""

    label: str
    drawings: tuple[Markup, ...] = ()
    failed: str = ""
    legend: str = ""
    low: str = ""
    high: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """All panels of one reading, with what its caption says.

    A group holds what belongs side by side: a map and its difference from the null.
    """

    anchor: str
    reading: Reading
    groups: list[list[Panel]]
    missing: str = ""
    constant: str = ""
    remarks: list[str] = field(default_factory=list)

    @property
    def panels(self) -> list[Panel]:
        """All panels, group by group."""
        return [panel for group in self.groups for panel in group]


def anchor(name: str) -> str:
    """A name as an in-page address."""
    return "r-" + (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "reading")


def curves(readings: Iterable[Reading]) -> list[Figure]:
    """One figure per reading along the depth."""
    return [_curves(r) for r in readings if is_curve(r)]


def maps(
    readings: Iterable[Reading],
    told: Collection[str],
    where: Mapping[tuple[str, int], str] | None = None,
) -> list[Figure]:
    """One figure per reading by layer and head; cells of those in `told` say their number and
    lead to the place in the page that `where` has for their site and head."""
    return [_maps(r, (where or {}) if r.name in told else None) for r in readings if is_map(r)]


def drawn_first(figures: Iterable[Figure]) -> list[Figure]:
    """Those with a drawing first, in their order."""
    return sorted(figures, key=lambda figure: not figure.panels)


def _constant(reading: Reading, tracks: list[Track]) -> Figure | None:
    """A reading that is the same everywhere needs a sentence, not a picture."""
    finite = np.concatenate([t.values[np.isfinite(t.values)] for t in tracks] or [np.zeros(0)])
    if not finite.size or finite.min() != finite.max():
        return None
    where = "head" if is_map(reading) else "layer"
    value = quantity(float(finite[0]), reading.unit)
    return _figure(reading, [], tracks, [], f"{value} at every {where}.")


def _figure(
    reading: Reading,
    groups: list[list[Panel]],
    tracks: list[Track],
    remarks: list[str],
    constant: str = "",
) -> Figure:
    return Figure(
        anchor=anchor(reading.name),
        reading=reading,
        groups=groups,
        missing=absent(reading),
        constant=constant,
        remarks=remarks,
    )


def absent(reading: Reading) -> str:
    """ "3 of 144 values not computed: reason", or ""."""
    # A stack with fewer heads than another lacks nothing.
    arrays = [t.values for t in split(reading)] if is_map(reading) else [reading.values]
    size = sum(a.size for a in arrays)
    gone = sum(int((~np.isfinite(a)).sum()) for a in arrays)
    if not gone:
        return ""
    why = reading.reason or "no reason was given"
    if gone == size:
        return f"Not computed: {why}"
    return f"{gone:,} of {size:,} values not computed: {why}"


def _curves(reading: Reading) -> Figure:
    tracks = [t for t in split(reading) if not t.empty]
    if same := _constant(reading, tracks):
        return same
    log = curve.logarithmic(tracks, reading.range)
    panels = [
        [drawn_panel(t.label, [partial(curve.draw, t, reading.title, reading.unit, log)])]
        for t in tracks
    ]
    remarks = _curve_remarks(reading, tracks)
    if log:
        remarks.append("The value axis is logarithmic.")
    return _figure(reading, panels, tracks, remarks)


def _curve_remarks(reading: Reading, tracks: list[Track]) -> list[str]:
    remarks = []
    if any(t.null is not None for t in tracks):
        remarks.append(f"Dashed: {reading.null_meaning or 'the null'}.")
    if tracks and all(t.low is None for t in tracks):
        remarks.append("No interval was computed.")
    return remarks


def drawn_panel(label: str, makers: Sequence[Callable[[], Markup]], **more: Any) -> Panel:
    """What the makers draw; one that fails says so in the panel."""
    try:
        return Panel(label, tuple(make() for make in makers), **more)
    except Exception as error:  # noqa: BLE001 - one chart that fails leaves the others standing
        return Panel(label, failed=f"{type(error).__name__}: {error}", **more)


def _maps(reading: Reading, told: Mapping[tuple[str, int], str] | None) -> Figure:
    tracks = [t for t in split(reading) if not t.empty]
    if not tracks:
        return _figure(reading, [], [], [])
    if same := _constant(reading, tracks):
        return same
    try:
        shade = heat.shading(tracks, reading.range)
        gaps = {t.label: heat.difference(t) for t in tracks if _telling(t)}
        gap_shade = heat.difference_shading(list(gaps.values())) if gaps else None
    except Exception as error:  # noqa: BLE001 - as above
        return _figure(
            reading, [[Panel("", failed=f"{type(error).__name__}: {error}")]], [], []
        )
    panels = []
    for track in tracks:
        panels.append([_map_panel(track, reading, shade, told)])
        if gap_shade and track.label in gaps:
            panels[-1].append(_map_panel(gaps[track.label], reading, gap_shade, None))
    return _figure(reading, panels, tracks, _map_remarks(tracks, bool(gaps), shade, reading))


def _map_panel(
    track: Track,
    reading: Reading,
    shade: heat.Shading,
    told: Mapping[tuple[str, int], str] | None,
) -> Panel:
    against = shade.scale == "d"
    title = f"{reading.title}, minus the null" if against else reading.title
    makers = [
        partial(
            heat.draw, track, title, reading.unit, shade, upright, None if upright else told
        )
        for upright in (False, True)
    ]
    return drawn_panel(
        f"{track.label}, minus the null" if against else track.label,
        makers,
        legend=shade.scale,
        **_ends(shade, reading.unit),
        note="log scale" if shade.log else "",
    )


def _ends(shade: heat.Shading, unit: str) -> dict[str, str]:
    """What stands at the ends of the colour bar."""
    if shade.scale == "d":
        low, high = ("≤ ", "≥ ") if shade.clipped else ("", "")
        low, high = f"{low}{number(shade.low)}", f"{high}+{number(shade.high)}"
        return {"low": low, "high": high}
    high = quantity(shade.high, unit)
    return {"low": number(shade.low), "high": f"≥ {high}" if shade.clipped else high}


def _telling(track: Track) -> bool:
    """Whether the null says something: enough heads lie off it, by more than their interval."""
    if track.null is None:
        return False
    both = np.isfinite(track.values) & np.isfinite(track.null)
    if not both.any():
        return False
    if track.low is not None and track.high is not None:
        off = (track.null < track.low) | (track.null > track.high)
    else:
        span = np.nanmax(track.values) - np.nanmin(track.values)
        off = np.abs(track.values - track.null) > 0.05 * (span or 1.0)
    return bool(off[both].mean() >= TELLING)


def _map_remarks(
    tracks: list[Track], differs: bool, shade: heat.Shading, reading: Reading
) -> list[str]:
    remarks = []
    if shade.log:
        remarks.append("Colours are on a logarithmic scale.")
    null = [t.null[np.isfinite(t.null)] for t in tracks if t.null is not None]
    if null and np.concatenate(null).size:
        middle = number(float(np.median(np.concatenate(null))))
        meaning = reading.null_meaning or "null"
        remarks.append(f"Null ({meaning}): median {middle}.")
        if not differs:
            remarks.append(
                "Nearly every head is where its null is: no difference map is drawn."
            )
    if any(t.values.size > heat.MOST_DRAWN for t in tracks):
        remarks.append("Drawn as a picture; exact numbers are in report.json.")
    return remarks
