"""Readings before and after, in short, at the places that both have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attoscope.diagnosis import Amount, Shift
from attoscope.measures.base import Array, Reading
from attoscope.report.choice import foremost
from attoscope.report.tracks import Track, is_curve, is_map, is_output, split
from attoscope.report.words import count, place

MOST_CURVES = 8
# Two runs of one model may differ by rounding.
_ROUNDING, _NOTHING = 1e-5, 1e-9
_NAMED = 5
# Single places count when more of them have left their interval than 95 % intervals let by chance.
_CHANCE = 0.05


@dataclass(frozen=True, slots=True)
class Shifts:
    """Loss and accuracy; the other readings that changed, largest change first; how
    many readings were compared; the baseline's curves of those that changed most; and what could
    not be compared."""

    outputs: tuple[Shift, ...]
    shifts: tuple[Shift, ...]
    compared: int
    curves: tuple[Reading, ...]
    notes: tuple[str, ...]


def between(before: Sequence[Reading], after: Sequence[Reading]) -> Shifts:
    """Every reading of `before` and `after` that both have, compared."""
    past = {r.name: r for r in before if _sound(r)}
    now = {r.name: r for r in after if _sound(r)}
    pairs = [
        (at_places_of(past[name], reading), reading)
        for name, reading in now.items()
        if name in past and _alike(past[name], reading)
    ]
    outputs, found, without = [], [], []
    for then, reading in pairs:
        shifts = of_reading(then, reading)
        if is_output(reading):
            outputs += shifts
        elif shifts and all(shift.apart is None for shift in shifts):
            without.append(reading.title)
        else:
            found += shifts
    compared = {shift.reading for shift in found}
    apart = sorted(filter(_changed, found), key=lambda s: -s.size)
    return Shifts(
        outputs=tuple(outputs),
        shifts=tuple(apart),
        compared=len(compared),
        curves=_most_changed(apart, [then for then, _ in pairs]),
        notes=(
            *_only("Only in the baseline", [r for r in before if r.name not in now]),
            *_only("Not in the baseline", [r for r in after if r.name not in past]),
            *_unlike(past, now),
            *_named("No interval, so nothing can be said of", without),
        ),
    )


def _changed(shift: Shift) -> bool:
    return bool(shift.apart) or shift.moved > _CHANCE * shift.places


def of_reading(before: Reading, after: Reading) -> list[Shift]:
    """Last block and mean over depth of each stack; mean over heads; or the number itself.

    `before` has the places of `after`, NaN where it lacks them.
    """
    if is_output(after):
        return [_shift(after, "output", _whole(before), _whole(after))]
    if not (is_curve(after) or is_map(after)):
        return []
    found: list[Shift] = []
    pasts = {track.label: track for track in split(before)}
    for track in split(after):
        past = pasts.get(track.label)
        if past is None:
            continue
        both = _common(past, track)
        if not both.any():
            continue
        if is_map(after):
            found.append(_shift(after, f"{track.label}, mean over heads", past, track, both))
            continue
        last = _last_block(track, both)
        where = f"{track.label}, layer {place(track.places[last])[1]} (last block)"
        only = np.arange(len(both)) == last
        found.append(_shift(after, where, past, track, only))
        found.append(_shift(after, f"{track.label}, mean over depth", past, track, both))
    return found


def at_places_of(source: Reading, target: Reading) -> Reading:
    """`source` at the labels of `target`, NaN where it has none."""
    spots = [{label: i for i, label in enumerate(source.coords[dim])} for dim in source.dims]
    shape = tuple(len(target.coords[dim]) for dim in target.dims)
    index = [
        [spot.get(label, -1) for label in target.coords[dim]]
        for spot, dim in zip(spots, target.dims, strict=True)
    ]
    here = np.ix_(*[[i for i, s in enumerate(row) if s >= 0] for row in index])
    there = np.ix_(*[[s for s in row if s >= 0] for row in index])

    def placed(values: Array | None) -> Array | None:
        if values is None:
            return None
        found = np.full(shape, np.nan)
        found[here] = values[there]
        return found

    values = placed(source.values)
    assert values is not None
    return replace(
        source,
        coords=target.coords,
        values=values,
        low=placed(source.low),
        high=placed(source.high),
        null=placed(source.null),
        row_error=None,
    )


def _sound(reading: Reading) -> bool:
    """Whether its arrays have the shape that its labels say (a file may hold anything)."""
    try:
        shape = tuple(len(reading.coords[dim]) for dim in reading.dims)
    except (KeyError, TypeError):
        return False
    arrays = (reading.values, reading.low, reading.high, reading.null)
    return bool(shape) and all(a is None or a.shape == shape for a in arrays)


def _alike(one: Reading, other: Reading) -> bool:
    return (one.dims, one.unit) == (other.dims, other.unit)


def _common(past: Track, track: Track) -> NDArray[np.bool_]:
    """Where both have a number; a stack may have had fewer heads that were filled."""
    if past.values.shape != track.values.shape:
        heads = min(past.values.shape[-1], track.values.shape[-1])
        found = np.zeros(track.values.shape, bool)
        found[..., :heads] = np.isfinite(past.values[..., :heads]) & np.isfinite(
            track.values[..., :heads]
        )
        return found
    return np.isfinite(past.values) & np.isfinite(track.values)


def _last_block(track: Track, both: NDArray[np.bool_]) -> int:
    """The last layer that both have; the norm after it is no block."""
    there = np.flatnonzero(both)
    layers = [i for i in there if place(track.places[i])[1].isdigit()]
    return int(layers[-1] if layers else there[-1])


def _whole(reading: Reading) -> Track:
    return Track(
        "output",
        ("output",),
        ("",),
        (),
        reading.values,
        reading.low,
        reading.high,
        reading.null,
    )


def _shift(
    reading: Reading,
    where: str,
    past: Track,
    track: Track,
    both: NDArray[np.bool_] | None = None,
) -> Shift:
    both = np.ones(track.values.shape, bool) if both is None else both
    ends = [_cells(each, both) for t in (past, track) for each in (t.low, t.high)]
    known: NDArray[np.bool_] = np.all(np.isfinite(np.stack(ends)), axis=0)
    # A mean and its interval are over the same places.
    kept = known if known.any() else np.ones_like(known)
    before, after = (_amount(t, both, kept) for t in (past, track))
    then, now = (_cells(t.values, both) for t in (past, track))
    apart = (ends[1] < ends[2]) | (ends[3] < ends[0])
    apart &= ~np.isclose(then, now, rtol=_ROUNDING, atol=_NOTHING)
    return Shift(
        reading=reading.name,
        title=reading.title,
        unit=reading.unit,
        where=where,
        before=before,
        after=after,
        size=_size(before.value, after.value, reading.range),
        apart=_apart(before, after),
        moved=int(apart.sum()),
        places=len(apart),
    )


def _cells(values: Array | None, both: NDArray[np.bool_]) -> Array:
    """The numbers at these places; heads that an array lacks are NaN."""
    if values is None:
        return np.full(int(both.sum()), np.nan)
    if values.shape != both.shape:
        wider = np.full(both.shape, np.nan)
        heads = min(values.shape[-1], both.shape[-1])
        wider[..., :heads] = values[..., :heads]
        values = wider
    return values[both]


def _amount(track: Track, both: NDArray[np.bool_], kept: NDArray[np.bool_]) -> Amount:
    value, low, high, null = (
        float(_cells(each, both)[kept].mean()) if each is not None else math.nan
        for each in (track.values, track.low, track.high, track.null)
    )
    both_ends = math.isfinite(low) and math.isfinite(high)
    return Amount(
        value,
        low if both_ends else None,
        high if both_ends else None,
        null if math.isfinite(null) else None,
    )


def _apart(before: Amount, after: Amount) -> bool | None:
    ends = (before.low, before.high, after.low, after.high)
    if any(end is None for end in ends):
        return None
    low, high, low_now, high_now = (float(end or 0.0) for end in ends)
    if math.isclose(before.value, after.value, rel_tol=_ROUNDING, abs_tol=_NOTHING):
        return False
    return high < low_now or high_now < low


def _size(before: float, after: float, bounds: tuple[float | None, float | None]) -> float:
    low, high = bounds
    if not math.isfinite(before) or not math.isfinite(after):
        return math.nan
    whole = max(abs(before), abs(after))
    if low is not None and high is not None:
        whole = high - low
    return min(1.0, abs(after - before) / whole) if whole else 0.0


def _most_changed(apart: Sequence[Shift], before: Sequence[Reading]) -> tuple[Reading, ...]:
    """Curves of the baseline to draw, the largest change first."""
    curves = {r.name: r for r in before if is_curve(r)}
    names = dict.fromkeys(s.reading for s in apart if s.reading in curves)
    return tuple(curves[name] for name in foremost(list(names), MOST_CURVES))


def _only(what: str, readings: Sequence[Reading]) -> list[str]:
    return _named(what, [r.title for r in readings])


def _unlike(past: dict[str, Reading], now: dict[str, Reading]) -> list[str]:
    names = [n for n, r in now.items() if n in past and not _alike(past[n], r)]
    return _named("Other unit or other places then", [now[name].title for name in names])


def _named(what: str, titles: Sequence[str]) -> list[str]:
    if not titles:
        return []
    more = f" and {len(titles) - _NAMED:,} more" if len(titles) > _NAMED else ""
    number = f"{count(len(titles), 'reading')}: {', '.join(titles[:_NAMED])}{more}"
    return [f"{what}: {number}." if not what.endswith(" of") else f"{what} {number}."]
