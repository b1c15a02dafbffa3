"""Bounds from training alone: valid, as tight as published, and lost by cancelling gradients."""

from __future__ import annotations

import numpy as np
import pytest

from attoscope.dynamics import (
    Gradient,
    Mirror,
    Normalised,
    Steepest,
    train,
    training_certificate,
)
from attoscope.svm import AttentionSVM, Entrywise
from tests.dynamics.build import random_data, unit_sphere


def optima(run, norm="frobenius", tol: float = 1e-9) -> np.ndarray:
    return np.array([
        AttentionSVM(norm, tol=tol).fit_selection(run.selection(r)).objective_
        for r in range(run.data.trials)
    ])  # fmt: skip


def test_published_medians() -> None:
    """Twenty seeds at 100, 1000 and 3000 steps: correlation, lower and upper over optimum."""
    run = train(unit_sphere(range(20)), Normalised(), 3000, record=[100, 1000, 3000])
    models = [AttentionSVM(tol=1e-9).fit_selection(run.selection(r)) for r in range(20)]
    optimum = np.array([m.objective_ for m in models])
    lower, upper = run.certificate()
    assert (lower <= optimum * (1 + 1e-9)).all() and (upper >= optimum * (1 - 1e-9)).all()
    reached = np.median(run.correlation(np.stack([m.weight_ for m in models])), 1)
    np.testing.assert_allclose(reached, [0.742, 0.9954, 0.9994], atol=5e-4)
    np.testing.assert_allclose(
        np.median(lower / optimum, 1), [0.821, 0.9994, 0.99998], atol=5e-4
    )
    assert np.median(upper[0]) == np.inf
    np.testing.assert_allclose(np.median(upper[1:] / optimum, 1), [1.104, 1.027], atol=5e-4)
    assert run.locally_optimal().all()


def test_runs_as_long_as_one_likes_where_plain_arithmetic_does_not() -> None:
    data = unit_sphere([0, 1, 3])
    run = train(data, Normalised(0.3), 10_000, record=[10_000])
    optimum = optima(run, tol=1e-11)
    lower, upper = run.certificate()
    assert (run.norms()[-1] > 2990.0).all()
    assert (lower[-1] / optimum > 0.99999).all()
    assert (upper[-1] / optimum < 1.0035).all()
    plain = train(data, Normalised(0.3, log_domain=False), 4000, record=[4000])
    assert (plain.certificate()[0][-1] / optima(plain) < 0.9).all()


def test_factors_need_the_average_of_their_duals() -> None:
    data, rng = unit_sphere(range(6)), np.random.default_rng(0)
    pair = rng.uniform(-1, 1, (2, 6, 10, 10)) / np.sqrt(10)
    run = train(data, Normalised(), 6000, factors=pair, record=[3000, 6000])
    optimum = optima(run, "nuclear", 1e-5)
    lower, upper = run.certificate("nuclear")
    assert (upper[-1] / optimum < 1.01).all()
    assert np.median(lower[-1] / optimum) > 0.93
    assert (lower[-1] <= optimum * (1 + 1e-9)).all()
    last, _ = run.certificate("nuclear", window=0)
    assert np.median(last[-1] / optimum) < 0.5


@pytest.mark.parametrize("norm", ["frobenius", "max", "spectral", "l1", "nuclear"])
def test_each_norms_descent_closes_its_own_gap(norm: str) -> None:
    """The dual average and the weight certify each other, in the norm of the steps only."""
    data = unit_sphere([0], 3, 4, 6)
    rule = Steepest(norm, lambda k: 0.1 / np.sqrt(1 + k / 200))
    run = train(data, rule, 3000, record=[1500, 3000])
    gaps = {}
    for name in ("frobenius", "max", "spectral", "l1", "nuclear"):
        lower, upper = run.certificate(name, window=0.5)
        gaps[name] = upper[-1, 0] / lower[-1, 0]
    assert min(gaps, key=gaps.__getitem__) == norm
    assert gaps[norm] < (1.35 if norm == "l1" else 1.08)


def test_mirror_descent_certifies_its_own_norm() -> None:
    run = train(unit_sphere([0, 1], 3, 4, 6), Mirror(1.5), 3000, record=[1500, 3000])
    lower, upper = run.certificate(Entrywise(1.5), window=0.5)
    assert (upper[-1] / lower[-1] < 1.005).all()


def test_summed_gradients_are_the_whole_weight() -> None:
    """W - W(0) = sum c_it x_it z_i^T where steps are multiples of the gradient."""
    data = random_data()
    run = train(data, Normalised(), 300, record=[150, 300])
    total = np.einsum("rnt,rntd,rnq->rdq", run.coefficients[-1], data.tokens, data.queries)
    np.testing.assert_allclose(total, run.weight, atol=1e-12)
    lower, upper = run.certificate(window=1)
    assert (lower <= upper).all() and (lower[-1] > 0.5 * optima(run)).all()


def test_one_constraint_is_certified_at_once() -> None:
    data = random_data(trials=1, n=1, tokens=2)
    slope = Gradient(data).at(np.zeros((1, 6, 4)))
    selection = data.selection(0, data.optimal()[0])
    found = training_certificate(selection, slope.direction[0], slope.coefficients[0])
    assert found.gap < 1e-14
    wrong = data.selection(0, 1 - data.optimal()[0])
    assert training_certificate(wrong, slope.direction[0], slope.coefficients[0]).lower == 0.0
