"""`report.json`: stable keys, no NaN, written whole. docs/report-schema.md explains them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attoscope.errors import AttoscopeError
from attoscope.findings import Finding
from attoscope.measures.base import Reading
from attoscope.report import json_baseline, json_closeups
from attoscope.report.files import write_whole
from attoscope.report.json_parts import finding_back, reading_back, reading_to_dict

if TYPE_CHECKING:
    from attoscope.diagnosis import Closeup, Comparison, Diagnosis

SCHEMA_VERSION = 2
# Version 1 had close-ups of three heads only, each with all its weights.
READABLE = (1, 2)


def to_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Everything that was found, as plain data: what stands in `report.json`."""
    data = {
        "schema_version": SCHEMA_VERSION,
        "verdict": diagnosis.verdict,
        "model": diagnosis.model,
        "data": diagnosis.data,
        "versions": diagnosis.versions,
        "findings": [finding.to_dict() for finding in diagnosis.findings],
        "readings": {r.name: reading_to_dict(r) for r in diagnosis.reading_list},
        **json_closeups.to_dict(diagnosis.closeups),
        "timings": diagnosis.timings,
        "baseline": json_baseline.to_dict(diagnosis.baseline),
    }
    plain: dict[str, Any] = _plain(data)
    return plain


def dumps(diagnosis: Diagnosis) -> str:
    """The text of `report.json`."""
    text = json.dumps(to_dict(diagnosis), ensure_ascii=False, allow_nan=False)
    # Half a character, which a byte-level token can hold, becomes its JSON escape.
    return text.encode("utf-8", "backslashreplace").decode("utf-8") + "\n"


def write(diagnosis: Diagnosis, path: str | Path) -> Path:
    """Write `report.json` whole, or not at all; gives the path."""
    return write_whole(path, dumps(diagnosis))


def read(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The plain data of a report, from a path or from data already loaded; keys are checked."""
    data: Any = source
    if isinstance(source, str | Path):
        try:
            data = json.loads(Path(source).read_text("utf-8"))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it holds no JSON"
            raise AttoscopeError(
                f"{source} cannot be read as a report ({why}); a report.json written by "
                "attoscope was expected: give the path of one."
            ) from error
    if not isinstance(data, Mapping) or "readings" not in data or "findings" not in data:
        raise AttoscopeError(
            "This is no attoscope report: the keys `readings` and `findings` were expected; "
            "give a report.json written by `attoscope diagnose`."
        )
    if data.get("schema_version") not in READABLE:
        raise AttoscopeError(
            f"The report has schema version {data.get('schema_version')!r}, and this attoscope "
            f"reads versions {READABLE[0]} to {READABLE[-1]}: write the report again with this "
            "version."
        )
    return dict(data)


def parts(data: Mapping[str, Any]) -> tuple[tuple[Reading, ...], tuple[Finding, ...]]:
    """Readings and findings back from the plain data of `read`."""
    try:
        readings = tuple(reading_back(name, r) for name, r in data["readings"].items())
        findings = tuple(finding_back(f) for f in data["findings"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AttoscopeError(
            f"The report is damaged ({type(error).__name__}: {error}); readings and findings "
            "as in docs/report-schema.md were expected: write the report again."
        ) from error
    return readings, findings


def _plain(value: Any) -> Any:
    """Plain JSON data: arrays as lists, tuples as lists, NaN and infinity as None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def closeups(data: Mapping[str, Any]) -> tuple[Closeup, ...]:
    """The close-ups back from the plain data of `read`, of any readable version."""
    try:
        return json_closeups.back(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise AttoscopeError(
            f"The report is damaged ({type(error).__name__}: {error}); close-ups as in "
            "docs/report-schema.md were expected: write the report again."
        ) from error


def baseline(data: Mapping[str, Any]) -> Comparison | None:
    """The comparison that the report holds, or None."""
    try:
        return json_baseline.back(data.get("baseline"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AttoscopeError(
            f"The report is damaged ({type(error).__name__}: {error}); a comparison as in "
            "docs/report-schema.md was expected: write the report again."
        ) from error
