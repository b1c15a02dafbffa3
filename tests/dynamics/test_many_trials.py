"""Many small trials side by side: the same training as each of them by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from attoscope.dynamics import (
    AttentionData,
    Gradient,
    GradientDescent,
    LambdaHead,
    LinearHead,
    Normalised,
    Rule,
    train,
)
from attoscope.dynamics._blocks import Blocks, served
from attoscope.dynamics._lanes import contract, exponential
from attoscope.errors import AttoscopeError
from tests.dynamics.build import random_data, unit_sphere

OFFICIAL = Normalised(0.1, log_domain=False)


def factors(data: AttentionData, m: int) -> tuple[np.ndarray, np.ndarray]:
    trials, _, _, dk, dq = data.shape
    rng = np.random.default_rng(3)
    return rng.standard_normal((trials, dk, m)), rng.standard_normal((trials, dq, m))


def taken(rule: Rule, data: AttentionData, *parts: np.ndarray) -> bool:
    return served(
        rule, Gradient(data), list(parts) or [np.zeros(data.shape[:1] + data.shape[3:])]
    )


def masked(trials: int) -> AttentionData:
    """Five samples that read two sequences, each of what it may see; widths 6 and 4."""
    rng = np.random.default_rng(1)
    allowed = rng.random((trials, 5, 7)) < 0.7
    allowed[:, :, 2] = True
    return AttentionData.cross(
        rng.standard_normal((trials, 2, 7, 6)),
        rng.standard_normal((trials, 5, 4)),
        rng.choice([-1.0, 1.0], (trials, 5)),
        LinearHead(rng.standard_normal((trials, 6))),
        sequence=[0, 1, 1, 0, 1],
        allowed=allowed,
    )


def alone(data: AttentionData, r: int, steps: int, m: int | None, **options):
    """Trial r in a run of its own, which is trained the other way."""
    one = data.take(r)
    start = {} if m is None else {"factors": tuple(f[[r]] for f in factors(data, m))}
    assert not taken(OFFICIAL, one)
    return train(one, options.pop("rule", OFFICIAL), steps, **start, **options)


@pytest.mark.parametrize("trials", [8, 9, 70])
@pytest.mark.parametrize("m", [None, 1, 3, 5])
def test_each_trial_is_trained_as_by_itself(trials: int, m: int | None) -> None:
    data = masked(trials)
    start = {} if m is None else {"factors": factors(data, m)}
    assert taken(OFFICIAL, data, *start.get("factors", ()))
    run = train(data, OFFICIAL, 12, record=[0, 5, 12], **start)
    for r in (0, 7, trials - 1):
        one = alone(data, r, 12, m, record=[0, 5, 12])
        np.testing.assert_allclose(run.weights[:, r], one.weights[:, 0], atol=1e-12)
        np.testing.assert_allclose(run.coefficients[:, r], one.coefficients[:, 0], atol=1e-12)
        for all_of_them, own in zip(run.factors or (), one.factors or (), strict=True):
            np.testing.assert_allclose(all_of_them[:, r], own[:, 0], atol=1e-12)


@pytest.mark.parametrize("m", [None, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"loss": "exponential"},
        {"loss": "linear"},
        {"weight_decay": 0.3},
        {"rule": Normalised(lambda number: 0.3 / (1 + number), log_domain=False)},
    ],
)
def test_losses_penalty_and_rates(m: int | None, options) -> None:
    data = random_data(trials=11)
    rule = options.get("rule", OFFICIAL)
    start = {} if m is None else {"factors": factors(data, m)}
    run = train(data, rule, 15, **{k: v for k, v in options.items() if k != "rule"}, **start)
    one = alone(data, 10, 15, m, **options)
    np.testing.assert_allclose(run.weights[:, 10], one.weights[:, 0], atol=1e-12)


def test_what_is_recorded_in_between_changes_nothing() -> None:
    data = unit_sphere(range(8))
    start = {"factors": factors(data, 10)}
    often, once = (train(data, OFFICIAL, 20, record=every, **start) for every in (1, 20))
    np.testing.assert_array_equal(often.weight, once.weight)
    assert often.steps.tolist() == list(range(1, 21))


def test_which_runs_are_trained_so() -> None:
    data = random_data(trials=8)
    assert taken(OFFICIAL, data)
    assert not taken(Normalised(0.1), data)
    assert not taken(GradientDescent(0.1, log_domain=False), data)
    assert not taken(OFFICIAL, random_data(trials=7))
    assert not taken(OFFICIAL, random_data(trials=8, d=(15, 4)))
    assert not taken(OFFICIAL, data, *factors(data, 15))
    curved = replace(data, head=LambdaHead(np.ones((8, 6)), 1.0))
    assert not taken(OFFICIAL, curved)


def test_a_rule_of_ones_own_is_asked() -> None:
    class Still(Normalised):
        def step(self, parameters, descent, memory):
            return [np.zeros(len(p)) for p in parameters]

    assert not train(random_data(trials=8), Still(0.1, log_domain=False), 3).weights.any()


def test_steps_that_overflow() -> None:
    with pytest.raises(AttoscopeError, match="no longer finite by step 3"):
        train(unit_sphere(range(8)), Normalised(1.7e308, log_domain=False), 9, record=3)


def test_trials_fill_blocks_of_whole_vectors() -> None:
    for trials, blocks, lanes in (
        (8, 1, 8),
        (50, 1, 56),
        (64, 1, 64),
        (65, 2, 40),
        (200, 4, 56),
    ):
        data = random_data(trials=trials)
        made = Blocks(Gradient(data), [np.zeros((trials, 6, 4))], False, 0.0)
        assert (made.blocks, made.lanes) == (blocks, lanes)


def test_exponential() -> None:
    x = np.concatenate([np.linspace(-708, 709, 20_011), [0.0, -1e-300, 1e-17, 0.5, -0.5]])
    found = np.array([exponential(v) for v in x])
    np.testing.assert_allclose(found, np.exp(x), rtol=2 * np.finfo(float).eps)
    assert exponential(0.0) == 1.0
    assert exponential(-709.0) == exponential(-np.inf) == 0.0
    assert exponential(710.0) == exponential(np.inf) == np.inf
    assert np.isnan(exponential(np.nan))


@pytest.mark.parametrize("count", range(12))
def test_contract(count: int) -> None:
    rng = np.random.default_rng(count)
    a, b = rng.standard_normal((2, 3, count, 5)), rng.standard_normal((count, 4, 5))
    out = np.empty((12, 5))
    contract(a[0].reshape(-1, 5), count, 1, b.reshape(-1, 5), 1, 4, 3, 4, count, out)
    np.testing.assert_allclose(
        out.reshape(3, 4, 5), np.einsum("iqr,qjr->ijr", a[0], b), atol=1e-13
    )
