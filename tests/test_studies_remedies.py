"""The page on remedies says what was measured, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies import remedies


def test_the_page_is_that_of_the_numbers() -> None:
    study = json.loads(remedies.RESULT.read_text())
    assert remedies.PAGE.read_text() == remedies.page(study), (
        "run: python -m studies.remedies --page"
    )
    assert [row["name"] for row in study["rows"]] == [row.name for row in remedies.ROWS]
    assert all(len(row["cosine"]) == remedies.SEEDS for row in study["rows"])


def test_verbs_follow_all_seeds() -> None:
    assert remedies.direction([0.5, 0.9]) == "lowers"
    assert remedies.direction([1.1, 2.0]) == "raises"
    assert "by the seed" in remedies.direction([0.9, 1.1])
    study = json.loads(remedies.RESULT.read_text())
    rows = {row["name"]: row for row in study["rows"]}
    rows["CutMix, mixing loss"]["cosine"] = [0.1] * remedies.SEEDS
    assert "**Patch mixing by itself lowers the cosine**" in remedies.page(study)


def test_a_sentence_without_a_number_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    template = tmp_path / "remedies.md"
    template.write_text("<cosine nothing> and <cosine of a remedy that is not there>")
    monkeypatch.setattr(remedies, "TEMPLATE", template)
    with pytest.raises(SystemExit, match="not there"):
        remedies.page(json.loads(remedies.RESULT.read_text()))


def test_a_finished_run_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remedies, "KEPT", tmp_path / "kept")
    calls: list[int] = []

    def measure() -> int:
        calls.append(1)
        return len(calls)

    assert remedies.kept("a", {"seed": 0}, measure) == 1
    assert remedies.kept("a", {"seed": 0}, measure) == 1
    assert remedies.kept("a", {"seed": 1}, measure) == 2
