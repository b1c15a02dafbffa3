"""Two independent conic solvers agree, on problems made to be awkward."""

from __future__ import annotations

import numpy as np
import pytest

from attoscope.svm import AttentionSVM, InfeasibleSelection, Schatten, Selection, certify
from tests.svm import conic
from tests.svm.random_problems import small, unit

pytest.importorskip("clarabel", reason="an independent solver; pip install clarabel scs")
pytest.importorskip("scs", reason="an independent solver; pip install clarabel scs")


def value(weight, norm: str) -> float:
    return Schatten(2 if norm == "frobenius" else 1).value(weight)


def shortfall(selection: Selection, weight) -> float:
    design, h, equal = conic.rows(selection)
    return float(np.maximum(h - design @ weight.ravel(), 0)[~equal].sum())


@pytest.mark.parametrize("norm", ["frobenius", "nuclear"])
@pytest.mark.parametrize("start", range(0, 200, 25))
def test_clarabel_on_200_problems(norm: str, start: int) -> None:
    for seed in range(start, start + 25):
        selection = small(seed)
        status, weight = conic.clarabel(selection, norm)
        try:
            model = AttentionSVM(norm, tol=1e-7).fit_selection(selection)
        except InfeasibleSelection as proof:
            assert "nfeasible" in status, seed
            assert proof.verify(), seed
            continue
        theirs = value(weight, norm)
        assert status.endswith("Solved"), seed
        # A conic solver's own slack is absolute: near zero only the square is comparable.
        close = abs(model.objective_ - theirs) <= 1e-6 * max(1.0, theirs)
        assert close or abs(model.objective_**2 - theirs**2) <= 1e-9, (seed, theirs)
        assert model.gap_ <= 1e-7, seed


@pytest.mark.parametrize("norm", ["frobenius", "nuclear"])
@pytest.mark.parametrize("start", range(0, 200, 50))
def test_scs_on_200_problems(norm: str, start: int) -> None:
    compared = 0
    for seed in range(start, start + 50):
        selection = small(seed)
        try:
            model = AttentionSVM(norm, tol=1e-7).fit_selection(selection)
        except InfeasibleSelection:
            continue
        if model.objective_ > 100.0:
            # A first-order solver does not reach 1e-6 on the worst conditioned of them.
            continue
        status, weight = conic.scs(selection, norm)
        if status != "solved":
            continue
        compared += 1
        theirs = value(weight, norm)
        close = abs(model.objective_ - theirs) <= 1e-6 * max(1.0, theirs)
        assert close or abs(model.objective_**2 - theirs**2) <= 1e-8, (seed, theirs)
    assert compared >= 20


@pytest.mark.parametrize("norm", ["frobenius", "nuclear"])
@pytest.mark.parametrize("C", [0.05, 1.0, 20.0])
def test_soft_margin(norm: str, C: float) -> None:
    for seed in range(24):
        selection = small(seed)
        model = AttentionSVM(norm, C=C, tol=1e-7).fit_selection(selection)
        _, weight = conic.clarabel(selection, norm, C)
        size = 0.5 * value(weight, norm) ** 2 if norm == "frobenius" else value(weight, norm)
        theirs = size + C * shortfall(selection, weight)
        assert model.objective_ == pytest.approx(theirs, rel=1e-6, abs=1e-6), seed
        assert model.gap_ <= 1e-7, seed


@pytest.mark.parametrize("norm", ["spectral", "max", "l1", Schatten(1.5), Schatten(4)])
def test_other_norms_are_certified(norm) -> None:
    for seed in range(40):
        selection = small(seed)
        try:
            model = AttentionSVM(norm, tol=1e-6).fit_selection(selection)
        except InfeasibleSelection as proof:
            assert proof.verify()
            continue
        assert model.gap_ <= 1e-6, seed


def test_the_comparison_can_fail() -> None:
    selection = unit(5, 4, 6)
    _, weight = conic.clarabel(selection)
    model = AttentionSVM().fit_selection(unit(5, 4, 6, seed=1))
    assert abs(model.objective_ - value(weight, "frobenius")) > 1e-3
    wrong = certify(selection, model.weight_, model.dual_)
    assert wrong.gap > 1e-3
