"""Training: flows known in closed form, the official rule, and what attention ends up selecting."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attoscope.dynamics import (
    Adam,
    AttentionData,
    GradientDescent,
    LambdaHead,
    LinearHead,
    Normalised,
    Polyak,
    ReluHead,
    Steepest,
    balance,
    correlation,
    gradient,
    nuclear_gap,
    sparsemax,
    train,
)
from attoscope.errors import AttoscopeError
from attoscope.svm import AttentionSVM
from tests.dynamics.build import as_users_run_it, random_data, torch_loss, unit_sphere, vis1

EPS = 2.22e-16


def svm(run, trial: int = 0, norm: str = "frobenius") -> np.ndarray:
    return AttentionSVM(norm, tol=1e-8).fit_selection(run.selection(trial)).weight_


@pytest.mark.parametrize(
    ("tokens", "query", "v", "time", "margin"),
    [
        ([[1.0, 2], [0, 0]], [1.0, -1], [0.3, 0.2], 20.0, 4.8695976),
        (np.eye(5), np.eye(5)[0], np.eye(5)[0], 40.0, 4.9786683),
    ],
)
def test_gradient_flow(tokens, query, v, time: float, margin: float) -> None:
    """K14; Euler steps of two sizes, extrapolated to none."""
    data = AttentionData.cross([[tokens]], [[query]], [[1.0]], LinearHead([v]))
    reached = []
    for steps in (2000, 4000):
        run = train(data, GradientDescent(time / steps), steps, loss="linear")
        logits = np.asarray(tokens) @ run.weight[0] @ np.asarray(query)
        reached.append(logits[0] - logits[1])
    assert 2 * reached[1] - reached[0] == pytest.approx(margin, abs=2e-6)
    assert abs(reached[0] - margin) > 1e-5


def test_gradient_flow_on_factors_conserves() -> None:
    """K^T K - Q^T Q stays as it was; by discretisation, in proportion to the step."""
    data, rng = random_data(trials=2), np.random.default_rng(1)
    k, q = rng.standard_normal((2, 6, 3)), rng.standard_normal((2, 4, 3))
    drift = []
    for steps in (2000, 4000):
        run = train(data, GradientDescent(10.0 / steps), steps, factors=(k, q), record=steps)
        ks, qs = run.factors
        apart = [a.transpose(0, 2, 1) @ a - b.transpose(0, 2, 1) @ b for a, b in
                 ((k, q), (ks[-1], qs[-1]))]  # fmt: skip
        drift.append(np.abs(apart[1] - apart[0]).max())
        assert np.abs(run.weight - k @ q.transpose(0, 2, 1)).max() > 0.5
    assert drift[1] < 0.01
    assert drift[0] / drift[1] == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("factored", [False, True])
def test_official_rule_is_that_of_the_code(factored: bool) -> None:
    """Each gradient from autograd, divided by its own norm + eps; a penalty eps on factors."""
    data, rng = random_data(), np.random.default_rng(2)
    start = [0.3 * rng.standard_normal((3, 6, 4)), 0.3 * rng.standard_normal((3, 4, 4))]
    start = start if factored else start[:1]
    parameters = [torch.tensor(p, requires_grad=True) for p in start]
    for _ in range(50):
        w = parameters[0]
        if factored:
            w = parameters[0] @ parameters[1].transpose(1, 2)
        loss = torch_loss(data, w).sum()
        if factored:
            loss = loss + EPS * sum((p**2).sum() for p in parameters)
        for p in parameters:
            p.grad = None
        loss.backward()
        with torch.no_grad():
            for p in parameters:
                p -= 0.1 * p.grad / (p.grad.norm(dim=(1, 2), keepdim=True) + EPS)
    given = {"factors": start} if factored else {"weight": start[0]}
    run = train(data, Normalised(log_domain=False), 50, **given)
    want = w = parameters[0].detach()
    if factored:
        want = w @ parameters[1].detach().transpose(1, 2)
    np.testing.assert_allclose(run.weight, want.numpy(), atol=1e-11)


def test_official_penalty_is_seen_once_attention_has_saturated() -> None:
    data = AttentionData.cross([[np.eye(2)]], [[[1.0, 0]]], [[1.0]], LinearHead([[1.0, 0]]))
    k, q = 100.0 * np.array([[[1.0], [-1.0]]]), np.array([[[1.0], [0.5]]])
    run = train(data, Normalised(log_domain=False), 1, factors=(k, q))
    shrunk = k - 0.1 * 2 * EPS * k / (2 * EPS * np.linalg.norm(k) + EPS)
    np.testing.assert_allclose(run.factors[0][-1], shrunk, rtol=1e-14)
    onward = train(data, Normalised(), 1, factors=(k, q))
    assert np.linalg.norm(onward.factors[0][-1]) > np.linalg.norm(k)


@pytest.mark.parametrize("factored", [False, True])
def test_official_picture(factored: bool) -> None:
    """W goes to the Frobenius solution, factors to the nuclear one, and not to the other."""
    data, rng = vis1(), np.random.default_rng(0)
    small = 0.1 * rng.standard_normal((1, 2, 2))
    given = {"factors": (small, np.zeros((1, 2, 2)))} if factored else {"weight": small}
    run = train(data, Normalised(log_domain=False), 2000, **given)
    assert run.globally_optimal()[0]
    fro, nuc = (
        correlation(run.weight[0], svm(run, 0, norm)) for norm in ("frobenius", "nuclear")
    )
    own, other = (nuc, fro) if factored else (fro, nuc)
    assert own > 0.999
    assert other < 0.95


def test_one_sequence_selects_its_best_token() -> None:
    """K1-type: from zero, along the one solution both norms share."""
    data = AttentionData.cross(
        [[[[3.0, 1], [1, 0]]]], [[[0, 2.0]]], [[1.0]], LinearHead([[1.0, 0]])
    )
    run = train(data, Normalised(), 100)
    np.testing.assert_array_equal(run.selected(), [[0]])
    want = np.array([[0, 0.2], [0, 0.1]])
    np.testing.assert_allclose(run.weight[0] / 10.0, want / np.linalg.norm(want), atol=1e-14)
    flipped = AttentionData.cross(data.tokens, data.queries, [[-1.0]], data.head)
    np.testing.assert_array_equal(train(flipped, Normalised(), 100).selected(), [[1]])


@pytest.mark.parametrize("strength", [1.0, 0.5, 0.2])
def test_nonlinear_head_reaches_sparsemax(strength: float) -> None:
    """K12: as many tokens are kept as the sparsemax of v / (2 lambda) keeps."""
    v = np.array([[1.0, 0.5, 0.0]])
    data = AttentionData.cross(
        [[np.eye(3)]], [[np.eye(3)[0]]], [[1.0]], LambdaHead(v, strength)
    )
    run = train(data, GradientDescent(10.0), 4000, record=4000)
    want = sparsemax(v / (2 * strength))
    np.testing.assert_allclose(run.probabilities()[0], want, atol=1e-3)
    start = train(data, GradientDescent(10.0), 1, record=[0])
    np.testing.assert_allclose(start.probabilities(0)[0], np.full((1, 3), 1 / 3), atol=1e-15)


def test_relu_head_trains_and_has_no_scores() -> None:
    data = random_data(head=ReluHead(np.random.default_rng(0).standard_normal((3, 6, 5))))
    run = train(data, GradientDescent(0.5), 200, record=[0, 200])
    assert (run.loss() < run.loss(0)).all()
    with pytest.raises(AttoscopeError, match="expected a LinearHead"):
        run.globally_optimal()
    with pytest.raises(AttoscopeError, match="infimum is not known; expected a LinearHead"):
        train(data, Polyak(), 1)


def test_causal_positions_converge_to_their_svm() -> None:
    rng = np.random.default_rng(4)
    tokens = rng.standard_normal((2, 2, 4, 12))
    labels = rng.choice([-1.0, 1.0], (2, 2, 4))
    data = AttentionData.causal(tokens, labels, LinearHead(rng.standard_normal((2, 12))))
    run = train(data, Normalised(), 2500, record=2500)
    p = run.probabilities()
    assert (p[:, ~data.allowed[0]] == 0.0).all()
    np.testing.assert_allclose(p.sum(2), 1.0, atol=1e-14)
    for trial in range(2):
        assert correlation(run.weight[trial], svm(run, trial)) > 0.99
    free = AttentionData(tokens, data.queries, data.labels, data.head, data.sequence)
    other = train(free, Normalised(), 2500, record=2500)
    assert correlation(other.weight[0], svm(run)) < 0.99


def test_padding_changes_nothing() -> None:
    data = random_data(tokens=3)
    junk = np.concatenate([np.full((3, 4, 2, 6), 9.0), data.tokens], 2)
    padded = AttentionData.cross(
        junk, data.queries, data.labels, data.head, allowed=np.tile(np.arange(5) >= 2, (4, 1))
    )
    a, b = (train(d, Normalised(), 300, record=300) for d in (data, padded))
    np.testing.assert_allclose(b.weight, a.weight, atol=1e-12)
    np.testing.assert_array_equal(b.selected(), a.selected() + 2)
    np.testing.assert_array_equal(b.selection(1).reference, b.selected()[1])


def test_a_sample_with_one_token_is_left_alone() -> None:
    data = random_data(trials=1, n=2)
    allowed = np.array([[True] * 5, [True] + [False] * 4])
    lonely = AttentionData.cross(
        data.tokens, data.queries, data.labels, data.head, allowed=allowed
    )
    alone = AttentionData.cross(
        data.tokens[:, :1], data.queries[:, :1], data.labels[:, :1], data.head
    )
    a, b = (train(d, Normalised(), 100, record=100).weight for d in (lonely, alone))
    np.testing.assert_allclose(a, b, atol=1e-13)
    hopeless = AttentionData.cross(
        data.tokens, data.queries, data.labels, data.head, allowed=allowed[[1, 1]]
    )
    assert not train(hopeless, Normalised(), 10).weight.any()


def test_trials_do_not_touch_each_other() -> None:
    data = random_data(trials=4)
    k, q = np.random.default_rng(1).standard_normal((2, 4, 6, 4))
    for given in ({}, {"factors": (k, q[:, :4])}):
        together = train(data, Normalised(), 200, record=200, **given).weight
        part = {name: tuple(f[[2]] for f in pair) for name, pair in given.items()}
        alone = train(data.take(2), Normalised(), 200, record=200, **part).weight
        np.testing.assert_allclose(alone[0], together[2], atol=1e-12)


@pytest.mark.parametrize("factored", [False, True])
def test_weight_decay_is_in_the_gradient(factored: bool) -> None:
    data, rng = random_data(), np.random.default_rng(3)
    k, q = rng.standard_normal((3, 6, 4)), rng.standard_normal((3, 4, 4))
    w = k @ q.transpose(0, 2, 1)
    for size in (1.0, 30.0):
        given = {"factors": (size * k, q)} if factored else {"weight": size * w}
        run = train(data, GradientDescent(0.1), 1, weight_decay=0.3, **given)
        g = gradient(data, size * w)
        if factored:
            want = size * k - 0.1 * (g @ q + 0.3 * size * k)
            np.testing.assert_allclose(run.factors[0][-1], want, rtol=1e-12)
        else:
            want = size * w - 0.1 * (g + 0.3 * size * w)
            np.testing.assert_allclose(run.weight, want, rtol=1e-12)


def test_weight_decay_balances_factors() -> None:
    """The decayed factors' norm becomes the nuclear norm of W: arXiv 2410.23819."""
    data, rng = random_data(trials=2), np.random.default_rng(5)
    pair = (rng.standard_normal((2, 6, 4)), rng.standard_normal((2, 4, 4)))
    decayed, free = (
        train(data, GradientDescent(0.5), 4000, factors=pair, weight_decay=d, record=4000)
        for d in (0.01, 0.0)
    )
    k, q = (f[-1] for f in decayed.factors)
    assert (balance(k, q) < 1e-8).all()
    assert (np.abs(nuclear_gap(k, q)) < 1e-8).all()
    k, q = (f[-1] for f in free.factors)
    assert (balance(k, q) > 1.0).all()
    assert (nuclear_gap(k, q) > 0.5).all()


