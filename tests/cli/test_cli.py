"""The command line as a user meets it: exit codes, one-sentence errors, files whole or absent."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from attoscope.cli import run
from attoscope.cli.inputs import gather
from tests.models import EXAMPLES


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("The captain told the crew that the storm would pass.")
    return file


def test_a_diagnosis(
    minilm: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(["diagnose", str(minilm), "--text", str(text), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "6 layers" in printed and "report.html" in printed
    report = json.loads((out / "report.json").read_text())
    assert report["data"]["sources"] == ["text.txt"]
    assert (out / "report.html").read_text().startswith("<!")
    assert sorted(f.name for f in out.iterdir()) == ["report.html", "report.json"]


def test_several_files_after_text(minilm: Path, text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Another document of some words.")
    arguments = ["diagnose", str(minilm), "--text", str(text), str(other), "--quiet"]
    assert run([*arguments, "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["data"]["documents"] == 2


def test_a_folder_of_texts_and_lines(minilm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("one line here\n\nand another line\n")
    (folder / "b.txt").write_text("a third line")
    arguments = ["diagnose", str(minilm), "--text", str(folder), "--out", str(tmp_path), "-q"]
    assert run(arguments) == 0
    assert json.loads((tmp_path / "report.json").read_text())["data"]["documents"] == 2
    assert run([*arguments, "--lines"]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["data"]["documents"] == 3


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252"])
def test_texts_in_the_encodings_that_people_have(
    minilm: Path, tmp_path: Path, encoding: str
) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes("Die Tür war offen. “Ach!”\r\n".encode(encoding))
    (document,) = gather([str(file)], None, None, lines=False).data
    assert document == "Die Tür war offen. “Ach!”\r\n"
    note = gather([str(file)], None, None, lines=False).sources[0]
    assert note == "text.txt" if encoding.startswith("utf-8") else "read as" in note


def test_a_reader_that_goes_away_is_no_failure(
    model: Path, batch: Path, tmp_path: Path
) -> None:
    command = f"{sys.executable} -m attoscope.cli diagnose {model} --batch {batch} | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, capture_output=True, text=True,
        timeout=120, env={**os.environ},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_fault_of_ours_is_told_from_a_failed_check(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attoscope.checking.check", lambda *_, **__: 1 / 0)
    assert run(["check", str(model)]) == 3
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said and "please report it" in said


def wait_until_it_loads(process: subprocess.Popen[bytes]) -> None:
    """Until the process has mapped torch: it is at work, and nothing is finished yet."""
    maps = Path(f"/proc/{process.pid}/maps")
    for _ in range(600):
        if not maps.exists() or "libtorch" in maps.read_text():
            return
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc to see it load")
def test_an_early_interrupt_says_that_nothing_was_written(minilm: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "attoscope.cli", "diagnose", str(minilm), "--out"]
    for attempt in range(3):
        out = tmp_path / str(attempt)
        process = subprocess.Popen(
            [*command, str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        wait_until_it_loads(process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        if process.returncode != 0:  # else a library swallowed the interrupt: try again
            break
    assert process.returncode == 130
    assert b"interrupted; nothing was written" in errors
    assert not out.exists()


def test_json_goes_to_standard_output_and_nowhere_else(
    model: Path, batch: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run(["diagnose", str(model), "--batch", str(batch), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["layers"] == 3 and report["data"]["documents"] == 4
    assert not list(tmp_path.iterdir())


def test_images(vit_digits: Path, digit_images: Path, tmp_path: Path) -> None:
    out = str(tmp_path)
    assert run(["diagnose", str(vit_digits), "--images", str(digit_images), "--out", out]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["model"]["kind"], report["data"]["documents"]) == ("vision", 32)


@pytest.fixture
def broken_model(tmp_path: Path) -> Path:
    """The tiny decoder with weights that are not numbers in layer 1."""
    torch.manual_seed(0)
    made = EXAMPLES["gpt2"].build()
    with torch.no_grad():
        made.transformer.h[1].mlp.c_fc.weight[0, 0] = float("nan")
    made.save_pretrained(tmp_path / "broken")
    return tmp_path / "broken"


def test_fail_on(model: Path, broken_model: Path, batch: Path, tmp_path: Path) -> None:
    arguments = ["--batch", str(batch), "--out", str(tmp_path), "-q", "--fail-on", "severe"]
    assert run(["diagnose", str(broken_model), *arguments]) == 1
    assert run(["diagnose", str(model), *arguments]) == 0


def test_baseline_judges_by_what_got_worse(
    model: Path, broken_model: Path, batch: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def diagnose(which: Path, *more: str) -> int:
        return run(["diagnose", str(which), "--batch", str(batch), "-q", *more])

    healthy, sick = tmp_path / "healthy", tmp_path / "sick"
    assert diagnose(model, "--out", str(healthy)) == 0
    assert diagnose(broken_model, "--out", str(sick)) == 0
    after = ["--fail-on", "severe", "--out", str(tmp_path / "now")]
    assert diagnose(broken_model, "--baseline", str(sick / "report.json"), *after) == 0
    capsys.readouterr()
    assert diagnose(broken_model, "--baseline", str(healthy / "report.json"), *after) == 1
    assert "Worse than the baseline" in capsys.readouterr().out


def test_dry_run_says_what_it_would_take(
    model: Path, batch: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run(["diagnose", str(model), "--batch", str(batch), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert (
        "M parameters" in printed and "expected peak" in printed and "expected time" in printed
    )
    assert not list(tmp_path.iterdir())


def test_check(model: Path, batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(model), "--batch", str(batch)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 7 and all(line.startswith("holds") for line in printed)


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert run([]) == 0
    assert run(["diagnose", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "attoscope 0.1.0" in printed and "--baseline" in printed


def make_bad_inputs(folder: Path) -> None:
    (folder / "empty.txt").write_text("")
    (folder / "blank.txt").write_text(" \n\t\n")
    (folder / "binary.txt").write_bytes(bytes(range(256)))
    (folder / "nul.txt").write_bytes(b"text\0text")
    (folder / "shift-jis.txt").write_bytes("日本語の文章です。".encode("shift-jis"))
    save_file({"input_ids": torch.full((2, 4), 5)}, folder / "fine.safetensors")
    (folder / "no-images").mkdir()
    (folder / "bad-images").mkdir()
    (folder / "bad-images" / "a.png").write_bytes(b"no image")
    (folder / "batch.npz").write_bytes(b"nonsense")
    (folder / "batch.what").write_bytes(b"nonsense")
    torch.save([1, 2], folder / "list.pt")
    ids = torch.ones(2, 3, dtype=torch.long)
    save_file({"input_ids": ids, "attention_mask": 0 * ids}, folder / "padding.safetensors")
    save_file({"input_ids": ids + 9_999}, folder / "out-of-range.safetensors")
    (folder / "report.json").write_text("{}")
    (folder / "file").write_text("")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "{}/empty.txt"], "holds no text"),
        (["--text", "{}/blank.txt"], "holds no text"),
        (["--text", "{}/binary.txt"], "is not text"),
        (["--text", "{}/nul.txt"], "control characters"),
        (["--text", "{}/shift-jis.txt"], "convert it to UTF-8"),
        (["--seed", "-1"], "seed: got -1"),
        (["--max-tokens", "0", "--batch", "{}/fine.safetensors"], "max_tokens: got 0"),
        (["--dry-run", "--baseline", "{}/missing.json"], "missing.json"),
        (["--dry-run", "--batch", "{}/fine.safetensors", "--layers", "99:100"], "are 0 to 2"),
        (["--text", "{}/missing.txt"], "cannot be read"),
        (["--text", "{}/no-images"], "holds no .txt or .md file"),
        (["--images", "{}/no-images"], "holds no image"),
        (["--images", "{}/missing"], "is no folder"),
        (["--batch", "{}/missing.npz"], "is no file"),
        (["--batch", "{}/batch.npz"], "cannot be read"),
        (["--batch", "{}/batch.what"], "has the ending .what"),
        (["--batch", "{}/list.pt"], "holds a list"),
        (["--batch", "{}/padding.safetensors"], "2 of 2 sequences are padding only"),
        (["--batch", "{}/out-of-range.safetensors"], "the model failed on this input"),
        (["--text", "{}/file", "--batch", "{}/batch.npz"], "given together"),
        (["{}/file"], "name them with --text"),
        (["--rows", "0"], "--rows: got '0'"),
        (["--layers", "x:y"], "--layers: got 'x:y'"),
        (["--fail-on", "catastrophe"], "--fail-on: got 'catastrophe'"),
        (["--dtype", "int8"], "dtype: got 'int8'"),
        (["--device", "abacus"], "device 'abacus'"),
        (["--baseline", "{}/report.json"], "report"),
        (["--baseline", "{}/missing.json"], "missing.json"),
        (["--out", "{}/file/below"], "cannot be written to"),
        (["--frobnicate"], "--frobnicate"),
        (["--batch-size", "many"], "--batch-size"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_two(
    model: Path, tmp_path: Path, arguments: list[str], message: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    make_bad_inputs(tmp_path)
    workplace = tmp_path / "workplace"
    workplace.mkdir()
    monkeypatch.chdir(workplace)
    filled = [a.replace("{}", str(tmp_path)) for a in arguments]
    assert run(["diagnose", str(model), *filled]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1
    assert said.err.startswith("attoscope: ")
    assert not said.out
    assert not list(workplace.rglob("*"))


def test_no_such_model_or_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["diagnose", "/no/such/model"]) == 2
    assert run(["frobnicate"]) == 2
    assert run(["diagnose"]) == 2
    assert not list(tmp_path.iterdir())
    assert "Traceback" not in capsys.readouterr().err


def test_an_interrupt_leaves_whole_files_or_none(minilm: Path, tmp_path: Path) -> None:
    """Ctrl-C in the middle of long work: what was finished is reported, nothing is half there."""
    file = tmp_path / "long.txt"
    file.write_text("\n".join(f"sentence number {i} of many sentences" for i in range(20_000)))
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "attoscope.cli", "diagnose", str(minilm), "--text", str(file),
         "--lines", "--out", str(out), "--batch-size", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ},
    )  # fmt: skip
    time.sleep(12)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 130, errors.decode()
    assert b"Traceback" not in errors
    left = sorted(f.name for f in out.iterdir()) if out.exists() else []
    assert left in ([], ["report.html", "report.json"])
    if left:
        report = json.loads((out / "report.json").read_text())
        assert report["data"]["interrupted"] and report["data"]["documents"] > 0


def test_a_full_disk_is_said_in_one_sentence(capsys, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("typer.echo", full)
    assert run(["papers", "--json"]) == 2
    said = capsys.readouterr().err
    assert "No space left on device" in said and "Traceback" not in said
