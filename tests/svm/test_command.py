"""`attoscope svm` as a user meets it."""

from __future__ import annotations

import io
import json
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import typer

from attoscope import AttoscopeError
from attoscope.cli import run as command_line
from attoscope.cli.svm import svm
from attoscope.svm import AttentionSVM
from tests.svm.random_problems import unit


def run(*arguments: object) -> int:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(svm)
    return int(app([str(a) for a in arguments], standalone_mode=False) or 0)


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    selection = unit(5, 4, 6)
    file = tmp_path / "problem.npz"
    np.savez(file, keys=selection.keys, queries=selection.queries, selected=selection.reference)
    return file


def test_it_solves_and_certifies(problem: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.npz"
    assert run(problem, "--norm", "nuclear", "--out", out) == 0
    shown = capsys.readouterr().out
    assert "status" in shown and "optimal" in shown and "nuclear" in shown
    with np.load(out) as stored:
        weight, dual = stored["weight"], stored["dual"]
    assert weight.shape == (6, 6) and dual.shape == (5, 4)
    margins = unit(5, 4, 6).margins(weight)
    assert margins[~unit(5, 4, 6).selected].min() >= 1 - 1e-9


@pytest.mark.parametrize("norm", ["frobenius", "spectral", "schatten:1.5", "entrywise:3"])
def test_json(problem: Path, norm: str, capsys) -> None:
    assert run(problem, "--norm", norm, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["gap"] <= 1e-6 and said["lower_bound"] <= said["objective"]


def test_a_contradiction_comes_with_its_proof(tmp_path: Path, capsys) -> None:
    file = tmp_path / "no.npz"
    np.savez(file, keys=[[[0.0, 0], [1, 0], [-1, 0]]], queries=[[1.0, 0]], selected=[0])
    out = tmp_path / "proof.npz"
    assert run(file, "--json", "--out", out) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["status"].startswith("infeasible") and said["verified"] is True
    np.testing.assert_allclose(np.load(out)["farkas"], [[0, 0.5, 0.5]], atol=1e-9)


def test_a_limit_is_said(problem: Path, capsys) -> None:
    assert run(problem, "--norm", "nuclear", "--max-iter", 2, "--tol", 1e-12) == 1
    assert "limit: stopped by max_iter" in capsys.readouterr().out


def test_a_soft_margin(problem: Path, capsys) -> None:
    assert run(problem, "--C", 0.5, "--json") == 0
    assert json.loads(capsys.readouterr().out)["gap"] <= 1e-6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "absent.npz", "no such file"),
        (lambda folder: _text(folder), "not an .npz file of plain arrays"),
        (lambda folder: _arrays(folder, keys=np.ones((1, 2, 3))), "expected keys, queries"),
        (
            lambda folder: _arrays(folder, keys=1, queries=1, selected=1, extra=1),
            "got keys, queries, selected, extra",
        ),
        (lambda folder: _bytes(folder, b""), r"not an .npz .* \(EOFError\)"),
        (lambda folder: _bytes(folder, b"PK\x03\x04" + b"junk" * 50), "not an .npz"),
        (lambda folder: _bytes(folder, _good(folder)[:-40]), r"\(BadZipFile\)"),
        (lambda folder: _bytes(folder, _flipped(_good(folder))), r"\(BadZipFile\)"),
        (lambda folder: _single(folder), "not an .npz"),
        (lambda folder: _absurd(folder), "not an .npz"),
        (
            lambda folder: _arrays(
                folder, keys=[[[1], [2]]], queries=[[1]], selected=[0], required="x"
            ),
            "^required: got",
        ),
        (
            lambda folder: _arrays(folder, keys=[[[1j], [2]]], queries=[[1]], selected=[0]),
            "^keys: got complex numbers",
        ),
    ],
)
def test_bad_files(tmp_path: Path, make, message: str) -> None:
    with pytest.raises(AttoscopeError, match=message):
        run(make(tmp_path))


def test_bad_options(problem: Path, tmp_path: Path) -> None:
    with pytest.raises(AttoscopeError, match="--norm: got 'schatten:x'"):
        run(problem, "--norm", "schatten:x")
    with pytest.raises(AttoscopeError, match="norm: got 'l9'"):
        run(problem, "--norm", "l9")
    with pytest.raises(AttoscopeError, match="--out: got"):
        run(problem, "--out", tmp_path / "absent" / "x.npz")


def test_an_empty_file_is_no_interrupt(tmp_path: Path, capsys) -> None:
    assert command_line(["svm", str(_bytes(tmp_path, b""))]) == 2
    said = capsys.readouterr().err
    assert "not an .npz file" in said and "interrupted" not in said


def test_where_the_answer_cannot_go_is_found_out_first(
    problem: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(AttentionSVM, "fit", lambda *_, **__: pytest.fail("solved already"))
    before = problem.read_bytes()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.npz").symlink_to(problem)
    os.mkfifo(tmp_path / "pipe")
    for out, message in (
        (problem, "the problem itself"),
        (tmp_path / "problem", "the problem itself"),
        (tmp_path / "link.npz", "the problem itself"),
        (tmp_path / "folder", "no regular file"),
        (tmp_path / "pipe", "no regular file"),
        (tmp_path / "absent" / "x.npz", "a folder that exists"),
    ):
        with pytest.raises(AttoscopeError, match=f"^--out: got .*{message}"):
            run(problem, "--out", out)

    def full(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(AttoscopeError, match=r"cannot be written to \(Read-only file system\)"):
        run(problem, "--out", tmp_path / "out.npz")
    assert problem.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "folder", "link.npz", "pipe", "problem.npz",
    ]  # fmt: skip


def test_an_answer_may_be_written_again_and_read_by_others(
    problem: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        assert run(problem, "--out", tmp_path / "out") == 0
    usual = tmp_path / "usual"
    usual.write_text("")
    assert (tmp_path / "out.npz").stat().st_mode == usual.stat().st_mode


def _bytes(folder: Path, content: bytes) -> Path:
    file = folder / "broken.npz"
    file.write_bytes(content)
    return file


def _good(folder: Path) -> bytes:
    return _arrays(folder, keys=np.ones((2, 3, 4)), queries=np.ones((2, 4))).read_bytes()


def _flipped(content: bytes) -> bytes:
    """One bit of the first array's numbers, so that its checksum is wrong."""
    at = 250
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def _single(folder: Path) -> Path:
    file = folder / "one.npy"
    np.save(file, np.ones(3))
    return file


def _absurd(folder: Path) -> Path:
    """A header that promises 10^17 numbers."""
    content = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": (10**17,)}
    np.lib.format.write_array_header_1_0(content, header)
    file = folder / "absurd.npz"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("keys.npy", content.getvalue())
    return file


def _text(folder: Path) -> Path:
    file = folder / "text.npz"
    file.write_text("no arrays")
    return file


def _arrays(folder: Path, **arrays) -> Path:
    file = folder / "arrays.npz"
    np.savez(file, **arrays)
    return file
