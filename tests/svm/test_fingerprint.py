"""Which norm a weight has minimised: the optimum of each is recognised, and "none" is an answer."""

from __future__ import annotations

import numpy as np
import pytest

from attoscope import AttoscopeError
from attoscope.svm import AttentionSVM, fingerprint
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
