"""What got worse since a baseline report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attoscope.findings import Finding, rank
from attoscope.report import json as report_json
from attoscope.report.words import count, interval, quantity

if TYPE_CHECKING:
    from attoscope.diagnosis import Diagnosis


@dataclass(frozen=True, slots=True)
class Change:
    """A finding that is new or got worse, and in which way, in words."""

    finding: Finding
    why: str


def compare_to_baseline(
    diagnosis: Diagnosis, baseline: str | Path | Mapping[str, Any]
) -> list[Finding]:
    """The findings that are new, or worse than in the baseline (a path or its plain data).

    Worse is: the severity rose; or the measured number left the baseline's 95 % interval, away
    from its null; or there are more sites. Most severe first, as in the diagnosis.
    """
    return [change.finding for change in changes(diagnosis, baseline)]


def changes(diagnosis: Diagnosis, baseline: str | Path | Mapping[str, Any]) -> list[Change]:
    """As `compare_to_baseline`, with the reason for each."""
    _, before = report_json.parts(report_json.read(baseline))
    found = []
    for finding in diagnosis.findings:
        why = _worse(finding, _partner(finding, before))
        if why:
            found.append(Change(finding, why))
    return found


def _partner(finding: Finding, before: Sequence[Finding]) -> Finding | None:
    """The baseline's finding of the same rule that shares most sites."""
    same = [f for f in before if (f.id, f.reading) == (finding.id, finding.reading)]
    sites = set(finding.sites)
    return max(same, key=lambda f: len(sites.intersection(f.sites)), default=None)


def _worse(now: Finding, then: Finding | None) -> str:
    if then is None:
        return "new"
    if rank(now.severity) > rank(then.severity):
        return f"was a {then.severity}, is {now.severity}"
    if _left(now, then):
        assert then.interval is not None
        return (
            f"was {quantity(then.measured, then.unit)} ({interval(*then.interval)}), "
            f"is {quantity(now.measured, now.unit)}"
        )
    if len(now.sites) > len(then.sites):
        return f"was in {count(len(then.sites), 'site')}, is in {len(now.sites):,}"
    return ""


def _left(now: Finding, then: Finding) -> bool:
    """Whether the number left the baseline's interval in the bad direction.

    Bad is away from the null. Without a null, nothing says which side is bad: both count.
    """
    if now.measured is None or then.measured is None or then.interval is None:
        return False
    low, high = then.interval
    null = now.null if now.null is not None else then.null
    above, below = now.measured > high, now.measured < low
    if null is None or null == then.measured:
        return above or below
    return above if then.measured > null else below
