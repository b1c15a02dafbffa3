"""`attoscope predict` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attoscope.cli import run
from tests.models import EXAMPLES


def test_a_table_with_a_line_for_each_layer(
    model: Path, batch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(["predict", str(model), "--batch", str(batch), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("decoder.")]
    assert [row.split()[0] for row in rows[:3]] == ["decoder.0", "decoder.1", "decoder.2"]
    assert "attention step" in printed and "By its spectra" in printed
    data = json.loads((out / "prediction.json").read_text())
    assert len(data["smoothing"]["layers"]) == 3


def test_json(model: Path, batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", str(model), "--batch", str(batch), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["documents"] == 4 and data["smoothing"]["verdict"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no-such-folder"], "no-such-folder"),
        (["MODEL"], "no data was given"),
        (["MODEL", "--batch", "BATCH", "--max-tokens", "1"], "max_tokens: got 1"),
        (["MODEL", "--batch", "BATCH", "--documents", "x"], "--documents"),
        (["MODEL", "stray.txt"], "name them with --text"),
        (["MODEL", "--images", "nowhere"], "nowhere is no folder"),
    ],
)
def test_nonsense_is_one_sentence_and_exit_code_2(
    model: Path,
    batch: Path,
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [{"MODEL": str(model), "BATCH": str(batch)}.get(a, a) for a in arguments]
    assert run(["predict", *given]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and "Traceback" not in error


def test_a_configuration_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    EXAMPLES["gpt2"].build().config.save_pretrained(tmp_path)
    assert run(["predict", str(tmp_path), "--max-tokens", "16"]) == 0
    printed = capsys.readouterr().out
    assert "by its weights the stream's variance" in printed and "Zipf" in printed
    assert run(["predict", str(tmp_path / "config.json"), "--init", "xavier", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["smoothing"] is None
    stack = data["signal"]["stacks"][0]
    assert stack["fit"] is None and len(stack["sublayers"]) == 6
    assert run(["predict", str(tmp_path), "--init", "nobody"]) == 2
    assert "expected one of xavier, deepscalelm" in capsys.readouterr().err
