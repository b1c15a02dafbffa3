"""What every claim that holds has to show."""

from __future__ import annotations

from attoscope.papers import Evidence


def sound(evidence: Evidence) -> Evidence:
    """The evidence, when its criterion is met, its control fails and its figure can be drawn."""
    assert evidence.holds, evidence.measured
    assert evidence.control.fails, evidence.control.measured
    assert evidence.figure.to_dict()
    return evidence
