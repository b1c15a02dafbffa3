"""Which norm a weight has minimised: the optimum of each is recognised, and "none" is an answer."""

from __future__ import annotations

import numpy as np
import pytest

from attoscope import AttoscopeError
from attoscope.svm import AttentionSVM, Entrywise, Schatten, fingerprint
from attoscope.svm.norms import NAMES
from tests.svm.random_problems import unit


@pytest.fixture(scope="module")
def problem():
    return unit(3, 4, 6, seed=3)


@pytest.mark.parametrize("norm", NAMES)
def test_each_optimum_is_recognised(problem, norm: str) -> None:
    weight = AttentionSVM(norm, tol=1e-6).fit_selection(problem).weight_
    found = fingerprint(7.0 * weight, problem)
    assert found.label == norm
    assert found.excess[norm] == pytest.approx(1.0, abs=2e-4)
    assert found.distance > 0 and found.runner_up != norm
    assert min(found.excess.values()) >= 1 - 2e-4


def test_none_is_an_answer(problem) -> None:
    best = AttentionSVM().fit_selection(problem).weight_
    noise = np.random.default_rng(0).standard_normal(best.shape)
    found = fingerprint(best + 0.12 * np.linalg.norm(best) * noise / 6, problem)
    while found.excess["frobenius"] <= 1.06:
        noise *= 1.5
        found = fingerprint(best + 0.12 * np.linalg.norm(best) * noise / 6, problem)
    assert found.label == "none"
    wrong = fingerprint(-best, problem)
    assert wrong.label == "none" and set(wrong.excess.values()) == {np.inf}


def test_two_norms_at_least(problem) -> None:
    with pytest.raises(AttoscopeError, match="two or more"):
        fingerprint(np.zeros((6, 6)), problem, norms=("l1",))
    for twice in (("l1", "l1"), ("frobenius", Schatten(2), "max")):
        with pytest.raises(AttoscopeError, match="each once"):
            fingerprint(np.ones((6, 6)), problem, norms=twice)


@pytest.mark.parametrize("max_iter", [1, 3, 10, 30, 100, 300])
def test_stopped_early_it_never_says_more_than_it_can_certify(problem, max_iter: int) -> None:
    weight = AttentionSVM(tol=1e-8).fit_selection(problem).weight_
    whole = fingerprint(weight, problem, tol=1e-8)
    found = fingerprint(weight, problem, max_iter=max_iter)
    assert found.label in ("frobenius", "undecided")
    for norm in NAMES:
        assert 1.0 <= found.excess[norm] <= found.at_most[norm]
        assert found.excess[norm] <= whole.at_most[norm] * (1 + 1e-9)
        assert found.at_most[norm] >= whole.excess[norm] * (1 - 1e-9)
    wide = max(found.at_most[norm] - found.excess[norm] for norm in NAMES)
    assert (" to " in str(found).split(")")[0]) == (wide > 2e-3)
    if max_iter == 1:
        assert found.label == "undecided" and "leaves open" in str(found)


def test_norms_that_agree_are_not_told_apart(problem) -> None:
    weight = AttentionSVM(tol=1e-8).fit_selection(problem).weight_
    found = fingerprint(weight, problem, norms=("frobenius", Entrywise(2)))
    assert found.label == "undecided" and found.distance == 0
    assert "frobenius" in found.sentence and "l_2" in found.sentence


def test_the_threshold_may_lie_inside_the_bounds(problem) -> None:
    weight = AttentionSVM(tol=1e-8).fit_selection(problem).weight_
    found = fingerprint(weight, problem, norms=("spectral", "max"), max_iter=1)
    assert found.excess["spectral"] < 1.06 < found.at_most["spectral"]
    assert found.label == "undecided" and "above or below 1.06" in found.sentence
    assert fingerprint(weight, problem, norms=("spectral", "max")).label == "none"


@pytest.mark.parametrize("size", [1e-200, 1e200, 1e307])
def test_the_scale_of_the_weight_does_not_matter(problem, size: float) -> None:
    weight = AttentionSVM(tol=1e-8).fit_selection(problem).weight_
    found = fingerprint(weight * size, problem)
    assert found.label == "frobenius"
    assert found.excess == pytest.approx(fingerprint(weight, problem).excess)


@pytest.mark.parametrize("required", [0.0, -1.0])
def test_nothing_exceeds_an_optimum_of_zero(problem, required: float) -> None:
    with pytest.raises(AttoscopeError, match="margins that the zero weight has"):
        fingerprint(np.ones((6, 6)), problem.replace(required=required))


def descend(selection, rule, steps: int = 4000):
    """Normalised descent on the loss of the chosen keys, with the exact gradient direction."""
    n, tokens, dk, dq = selection.shape
    apart = selection.keys[np.arange(n), selection.reference][:, None] - selection.keys
    weight = np.zeros((dk, dq))
    for k in range(steps):
        margins = np.einsum("ntk,kd,nd->nt", apart, weight, selection.queries)
        margins[selection.selected] = np.inf
        pull = np.exp(-(margins - margins.min()))
        gradient = np.einsum("nt,ntk,nd->kd", pull, apart, selection.queries)
        weight += 0.1 / np.sqrt(1 + k / 200) * rule(gradient)
    return weight


def spectral(g):
    u, s, vt = np.linalg.svd(g)
    keep = s > 1e-10 * s[0]
    return u[:, keep] @ vt[keep]


@pytest.mark.parametrize(
    ("rule", "norm"),
    [
        (lambda g: g / np.linalg.norm(g), "frobenius"),
        (spectral, "spectral"),
        (np.sign, "max"),
    ],
)
def test_descent_minimises_its_own_norm(problem, rule, norm: str) -> None:
    found = fingerprint(descend(problem, rule), problem)
    assert found.nearest == norm and found.label == norm, str(found)
