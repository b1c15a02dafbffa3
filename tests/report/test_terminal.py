"""The terminal: fits 80 columns, plain in a pipe, nothing steers it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from attoscope.report import terminal


@pytest.mark.parametrize("name", ["encoder", "decoder", "both", "empty"])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_fits_and_is_plain(name, width, request):
    text = terminal.text(request.getfixturevalue(name), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text and "\u202e" not in text
    assert "…" not in text.split("\n\n")[-2] or width < 80


def test_says_verdict_findings_in_order_and_a_table(decoder):
    text = terminal.text(decoder)
    flat = " ".join(text.split())
    assert decoder.verdict in flat
    spots = [flat.index(f"{i}. {f.severity}") for i, f in enumerate(decoder.findings, 1)]
    assert spots == sorted(spots)
    assert "measured 164× · 95 % interval 159–169 · null 180×" in flat
    assert "What to do: Leave the first token out of maps." in flat
    assert "Normalised entropy" in flat or "Normalised" in flat
    assert "5 of 16 documents were cut: 1,234 tokens were not read." in flat


def test_markup_in_names_is_shown_as_it_is(encoder):
    assert "<script>alert('x')</script>" in terminal.text(encoder)
    odd = replace(encoder, model={"name": "[bold red]x[/]"})
    assert "[bold red]x[/]" in terminal.text(odd)


def test_long_models_are_thinned_and_say_so(decoder):
    one = decoder.reading_list[3]
    points = tuple(f"decoder.{i}" for i in range(200))
    parts = {k: getattr(one, k).repeat(10)[:200] for k in ("values", "low", "high", "null")}
    long = replace(one, coords={"point": points}, **parts)
    text = terminal.text(replace(decoder, reading_list=(long,)))
    assert "36 of 200 layers shown" in text


def test_in_a_pipe_there_is_no_colour(decoder, tmp_path):
    path = decoder.to_json(tmp_path / "r.json")
    code = (
        "import sys; from attoscope.diagnosis import Diagnosis; "
        "from attoscope.report.terminal import show; show(Diagnosis.from_json(sys.argv[1]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert "\x1b" not in run.stdout and "Something is wrong" in run.stdout
