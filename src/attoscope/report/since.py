"""A comparison with a baseline in words, and what the page shows of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from markupsafe import Markup

from attoscope.diagnosis import Amount, Change, Comparison, Shift
from attoscope.measures.base import Reading
from attoscope.report import curves as curve
from attoscope.report.choice import foremost
from attoscope.report.figures import Figure, anchor, drawn_panel
from attoscope.report.shifts import at_places_of
from attoscope.report.tracks import split
from attoscope.report.words import count, interval, missing, number, quantity, visible

# In a terminal, one line each.
MOST_LINES = 8
MOST_ROWS = 12


def sentence(comparison: Comparison) -> str:
    """What happened to the loss, to findings and to readings, in one to three sentences."""
    said = [_outcome(shift) for shift in comparison.outputs]
    gone = sum(change.why == "gone" for change in comparison.better)
    said.append(
        f"Findings: {gone} gone, {len(comparison.better) - gone} milder, "
        f"{len(comparison.worse)} new or worse."
    )
    names = dict.fromkeys(shift.reading for shift in comparison.shifts)
    if not comparison.compared:
        return " ".join([*said, "No reading could be compared."])
    said.append(
        f"{len(names)} of {count(comparison.compared, 'reading')} changed by more than their "
        "intervals."
    )
    return " ".join(said)


def _outcome(shift: Shift) -> str:
    """ "Loss rose from 2.30 to 2.45 nats (intervals apart)."."""
    before, after = shift.before.value, shift.after.value
    if not math.isfinite(before) or not math.isfinite(after):
        return f"{shift.title} before: {number(before)}; now: {number(after)}."
    if before == after:
        return f"{shift.title} stayed at {quantity(after, shift.unit)}."
    went = "rose" if after > before else "fell"
    return (
        f"{shift.title} {went} from {number(before)} to {quantity(after, shift.unit)} "
        f"({_overlap(shift)})."
    )


def _overlap(shift: Shift) -> str:
    if shift.apart is None:
        return "no interval"
    return "intervals apart" if shift.apart else "intervals overlap"


def lines(comparison: Comparison) -> list[str]:
    """The comparison in a few lines, for a terminal."""
    found = []
    if comparison.differs:
        found.append(differing(comparison))
    found.append(f"Since the baseline: {sentence(comparison)}")
    found += [f"  {_line(shift)}" for shift in comparison.outputs]
    found += [f"  better ({c.why}): {visible(c.finding.title)}" for c in comparison.better]
    found += [f"  worse ({c.why}): {visible(c.finding.title)}" for c in comparison.worse]
    largest = _largest(comparison.shifts)
    found += [f"  {_line(largest[name])}" for name in foremost(list(largest), MOST_LINES)]
    more = len(largest) - MOST_LINES
    if more > 0:
        found.append(f"  and {count(more, 'more reading', 'more readings')}, in the report")
    return found + [visible(note) for note in comparison.notes]


def differing(comparison: Comparison) -> str:
    """That model or data are not the same, and in what."""
    return f"The baseline is of another model or other data: {visible(comparison.differs)}."


def _largest(shifts: Sequence[Shift]) -> dict[str, Shift]:
    """One for each reading, the largest."""
    found: dict[str, Shift] = {}
    for shift in shifts:
        found.setdefault(shift.reading, shift)
    return found


def _line(shift: Shift) -> str:
    """ "Cosine, encoder, layer 5 (last block): 0.91 (0.90–0.92) → 0.45 (0.43–0.47), null 0.88"."""
    where = "" if shift.where == "output" else f", {visible(shift.where)}"
    text = f"{visible(shift.title)}{where}: {_said(shift.before)} → {_said(shift.after)}"
    if shift.unit not in ("", "share"):
        text += f" {visible(shift.unit)}"
    if shift.after.null is not None:
        text += f", null {number(shift.after.null)}"
    return text + (f"; {_moved(shift)}" if shift.places > 1 else "")


def _said(amount: Amount) -> str:
    between = interval(amount.low, amount.high)
    return number(amount.value) + (f" ({between})" if between else "")


def _moved(shift: Shift) -> str:
    """ "34 of 144 heads apart"."""
    noun = "head" if "heads" in shift.where else "point"
    return f"{shift.moved:,} of {count(shift.places, noun)} apart"


def view(comparison: Comparison | None, readings: Sequence[Reading]) -> dict[str, Any] | None:
    """What the template shows; None without a comparison."""
    if comparison is None:
        return None
    shown = {reading.name for reading in readings}
    rows = [_row(shift, shown) for shift in (*comparison.outputs, *comparison.shifts)]
    return {
        "model": comparison.model,
        "differs": differing(comparison) if comparison.differs else "",
        "sentence": sentence(comparison),
        "better": [_change(change) for change in comparison.better],
        "worse": [_change(change) for change in comparison.worse],
        "rows": rows[:MOST_ROWS],
        "more": rows[MOST_ROWS:],
        "figures": _figures(comparison.before, readings),
        "notes": comparison.notes,
    }


def _change(change: Change) -> dict[str, Any]:
    return {"finding": change.finding, "why": change.why}


def _row(shift: Shift, shown: set[str]) -> dict[str, Any]:
    before, after = shift.before, shift.after
    nulls = [number(null) for null in (before.null, after.null) if not missing(null)]
    return {
        "title": shift.title,
        "unit": "" if shift.unit == "share" else shift.unit,
        "link": anchor(shift.reading) if shift.reading in shown else "",
        "where": "" if shift.where == "output" else shift.where,
        "moved": _moved(shift) if shift.places > 1 else "",
        "before": number(before.value),
        "before_interval": interval(before.low, before.high),
        "after": number(after.value),
        "after_interval": interval(after.low, after.high),
        "null": " → ".join(dict.fromkeys(nulls)),
        "overlap": "" if shift.apart else _overlap(shift),
    }


def _figures(before: Sequence[Reading], readings: Sequence[Reading]) -> list[Figure]:
    """Curves before and after, drawn over each other."""
    now = {reading.name: reading for reading in readings}
    return [_figure(then, now[then.name]) for then in before if then.name in now]


def _figure(then: Reading, now: Reading) -> Figure:
    # Saved comparisons come from files: their places need not be those of this report.
    pasts = {track.label: track for track in split(at_places_of(then, now))}
    tracks = [track for track in split(now) if not track.empty and track.label in pasts]
    drawn = [*tracks, *(pasts[track.label] for track in tracks)]
    log = curve.logarithmic(drawn, now.range)

    def make(label: str) -> Markup:
        track = next(t for t in tracks if t.label == label)
        return curve.draw(track, f"{now.title}, before and now", now.unit, log, pasts[label])

    panels = [[drawn_panel(track.label, [partial(make, track.label)])] for track in tracks]
    remarks = ["The value axis is logarithmic."] if log else []
    return Figure(f"since-{anchor(now.name)}", now, panels, remarks=remarks)
