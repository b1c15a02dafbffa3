"""A comparison with a baseline as plain data, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from attoscope.diagnosis import Amount, Change, Comparison, Shift
from attoscope.report.json_parts import finding_back, reading_back, reading_to_dict


def to_dict(comparison: Comparison | None) -> dict[str, Any] | None:
    """What stands under `baseline`; None without a comparison."""
    if comparison is None:
        return None
    return {
        "sentence": comparison.sentence,
        "model": comparison.model,
        "differs": comparison.differs,
        "better": [asdict(change) for change in comparison.better],
        "worse": [asdict(change) for change in comparison.worse],
        "outputs": [asdict(shift) for shift in comparison.outputs],
        "shifts": [asdict(shift) for shift in comparison.shifts],
        "compared": comparison.compared,
        "notes": list(comparison.notes),
        "before": {r.name: reading_to_dict(r) for r in comparison.before},
    }


def back(data: Mapping[str, Any] | None) -> Comparison | None:
    """The comparison from its plain data."""
    if data is None:
        return None
    return Comparison(
        model=data["model"],
        differs=data["differs"],
        better=tuple(_change(each) for each in data["better"]),
        worse=tuple(_change(each) for each in data["worse"]),
        outputs=tuple(_shift(each) for each in data["outputs"]),
        shifts=tuple(_shift(each) for each in data["shifts"]),
        compared=data["compared"],
        notes=tuple(data["notes"]),
        before=tuple(reading_back(name, r) for name, r in data["before"].items()),
    )


def _change(each: Mapping[str, Any]) -> Change:
    return Change(finding_back(each["finding"]), each["why"])


def _shift(each: Mapping[str, Any]) -> Shift:
    return Shift(
        **{**each, "before": _amount(each["before"]), "after": _amount(each["after"])}
        | {"size": _number(each["size"])}
    )


def _amount(each: Mapping[str, Any]) -> Amount:
    return Amount(**{**each, "value": _number(each["value"])})


def _number(value: float | None) -> float:
    return math.nan if value is None else value
