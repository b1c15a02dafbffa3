"""The pages are held to the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attoscope.cli import run
from docs import tables
from tests.models import EXAMPLES

ROOT = Path(__file__).parent.parent


def test_the_tables_of_readings_and_findings_are_those_of_the_code() -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.filled(page) == page, "run: python docs/tables.py"
    assert page.count("| `") > 30


def test_every_option_of_the_readme_exists(capsys: pytest.CaptureFixture[str]) -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named: set[str] = set()
    for page in pages:
        for line in page.read_text(encoding="utf-8").splitlines():
            if "attoscope diagnose" in line or "attoscope check" in line:
                named |= set(re.findall(r"(--[a-z-]+)", line))
    run(["diagnose", "--help"])
    run(["check", "--help"])
    offered = capsys.readouterr().out
    assert len(named) > 5
    assert not [option for option in named if option not in offered]


def test_the_number_of_architectures_is_right() -> None:
    words = {26: "Twenty-six", 27: "Twenty-seven", 28: "Twenty-eight"}
    assert f"{words[len(EXAMPLES)]} architectures" in (ROOT / "README.md").read_text()


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
