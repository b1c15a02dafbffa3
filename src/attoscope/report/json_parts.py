"""A reading and a finding as plain data, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attoscope.findings import Evidence, Finding, Remedy
from attoscope.measures.base import Reading


def reading_to_dict(r: Reading) -> dict[str, Any]:
    """A reading as it stands under `readings`; arrays are still arrays."""
    interval = None if r.low is None or r.high is None else {"low": r.low, "high": r.high}
    return {
        "title": r.title,
        "meaning": r.meaning,
        "unit": r.unit,
        "range": r.range,
        "dims": r.dims,
        "coords": r.coords,
        "values": r.values,
        "interval": interval,
        "null": r.null,
        "null_meaning": r.null_meaning,
        "row_error": r.row_error,
        "reason": r.reason,
        "source": r.source,
    }


def _array(values: Any) -> Any:
    """A float64 array from nested lists; None inside becomes NaN, None itself stays."""
    return None if values is None else np.array(values, dtype=np.float64)


def reading_back(name: str, r: Mapping[str, Any]) -> Reading:
    """A reading from its plain data."""
    interval = r["interval"] or {"low": None, "high": None}
    low, high = r["range"]
    return Reading(
        name=name,
        title=r["title"],
        meaning=r["meaning"],
        unit=r["unit"],
        range=(low, high),
        dims=tuple(r["dims"]),
        coords={dim: tuple(labels) for dim, labels in r["coords"].items()},
        values=_array(r["values"]),
        low=_array(interval["low"]),
        high=_array(interval["high"]),
        null=_array(r["null"]),
        null_meaning=r["null_meaning"],
        row_error=_array(r["row_error"]),
        reason=r["reason"],
        source=r["source"],
    )


def finding_back(f: Mapping[str, Any]) -> Finding:
    """A finding from its plain data."""
    return Finding(
        **{
            **f,
            "sites": tuple(f["sites"]),
            "heads": tuple((site, head) for site, head in f["heads"]),
            "interval": None if f["interval"] is None else tuple(f["interval"]),
            "evidence": tuple(Evidence(**each) for each in f["evidence"]),
            "remedy": Remedy(**f["remedy"]),
        }
    )
