"""From every finding and every head, down to the text."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from attoscope.diagnosis import Closeup, Mark, Text
from attoscope.report import closer, html
from attoscope.report.sentence import Around, marked

TEXT = Text(0, "words", ("The", " capt", "ain", " told", " the", " crew", " a", " tale"))


def row_of(page, anchor):
    """What stands in the row with that anchor."""
    return re.search(f'<li id="{anchor}">(.*?)</li>', page, flags=re.S)[1]


@pytest.mark.parametrize("name", ["encoder", "decoder", "both"])
def test_every_head_has_a_row_that_cells_lead_to(name, request):
    diagnosis = request.getfixturevalue(name)
    page = html.page(diagnosis)
    where = closer.anchors(diagnosis.closeups)
    reading = diagnosis.reading_list[1]
    heads = [(s, h) for s, h in where if h >= 0]
    computed = int((reading.values == reading.values).sum())
    assert len(heads) == computed
    for site, head in heads:
        anchor = where[site, head]
        assert "picks" in row_of(page, anchor)
        assert page.count(f'href="#{anchor}" tabindex="-1"') >= 1, (site, head)


def test_a_cell_leads_to_its_own_head(both):
    """The cell that speaks of decoder cross 2, head 3 leads to the row of that head."""
    page = html.page(both)
    anchor = closer.anchors(both.closeups)["decoder.2.cross", 3]
    cells = re.findall(r'<a href="#([^"]+)" tabindex="-1"><path[^>]*><title>([^:]*)', page)
    assert {link for link, title in cells if title == "decoder cross 2, head 3"} == {anchor}
    layer = page.index("decoder cross, layer 2: 4 heads")
    assert layer < page.index(f'id="{anchor}"') < page.index("decoder cross, layer 3: 4 heads")
    assert "head 3" in row_of(page, anchor) and "reads" in row_of(page, anchor)


def test_findings_lead_to_rows_and_heads(decoder):
    page = html.page(decoder)
    cards = re.findall(r'<article class="finding.*?</article>', page, flags=re.S)
    where = closer.anchors(decoder.closeups)
    for card, finding in zip(cards, decoder.findings, strict=True):
        assert "In the text" in card
        links = set(re.findall(r'href="#([^"]+)"', card))
        if finding.heads:
            assert {where[site, head] for site, head in finding.heads} <= links
    assert "In the text: 2 rows" in cards[2] and "no weight is a number" in cards[2]
    assert "In the text: 1 place" in cards[1] and "×" in cards[1]
    assert where["decoder.28", -1] in cards[0] and where["decoder.29", -1] in cards[0]


def test_a_row_says_chosen_competitors_weights_and_margins():
    marks = (Mark(3, 0.75, 0.0), Mark(0, 0.125, 1.79), Mark(5, 0.0625, 2.48))
    said = closer.compact(Closeup("decoder.0", 0, TEXT, 5, marks, 0.06), Around(2, 0))
    assert said == (
        '<p class="t" dir="auto"><u>The</u> captain <mark>told</mark> the '
        "<b><u>crew</u></b> a tale</p>"
        "<p><b>crew</b> picks <mark>told</mark> 0.750 over <u>The</u> 0.125 (by 1.79), "
        "<u>crew</u> 0.062 (by 2.48)</p>"
    )
    bare = tuple(replace(mark, margin=None) for mark in marks)
    said = closer.compact(Closeup("decoder.0", 0, TEXT, 5, bare, 0.06), None)
    assert said.endswith("over <u>The</u> 0.125, <u>crew</u> 0.062</p>") and "by" not in said


def test_patches_stand_in_their_grid():
    tokens = ("[CLS]", *(f"row {r}, column {c}" for r in (1, 2) for c in (1, 2, 3)))
    text = Text(0, "patches", tokens, (2, 3))
    picture = marked(
        Closeup("encoder.0", 0, text, 6, (Mark(1, 0.9), Mark(0, 0.1))), Around(1, 1)
    )
    assert 'viewBox="0 0 3 2"' in picture
    assert '<path class="c" d="M0,0h1v1h-1z"/>' in picture
    assert '<path class="q" d="M2,1h1v1h-1z"/>' in picture
    assert 'class="r"' not in picture, "[CLS] lies nowhere in the image"


def test_tokens_of_rows_are_escaped():
    text = Text(0, "words", ("<script>", "&", '"><b>'))
    said = closer.compact(
        Closeup("a.0", 0, text, 0, (Mark(1, 0.5), Mark(2, 0.5))), Around(1, 1)
    )
    assert "<script" not in said and "&lt;script&gt;" in said and "&#34;&gt;&lt;b&gt;" in said


def test_one_row_that_fails_leaves_the_others(decoder):
    own = [c for c in decoder.closeups if c.finding is None and not c.why]
    odd = replace(own[0], query=10_000)
    page = html.page(replace(decoder, closeups=(odd, *own[1:])))
    assert page.count("This row could not be shown (IndexError") == 1
    assert page.count(" picks ") >= len(own) - 1


def test_many_heads_keep_their_rows_within_the_limit(decoder):
    own = next(c for c in decoder.closeups if c.finding is None and not c.why)
    rows = tuple(
        replace(own, site=f"decoder.{layer}", head=head)
        for layer in range(80)
        for head in range(64)
    )
    page = html.page(replace(decoder, closeups=rows, reading_list=(), findings=()))
    assert page.count('<li id="h') == 5_120
    assert len(page.encode()) < 2_500_000
    assert "only the marked tokens are shown" in page


def test_no_closeups_no_section(decoder):
    page = html.page(replace(decoder, closeups=()))
    assert 'id="closer"' not in page and "In the text" not in page
    assert "A cell leads" not in page and 'tabindex="-1"' not in page


def test_what_competes_by_the_attention_svm_stands_with_the_head() -> None:
    one = {
        "token": "ship", "position": 5, "chosen": "the", "chosen_position": 4,
        "competitor": "<script>", "competitor_position": 2, "multiplier": 0.25,
    }  # fmt: skip
    facts = {"competitors": [one] * 5, "fingerprint": {"label": "none"}}
    line = str(closer.max_margin(facts))
    assert line.count("<b>ship</b>") == 3 and "<mark>the</mark>" in line and "0.25" in line
    assert "&lt;script&gt;" in line and "<script>" not in line and "fingerprint: none" in line
    unknown = one | {"token": None, "chosen": None, "competitor": None}
    bare = str(closer.max_margin({"competitors": [unknown], "fingerprint": None}))
    assert "position 5" in bare and "fingerprint" not in bare
    assert "nothing competes" in str(
        closer.max_margin({"competitors": [], "fingerprint": None})
    )
