"""Local optimality, its cone, and the conditions for the globally best tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attoscope.dynamics import (
    AttentionData,
    Gradient,
    LinearHead,
    Normalised,
    all_tokens_support,
    equal_scores,
    first_gradient_separates,
    gradient,
    local_cone,
    locally_optimal,
    train,
)
from attoscope.dynamics.optimality import max_margin
from attoscope.errors import AttoscopeError
from attoscope.svm import AttentionSVM, Selection
from tests.dynamics.build import as_users_run_it, random_data, unit_sphere

KEYS = [[[-0.1, 1.0], [1.0, 0.0], [0.0, 0.0]]]
SLACK = [[[0.0, 0], [-1, 0], [-2, -1], [0, -1]]]


def prompt(scores) -> AttentionData:
    """One sequence whose keys and scores are given apart: arXiv 2306.13596."""
    values = np.asarray(scores, float)[None, None, :, None]
    return AttentionData.cross([KEYS], [[[1.0]]], [[1.0]], LinearHead([[1.0]]), values=values)


@pytest.mark.parametrize(
    ("scores", "optimal", "ends"),
    [((1, 0.9, 0.9), False, [0] * 6), ((1, 0.9, 0), True, [0, 0, 0, 0, 1, 1])],
)
def test_prompt_with_two_basins_or_one(scores, optimal: bool, ends) -> None:
    data = prompt(scores)
    local = locally_optimal(data.selection(0, [1]), data.scores()[0])
    assert bool(local) is optimal
    np.testing.assert_array_equal(local.supports, [[0, 2]])
    assert len(local.offending) == (0 if optimal else 1)
    assert local.slack == pytest.approx(0.9 - scores[2], abs=1e-15)
    assert locally_optimal(data.selection(0, [0]), data.scores()[0])
    starts = [1, 0.5, 0, -0.5, -1, -1.5]
    reached = []
    for y in starts:
        run = train(data, Normalised(), 1000, weight=[[[0.0], [y]]], record=1000)
        reached.append(int(run.selected()[0, 0]))
        assert run.locally_optimal()[0]
        unit = run.weight[0, :, 0] / run.norms()[-1]
        want = ([-0.0995, 0.995], [1, 0])[reached[-1]]
        np.testing.assert_allclose(unit, want, atol=0.03)
    assert reached == ends


def test_three_prompts_have_the_published_solution() -> None:
    keys = [[[0, 0], [1, 1]], [[0, 0], [1, -1]], [[0, 0], [0.5, 1]]]
    selection = Selection(keys, np.ones((3, 1)), [1, 1, 1])
    np.testing.assert_allclose(max_margin(selection)[:, 0], [4 / 3, 1 / 3], atol=1e-9)


def test_best_tokens_are_locally_optimal_and_random_ones_are_not() -> None:
    data, rng = unit_sphere(range(10), 5, 5, 20), np.random.default_rng(0)
    for r in range(10):
        scores = data.scores()[r]
        assert locally_optimal(data.selection(r, data.optimal()[r]), scores)
    found = [
        bool(locally_optimal(data.selection(r, rng.integers(0, 5, 5)), data.scores()[r]))
        for r in range(10)
    ]
    assert not any(found)


def test_cone_of_one_constraint() -> None:
    """delta 1, A 1: mu = .5^2 / 8, and both radii are 2 log(8) / theta."""
    data = AttentionData.cross(
        [[[[2.0, 1], [0, 0]]]], [[[0, 2.0]]], [[1.0]], LinearHead([[1.0, 0]])
    )
    cone = local_cone(data.selection(0, [0]), data.scores()[0])
    assert cone.theta == pytest.approx(2 * math.sqrt(5), rel=1e-9)
    assert (cone.delta, cone.mu) == (1.0, pytest.approx(1 / 32, rel=1e-9))
    assert cone.radius == pytest.approx(2 * math.log(8) / cone.theta, rel=1e-9)


def test_cone_with_a_slack_token() -> None:
    """K4: margins 1, 3, 1, so delta 1; A = sqrt 5 sqrt 2; scores 0, -1, -4, -2 under v = (1, 2)."""
    data = AttentionData.cross([SLACK], [[[1.0, 0]]], [[1.0]], LinearHead([[1.0, 2.0]]))
    cone = local_cone(data.selection(0, [0]), data.scores()[0])
    np.testing.assert_allclose(cone.weight, [[1, 0], [1, 0]], atol=1e-9)
    assert cone.delta == pytest.approx(1.0, rel=1e-9)
    assert cone.mu == pytest.approx(1 / 320, rel=1e-9)
    assert cone.radius == pytest.approx(2 * math.sqrt(2) * math.log(4 * 4 * 3 * 4), rel=1e-9)
    unit = cone.weight * cone.theta
    assert cone.contains(1.01 * cone.radius * unit)
    assert not cone.contains(0.99 * cone.radius * unit)
    assert not cone.contains(-2 * cone.radius * unit)
    points = cone.sample(np.random.default_rng(0), 50)
    np.testing.assert_allclose(np.linalg.norm(points, axis=(1, 2)), cone.radius, rtol=1e-12)
    inner = np.einsum("rij,ij->r", points, unit) / cone.radius
    np.testing.assert_allclose(inner, 1 - cone.mu, rtol=1e-12)


def test_no_stationary_point_on_the_cone_and_training_stays() -> None:
    """A purely local selection: reached by training, and not the globally best one."""
    many = unit_sphere(range(40))
    run = train(many, Normalised(), 3000, record=3000)
    trial = int(np.flatnonzero(~run.globally_optimal() & run.locally_optimal())[0])
    data, selected = many.take([trial] * 50), run.selected()[trial]
    cone = local_cone(many.selection(trial, selected), many.scores()[trial])
    points = cone.sample(np.random.default_rng(0), 50)
    slope = Gradient(data).at(points)
    assert (np.einsum("rij,ij->r", slope.direction, cone.weight) > 0).all()
    onward = train(data.take([0, 1]), Normalised(), 500, weight=points[:2])
    assert (onward.selected() == selected).all()
    best = many.take(trial)
    with pytest.raises(AttoscopeError, match="selection: got .* supports that score at least"):
        worst = np.where(best.allowed, best.scores(), np.inf).argmin(2)[0]
        local_cone(best.selection(0, worst), best.scores()[0])


def weights_and_slopes(data: AttentionData, weight: np.ndarray):
    """<-grad L(W), W^mm>, probabilities and -l' of trial 0, and the margins' scores X W^mm z."""
    selection = data.selection(0, data.optimal()[0])
    best = AttentionSVM(tol=1e-12).fit_selection(selection).weight_
    left = -float(np.vdot(gradient(data, weight)[0], best))
    s, gamma = Gradient(data).at(weight).probabilities()[0], data.scores()[0]
    slope = 1 / (1 + np.exp((s * gamma).sum(1)))
    return left, s, gamma, slope, selection.scores(best)


@pytest.mark.parametrize("size", [0.0, 0.3, 1.0])
def test_identity_where_all_tokens_support(size: float) -> None:
    """B.1: (1/n) sum (-l') s_o (1 - s_o) (gamma_o - mean of the others), exactly."""

    def sides(data):
        weight = size * np.random.default_rng(1).standard_normal((1, 30, 30)) / 30
        left, s, gamma, slope, _ = weights_and_slopes(data, weight)
        rows, o = np.arange(3), data.optimal()[0]
        s_o, g_o = s[rows, o], gamma[rows, o]
        others = ((s * gamma).sum(1) - s_o * g_o) / (1 - s_o)
        return left, float((slope * s_o * (1 - s_o) * (g_o - others)).mean())

    rng = np.random.default_rng(0)
    tokens, v = rng.standard_normal((1, 3, 3, 30)), rng.standard_normal((1, 30))
    queries = rng.standard_normal((1, 3, 30))
    data = AttentionData.cross(tokens, queries, [[1, -1, 1]], LinearHead(v))
    assert all_tokens_support(data).holds[0]
    left, right = sides(data)
    assert left == pytest.approx(right, rel=1e-8) and left > 0
    # A token moved far away along its own difference is no support any more.
    far = tokens.copy()
    own, other = data.optimal()[0, 0], (data.optimal()[0, 0] + 1) % 3
    far[0, 0, other] = far[0, 0, own] + 3 * (far[0, 0, 3 - own - other] - far[0, 0, own])
    moved = AttentionData.cross(far, queries, [[1, -1, 1]], LinearHead(v))
    np.testing.assert_array_equal(moved.optimal(), data.optimal())
    assert not all_tokens_support(moved).holds[0]
    left, right = sides(moved)
    assert abs(left / right - 1) > 1e-3


def test_all_tokens_support_agrees_with_the_solution() -> None:
    data = unit_sphere(range(12), 3, 3, 12)
    found = all_tokens_support(data)
    assert 0 < found.holds.sum() < 12
    for r in range(12):
        model = AttentionSVM(tol=1e-11).fit_selection(data.selection(r, data.optimal()[r]))
        assert (len(model.support_) == 6) == found.holds[r]
        if found.holds[r]:
            assert model.dual_.data.min() == pytest.approx(found.slack[r], abs=1e-6)


def test_all_tokens_support_where_constraints_depend() -> None:
    data = random_data(trials=1, n=1, tokens=5, d=(2, 2))
    found = all_tokens_support(data)
    assert not found.holds[0] and found.slack[0] == -np.inf


@pytest.mark.parametrize("size", [0.0, 1.0, 5.0])
def test_identity_of_equal_scores(size: float) -> None:
    """B.2: (1/n) sum (-l') (gamma_o - gamma_non) s_o (h_o - s^T h), and its lower bound."""
    data = unit_sphere([0], 4, 5, 8)
    v, rows, o = data.head.v[0], np.arange(4), data.optimal()[0]
    goal = np.where(np.arange(5) == o[:, None], 0.5, -0.2) * data.labels[0][:, None]
    tokens = data.tokens[0] + (goal - data.tokens[0] @ v)[:, :, None] * v / (v @ v)
    equal = AttentionData.cross(tokens[None], data.queries, data.labels, data.head)
    condition = equal_scores(equal)
    assert condition.holds[0] and condition.slack[0] == pytest.approx(0, abs=1e-15)
    unequal = equal_scores(data)
    assert not unequal.holds[0] and unequal.slack[0] < -0.1
    weight = size * np.random.default_rng(2).standard_normal((1, 8, 8))
    left, s, gamma, slope, h = weights_and_slopes(equal, weight)
    s_o, h_o = s[rows, o], h[rows, o]
    right = (slope * 0.7 * s_o * (h_o - (s * h).sum(1))).mean()
    assert left == pytest.approx(right, rel=1e-9)
    assert left >= (slope * 0.7 * s_o * (1 - s_o)).mean() * (1 - 1e-9)


def test_first_gradient_that_separates() -> None:
    """One sequence of orthonormal tokens: -grad ~ (X^T (g - mean)) z^T / T, margins g_o - g_t."""
    head = LinearHead([[1.0, 0.4, 0.0]])
    data = AttentionData.cross([[np.eye(3)]], [[[2.0]]], [[1.0]], head)
    found = first_gradient_separates(data)
    g = np.array([1.0, 0.4, 0.0])
    unit = (g - g.mean()) / np.linalg.norm(g - g.mean())
    assert found.holds[0]
    assert found.slack[0] == pytest.approx(2 * (unit[0] - unit[1]), rel=1e-12)
    # Two samples with one query that want opposite things.
    tokens = [[[[1.0, 0], [0, 0]], [[0, 0], [1.0, 0]]]]
    clash = AttentionData.cross(tokens, [[[1.0], [0.5]]], [[1, -1]], LinearHead([[1.0, 0]]))
    found = first_gradient_separates(clash)
    assert not found.holds[0] and found.slack[0] < 0


def test_first_gradient_leads_to_the_best_tokens() -> None:
    data = unit_sphere(range(60), 5, 5, 10)
    good = first_gradient_separates(data).holds
    assert 0 < good.sum() < 60
    big_first = Normalised(lambda k: 30.0 if k == 0 else 0.1)
    run = train(data, big_first, 1000, record=1000)
    assert run.globally_optimal()[good].all()
    assert not run.globally_optimal()[~good].all()


def test_scores_of_another_shape() -> None:
    selection = prompt([1.0, 0.5, 0.0]).selection(0, [0])
    for scores in ([[1.0, 0.5]], [[1.0, np.nan, 0.0]], [1.0, 0.5, 0.0]):
        with (
            as_users_run_it(),
            pytest.raises(AttoscopeError, match="scores: got shape .* expected"),
        ):
            locally_optimal(selection, scores)
