"""A real diagnosis, end to end into all reports."""

from __future__ import annotations

import re

import numpy as np
import pytest
from markupsafe import escape

from attoscope.diagnosing import diagnose
from attoscope.diagnosis import Diagnosis
from attoscope.report import html, terminal
from tests.report.test_json import SCHEMA, strict, table_keys


@pytest.fixture(scope="module")
def real(vit_digits):
    images = np.random.default_rng(0).integers(0, 255, (4, 8, 8, 3), dtype=np.uint8)
    return diagnose(str(vit_digits), list(images))


def test_every_reading_is_shown(real):
    page = html.page(real)
    assert not re.search(r"could not be (drawn|shown|made)", page)
    for reading in real.reading_list:
        assert f"<h3>{escape(reading.title)}" in page, reading.name
    assert "4 images" in page


def test_the_schema_documents_what_real_runs_write(real, tmp_path):
    path = real.to_json(tmp_path / "report.json")
    data = strict(path.read_text("utf-8"))
    assert set(data["model"]) <= table_keys("`model`")
    assert set(data["data"]) <= table_keys("`data`")
    page = SCHEMA.read_text("utf-8")
    assert all(f"`{step}`" in page for step in data["timings"])
    assert Diagnosis.from_json(path).verdict == real.verdict


def test_terminal(real):
    text = terminal.text(real)
    assert real.verdict.split(".")[0] in " ".join(text.split())
