"""What `diagnose` gives: readings, findings, close-ups, and how to write them down."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class Change:
    """A finding that got worse or better since a baseline, and in which way, in words."""

    finding: Finding
    why: str


@dataclass(frozen=True, slots=True)
class Amount:
    """A number with its 95 % interval and its null; None where it has none."""

    value: float
    low: float | None = None
    high: float | None = None
    null: float | None = None


@dataclass(frozen=True, slots=True)
class Shift:
    """A reading in short before and after: its last block, its mean over depth or over heads.

    The interval of a mean is the mean of the ends of its parts: never narrower than the interval
    of a mean of numbers that vary together. `size` is how far it moved, from 0 to 1: in shares
    of the reading's range where that is bounded, else of the larger of the two numbers. `apart`
    says whether the intervals have nothing in common (None: one of them is missing), `moved` of
    how many of the `places` that is true.
    """

    reading: str
    title: str
    unit: str
    where: str
    before: Amount
    after: Amount
    size: float
    apart: bool | None
    moved: int = 0
    places: int = 1


@dataclass(frozen=True)
class Comparison:
    """A diagnosis beside an earlier one of the same documents.

    `better` and `worse` are findings that are gone or milder, and new or graver. `outputs` are
    loss and accuracy, always; `shifts` the other readings whose intervals are apart (their own, or
    those of more than one in twenty of their heads or points), the largest change first, of
    `compared` readings that could be compared. `model` names the model of the
    baseline, `differs` says in which facts model and data differ, `notes` what could not be
    compared and why. `before` holds the baseline's curves of the readings that changed most.
    """

    model: str
    differs: str
    better: tuple[Change, ...]
    worse: tuple[Change, ...]
    outputs: tuple[Shift, ...]
    shifts: tuple[Shift, ...]
    compared: int
    notes: tuple[str, ...]
    before: tuple[Reading, ...] = ()

    @property
    def sentence(self) -> str:
        """The comparison in one to three sentences."""
        from attoscope.report.since import sentence

        return sentence(self)

    def __str__(self) -> str:
        from attoscope.report.since import lines

        return "\n".join(lines(self))


@dataclass(frozen=True)
class Diagnosis:
    """A diagnosed model: what was read, with intervals and nulls, and what it says.

    `findings` come most severe first. `readings` is an `xarray.Dataset`; `reading_list` holds
    the same as plain records. `closeups` lead from findings and heads to the text: first a few
    telling rows, then those of findings, then one row for each head. `baseline` sets it beside
    an earlier one (see `since`); the reports then show both.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    versions: dict[str, str]
    reading_list: tuple[Reading, ...]
    findings: tuple[Finding, ...]
    closeups: tuple[Closeup, ...]
    timings: dict[str, float]
    baseline: Comparison | None = None

    @property
    def verdict(self) -> str:
        """The verdict in words, made from the findings."""
        from attoscope.report.verdict import verdict

        return verdict(self.findings, self.model)

    @cached_property
    def readings(self) -> xr.Dataset:
        """All readings as an `xarray.Dataset`, dims `site`, `head`, `point`, `output`.

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

    def compare(self, before: Diagnosis | str | Path | Mapping[str, Any]) -> Comparison:
        """What changed since `before`, a diagnosis of the same documents (or its report.json).

        Findings that got better or worse, loss before and after, and the readings whose 95 %
        intervals have nothing in common. Raises `AttoscopeError` when `before` is no report.
        """
        from attoscope.report.baseline import compare

        return compare(self, before)

    def since(self, before: Diagnosis | str | Path | Mapping[str, Any]) -> Diagnosis:
        """This diagnosis with its comparison to `before` in all its reports."""
        return replace(self, baseline=self.compare(before))

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
            baseline=report_json.baseline(data),
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
