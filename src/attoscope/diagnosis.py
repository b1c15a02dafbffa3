"""What `diagnose` gives: readings, findings, close-ups, and how to write them down."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attoscope.findings import Finding
from attoscope.measures.base import Reading

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class Closeup:
    """One row of attention, down to the words.

    `weights` are those of the query at position `query` over `tokens` (one per token; they sum
    to at most 1, less where a sink takes a share). `why` says what there is to see.
    """

    site: str
    head: int
    document: int
    tokens: tuple[str, ...]
    query: int
    weights: tuple[float, ...]
    why: str


@dataclass(frozen=True)
class Diagnosis:
    """A diagnosed model: what was read, with intervals and nulls, and what it says.

    `findings` come most severe first. `readings` is an `xarray.Dataset`; `reading_list` holds
    the same as plain records.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    versions: dict[str, str]
    reading_list: tuple[Reading, ...]
    findings: tuple[Finding, ...]
    closeups: tuple[Closeup, ...]
    timings: dict[str, float]

    @property
    def verdict(self) -> str:
        """The verdict in words, made from the findings."""
        from attoscope.report.verdict import verdict

        return verdict(self.findings, self.model)

    @cached_property
    def readings(self) -> xr.Dataset:
        """All readings as an `xarray.Dataset`, dims `site`, `head`, `point`.

        A reading NAME is there with NAME_low, NAME_high (95 % bootstrap interval over
        documents), NAME_null and NAME_row_error where it has them. NaN is "not computed"; the
        attribute `reason` says why. Attributes: title, meaning, unit, valid_min, valid_max,
        null_meaning, reason, source.
        """
        import xarray as xr

        coords = _common_coords(self.reading_list)
        variables = {}
        for reading in self.reading_list:
            for name, values in _arrays(reading):
                variables[name] = (
                    reading.dims,
                    _placed(values, reading, coords),
                    _attributes(reading),
                )
        return xr.Dataset(variables, coords={dim: list(each) for dim, each in coords.items()})

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one HTML file, which needs nothing else; gives its path."""
        from attoscope.report.files import write_whole
        from attoscope.report.html import page

        return write_whole(path, page(self))

    def to_json(self, path: str | Path) -> Path:
        """Write `report.json` (keys as in docs/report-schema.md); gives its path."""
        from attoscope.report import json as report_json

        return report_json.write(self, path)

    @classmethod
    def from_json(cls, source: str | Path | Mapping[str, Any]) -> Diagnosis:
        """The diagnosis back from a `report.json` (its path, or its plain data).

        Raises `AttoscopeError` when it is no report, or of another schema version.
        """
        from attoscope.report import json as report_json

        data = report_json.read(source)
        readings, findings = report_json.parts(data)
        return cls(
            model=dict(data.get("model", {})),
            data=dict(data.get("data", {})),
            versions=dict(data.get("versions", {})),
            reading_list=readings,
            findings=findings,
            closeups=report_json.closeups(data),
            timings=dict(data.get("timings", {})),
        )

    def _repr_html_(self) -> str:
        """The report in a notebook, in a frame of its own: two of them do not interfere."""
        from attoscope.report.html import frame

        return frame(self)

    def __repr__(self) -> str:
        name = self.model.get("name", "model")
        return (
            f"<Diagnosis of {name}: {len(self.findings)} findings, "
            f"{len(self.reading_list)} readings>"
        )


def _common_coords(readings: Iterable[Reading]) -> dict[str, tuple[str | int, ...]]:
    """For each dim, all labels of all readings, in order of appearance."""
    found: dict[str, dict[str | int, None]] = {}
    for reading in readings:
        for dim in reading.dims:
            found.setdefault(dim, {}).update(dict.fromkeys(reading.coords[dim]))
    return {dim: tuple(labels) for dim, labels in found.items()}


def _arrays(reading: Reading) -> list[tuple[str, NDArray[np.float64]]]:
    parts = {
        reading.name: reading.values,
        f"{reading.name}_low": reading.low,
        f"{reading.name}_high": reading.high,
        f"{reading.name}_null": reading.null,
        f"{reading.name}_row_error": reading.row_error,
    }
    return [(name, values) for name, values in parts.items() if values is not None]


def _placed(
    values: NDArray[np.float64], reading: Reading, coords: Mapping[str, tuple[str | int, ...]]
) -> NDArray[np.float64]:
    """The array over the common labels, NaN where the reading has none."""
    whole = np.full([len(coords[dim]) for dim in reading.dims], math.nan)
    spots = []
    for dim in reading.dims:
        index = {label: i for i, label in enumerate(coords[dim])}
        spots.append([index[label] for label in reading.coords[dim]])
    whole[np.ix_(*spots)] = values
    return whole


def _attributes(reading: Reading) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "title": reading.title,
        "meaning": reading.meaning,
        "unit": reading.unit,
        "null_meaning": reading.null_meaning,
        "reason": reading.reason,
        "source": reading.source,
    }
    for key, bound in zip(("valid_min", "valid_max"), reading.range, strict=True):
        if bound is not None:
            attributes[key] = bound
    return attributes
