"""`attoscope svm` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer

from attoscope import AttoscopeError
from attoscope.cli.svm import svm
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


def _text(folder: Path) -> Path:
    file = folder / "text.npz"
    file.write_text("no arrays")
    return file


def _arrays(folder: Path, **arrays) -> Path:
    file = folder / "arrays.npz"
    np.savez(file, **arrays)
    return file
