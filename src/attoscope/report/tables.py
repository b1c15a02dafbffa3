"""All numbers in tables: one line per reading, and each reading in full."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attoscope.measures.base import Reading
from attoscope.report.figures import absent, anchor
from attoscope.report.tracks import is_output
from attoscope.report.words import interval, number, spelt

# A longer table helps nobody; report.json holds every number.
MOST_CELLS = 1_600


@dataclass(frozen=True, slots=True)
class Cell:
    """A number with its interval and its null."""

    value: str
    interval: str
    null: str


def summary(reading: Reading) -> dict[str, Any]:
    """Lowest, median and highest value, with where they are, and the null's median."""
    values = np.where(np.isfinite(reading.values), reading.values, np.nan)
    line: dict[str, Any] = {
        "reading": reading,
        "anchor": anchor(reading.name),
        "absent": absent(reading),
        "computed": bool(np.isfinite(values).any()),
    }
    if not line["computed"]:
        return line
    for name, flat in (("lowest", np.nanargmin(values)), ("highest", np.nanargmax(values))):
        index = np.unravel_index(flat, values.shape)
        line[name] = _cell(reading, index)
        line[f"{name}_at"] = _spot(reading, index)
    line["median"] = number(float(np.nanmedian(values)))
    null = None if reading.null is None else reading.null[np.isfinite(reading.null)]
    line["null"] = "" if null is None or not null.size else number(float(np.median(null)))
    return line


def outputs(readings: Iterable[Reading]) -> list[dict[str, Any]]:
    """What came out of the model: each reading with its number, interval and null."""
    return [
        {"reading": r, "anchor": anchor(r.name), "cell": _cell(r, (0,)), "absent": absent(r)}
        for r in readings
        if is_output(r)
    ]


def _spot(reading: Reading, index: tuple[Any, ...]) -> str:
    if is_output(reading):
        return ""
    labels = [reading.coords[d][i] for d, i in zip(reading.dims, index, strict=True)]
    text = []
    for dim, label in zip(reading.dims, labels, strict=True):
        is_place = dim in ("site", "point", "layer")
        text.append(spelt(str(label)) if is_place else f"{dim} {label}")
    return ", ".join(text)


def _at(array: NDArray[np.float64] | None, index: tuple[Any, ...]) -> float | None:
    return None if array is None else float(array[index])


def _cell(reading: Reading, index: tuple[Any, ...]) -> Cell:
    null = _at(reading.null, index)
    return Cell(
        number(float(reading.values[index])),
        interval(_at(reading.low, index), _at(reading.high, index)),
        "" if null is None or not np.isfinite(null) else number(null),
    )


def full(reading: Reading) -> dict[str, Any]:
    """Rows are sites or points. Columns are heads, or value, interval and null."""
    rows: list[dict[str, Any]] = []
    columns = list(reading.coords[reading.dims[1]]) if len(reading.dims) == 2 else []
    too_many = reading.values.size > MOST_CELLS or len(reading.dims) > 2
    if not too_many and len(reading.dims) >= 1:
        for i, label in enumerate(reading.coords[reading.dims[0]]):
            spots = [(i, j) for j in range(len(columns))] if columns else [(i,)]
            cells = [_cell(reading, spot) for spot in spots]
            rows.append({"label": spelt(str(label)), "cells": cells})
    return {
        "reading": reading,
        "columns": columns,
        "column_name": reading.dims[1] if columns else "",
        "rows": rows,
        "too_many": too_many,
        "size": reading.values.size,
        "has_interval": reading.low is not None,
        "has_null": reading.null is not None,
    }
