"""Numbers, places and tokens in words."""

from __future__ import annotations

import pytest

from attoscope.report import words
from attoscope.report.verdict import verdict


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "not computed"),
        (float("nan"), "not computed"),
        (0.0, "0"),
        (1.0, "1"),
        (0.5734, "0.573"),
        (0.99, "0.990"),
        (0.0123, "0.012"),
        (0.0004, "0.00040"),
        (0.00001, "1.0 × 10⁻⁵"),
        (-3.14159, "−3.14"),
        (12.345, "12.3"),
        (163.7, "164"),
        (12345.6, "12,346"),
        (2.5e9, "2.5 × 10⁹"),
        (float("inf"), "∞"),
    ],
)
def test_number(value, text):
    assert words.number(value) == text


def test_interval_never_hides_a_sign():
    assert words.interval(159.2, 169.1) == "159–169"
    assert words.interval(-0.1, 0.2) == "−0.100 to 0.200"
    assert words.interval(None, 0.2) == ""
    assert words.interval(float("nan"), 0.2) == ""


@pytest.mark.parametrize(
    "site, found",
    [
        ("encoder.3", ("encoder", "3")),
        ("decoder.3.cross", ("decoder cross", "3")),
        ("encoder.in", ("encoder", "in")),
        ("model.blocks.7", ("model.blocks", "7")),
        ("odd", ("odd", "")),
    ],
)
def test_place(site, found):
    assert words.place(site) == found


def test_where_is_short():
    sites = [f"decoder.{i}" for i in (0, 1, 2, 5, 7, 8)] + ["decoder.final"]
    assert words.where(sites) == "decoder layers 0–2, 5, 7–8, final"
    heads = [(s, h) for s in sites[:3] for h in range(4)]
    assert words.where(sites[:3], heads) == "decoder layers 0–2 · 12 heads"
    assert words.where(["encoder.1"], [("encoder.1", 3)]) == "encoder layer 1, head 3"
    assert words.where([]) == "the whole model"


def test_tokens_are_shown_as_given_but_can_neither_hide_nor_steer():
    assert words.piece("Ġtold") == "Ġtold"
    assert words.piece(" told") == "told"
    assert words.piece(" ") == "␣"
    assert words.piece("\n") == "↵"
    assert words.piece("") == "∅"
    assert words.piece("\x1b[31m") == "␛[31m"
    assert "\u202e" not in words.piece("\u202eevil")
    assert words.piece("\udce2") == "\\udce2"
    assert words.piece("👩‍🔬") == "👩‍🔬"


def test_verdict_speaks_of_the_worst(decoder):
    told = verdict(decoder.findings, {})
    assert told.startswith("Something is wrong: tokens collapse")
    assert "2 further findings below" in told
    told = verdict(decoder.findings[1:], {})
    assert told.startswith("Nothing is broken, but one thing needs a look: massive")
    told = verdict(decoder.findings[2:], {})
    assert told.startswith("Nothing is broken. One thing to know: 75 heads")
    assert "no rule found anything" in verdict((), {"layers": 6, "heads": 12})


def test_verdict_says_that_watching_changed_the_output():
    told = verdict((), {"unchanged": {"equal": False, "max_difference": 0.5}})
    assert "changed the model's output by up to 0.500" in told
    told = verdict((), {"unchanged": {"equal": False, "max_difference": 2e-6}})
    assert "changed" not in told
