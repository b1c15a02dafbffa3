"""`report.json`: everything comes back, the keys are documented, no NaN, no half file."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attoscope.diagnosis import Diagnosis
from attoscope.errors import AttoscopeError
from attoscope.report import json as report_json
from attoscope.report.files import write_whole

SCHEMA = Path(__file__).parents[2] / "docs" / "report-schema.md"


def strict(text):
    """Parse JSON as strict readers do: NaN is an error."""

    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def same(a, b):
    if a is None or b is None:
        return a is b
    return np.array_equal(a, b, equal_nan=True)


@pytest.mark.parametrize("name", ["encoder", "decoder", "both", "empty"])
def test_round_trip(name, request, tmp_path):
    diagnosis = request.getfixturevalue(name)
    path = diagnosis.to_json(tmp_path / "report.json")
    back = Diagnosis.from_json(path)
    assert back.findings == diagnosis.findings
    assert back.closeups == diagnosis.closeups
    assert back.verdict == diagnosis.verdict
    assert back.model == diagnosis.model and back.timings == diagnosis.timings
    assert len(back.reading_list) == len(diagnosis.reading_list)
    for ours, theirs in zip(diagnosis.reading_list, back.reading_list, strict=True):
        for part in ("values", "low", "high", "null", "row_error"):
            assert same(getattr(ours, part), getattr(theirs, part)), (ours.name, part)
        for part in ("name", "title", "meaning", "unit", "range", "dims", "coords", "reason"):
            assert getattr(ours, part) == getattr(theirs, part)
    again = back.to_json(tmp_path / "again.json")
    assert again.read_bytes() == path.read_bytes()


def as_first_version(diagnosis):
    """The data as version 1 wrote them: a close-up held all tokens and all weights."""
    data = json.loads(json.dumps(report_json.to_dict(diagnosis)))
    texts, one = data.pop("texts"), data["closeups"][0]
    tokens = texts[one["text"]]["tokens"]
    weights = [0.0] * len(tokens)
    for mark in one["marks"]:
        weights[mark["position"]] = mark["value"]
    weights[one["marks"][3]["position"]] = None
    old = {k: one[k] for k in ("site", "head", "query", "why")}
    data["closeups"] = [{**old, "document": 0, "tokens": tokens, "weights": weights}]
    return {**data, "schema_version": 1}


def test_reports_of_the_first_version_are_read(decoder, tmp_path):
    back = Diagnosis.from_json(as_first_version(decoder))
    assert back.findings == decoder.findings
    (closeup,) = back.closeups
    ours = decoder.closeups[0]
    assert closeup.text.tokens == ours.text.tokens and closeup.query == ours.query
    assert [m.value for m in closeup.marks] == [m.value for m in ours.marks[:3]]
    assert all(mark.margin is None for mark in closeup.marks)
    assert "lost by" not in back.to_html(tmp_path / "r.html").read_text("utf-8")


def test_each_text_is_written_once(decoder):
    data = report_json.to_dict(decoder)
    assert len(data["texts"]) == 2 < len(data["closeups"])


def test_damaged_closeups_are_refused_in_words(decoder):
    data = report_json.to_dict(decoder)
    data["closeups"][0]["text"] = 99
    with pytest.raises(AttoscopeError, match="close-ups as in docs/report-schema.md"):
        Diagnosis.from_json(data)


def test_missing_numbers_are_null_and_infinity_is_too(encoder, tmp_path):
    reading = encoder.reading_list[0]
    values = reading.values.copy()
    values[0, :3] = [np.inf, -np.inf, np.nan]
    broken = replace(encoder, reading_list=(replace(reading, values=values),))
    data = strict(broken.to_json(tmp_path / "r.json").read_text())
    assert data["readings"][reading.name]["values"][0][:3] == [None, None, None]


def table_keys(heading):
    """The keys in the table under a heading of the schema's page."""
    text = SCHEMA.read_text("utf-8")
    part = re.split(r"^#+ ", text, flags=re.M)
    section = next(p for p in part if p.startswith(heading))
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {key for row in rows for key in re.findall(r"`([^`]+)`", row)}


def test_the_page_documents_every_key_and_no_other(encoder):
    data = report_json.to_dict(encoder)
    assert table_keys("Top level") == set(data)
    assert table_keys("A finding") == set(data["findings"][0])
    assert table_keys("Evidence") == set(data["findings"][0]["evidence"][0])
    assert table_keys("A reading") == set(next(iter(data["readings"].values())))
    assert table_keys("A text") == set(data["texts"][0])
    assert table_keys("A close-up") == set(data["closeups"][0])
    assert table_keys("A mark") == set(data["closeups"][0]["marks"][0])
    assert set(data["model"]) <= table_keys("`model`")
    assert set(data["data"]) <= table_keys("`data`")
    assert f"| `schema_version` | {data['schema_version']} |" in SCHEMA.read_text("utf-8")


def test_dataset_has_every_reading_with_its_parts(both):
    readings = both.readings
    assert readings["normalised_entropy"].dims == ("site", "head")
    assert list(readings.site.values[:2]) == ["encoder.0", "encoder.1"]
    assert "decoder.3.cross" in readings.site
    for part in ("low", "high", "null", "row_error"):
        assert f"normalised_entropy_{part}" in readings
    assert readings["cosine"].attrs["valid_min"] == -1.0
    assert readings["cosine"].attrs["unit"] == "cosine"
    assert float(readings["cosine"].sel(point="decoder.in")) == both.reading_list[3].values[8]


def test_readings_of_different_places_share_one_dataset(encoder):
    one = encoder.reading_list[0]
    sites = one.coords["site"][::-1][:4]
    part = replace(
        one,
        name="part",
        coords={**one.coords, "site": sites},
        **{
            k: getattr(one, k)[::-1][:4] for k in ("values", "low", "high", "null", "row_error")
        },
    )
    data = replace(encoder, reading_list=(one, part)).readings
    assert tuple(data.site.values) == one.coords["site"]
    assert same(data["part"].sel(site="encoder.11").values, one.values[11])
    assert np.isnan(data["part"].sel(site="encoder.0").values).all()


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = write_whole(tmp_path / "report.json", "old")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_a_directory_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AttoscopeError, match=r"cannot be written .* choose another directory"):
        write_whole(tmp_path / "file" / "report.json", "x")


@pytest.mark.parametrize(
    "text, says",
    [
        ("not json", "cannot be read as a report"),
        ("[]", "no attoscope report"),
        ('{"readings": {}, "findings": [], "schema_version": 99}', "schema version 99"),
        ('{"readings": {}, "findings": [{}], "schema_version": 1}', "damaged"),
    ],
)
def test_what_is_no_report_is_refused_in_words(text, says, tmp_path):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(AttoscopeError, match=says):
        Diagnosis.from_json(tmp_path / "r.json")
