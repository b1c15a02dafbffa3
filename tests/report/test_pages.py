"""The page in headless Chromium: no network, scripts off, wide and narrow, light and dark."""

from __future__ import annotations

import html as escaping
import json
import re
import subprocess

import pytest

from attoscope.report import html

image = pytest.importorskip("PIL.Image", reason="Pillow reads the screenshots")

# The page stands in a frame that may not run scripts; the script around it measures.
HARNESS = """<!doctype html><meta charset="utf-8"><style>body{{margin:0}}
iframe{{border:0;width:{width}px;height:{height}px}}</style>
<iframe id="f" sandbox="allow-same-origin" srcdoc="{page}"></iframe><script>
document.getElementById("f").onload = (event) => {{
  const inner = event.target.contentDocument, root = inner.documentElement;
  const shown = [...inner.querySelectorAll("svg.chart")].filter((s) => s.clientWidth > 0);
  const over = [...inner.querySelectorAll("main *")].filter(
    (e) => !e.closest("svg, .scroll, pre")
      && e.getBoundingClientRect().right > root.clientWidth + 1);
  console.log("measured" + JSON.stringify({{
    wide: root.scrollWidth, room: root.clientWidth, high: root.scrollHeight,
    charts: shown.length, small: shown.filter((s) => s.clientHeight < 40).length,
    over: over.map((e) => e.tagName + "." + e.className).slice(0, 5),
    ink: inner.defaultView.getComputedStyle(inner.body).color,
    filled: new Set([...inner.querySelectorAll("svg.chart path")].map(
      (p) => inner.defaultView.getComputedStyle(p).fill)).size,
  }}));
}};</script>"""


def chromium_says(chromium, folder, page, width, height=6000, dark=False):
    """Screenshot, what was measured, and all other console lines."""
    (folder / "harness.html").write_text(
        HARNESS.format(width=width, height=height, page=escaping.escape(page)), "utf-8"
    )
    shot = folder / "shot.png"
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},{height}",
        f"--screenshot={shot}",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
        f"file://{folder / 'harness.html'}",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = re.findall(r'CONSOLE.*?"(.*)", source', run.stderr)
    measured = [line for line in said if line.startswith("measured")]
    assert measured, run.stderr[-2000:]
    others = [line for line in said if not line.startswith("measured")]
    with image.open(shot) as picture:
        return picture.convert("RGB").copy(), json.loads(measured[0][8:]), others


def brightness(colour):
    return sum(colour) / 3


@pytest.mark.parametrize("name", ["encoder", "decoder", "both"])
@pytest.mark.parametrize("width", [1280, 390])
def test_looks_right(chromium, name, width, request, tmp_path):
    page = html.page(request.getfixturevalue(name))
    shot, measured, others = chromium_says(chromium, tmp_path, page, width)
    assert others == [], "the console is empty"
    assert measured["wide"] <= measured["room"], measured
    assert measured["over"] == []
    assert measured["charts"] >= 8 and measured["small"] == 0
    assert measured["filled"] > 20
    colours = {colour for _, colour in shot.getcolors(1 << 24)}
    assert len(colours) > 200
    assert brightness(shot.getpixel((2, 2))) > 240


@pytest.mark.parametrize("width", [1280, 390])
def test_dark(chromium, width, encoder, tmp_path):
    shot, measured, _ = chromium_says(chromium, tmp_path, html.page(encoder), width, dark=True)
    assert brightness(shot.getpixel((2, 2))) < 40
    ink = [int(part) for part in re.findall(r"\d+", measured["ink"])[:3]]
    assert brightness(ink) > 200
    assert len(shot.getcolors(1 << 24)) > 200


def test_the_measuring_notices_a_page_that_is_too_wide(chromium, encoder, tmp_path):
    page = html.page(encoder).replace("<footer>", '<p style="width:900px">wide</p><footer>')
    _, measured, _ = chromium_says(chromium, tmp_path, page, 390)
    assert measured["wide"] > measured["room"] and measured["over"]


def test_the_measuring_notices_what_reaches_for_the_network(chromium, encoder, tmp_path):
    outside = '<img src="http://example.org/x.png"><footer>'
    page = html.page(encoder).replace("<footer>", outside)
    _, _, others = chromium_says(chromium, tmp_path, page, 390)
    assert any("Content Security Policy" in line for line in others)
