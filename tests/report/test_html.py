"""The page as text: one file, no script, nothing from outside, everything escaped."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from attoscope.diagnosis import Closeup, Text
from attoscope.measures.base import Reading
from attoscope.report import colours, curves, figures, html, picture
from attoscope.report.sentence import Around, marked
from tests.report.conftest import row

VOID = {
    "wbr",
    "meta",
    "link",
    "br",
    "img",
    "input",
    "hr",
    "base",
    "image",
    "path",
    "line",
    "rect",
}


class Reader(HTMLParser):
    """Collects tags, attributes and texts, and checks that tags are closed in order."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID or tag == "path":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID or tag == "path":
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.texts.append(data)


def read(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    return reader


@pytest.fixture(scope="module", params=["encoder", "decoder", "both", "empty"])
def page(request):
    return html.page(request.getfixturevalue(request.param))


def test_well_formed_and_nothing_from_outside(page):
    reader = read(page)
    assert not {"script", "link", "iframe", "object", "embed", "img"} & set(reader.tags)
    for tag, name, value in reader.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "xlink:href", "data", "srcset", "poster", "action"):
            link = tag == "a" and value.startswith("https://arxiv.org/abs/")
            assert link or value.startswith(("#", "data:image/png")), (tag, name, value)
        assert "url(" not in value and "javascript:" not in value
    css = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in css and "@import" not in css and "http" not in css


