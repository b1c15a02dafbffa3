"""What a finding is. A leaf: nothing of ours is imported here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["note", "warning", "severe"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "severe")


def rank(severity: Severity) -> int:
    """Order of a severity: note 0, warning 1, severe 2."""
    return SEVERITIES.index(severity)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One input that triggered a finding: which document, token and head, and the number there."""

    site: str
    value: float | None = None
    head: int | None = None
    document: int | None = None
    position: int | None = None
    token: str | None = None
    chosen_position: int | None = None
    chosen_token: str | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to do about a finding, in words and as code that can be pasted."""

    text: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the diagnosis says, with everything needed to judge it.

    `measured` is the number that triggered it and `unit` says what it counts; `interval` is its
    95 % bootstrap interval over documents; `null` is the same number where nothing is wrong or
    nothing is read (`null_meaning` says which). `reading` names the reading it comes from.
    """

    id: str
    severity: Severity
    title: str
    sentence: str
    sites: tuple[str, ...]
    heads: tuple[tuple[str, int], ...]
    reading: str
    measured: float | None
    unit: str
    interval: tuple[float, float] | None
    null: float | None
    null_meaning: str
    evidence: tuple[Evidence, ...]
    paper: str
    remedy: Remedy

    def __str__(self) -> str:
        return f"{self.severity}: {self.sentence}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as it stands in `report.json`."""
        return asdict(self)
