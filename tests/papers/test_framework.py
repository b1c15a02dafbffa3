"""Papers and ledgers: what holds, what fails, and what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attoscope import AttoscopeError
from attoscope.papers import ENTRIES, HOLDS, Fails, Paper, reproduce
from attoscope.papers.ledger import show, summary
from attoscope.papers.registry import find
from tests.papers import fakes


def test_what_was_declared_comes_out() -> None:
    ledger = reproduce(fakes.declared())
    assert [o.holds for o in ledger.claims] == [True, False, True]
    assert [o.verdict for o in ledger.claims] == [
        "holds",
        "does not hold, as declared",
        "holds",
    ]
    assert ledger.complete and ledger.as_expected
    assert all(o.seconds >= 0 for o in ledger.claims)


@pytest.mark.parametrize(
    ("holds", "fails", "expected", "good"),
    [
        (True, True, HOLDS, True),
        (False, True, Fails("known"), True),
        (False, True, HOLDS, False),
        (True, True, Fails("known"), False),
        (True, False, HOLDS, False),
        (False, False, Fails("known"), False),
    ],
)
def test_a_surprise_in_either_direction_and_an_idle_control_are_alarms(
    holds: bool, fails: bool, expected: Any, good: bool
) -> None:
    ledger = reproduce(fakes.one(fakes.evidence(holds, fails), expected))
    assert ledger.as_expected is good
    (outcome,) = ledger.claims
    assert ("control did not fail" in outcome.verdict) is not fails


def test_numpy_booleans_are_judged_as_booleans() -> None:
    result = fakes.evidence()
    object.__setattr__(result, "holds", np.bool_(False))
    result.__post_init__()
    assert result.holds is False


def test_an_error_does_not_lose_the_other_claims(tmp_path: Path) -> None:
    paper = fakes.declared()
    paper.claim(name="broken", **fakes.TEXTS)(lambda run: 1 / 0)
    paper.claim(name="last", **fakes.TEXTS)(lambda run: fakes.evidence())
    ledger = reproduce(paper, out=tmp_path)
    assert [o.verdict for o in ledger.claims[3:]] == ["error", "holds"]
    assert not ledger.as_expected and ledger.complete
    broken = json.loads((tmp_path / "evidence.json").read_text())["claims"][3]
    assert broken["error"] == "ZeroDivisionError: division by zero"
    assert (broken["holds"], broken["measured"], broken["control"]) == (None, None, None)


@pytest.mark.parametrize("wrong", [None, {"share": 1}, fakes.evidence(table=[{"set": {1}}])])
def test_a_claim_that_gives_no_evidence_is_an_error_in_the_ledger(
    wrong: Any, tmp_path: Path
) -> None:
    (outcome,) = reproduce(fakes.one(wrong), out=tmp_path).claims
    assert outcome.error is not None and "TypeError" in outcome.error
    assert (tmp_path / "evidence.json").exists()


def test_a_figure_that_cannot_be_drawn_keeps_what_was_measured(tmp_path: Path) -> None:
    (outcome,) = reproduce(fakes.one(fakes.evidence(figure="no chart")), out=tmp_path).claims
    assert outcome.error is not None and outcome.measured is not None
    assert outcome.verdict == "error" and not outcome.as_expected


def test_evidence_is_strict_json_with_figures_beside_it(tmp_path: Path) -> None:
    reproduce(fakes.declared(), out=tmp_path, seed=3)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    text = (tmp_path / "evidence.json").read_text()
    data = json.loads(text, parse_constant=refuse)
    assert (data["paper"], data["scale"], data["seed"]) == ("fake", "quick", 3)
    holding, failing, drawn = data["claims"]
    wanted = {"name", "statement", "source", "expected", "measured", "criterion", "holds"}
    assert wanted | {"control", "seconds", "figure"} <= set(holding)
    assert holding["measured"] == {"share": 0.5, "undefined": None, "trials": 3}
    assert holding["control"] == {
        "what": "labels shuffled", "measured": {"share": 0.1}, "fails": True
    }  # fmt: skip
    assert failing["expected"] == {
        "holds": False, "reason": "the constant is wrong", "where": "appendix B, redone"
    }  # fmt: skip
    svg = (tmp_path / drawn["figure"]).read_text()
    assert "It is so." in svg and "correlation" in svg and "step" in svg
    png = (tmp_path / drawn["figure"]).with_suffix(".png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.glob(".evidence*"))


def test_the_printed_ledger_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    paper = fakes.declared()
    paper.claim(name="idle", **fakes.TEXTS)(lambda run: fakes.evidence(fails=False))
    ledger = reproduce(paper)
    show(ledger)
    printed = " ".join(capsys.readouterr().out.split())
    for part in (
        "A Made-up Paper", "scale quick, seed 0", "statement It is so.", "source Figure 1",
        "expected does not hold: the constant is wrong (appendix B, redone)",
        "measured share = 0.5 · undefined = not computed · trials = 3 criterion share at least",
        "control labels shuffled: share = 0.1; fails, as it must",
        "idle holds, but its control did not fail", "does not fail: nothing is shown", "seconds 0.",
    ):  # fmt: skip
        assert part in printed, part
    said = summary(ledger)
    assert "3 held, as expected, 1 did not hold, as declared" in said and "idle" in said


def test_two_claims_of_one_name_are_an_error_at_import() -> None:
    paper = fakes.declared()
    with pytest.raises(AttoscopeError, match="two claims named 'holding'"):
        paper.claim(name="holding", **fakes.TEXTS)


@pytest.mark.parametrize("name", ["Upper", "two words", "../up", "", "under_score", "end-"])
def test_names_make_good_file_names(name: str) -> None:
    with pytest.raises(AttoscopeError, match="lower-case words"):
        fakes.paper().claim(name=name, **fakes.TEXTS)
    with pytest.raises(AttoscopeError, match="lower-case words"):
        Paper(name, "title", "authors", 2024, "link")


# Bad input, in a sentence.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "huge"}, "scale: got 'huge'; expected quick or paper"),
        ({"seed": -1}, "seed: got -1"),
        ({"jobs": 0}, "jobs: got 0"),
        ({"jobs": -2}, "jobs: got -2"),
        ({"claims": ["holdin"]}, "did you mean holding?"),
        ({"claims": []}, "no claim was chosen"),
        ({"jobs": 2, "scheduler": "tcp://127.0.0.1:1"}, "choose one"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AttoscopeError) as caught:
        reproduce(fakes.declared(), **options)
    assert message in str(caught.value)


def test_claims_are_chosen_by_name_and_run_in_the_papers_order() -> None:
    ledger = reproduce(fakes.declared(), claims=["known-to-fail", "holding"])
    assert [o.name for o in ledger.claims] == ["holding", "known-to-fail"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AttoscopeError, match="cannot be written"):
        reproduce(fakes.declared(), claims=["holding"], out=tmp_path / "file" / "below")


# The list of papers.


def test_twenty_papers_and_the_follow_ups_of_the_first() -> None:
    slugs = [entry.slug for entry in ENTRIES]
    assert len(slugs) == len(set(slugs)) == 21
    assert {"transformers-as-svms", "attention-max-margin-followups", "slalom"} < set(slugs)
    assert all(entry.title and entry.link.startswith("https://") for entry in ENTRIES)
    assert len({entry.link for entry in ENTRIES}) == 21


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.slug for entry in ENTRIES])
def test_a_paper_that_can_be_run_is_the_one_in_the_list(entry: Any) -> None:
    if not entry.exists:
        with pytest.raises(AttoscopeError, match=f"{entry.slug} cannot be run yet"):
            entry.load()
        return
    paper = entry.load()
    assert (paper.slug, paper.link) == (entry.slug, entry.link)
    assert paper.claims


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("slalm", "slalom"),
        ("transformers", "transformers-as-svms"),
        ("deepscale", "deepscalelm"),
    ],
)
def test_an_unknown_slug_suggests_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(AttoscopeError, match=f"did you mean {meant}\\?"):
        find(typed)
