"""What got worse since a baseline, and what did not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attoscope.report import json as report_json
from attoscope.report.baseline import changes, compare_to_baseline
from tests.report.test_json import as_first_version


@pytest.fixture
def baseline(decoder):
    return report_json.to_dict(decoder)


def changed(diagnosis, index, **parts):
    findings = list(diagnosis.findings)
    findings[index] = replace(findings[index], **parts)
    return replace(diagnosis, findings=tuple(findings))


def test_nothing_changed(decoder, baseline):
    assert compare_to_baseline(decoder, baseline) == []


def test_from_a_file(decoder, tmp_path):
    assert compare_to_baseline(decoder, decoder.to_json(tmp_path / "base.json")) == []


def test_a_baseline_of_the_first_version(decoder):
    old = as_first_version(decoder)
    assert compare_to_baseline(decoder, old) == []
    assert compare_to_baseline(changed(decoder, 0, measured=0.0001), old)


def test_a_new_finding(decoder, baseline):
    baseline["findings"] = baseline["findings"][1:]
    found = changes(decoder, baseline)
    assert [(c.finding.id, c.why) for c in found] == [("tokens-collapsed", "new")]


def test_severity_rose_counts_and_fell_does_not(decoder, baseline):
    assert compare_to_baseline(changed(decoder, 2, severity="severe"), baseline)
    assert not compare_to_baseline(changed(decoder, 0, severity="note"), baseline)


@pytest.mark.parametrize(
    "index, measured, worse",
    [
        (0, 0.0001, True),  # null 0.61 lies above: lower is worse
        (0, 0.00045, False),  # inside the interval
        (0, 0.3, False),  # nearer the null
        (1, 100.0, True),  # null 180 lies above
        (1, 175.0, False),
    ],
)
def test_numbers_count_when_they_leave_the_interval_away_from_the_null(
    decoder, baseline, index, measured, worse
):
    found = compare_to_baseline(changed(decoder, index, measured=measured), baseline)
    assert bool(found) is worse


def test_without_a_null_both_sides_are_bad(decoder):
    base = changed(decoder, 1, null=None)
    for measured in (100.0, 200.0):
        now = changed(base, 1, measured=measured)
        assert compare_to_baseline(now, report_json.to_dict(base))


def test_more_sites(decoder, baseline):
    more = changed(decoder, 1, sites=("decoder.5", "decoder.6"))
    assert changes(more, baseline)[0].why == "was in 1 site, is in 2"
    assert not compare_to_baseline(changed(decoder, 1, sites=("decoder.6",)), baseline)


def test_two_findings_of_one_rule_are_told_apart_by_their_sites(decoder):
    here = decoder.findings[1]
    there = replace(here, sites=("decoder.20",), measured=400.0, interval=(390.0, 410.0))
    both = replace(decoder, findings=(here, there))
    assert compare_to_baseline(both, report_json.to_dict(both)) == []
