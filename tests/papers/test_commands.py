"""`attoscope papers` and `attoscope reproduce` as a user meets them."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attoscope.cli import run
from attoscope.papers import ENTRIES, Entry, Paper, reproduce
from tests.papers import fakes

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Paper], None]:
    """Puts a made-up paper on the list, and the test into an empty folder."""
    workplace = tmp_path / "workplace"
    workplace.mkdir()
    monkeypatch.chdir(workplace)

    def put(paper: Paper) -> None:
        monkeypatch.setattr(fakes, "PAPER", paper, raising=False)
        entry = Entry("fake", paper.title, paper.link, "tests.papers.fakes")
        monkeypatch.setattr("attoscope.papers.registry.ENTRIES", (*ENTRIES, entry))
        monkeypatch.setattr("attoscope.papers.ENTRIES", (*ENTRIES, entry))

    return put


def test_the_list_of_papers(listed: Callable[[Paper], None], capsys: Captured) -> None:
    listed(fakes.declared())
    assert run(["papers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(any(line.startswith(e.slug) for e in ENTRIES) for line in lines) == 21
    (fake,) = (line.split() for line in lines if line.startswith("fake"))
    assert fake[1] == "3"
    (slalom,) = (line for line in lines if line.startswith("slalom"))
    assert "Attention Mechanisms Don't Learn Additive Models" in slalom


def test_the_list_as_json(listed: Callable[[Paper], None], capsys: Captured) -> None:
    listed(fakes.declared())
    assert run(["papers", "--json"]) == 0
    rows = {row["slug"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(rows) == 22
    assert rows["fake"]["claims"] == ["holding", "known-to-fail", "drawn"]
    assert rows["transformers-as-svms"]["link"] == "https://arxiv.org/abs/2308.16898"


def test_a_paper_that_comes_out_as_declared(
    listed: Callable[[Paper], None], capsys: Captured
) -> None:
    listed(fakes.declared())
    assert run(["reproduce", "fake", "--jobs", "1"]) == 0
    said = capsys.readouterr()
    assert "2 held, as expected" in said.out
    assert f"Written: {Path('attoscope-papers/fake/evidence.json')}" in said.out
    assert said.err.splitlines() == [
        line for line in said.err.splitlines() if line.startswith("[")
    ]
    assert (
        said.err.count("\n") == 3 and "[2/3] known-to-fail: does not hold, as dec" in said.err
    )
    out = Path("attoscope-papers/fake")
    assert sorted(f.name for f in out.rglob("*") if f.is_file()) == [
        "drawn.png", "drawn.svg", "evidence.json"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (fakes.evidence(), 0),
        (fakes.evidence(holds=False), 1),
        (fakes.evidence(fails=False), 1),
        (None, 1),
    ],
)
def test_exit_codes(
    listed: Callable[[Paper], None], result: Any, code: int, capsys: Captured
) -> None:
    listed(fakes.one(result))
    assert run(["reproduce", "fake"]) == code
    assert "Traceback" not in capsys.readouterr().err


def test_a_traceback_is_shown_when_it_is_asked_for(
    listed: Callable[[Paper], None], capsys: Captured
) -> None:
    paper = fakes.paper()
    paper.claim(name="only", **fakes.TEXTS)(lambda run: 1 / 0)
    listed(paper)
    assert run(["reproduce", "fake"]) == 1
    said = capsys.readouterr()
    assert "ZeroDivisionError: division by zero" in said.out and "--debug" in said.out
    assert "Traceback" not in said.out + said.err
    assert run(["reproduce", "fake", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_some_claims(listed: Callable[[Paper], None], capsys: Captured) -> None:
    listed(fakes.declared())
    arguments = ["reproduce", "fake", "--claim", "drawn", "--claim", "holding", "--out", "here"]
    assert run([*arguments, "--seed", "7", "--scale", "paper"]) == 0
    data = json.loads(Path("here/evidence.json").read_text())
    assert [claim["name"] for claim in data["claims"]] == ["holding", "drawn"]
    assert (data["seed"], data["scale"]) == (7, "paper")


def test_json_goes_to_standard_output_and_nowhere_else(
    listed: Callable[[Paper], None], capsys: Captured
) -> None:
    listed(fakes.sweeping())
    assert run(["reproduce", "fake", "--json", "--jobs", "1"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["as_expected"] and len(data["claims"][0]["measured"]["ends"]) == 6
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fak"], "did you mean fake?"),
        ([""], "there is no paper ''"),
        (["zzz"], "did you mean"),
        (["sufo"], "the claims of sufo cannot be run yet"),
        (["fake", "--claim", "holdin"], "did you mean holding?"),
        (["fake", "--claim", ""], "no claim ''"),
        (["fake", "--scale", "huge"], "scale: got 'huge'; expected quick or paper"),
        (["fake", "--jobs", "-1"], "jobs: got -1"),
        (["fake", "--jobs", "0"], "jobs: got 0"),
        (["fake", "--jobs", "many"], "--jobs"),
        (["fake", "--seed", "-1"], "seed: got -1"),
        (["fake", "--out", "{}/file/below"], "cannot be written to"),
        (["fake", "--scheduler", "nonsense"], "scheduler: "),
        (["fake", "--jobs", "2", "--scheduler", "tcp://127.0.0.1:1"], "choose one"),
        (["fake", "more"], "more"),
        ([], "SLUG"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_two(
    listed: Callable[[Paper], None], tmp_path: Path, arguments: list[str], message: str,
    capsys: Captured, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("attoscope.papers.running._REACH_SECONDS", 1)
    listed(fakes.declared())
    (tmp_path / "file").write_text("")
    filled = [a.replace("{}", str(tmp_path)) for a in arguments]
    assert run(["reproduce", *filled]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1
    assert said.err.startswith("attoscope: ")
    assert not said.out and not list(Path().iterdir())


def test_an_interrupt_before_anything_was_finished(
    listed: Callable[[Paper], None], capsys: Captured
) -> None:
    def interrupted(run: Any) -> Any:
        raise KeyboardInterrupt

    paper = fakes.paper()
    paper.claim(name="only", **fakes.TEXTS)(interrupted)
    listed(paper)
    assert run(["reproduce", "fake"]) == 130
    said = capsys.readouterr()
    assert "interrupted; nothing was written" in said.err and not said.out
    assert not list(Path().iterdir())


# A process of its own, so that it can be interrupted as from a keyboard: workers and all.
SLOW = """
import sys, time
from pathlib import Path
from attoscope.papers import Control, Evidence, Paper

