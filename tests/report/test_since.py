"""Before and now: readings with known answers, findings, and where they are shown."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from attoscope.cli import run
from attoscope.diagnosis import Diagnosis
from attoscope.errors import AttoscopeError
from attoscope.measures.base import Reading
from attoscope.report import curves, html, terminal
from attoscope.report import json as report_json
from attoscope.report.choice import foremost
from attoscope.report.shifts import between
from tests.models import EXAMPLES
from tests.report.test_html import read
from tests.report.test_json import as_first_version, same, strict, table_keys
from tests.report.test_pages import chromium_says

POINTS = ("encoder.in", "encoder.0", "encoder.1", "encoder.final")


def curve(values, half=0.02, name="cosine", bounds=(-1.0, 1.0), points=POINTS, **parts):
    values = np.array(values, float)
    return Reading(
        **{
            "name": name, "title": name, "meaning": "", "unit": "share", "range": bounds,
            "dims": ("point",), "coords": {"point": points}, "values": values,
            "low": values - half, "high": values + half, **parts,
        }
    )  # fmt: skip


def heads(values, half=0.02, name="entropy"):
    values = np.array(values, float)
    sites = tuple(f"encoder.{i}" for i in range(len(values)))
    coords = {"site": sites, "head": tuple(range(values.shape[1]))}
    return replace(curve(values, half, name, (0.0, 1.0)), dims=("site", "head"), coords=coords)


def loss(value, half=0.1, **parts):
    parts = {"dims": ("output",), "coords": {"output": ("output",)}, "unit": "nats", **parts}
    return curve([value], half, "loss", (0.0, None), **parts)


def of(*readings, findings=(), **parts):
    made = {"model": {"name": "m"}, "data": {}, "versions": {}, "timings": {}, **parts}
    return Diagnosis(reading_list=readings, findings=tuple(findings), closeups=(), **made)


def test_a_curve_is_compared_in_its_last_block_and_in_its_mean_over_depth():
    before = curve([0.0, 0.2, 0.8, 0.9], null=np.array([0.0, 0.1, 0.2, 0.3]))
    last, mean = between([before], [curve([0.0, 0.2, 0.4, 0.5], half=0.01)]).shifts
    assert (last.where, mean.where) == (
        "encoder, layer 1 (last block)",
        "encoder, mean over depth",
    )
    assert (last.before.value, last.after.value) == pytest.approx((0.8, 0.4))
    assert (last.before.low, last.before.high) == pytest.approx((0.78, 0.82))
    assert last.before.null == pytest.approx(0.2) and last.after.null is None
    assert last.size == pytest.approx(0.4 / 2)
    assert (mean.before.value, mean.after.value) == pytest.approx((1.9 / 4, 1.1 / 4))
    assert (mean.after.low, mean.after.high) == pytest.approx((1.1 / 4 - 0.01, 1.1 / 4 + 0.01))
    assert (mean.moved, mean.places, last.moved, last.places) == (2, 4, 1, 1)
    assert last.apart is True and mean.apart is True


@pytest.mark.parametrize("step, listed", [(0.03, False), (0.04, False), (0.0401, True)])
def test_intervals_that_touch_are_not_apart(step, listed):
    before = curve([0.5] * 4, half=0.02)
    found = between([before], [curve([0.5 + step] * 4, half=0.02)])
    assert bool(found.shifts) is listed and found.compared == 1


def test_rounding_is_no_change():
    before = curve([0.5] * 4, half=0.0)
    assert not between([before], [curve([0.5 + 1e-7] * 4, half=0.0)]).shifts


@pytest.mark.parametrize("moved, listed", [(1, False), (2, False), (3, True)])
def test_single_heads_count_when_more_than_one_in_twenty_left_its_interval(moved, listed):
    before = np.full((2, 20), 0.5)
    after = before.copy()
    # Half of them up, half of them down: the mean stays.
    after.flat[:moved] += 0.2 * np.array([1, -1, 1])[:moved]
    found = between([heads(before)], [heads(after)]).shifts
    assert bool(found) is listed
    if found:
        assert (found[0].apart, found[0].moved, found[0].places) == (False, moved, 40)
        assert found[0].where == "encoder, mean over heads"


def test_only_places_that_both_have_count():
    deeper = curve(
        [0.0, 0.1, 0.2, 0.3, 0.9],
        points=("encoder.in", "encoder.0", "encoder.1", "encoder.2", "encoder.final"),
    )
    last, _ = between([curve([0.0, 0.1, 0.6, 0.7])], [deeper]).shifts
    assert last.where == "encoder, layer 1 (last block)"
    assert (last.before.value, last.after.value) == (0.6, 0.2)
    elsewhere = curve([0.5] * 4, points=tuple(f"decoder.{i}" for i in range(4)))
    assert between([curve([0.0] * 4)], [elsewhere]).compared == 0


def test_what_is_not_a_number_is_left_out():
    before = curve([0.0, 0.2, np.nan, 0.9])
    last, mean = between([before], [curve([np.inf, 0.6, 0.4, 0.5])]).shifts
    assert last.where == "encoder, layer 0 (last block)"
    assert mean.before.value == pytest.approx((0.2 + 0.9) / 2)
    nothing = between([curve([np.nan] * 4)], [curve([0.5] * 4)])
    assert (nothing.shifts, nothing.compared) == ((), 0)


def test_a_mean_and_its_interval_are_over_the_same_places():
    before = curve([0.0, 0.2, 0.8, 0.9])
    before.low[0] = np.nan
    _, mean = between([before], [curve([0.5] * 4)]).shifts
    assert mean.before.value == pytest.approx(1.9 / 3)
    assert mean.before.low == pytest.approx(1.9 / 3 - 0.02)


def test_without_intervals_nothing_is_said_and_the_notes_say_so():
    before = curve([0.0] * 4, low=None, high=None)
    found = between([before], [curve([0.9] * 4)])
    assert found.shifts == () and found.compared == 0
    assert found.notes == ("No interval, so nothing can be said of 1 reading: cosine.",)


def test_readings_of_one_report_only_are_named():
    found = between([curve([0.0] * 4, name="old")], [curve([0.0] * 4, name="new")])
    assert found.notes == (
        "Only in the baseline: 1 reading: old.",
        "Not in the baseline: 1 reading: new.",
    )
    other = between([curve([0.0] * 4, unit="nats")], [curve([0.9] * 4)])
    assert other.shifts == () and "Other unit" in other.notes[0]


def test_arrays_of_the_wrong_shape_are_left_out():
    broken = replace(curve([0.0] * 4), values=np.zeros(3))
    assert between([broken], [curve([0.9] * 4)]).shifts == ()


def test_the_largest_change_comes_first():
    before = [curve([0.5] * 4), curve([1.0] * 4, name="norm", bounds=(0.0, None))]
    after = [curve([0.9] * 4), curve([2.0] * 4, name="norm", bounds=(0.0, None))]
    found = between(before, after)
    # 1 of the larger, 2, is a half; 0.4 of a range of 2 is a fifth.
    assert [round(s.size, 6) for s in found.shifts] == [0.5, 0.5, 0.2, 0.2]
    assert [r.name for r in found.curves] == ["norm", "cosine"]


def test_where_there_is_little_room_each_question_has_a_place():
    names = ["a", "frequency_ratio", "b", "cosine"]
    assert foremost(names, 3) == ["a", "frequency_ratio", "cosine"]
    assert foremost(names, 1) == ["cosine"]


def test_the_loss_is_always_there():
    comparison = of(loss(2.35)).compare(of(loss(2.30)))
    (shift,) = comparison.outputs
    assert (shift.before.value, shift.after.value, shift.apart) == (2.30, 2.35, False)
    assert "Loss" not in comparison.sentence  # the made-up reading's title is its name
    assert "loss rose from 2.30 to 2.35 nats (intervals overlap)." in comparison.sentence
    assert "loss: 2.30 (2.20–2.40) → 2.35 (2.25–2.45) nats" in str(comparison)
    fell = of(loss(1.0)).compare(of(loss(2.30))).sentence
    assert "loss fell from 2.30 to 1 nats (intervals apart)." in fell
    lone = of(loss(2.35, low=None, high=None)).compare(of(loss(2.30)))
    assert "(no interval)" in lone.sentence
    broken = of(loss(math.nan)).compare(of(loss(2.30)))
    assert "loss before: 2.30; now: not computed." in broken.sentence


def test_without_a_loss_the_reason_is_given():
    comparison = of(data={"loss": "none: no labels"}).compare(of())
    assert comparison.notes[0] == "Loss before: not recorded; now: none: no labels."
    assert comparison.outputs == ()


def test_facts_that_differ_are_named():
    before = of(model={"name": "m", "layers": 6}, data={"documents": 4, "sources": ["a.txt"]})
    after = of(model={"name": "m", "layers": 6}, data={"documents": 5, "sources": ["b.txt"]})
    assert after.compare(before).differs == (
        "documents 4 then, 5 now; read from a.txt then, b.txt now"
    )
    assert before.compare(before).differs == ""


def why(after, before):
    found = after.compare(before)
    return [[(c.finding.id, c.why) for c in part] for part in (found.better, found.worse)]


def changed(diagnosis, index, **parts):
    findings = list(diagnosis.findings)
    findings[index] = replace(findings[index], **parts)
    return replace(diagnosis, findings=tuple(findings))


def test_findings_that_are_gone_or_milder(decoder):
    assert why(decoder, decoder) == [[], []]
    fewer = replace(decoder, findings=decoder.findings[1:])
    assert why(fewer, decoder) == [[("tokens-collapsed", "gone")], []]
    milder = changed(decoder, 0, severity="warning")
    assert why(milder, decoder) == [[("tokens-collapsed", "was severe, is a warning")], []]
    # The null, 0.61, lies above: higher is better.
    nearer = changed(decoder, 0, measured=0.3)
    assert why(nearer, decoder)[0][0][1].startswith("was 0.00040 (0.00030–0.00050)")
    smaller = changed(decoder, 0, sites=decoder.findings[0].sites[:1])
    assert why(smaller, decoder)[0] == [("tokens-collapsed", "was in 3 sites, is in 1")]


def test_what_is_worse_in_one_way_is_not_better_in_another(decoder):
    both = changed(decoder, 0, severity="warning", measured=0.00001)
    better, worse = why(both, changed(decoder, 0, severity="note"))
    assert better == [] and len(worse) == 1


def test_findings_that_grew_together_are_not_gone(decoder):
    here = decoder.findings[1]
    one, two = (replace(here, sites=(f"decoder.{i}",)) for i in (5, 7))
    grown = replace(here, sites=("decoder.5", "decoder.6", "decoder.7"))
    apart = replace(decoder, findings=(one, two))
    better, worse = why(replace(decoder, findings=(grown,)), apart)
    assert better == [] and [w for _, w in worse] == ["was in 1 site, is in 3"]
    assert why(replace(decoder, findings=(two,)), apart) == [[(one.id, "gone")], []]


@pytest.fixture(scope="module")
def treated(both):
    """The awkward diagnosis of two stacks, with its curves and heads moved and a finding less."""
    moved = []
    for reading in both.reading_list:
        arrays = {k: getattr(reading, k) for k in ("values", "low", "high")}
        shifted = {k: None if a is None else 0.5 * a for k, a in arrays.items()}
        moved.append(replace(reading, **shifted))
    after = replace(both, findings=both.findings[1:], reading_list=tuple(moved))
    before = replace(both, findings=(both.findings[0], *both.findings[2:]))
    return after.since(report_json.to_dict(before))


def test_it_is_written_and_comes_back(treated, tmp_path):
    path = treated.to_json(tmp_path / "report.json")
    data = strict(path.read_text("utf-8"))
    back = Diagnosis.from_json(path)
    ours, theirs = treated.baseline, back.baseline
    assert theirs is not None
    for part in ("model", "differs", "better", "worse", "outputs", "shifts", "notes"):
        assert getattr(ours, part) == getattr(theirs, part), part
    for one, other in zip(ours.before, theirs.before, strict=True):
        assert one.name == other.name and same(one.values, other.values)
    assert back.to_json(tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert table_keys("The comparison") == set(data["baseline"])
    assert table_keys("A change") == set(data["baseline"]["worse"][0])
    assert table_keys("A shift") == set(data["baseline"]["shifts"][0])


def test_older_reports_are_read_and_compared(decoder):
    old = json.loads(json.dumps(report_json.to_dict(decoder)))
    del old["baseline"]
    assert Diagnosis.from_json(old).baseline is None
    for before in (old, as_first_version(decoder), Diagnosis.from_json(old)):
        comparison = decoder.compare(before)
        assert comparison.shifts == () and comparison.compared == len(decoder.reading_list) - 1


def test_a_damaged_comparison_is_refused_in_words(treated):
    data = report_json.to_dict(treated)
    del data["baseline"]["shifts"][0]["before"]
    with pytest.raises(AttoscopeError, match="a comparison as in docs/report-schema.md"):
        Diagnosis.from_json(data)


def test_the_page_shows_both_curves_over_each_other(treated, both):
    page = html.page(treated)
    reader = read(page)
    part = page[page.index('<section id="since">') : page.index('<section id="findings">')]
    assert part.count("<svg") >= 8 and "could not be" not in part
    assert all("var(--before)" in svg for svg in re.findall(r"<svg.*?</svg>", part, re.S))
    assert ", before " in part and "<b>gone</b>" in part and "<b>new</b>" in part
    ids = [value for _, name, value in reader.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert not re.search(r"\bnan\b|\bNaN\b|\binf\b|\bNone\b", " ".join(reader.texts))
    alone = html.page(both)
    assert 'id="since"' not in alone and "var(--before)" not in alone.split("</style>")[1]


def test_the_band_before_and_now_are_drawn_at_their_places():
    before, now = curve([0.0, 0.2, 0.8, 0.9]), curve([0.0, 0.2, 0.4, np.nan])
    page = html.page(of(now).since(of(before)))
    part = page[page.index('<section id="since">') : page.index('<section id="findings">')]
    titles = re.findall(r"<title>(.*?)</title>", part)
    assert "encoder 1: 0.400 (0.380–0.420), before 0.800" in titles


def test_a_comparison_that_cannot_be_drawn_leaves_the_page(treated, monkeypatch):
    def fail(*_):
        raise RuntimeError("no pen")

    monkeypatch.setattr(curves, "_earlier", fail)
    page = html.page(treated)
    part = page[page.index('<section id="since">') : page.index('<section id="findings">')]
    assert "RuntimeError: no pen" in part and "<table" in part
    assert "could not be drawn" not in page[page.index('<section id="findings">') :]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_terminal_says_it_in_a_few_lines(treated, width):
    text = terminal.text(treated, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text and "\u202e" not in text
    said = text[text.index("Since the baseline") :]
    assert " better (gone): " in said and " worse (new): " in said
    assert len(str(treated.baseline).splitlines()) <= 15


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_looks_right(chromium, treated, width, tmp_path):
    _, measured, others = chromium_says(chromium, tmp_path, html.page(treated), width)
    assert others == [] and measured["over"] == [] and measured["small"] == 0
    assert measured["wide"] <= measured["room"]


def test_loss_is_shown_with_what_comes_out(tmp_path):
    page = html.page(of(loss(2.3, null=np.array([4.0]), null_meaning="shuffled")))
    part = page[page.index('<section id="output">') :]
    assert re.search(r"<h3>loss</h3>.*2\.30 <small>nats.*2\.20–2\.40.*4 <small>shuffled", part,
                     re.S)  # fmt: skip


def test_from_the_command_line(tmp_path, capsys):
    ids = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, tmp_path / "batch.safetensors")
    for name, seed in (("one", 0), ("two", 1)):
        torch.manual_seed(seed)
        EXAMPLES["gpt2"].build().save_pretrained(tmp_path / name)

    def diagnose(name, out, *more):
        arguments = [
            "--batch",
            str(tmp_path / "batch.safetensors"),
            "--out",
            str(tmp_path / out),
        ]
        return run(["diagnose", str(tmp_path / name), *arguments, *more])

    assert diagnose("one", "before") == 0
    baseline = ["--baseline", str(tmp_path / "before" / "report.json")]
    capsys.readouterr()
    assert diagnose("two", "after", *baseline) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Since the baseline: Loss " in printed and "next token" not in printed
    found = Diagnosis.from_json(tmp_path / "after" / "report.json").baseline
    assert found is not None and found.outputs[0].reading == "loss" and found.compared > 20
    assert 'id="since"' in (tmp_path / "after" / "report.html").read_text("utf-8")
    assert diagnose("one", "same", *baseline) == 0
    same_again = Diagnosis.from_json(tmp_path / "same" / "report.json").baseline
    assert same_again is not None and same_again.shifts == () and same_again.differs == ""
    assert same_again.outputs[0].before == same_again.outputs[0].after
