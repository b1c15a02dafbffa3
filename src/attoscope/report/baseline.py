"""A diagnosis beside a baseline: what got worse, what got better, and which readings changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attoscope.diagnosis import Change, Comparison, Diagnosis
from attoscope.findings import Finding, rank
from attoscope.measures.base import Reading
from attoscope.report import json as report_json
from attoscope.report import shifts
from attoscope.report.words import count, interval, quantity

Baseline = Diagnosis | str | Path | Mapping[str, Any]
# What makes two reports hard to compare.
_FACTS = ("architecture", "layers", "heads", "width", "documents", "tokens", "rows")


@dataclass(frozen=True, slots=True)
class _Before:
    """What a comparison needs of the baseline."""

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    versions: Mapping[str, Any]
    readings: tuple[Reading, ...]
    findings: tuple[Finding, ...]


def compare(diagnosis: Diagnosis, before: Baseline) -> Comparison:
    """What changed since the baseline (a diagnosis, a path, or plain data of a report).

    The same documents are assumed, in which case intervals that are apart are more than chance;
    `differs` says where model or data are not the same.
    """
    then = _before(before)
    found = shifts.between(then.readings, diagnosis.reading_list)
    notes = [*_written_by(diagnosis, then), *found.notes]
    if not found.outputs:
        now, past = (d.get("loss") for d in (diagnosis.data, then.data))
        notes.insert(0, f"Loss before: {past or 'not recorded'}; now: {now or 'not recorded'}.")
    return Comparison(
        model=str(then.model.get("name", "model")),
        differs=_differs(diagnosis, then),
        better=tuple(_better(diagnosis.findings, then.findings)),
        worse=tuple(_worse(diagnosis.findings, then.findings)),
        outputs=found.outputs,
        shifts=found.shifts,
        compared=found.compared,
        notes=tuple(notes),
        before=found.curves,
    )


def compare_to_baseline(diagnosis: Diagnosis, baseline: Baseline) -> list[Finding]:
    """The findings that are new, or worse than in the baseline (a path or its plain data).

    Worse is: the severity rose; or the measured number left the baseline's 95 % interval, away
    from its null; or there are more sites. Most severe first, as in the diagnosis.
    """
    return [change.finding for change in changes(diagnosis, baseline)]


def changes(diagnosis: Diagnosis, baseline: Baseline) -> list[Change]:
    """As `compare_to_baseline`, with the reason for each."""
    return _worse(diagnosis.findings, _before(baseline).findings)


def _before(baseline: Baseline) -> _Before:
    if isinstance(baseline, Diagnosis):
        return _Before(
            baseline.model,
            baseline.data,
            baseline.versions,
            baseline.reading_list,
            baseline.findings,
        )
    data = report_json.read(baseline)
    readings, findings = report_json.parts(data)
    model, facts, versions = (
        part if isinstance(part, Mapping) else {}
        for part in (data.get("model"), data.get("data"), data.get("versions"))
    )
    return _Before(model, facts, versions, readings, findings)


def _differs(diagnosis: Diagnosis, before: _Before) -> str:
    """The facts in which model or data differ, in words."""
    now = {**diagnosis.model, **diagnosis.data}
    then = {**before.model, **before.data}
    found = [
        f"{k} {then.get(k)} then, {now.get(k)} now" for k in _FACTS if now.get(k) != then.get(k)
    ]
    read = [", ".join(map(str, facts.get("sources") or ())) for facts in (then, now)]
    if all(read) and read[0] != read[1]:
        found.append(f"read from {read[0]} then, {read[1]} now")
    return "; ".join(found)


def _written_by(diagnosis: Diagnosis, before: _Before) -> list[str]:
    then, now = before.versions.get("attoscope"), diagnosis.versions.get("attoscope")
    if then is None or then == now:
        return []
    return [f"The baseline was written by attoscope {then}, this report by {now}."]


def _worse(now: Sequence[Finding], before: Sequence[Finding]) -> list[Change]:
    found = []
    for finding in now:
        why = _why_worse(finding, _partner(finding, before))
        if why:
            found.append(Change(finding, why))
    return found


def _better(now: Sequence[Finding], before: Sequence[Finding]) -> list[Change]:
    """Findings of the baseline that are gone, and present ones that are milder than there.

    One finding may continue several that have grown together: those are not gone.
    """
    partners = [(finding, _partner(finding, before)) for finding in now]
    found = []
    for then in before:
        heirs = [finding for finding, partner in partners if partner is then]
        if not heirs and not any(_overlap(finding, then) for finding in now):
            found.append(Change(replace(then, evidence=()), "gone"))
        for heir in heirs:
            why = "" if _why_worse(heir, then) else _why_better(heir, then)
            if why:
                found.append(Change(heir, why))
    return found


def _overlap(one: Finding, other: Finding) -> bool:
    same = (one.id, one.reading) == (other.id, other.reading)
    return same and bool(set(one.sites).intersection(other.sites))


def _partner(finding: Finding, before: Sequence[Finding]) -> Finding | None:
    """The baseline's finding of the same rule that shares most sites."""
    same = [f for f in before if (f.id, f.reading) == (finding.id, finding.reading)]
    sites = set(finding.sites)
    return max(same, key=lambda f: len(sites.intersection(f.sites)), default=None)


def _why_worse(now: Finding, then: Finding | None) -> str:
    if then is None:
        return "new"
    if rank(now.severity) > rank(then.severity):
        return f"was a {then.severity}, is {now.severity}"
    if _left(now, then) in ("away", "either"):
        return _moved(now, then)
    if len(now.sites) > len(then.sites):
        return f"was in {count(len(then.sites), 'site')}, is in {len(now.sites):,}"
    return ""


def _why_better(now: Finding, then: Finding) -> str:
    if rank(now.severity) < rank(then.severity):
        return f"was {then.severity}, is a {now.severity}"
    if _left(now, then) == "towards":
        return _moved(now, then)
    if len(now.sites) < len(then.sites):
        return f"was in {count(len(then.sites), 'site')}, is in {len(now.sites):,}"
    return ""


def _moved(now: Finding, then: Finding) -> str:
    assert then.interval is not None
    return (
        f"was {quantity(then.measured, then.unit)} ({interval(*then.interval)}), "
        f"is {quantity(now.measured, now.unit)}"
    )


def _left(now: Finding, then: Finding) -> str:
    """Which way the number left the baseline's interval: "away" from the null or "towards" it.

    Without a null, nothing says which side is bad: "either". "" when it did not leave.
    """
    if now.measured is None or then.measured is None or then.interval is None:
        return ""
    low, high = then.interval
    null = now.null if now.null is not None else then.null
    above, below = now.measured > high, now.measured < low
    if not above and not below:
        return ""
    if null is None or null == then.measured:
        return "either"
    return "away" if above == (then.measured > null) else "towards"