def test_records() -> None:
    data = random_data()
    assert list(train(data, Normalised(), 10, record=3).steps) == [3, 6, 9, 10]
    assert list(train(data, Normalised(), 10, record=[7, 0]).steps) == [0, 7, 10]
    spaced = train(data, Normalised(), 2000)
    assert spaced.steps[0] == 1 and spaced.steps[-1] == 2000 and 45 <= len(spaced.steps) <= 60
    assert spaced.weights.shape == (len(spaced.steps), 3, 6, 4)
    np.testing.assert_allclose(spaced.norms()[0], 0.1, rtol=1e-12)
    again = train(data, Normalised(), 2000, record=[500])
    longer = train(data, Normalised(), 1500, weight=again.weights[0])
    np.testing.assert_allclose(longer.weight, again.weight, atol=1e-10)


def test_start_is_not_changed() -> None:
    data, w = random_data(), np.ones((3, 6, 4))
    train(data, Normalised(), 3, weight=w)
    assert (w == 1.0).all()


def test_correlation_of_a_zero_weight_is_undefined() -> None:
    run = train(random_data(), Normalised(), 2, record=[0])
    found = run.correlation(run.weight)
    assert np.isnan(found[0]).all()
    np.testing.assert_allclose(found[1], 1.0, atol=1e-15)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"steps": 0}, "steps: got 0; expected a whole number of at least 1"),
        ({"steps": 2.5}, "steps: got 2.5"),
        ({"steps": "5"}, "steps: got '5'"),
        ({"steps": None}, "steps: got None"),
        ({"record": "all"}, "record: got 'all'"),
        ({"record": {1, 2}}, "record: got {1, 2}"),
        ({"record": float("nan")}, "record: got nan"),
        ({"record": 1.5}, "record: got 1.5"),
        ({"record": True}, "record: got True"),
        ({"record": [1.5]}, "record: got shape"),
        ({"rule": Normalised}, "rule: got <class"),
        ({"rule": "adam"}, "rule: got 'adam'"),
        ({"weight_decay": "a"}, "weight_decay: got 'a'"),
        ({"rule": Normalised(lambda k: "a")}, "lr: got 'a' for step 0; expected a number"),
        ({"record": 0}, "record: got every 0 steps"),
        ({"record": [3, 11]}, "record: got steps from 3 to 11; expected 0 to 10"),
        ({"loss": "square"}, "loss: got 'square'"),
        ({"weight": np.zeros((3, 4, 6))}, "weight: got shape"),
        ({"weight": np.full((3, 6, 4), np.nan)}, "weight: got 72 values that are NaN"),
        ({"factors": (np.zeros((3, 6, 2)), np.zeros((3, 4, 3)))}, "factors: got shapes"),
        ({"factors": (np.zeros((3, 6, 2)),)}, "factors: got 1 arrays"),
        ({"weight": np.zeros((3, 6, 4)), "factors": (1, 2)}, "weight: got weight and factors"),
        ({"weight_decay": -1.0}, "weight_decay: got -1"),
        ({"rule": GradientDescent(1e308)}, "lr: got a weight that is no longer finite by step"),
    ],
)
def test_errors(change, says: str) -> None:
    given = {"rule": Normalised(), "steps": 10} | change
    with (
        pytest.raises(AttoscopeError, match=says),
        as_users_run_it(),
        np.errstate(over="ignore", invalid="ignore"),
    ):
        train(random_data(), given.pop("rule"), given.pop("steps"), **given)