PAPER = Paper("slow", "A Slow Paper", "A. Nobody", 2024, "https://arxiv.org/abs/0000.00000")
TEXTS = dict(statement="It is so.", source="Figure 1", criterion="all finished")

def slow(item):
    number, log, pause = item
    time.sleep(pause)
    with open(log, "a") as file:
        file.write(f"{number}\\n")
    return number

@PAPER.claim(name="first", **TEXTS)
def first(run):
    return Evidence({"one": 1}, True, Control("none", {"one": 0}, True))

@PAPER.claim(name="second", **TEXTS)
def second(run):
    log = str(Path(__file__).with_name("log"))
    items = [(i, log, 0.1) for i in range(40)]
    done = run.map(slow, items, "counting")
    return Evidence({"done": done}, done == list(range(40)), Control("none", {}, True))
"""
START = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from attoscope.papers import registry
registry.ENTRIES += (registry.Entry("slow", "A Slow Paper", "https://x", "slow_paper"),)
from attoscope.cli import main
main()
"""


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupted_command_goes_on_where_it_was(tmp_path: Path, jobs: str) -> None:
    (tmp_path / "slow_paper.py").write_text(SLOW)
    log, out = tmp_path / "log", tmp_path / "out"
    command = [sys.executable, "-c", START, str(tmp_path), "reproduce", "slow", "--jobs", jobs]
    command += ["--out", str(out)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, cwd=tmp_path, env={**os.environ},
    )  # fmt: skip
    for _ in range(600):
        if log.exists() and log.read_text().count("\n") > 8:
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and "[1/2] first: holds" in errors
    kept = len(list((out / ".trials").rglob("*.npz")))
    assert 4 <= kept < 40
    # The interrupt can fall between keeping an item and counting it.
    said = re.search(r"1 of 2 claims in evidence.json, and (\d+) finished items", errors)
    assert said and int(said[1]) in (kept - 1, kept) and "goes on from there" in errors
    assert "Not all claims have run" in " ".join(printed.split())
    data = json.loads((out / "evidence.json").read_text())
    assert [claim["name"] for claim in data["claims"]] == ["first"] and not data["complete"]

    before = log.read_text().count("\n")
    again = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env={**os.environ}
    )
    assert again.returncode == 0, again.stderr
    assert log.read_text().count("\n") - before == 40 - kept
    assert json.loads((out / "evidence.json").read_text())["complete"]


def test_the_papers_page_has_an_example_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "papers.md"
    (example,) = re.findall(r"```python\n(# coin_paper\.py\n.*?)```", page.read_text(), re.S)
    (tmp_path / "coin_paper.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    paper = importlib.import_module("coin_paper").PAPER
    ledger = reproduce(paper, out=tmp_path / "out", jobs=1)
    assert ledger.as_expected, ledger.dumps()
    assert {o.verdict for o in ledger.claims} == {"holds", "does not hold, as declared"}
    assert (tmp_path / "out" / "figures" / "law-of-large-numbers.svg").exists()
