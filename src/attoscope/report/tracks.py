"""Readings cut into what one chart shows: one stack, one kind of call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attoscope.measures.base import Reading
from attoscope.report.words import place, tracks

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Track:
    """One reading in one stack: arrays (layer,) or (layer, head), NaN where not computed."""

    label: str
    places: tuple[str, ...]
    ticks: tuple[str, ...]
    heads: tuple[int, ...]
    values: Array
    low: Array | None
    high: Array | None
    null: Array | None

    @property
    def empty(self) -> bool:
        """True where nothing was computed."""
        return not np.isfinite(self.values).any()


def is_curve(reading: Reading) -> bool:
    """One number per layer or point: drawn as a curve along the depth."""
    return reading.dims in (("site",), ("point",), ("layer",))


def is_map(reading: Reading) -> bool:
    """One number per site and head: drawn as a map."""
    return reading.dims == ("site", "head")


def is_output(reading: Reading) -> bool:
    """One number for what comes out of the model: loss, accuracy."""
    return reading.dims == ("output",)


def split(reading: Reading) -> list[Track]:
    """The tracks of a curve or a map, in the order in which the model runs them."""
    places = [str(label) for label in reading.coords[reading.dims[0]]]
    found = []
    for label, members in tracks(places).items():
        heads = _heads(reading, members)
        found.append(
            Track(
                label=label,
                places=tuple(places[i] for i in members),
                ticks=tuple(place(places[i])[1] or str(i) for i in members),
                heads=tuple(int(reading.coords["head"][h]) for h in heads),
                values=_cut(reading.values, members, heads),
                low=_cut_maybe(reading.low, members, heads),
                high=_cut_maybe(reading.high, members, heads),
                null=_cut_maybe(reading.null, members, heads),
            )
        )
    return found


def _heads(reading: Reading, members: list[int]) -> list[int]:
    """The heads that this stack has: trailing ones that it never filled belong to others."""
    if not is_map(reading):
        return []
    filled: NDArray[np.bool_] = np.any(np.isfinite(reading.values[members]), axis=0)
    amount = int(np.flatnonzero(filled).max()) + 1 if filled.any() else len(filled)
    return list(range(amount))


def _cut(values: Array, members: list[int], heads: list[int]) -> Array:
    cut = values[np.ix_(members, heads)] if heads else values[members]
    # Infinity is no place on an axis.
    return np.where(np.isfinite(cut), cut, np.nan)


def _cut_maybe(values: Array | None, members: list[int], heads: list[int]) -> Array | None:
    if values is None or not np.isfinite(values).any():
        return None
    return _cut(values, members, heads)
