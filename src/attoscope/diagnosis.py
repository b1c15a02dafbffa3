"""What `diagnose` gives: readings, findings, close-ups, and how to write them down."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from attoscope.findings import Finding
from attoscope.measures.base import Reading

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class Text:
    """What close-ups of one document show: its tokens, as one stack reads them.

    `kind` is "words", "patches" (of an image: the last `rows` × `columns` of the `tokens`, the
    others come before them) or "positions", where it is not known what a token is. `part` counts
    the pieces where a layer attends within pieces of a document, such as windows of an image.
    """

    document: int
    kind: Literal["words", "patches", "positions"]
    tokens: tuple[str, ...]
    grid: tuple[int, int] | None = None
    part: int = 0


@dataclass(frozen=True)
class Mark:
    """A token that a close-up marks: its position, its number, and by how much it lost.

    `value` is its attention weight, or the token's own number where the close-up is of the
    residual stream. `margin` is the score of the chosen token minus this one's, in nats and 0
    for the chosen one; None where the model gives weights but no scores.
    """

    position: int
    value: float
    margin: float | None = None


@dataclass(frozen=True)
class Closeup:
    """One row of attention, or the stream at one place, down to the tokens.

    A row has a `head` and a `query`, a position in `text`; its `marks` are the chosen key and
    then its strongest competitors, positions in `keys` (None: in `text` too). `rest` is the
    attention that goes elsewhere. At a place in the stream `head`, `query` and `rest` are None
    and the marks are the tokens with the largest numbers. `finding` is the number of the finding
    that it shows; None for a head's own row. `why` says what there is to see; it is empty for
    the row that every head has.
    """

    site: str
    head: int | None
    text: Text
    query: int | None
    marks: tuple[Mark, ...]
    rest: float | None = None
    keys: Text | None = None
    finding: int | None = None
    why: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """A diagnosed model: what was read, with intervals and nulls, and what it says.

    `findings` come most severe first. `readings` is an `xarray.Dataset`; `reading_list` holds
    the same as plain records. `closeups` lead from findings and heads to the text: first a few
    telling rows, then those of findings, then one row for each head.
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
