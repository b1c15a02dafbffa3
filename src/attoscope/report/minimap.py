"""A small map that shows at a glance where in the model a finding lies."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape

from attoscope.findings import Finding
from attoscope.measures.base import Reading
from attoscope.report.words import place, tracks, where

_CELL, _GAP = 7, 1
_WIDEST = 210
_MOST_HEADS = 24


def minimap(finding: Finding, readings: Iterable[Reading]) -> Markup:
    """Layers across, heads down; what the finding names is filled."""
    layers, heads = _extent(readings)
    parts = []
    for track in tracks(finding.sites):
        if layers.get(track):
            parts.append(_grid(track, layers[track], heads.get(track, 1), finding))
    return Markup("").join(parts)


def _extent(readings: Iterable[Reading]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Layers and number of heads of each track, as the readings have them."""
    layers: dict[str, set[int]] = {}
    heads: dict[str, int] = {}
    for reading in readings:
        if not reading.dims or reading.dims[0] not in ("site", "point", "layer"):
            continue
        for label in reading.coords[reading.dims[0]]:
            track, index = place(str(label))
            if index.isdigit():
                layers.setdefault(track, set()).add(int(index))
                if reading.dims == ("site", "head"):
                    heads[track] = max(heads.get(track, 0), len(reading.coords["head"]))
    return {track: sorted(each) for track, each in layers.items()}, heads


def _grid(track: str, layers: list[int], heads: int, finding: Finding) -> Markup:
    sites = {int(i) for t, i in map(place, finding.sites) if t == track and i.isdigit()}
    named: set[tuple[int, int]] = set()
    for site, head in finding.heads:
        t, i = place(site)
        if t == track and i.isdigit():
            named.add((int(i), head))
    rows = heads if named and heads <= _MOST_HEADS else 1
    cell = max(3, min(_CELL, _WIDEST // len(layers) - _GAP))
    pitch = cell + _GAP
    high = cell if rows > 1 else 2 * cell
    empty: list[str] = []
    full: list[str] = []
    for column, layer in enumerate(layers):
        for row in range(rows):
            hit = (layer, row) in named if rows > 1 else layer in sites
            box = f"M{column * pitch},{row * (high + _GAP)}h{cell}v{high}h-{cell}z"
            (full if hit else empty).append(box)
    return Markup(
        '<figure class="minimap"><svg role="img" aria-label="{}" width="{}" height="{}" '
        'viewBox="0 0 {} {}"><path class="off" d="{}"/><path class="on" d="{}"/></svg>'
        "<figcaption>{}</figcaption></figure>"
    ).format(
        f"Where: {where(finding.sites, finding.heads)}",
        *(width := len(layers) * pitch, height := rows * (high + _GAP)),
        width,
        height,
        "".join(empty),
        "".join(full),
        Markup("{} · {}").format(track, "layer → head ↓" if rows > 1 else "layer →")
        if track
        else escape(""),
    )