def test_factors_beat_the_other_norm_in_every_trial() -> None:
    """Eight of the paper's hundred trials: W ends nearer to Frobenius, (K, Q) nearer to nuclear."""
    data, rng = unit_sphere(range(8)), np.random.default_rng(0)
    uniform = [rng.uniform(-1, 1, (8, 10, 10)) / np.sqrt(10) for _ in range(3)]
    for factored in (False, True):
        given = {"factors": uniform[1:]} if factored else {"weight": uniform[0]}
        run = train(data, Normalised(log_domain=False), 2000, record=2000, **given)
        near = {
            norm: run.correlation(np.stack([svm(run, r, norm) for r in range(8)]))[-1]
            for norm in ("frobenius", "nuclear")
        }
        own, other = ("nuclear", "frobenius") if factored else ("frobenius", "nuclear")
        assert near[own].mean() > 0.99
        assert near[other].mean() < 0.9
        assert (near[own] > near[other]).all()


def test_training_takes_attention_data() -> None:
    with (
        as_users_run_it(),
        pytest.raises(AttoscopeError, match="data: got ndarray"),
    ):
        train(np.zeros((1, 2, 3, 4)), Normalised(), 1)


@pytest.mark.parametrize("rule", [Adam(20.0), Steepest("spectral", 50.0, 0.9)])
def test_steps_that_overflow_the_means_of_gradients(rule) -> None:
    with pytest.raises(AttoscopeError, match="lr: got .* no longer finite .* lower lr"):
        train(gaussian(), rule, 3000)
    # Smaller steps are taken to the end.
    assert np.isfinite(train(gaussian(), replace(rule, lr=0.05), 300).weight).all()


