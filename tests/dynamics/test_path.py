"""The regularisation path of both parameterisations, against a pair of known solutions (K7)."""

from __future__ import annotations

import numpy as np
import pytest

from attoscope.dynamics import (
    LambdaHead,
    Normalised,
    correlation,
    nuclear_gap,
    regularisation_path,
    train,
)
from attoscope.dynamics.gradients import Gradient
from attoscope.errors import AttoscopeError
from attoscope.svm import AttentionSVM
from tests.dynamics.build import angle, random_data

RADII = [3, 10, 30, 100, 300]
FROBENIUS = np.array([[[1.0, 0.0], [0.5, np.sqrt(0.75)]]])
NUCLEAR = np.array([[[1.0, np.tan(np.pi / 6)]] * 2])


def test_weight_path_goes_to_the_frobenius_solution() -> None:
    path = regularisation_path(angle(60), RADII)
    own = path.correlation(FROBENIUS)[:, 0]
    np.testing.assert_allclose(own, [0.99773, 0.99923, 0.99990, 0.99999, 0.999999], atol=6e-6)
    assert path.correlation(NUCLEAR)[3, 0] == pytest.approx(0.8660, abs=1e-3)
    np.testing.assert_allclose(
        np.linalg.norm(path.weights, axis=(2, 3))[:, 0], RADII, rtol=1e-12
    )


def test_factored_path_goes_to_the_nuclear_solution() -> None:
    path = regularisation_path(angle(60), RADII, factors=True)
    own = path.correlation(NUCLEAR)[:, 0]
    np.testing.assert_allclose(own, [0.99724, 0.99907, 0.99989, 0.99999, 0.999999], atol=6e-6)
    assert path.correlation(FROBENIUS)[3, 0] == pytest.approx(0.8660, abs=1e-3)
    values = np.linalg.svd(path.weights[:, 0], compute_uv=False)
    assert (values[:, 1] < 1e-10).all()
    np.testing.assert_allclose(values.sum(1), RADII, rtol=1e-9)
    k, q = path.factors
    np.testing.assert_allclose(
        (k**2).sum((2, 3)) + (q**2).sum((2, 3)), 2.0 * path.radii[:, None]
    )
    np.testing.assert_allclose(nuclear_gap(k, q), 0, atol=1e-9)


def test_no_descent_of_the_same_norm_is_better() -> None:
    data = random_data(trials=2, n=2, tokens=3, d=(3, 3))
    path = regularisation_path(data, [10.0])
    run = train(data, Normalised(), 100, record=[100])
    assert (run.norms()[-1] < 10.0 + 1e-9).all()
    at = Gradient(data).at(10.0 * run.weight / run.norms()[-1][:, None, None])
    assert (path.log_excess[0] <= at.log_excess() + 1e-12).all()
    for r in range(2):
        svm = AttentionSVM(tol=1e-9).fit_selection(data.selection(r, data.optimal()[r]))
        far = regularisation_path(data.take(r), [500.0]).weights[0, 0]
        assert correlation(far, svm.weight_) > 0.9999


def test_rank_of_the_factors_is_that_asked_for() -> None:
    path = regularisation_path(angle(60), [5.0], factors=True, rank=1)
    assert path.factors[0].shape == (1, 1, 2, 1)
    assert path.correlation(NUCLEAR)[0, 0] > 0.99


def test_errors() -> None:
    with pytest.raises(AttoscopeError, match="radii: got .* expected positive numbers"):
        regularisation_path(angle(60), [1.0, -1.0])
    with pytest.raises(AttoscopeError, match="rank: got 0"):
        regularisation_path(angle(60), [1.0], factors=True, rank=0)
    with pytest.raises(AttoscopeError, match="expected a LinearHead"):
        regularisation_path(random_data(head=LambdaHead(np.ones((3, 6)), 1.0)), [1.0])