def test_addresses_in_the_page_exist_once(page):
    reader = read(page)
    ids = [value for _, name, value in reader.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for tag, _, value in reader.attributes:
        if tag == "a" and value.startswith("#"):
            assert value[1:] in ids, value


def test_every_colour_variable_is_defined_in_light_and_dark(page):
    used = set(re.findall(r"var\((--[a-z0-9]+)\)", page))
    light, dark = page.split("@media screen and (prefers-color-scheme:dark)", 1)
    dark = dark[: dark.index("}}")]
    for name in used - {"--c"}:
        assert f"{name}:" in light and f"{name}:" in dark, name
    assert not re.search(r"#0[12][01]\d[0-9a-f]{2}\b", page), "a placeholder colour is left"


def test_no_nan_reaches_a_reader(page):
    text = " ".join(read(page).texts)
    assert not re.search(r"\bnan\b|\bNaN\b|\binf\b|\bNone\b", text)


def test_nothing_failed(page):
    assert not re.search(r"could not be (drawn|shown|made)", page)


def test_charts_have_names_and_captions(decoder):
    page = html.page(decoder)
    svgs = re.findall(r"<svg[^>]*>", page)
    assert len(svgs) >= 20
    assert all('role="img"' in svg and "aria-label=" in svg for svg in svgs)
    for part in re.findall(r'<figure class="(?:curves|maps).*?</figure>', page, flags=re.S):
        assert "<h3>" in part and "<figcaption>" in part


def test_hostile_text_is_shown_and_not_obeyed(encoder, both):
    for diagnosis in (encoder, both):
        page = html.page(diagnosis)
        reader = read(page)
        text = "".join(reader.texts)
        assert "<script>alert('x')</script>" in text
        assert "</style></main>" in text and "<!--" in text and "{{ 7 * 7 }}" in text
        assert '<b>SmolLM2</b> & "co"' in text and "<img src=x>" in text
        assert "שלום" in text and "👩‍🔬" in text and "Ġtold" in text
        assert "\u202e" not in page and "\x1b" not in page
        assert "49" not in re.findall(r"\{\{.*?\}\}", text)


def test_size(encoder, decoder, tmp_path):
    for diagnosis in (encoder, decoder):
        assert diagnosis.to_html(tmp_path / "r.html").stat().st_size < 500_000


def twelve_by_twelve_by_1024(encoder):
    """Everything that 12 × 12 heads and documents of 1,024 tokens can bring."""
    rng = np.random.default_rng(0)
    readings = [
        replace(r, name=f"{r.name}_{i}") for i in range(5) for r in encoder.reading_list
    ]
    closeups = tuple(
        Closeup(
            f"encoder.{i % 12}",
            i % 12,
            Text(i, "words", tuple(f"Ġtoken{j}" for j in range(1024))),
            1000,
            row(rng, 1024),
            0.1,
            why="why",
        )
        for i in range(24)
    )
    closeups += tuple(c for c in encoder.closeups if not c.why)
    return replace(encoder, reading_list=tuple(readings), closeups=closeups)


def test_size_at_1024_tokens_with_forty_five_readings(encoder, tmp_path):
    large = twelve_by_twelve_by_1024(encoder)
    assert large.to_html(tmp_path / "r.html").stat().st_size < 5_000_000


def test_large_maps_are_pictures(encoder):
    rng = np.random.default_rng(0)
    values = rng.random((80, 64))
    values[3, 5] = np.nan
    reading = Reading(
        **{
            **encoder.reading_list[0].__dict__,
            "coords": {
                "site": tuple(f"decoder.{i}" for i in range(80)),
                "head": tuple(range(64)),
            },
            "values": values,
            **dict.fromkeys(("low", "high", "null", "row_error")),
        }
    )
    page = html.page(replace(encoder, reading_list=(reading,), findings=()))
    assert page.count("data:image/png;base64,") == 4  # wide and narrow, light and dark
    assert len(page) < 150_000
    read(page)


def test_a_picture_holds_its_values():
    """The PNG decodes to the colours of its steps: an independent reader agrees."""
    image = pytest.importorskip("PIL.Image", reason="Pillow reads the picture back")
    import base64
    import io

    steps = np.array([[0, 10, 20], [-1, 5, 20]])
    scale = colours.SCALES["light"]["s"]
    data = base64.b64decode(picture.png(steps, scale).split(",")[1])
    pixels = image.open(io.BytesIO(data)).convert("RGBA")
    assert pixels.size == (3, 2)
    assert pixels.getpixel((1, 0)) == (*bytes.fromhex(scale[10][1:]), 255)
    assert pixels.getpixel((0, 1))[3] == 0


def test_down_sampling_is_the_mean_of_blocks():
    values = np.arange(512.0)[:, None] * np.ones((1, 3))
    values[1] = np.nan
    small = picture.down_sample(values)
    assert small.shape == (256, 3)
    assert small[0, 0] == 0.0 and small[1, 0] == 2.5 and small[-1, 0] == 510.5


def test_scales_run_one_way_in_lightness():
    """Sequential scales are read by lightness alone, so it never turns back."""
    for theme, sign in (("light", -1), ("dark", 1)):
        light = [colours._to_lab(c)[0] for c in colours.SCALES[theme]["s"]]
        assert (np.diff(light) * sign > 0).all()
        both = [colours._to_lab(c)[0] for c in colours.SCALES[theme]["d"]]
        turn = np.sign(np.diff(both))
        assert (turn[:10] == -turn[10:]).all()


def test_steps_cover_the_scale_and_mark_what_is_missing():
    share = np.array([-1.0, 0.0, 0.5, 1.0, 2.0, np.nan])
    assert colours.step(share).tolist() == [0, 0, 10, 20, 20, -1]


def test_one_chart_that_fails_leaves_the_others(decoder, monkeypatch):
    whole = html.page(decoder).count("<svg")
    draw = curves.draw

    def broken(track, title, *rest):
        if title == "Token cosine":
            raise ValueError("no <ink> left")
        return draw(track, title, *rest)

    monkeypatch.setattr(curves, "draw", broken)
    page = html.page(decoder)
    assert "could not be drawn (ValueError: no &lt;ink&gt; left)" in page
    assert page.count("<svg") == whole - 1


def test_a_broken_closeup_leaves_the_others(decoder):
    odd = replace(decoder.closeups[0], query=10_000)
    page = html.page(replace(decoder, closeups=(odd, decoder.closeups[1])))
    assert "could not be shown (IndexError" in page and "w389" in page


def test_what_is_not_computed_says_why(encoder):
    page = html.page(encoder)
    assert "Not computed: it needs at least three tokens" in page
    assert re.search(r"3 of 144 values not computed: no row of this head", page)


def test_a_stack_with_fewer_heads_lacks_nothing(both):
    assert figures.absent(both.reading_list[1]) == ""


def test_a_reading_that_is_constant_is_a_sentence(encoder):
    one = encoder.reading_list[1]
    zero = replace(one, values=np.zeros_like(one.values), low=None, high=None, null=None)
    page = html.page(replace(encoder, reading_list=(zero,)))
    assert "0 at every head." in page and 'class="chart' not in page


def test_difference_map_only_where_the_null_differs(encoder):
    one = replace(encoder.reading_list[1], null=encoder.reading_list[1].values)
    assert "minus the null" not in html.page(replace(encoder, reading_list=(one,)))
    assert "minus the null" in html.page(encoder)


def test_long_documents_show_the_words_around_what_matters(decoder):
    words = marked(decoder.closeups[1], Around(12, 5))
    assert "<b>w500</b>" in words and "<mark>w389</mark>" in words and words.count("<u>") == 3
    assert "w488 w489" in words and "w487" not in words and "w384 w385" in words
    assert words.count("…") >= 2 and len(re.findall(r"w\d+", words)) < 90


def test_frames_in_a_notebook_do_not_interfere(encoder, decoder):
    both = encoder._repr_html_() + decoder._repr_html_()
    reader = read(both)
    assert reader.tags == ["iframe", "iframe"]
    inner = [value for _, name, value in reader.attributes if name == "srcdoc"]
    assert [read(page).tags[0] for page in inner] == ["html", "html"]
    assert all('<base href="about:srcdoc">' in page for page in inner)


def test_papers_with_an_arxiv_number_become_links():
    link = html.linked_paper('Dong & co (arXiv 2103.03404) "x"')
    assert '<a rel="noreferrer" href="https://arxiv.org/abs/2103.03404">' in link
    assert "Dong &amp; co" in link
    assert html.linked_paper("Xiao <i> 2024") == "Xiao &lt;i&gt; 2024"


def test_drawing_is_fast(encoder):
    html.page(encoder)
    start = time.perf_counter()
    html.page(encoder)
    assert time.perf_counter() - start < 6  # a second on a quiet core


def test_charts_are_loaded_only_to_draw(decoder, tmp_path):
    path = decoder.to_json(tmp_path / "r.json")
    code = (
        "import sys; from attoscope.diagnosis import Diagnosis; "
        "d = Diagnosis.from_json(sys.argv[1]); d.verdict; "
        "assert not {'altair', 'vl_convert', 'jinja2', 'rich'} & set(sys.modules)\n"
        "d.to_html(sys.argv[2]); assert 'altair' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, path, tmp_path / "r.html"], check=True)