@pytest.mark.parametrize("loss", ["logistic", "exponential"])
def test_polyak_with_large_scores(loss: str) -> None:
    assert np.isfinite(train(gaussian(700.0), Polyak(), 20, loss=loss).weight).all()


def gaussian(size: float = 1.0) -> AttentionData:
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(2, 3, 5))
    y, v = np.sign(rng.normal(size=(2, 3))), rng.normal(size=(2, 5))
    return AttentionData.cross(x, z, y, LinearHead(size * v))


def test_either_of_two_best_tokens_is_globally_optimal() -> None:
    tokens = [[[[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]]] * 3
    data = AttentionData.cross(tokens, [[[1.0]]] * 3, [[1]] * 3, LinearHead([[1.0, 0.0]] * 3))
    weight = np.array([[[1.0], [-9.0]], [[1.0], [9.0]], [[-99.0], [-99.0]]])
    run = train(data, Normalised(1e-9), 1, weight=weight)
    assert run.selected().ravel().tolist() == [0, 1, 2]
    assert run.globally_optimal().tolist() == [True, True, False]


def test_a_selection_no_weight_makes_is_not_locally_optimal() -> None:
    """In the second trial the first tokens cannot both win: they ask for w > 0 and w < 0."""
    tokens = [[[[1.0], [0.0]], [[1.0], [0.0]]], [[[1.0], [0.0]], [[0.0], [1.0]]]]
    data = AttentionData.cross(
        tokens, np.ones((2, 2, 1)), np.ones((2, 2)), LinearHead([[1.0]] * 2)
    )
    run = train(data, Normalised(), 5)
    object.__setattr__(
        run, "_attention", lambda at: SimpleNamespace(chosen=np.zeros((2, 2), int))
    )
    assert run.locally_optimal().tolist() == [True, False]


def test_records_and_trials_that_are_not_there() -> None:
    run = train(gaussian(), Normalised(), 5)
    for call, name in [
        (lambda: run.selected(99), "at: got 99"),
        (lambda: run.loss("last"), "at: got 'last'"),
        (lambda: run.selection(7), "trial: got 7; expected a whole number from -2 to 1"),
        (lambda: run.data.selection(7, [0, 0, 0]), "trial: got 7"),
    ]:
        with as_users_run_it(), pytest.raises(AttoscopeError, match=name):
            call()
