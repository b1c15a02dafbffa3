"""Moments chained along a stack: the initialisers' known values, and simulated stacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attoscope import AttoscopeError
from attoscope.moments import components as m
from attoscope.papers.deepscalelm._simulation import simulate
from attoscope.prediction.propagation import (
    SignalProfile,
    SublayerPlan,
    branch_gradient,
    branch_moments,
    forward_moments,
    initialiser_plans,
    propagate,
)

RATES: dict[str, Any] = {"dropout": 0.1, "attention_dropout": 0.1}
HEADS = {"query": 1 / 64, "key": 1 / 64, "value": 1 / 64, "output": 1 / 64}


def deviations(plans: tuple[SublayerPlan, ...]) -> list[float]:
    return [math.sqrt(plan.weights["value"]) for plan in plans[::2]]


# DeepScaleLM's own numbers.


def test_weights_of_192_layers() -> None:
    plans = initialiser_plans("deepscalelm", 192, 1024, k=0.005 * 192, **RATES)
    assert plans[0].skip ** 2 == pytest.approx(0.995) and plans[0].branch ** 2 == pytest.approx(
        0.005
    )
    assert math.sqrt(plans[0].weights["query"]) == 0.03125
    assert math.sqrt(plans[1].weights["in"]) == pytest.approx(0.02559488, abs=1e-8)
    found = deviations(plans)
    wanted = [0.04557765, 0.04532842, 0.03615816, 0.03378788]
    assert [found[i] for i in (0, 1, 95, 191)] == pytest.approx(wanted, abs=1e-8)
    # r that enters a layer is what its value weights were made for: (1 - p) / (d^2 sv2^2).
    r = [0.9 / (1024 * found[i] ** 2) ** 2 for i in (0, 1, 96)]
    assert r == pytest.approx([0.1989, 0.20331072, 0.50435298], abs=1e-8)


def test_weights_of_12_layers() -> None:
    plans = initialiser_plans("deepscalelm", 12, 256, **RATES)
    wanted = [0.09115531, 0.07990027, 0.07459400, 0.07146980]
    assert deviations(plans)[:4] == pytest.approx(wanted, abs=1e-8)
    assert deviations(plans)[-1] == pytest.approx(0.06467814, abs=1e-8)


def test_what_n_counts() -> None:
    layers = initialiser_plans("deepscalelm", 12, 64)
    sublayers = initialiser_plans("deepscalelm", 12, 64, count="sublayers")
    assert layers[0].branch ** 2 == pytest.approx(1 / 6)
    assert sublayers[0].branch ** 2 == pytest.approx(1 / 12)
    with pytest.raises(AttoscopeError, match="beta"):
        initialiser_plans("deepscalelm", 2, 64)


def test_the_other_initialisers() -> None:
    xavier = initialiser_plans("xavier", 2, 64, key_values=16, norm="post")
    assert xavier[0].weights == {
        "query": 1 / 64, "key": 2 / 80, "value": 2 / 80, "output": 1 / 64,
    }  # fmt: skip
    assert xavier[1].weights == {"in": 2 / 320, "out": 2 / 320}
    plain = initialiser_plans("huggingface", 2, 64, gated=True, activation="silu")
    assert len(plain) == 4 and set(plain[1].weights.values()) == {0.0004}
    deep = initialiser_plans("deepnet", 18, 64, norm="post")
    assert deep[0].skip == pytest.approx(36**0.25) and deep[0].branch == 1
    assert deep[0].weights["query"] == 1 / 64
    assert deep[0].weights["value"] == pytest.approx(1 / 64 / 12)


# One branch, by hand.


def test_an_mlp_branch_is_neutral() -> None:
    plan = SublayerPlan("mlp", 64, 256, {"in": 0.01, "out": 0.02}, dropout=0.1)
    x, g = m.of(1.0, 0.5), m.of(1.0, 0.3)
    factor = 64 * 256 * 0.01 * 0.02 / (2 * 0.9)
    made = branch_moments(plan, x, 10)
    assert made.variance == pytest.approx(factor)
    assert made.correlation == pytest.approx(0.9 * m.kappa(0.5))
    back = branch_gradient(plan, g, x, 10)
    assert back.variance == pytest.approx(factor)
    assert back.correlation == pytest.approx(0.9 * (0.5 + math.asin(0.5) / math.pi) * 0.3)


def test_an_attention_branch() -> None:
    plan = SublayerPlan("attention", 64, 64, HEADS, **RATES)
    back = branch_gradient(plan, m.of(1.0, 0.2), m.of(1.0, 0.4), 100)
    a = 0.4 * 0.6
    assert back.variance == pytest.approx(
        (1 + 99 * 0.2 * 0.81 * math.exp(a) * (1 + a)) / (100 * 0.81)
    )
    assert back.covariance == pytest.approx((1 + 99 * 0.2 * 0.9) / (100 * 0.9))


# Stacks.


def test_without_branches_nothing_changes() -> None:
    plans = [
        replace(plan, branch=0.0) for plan in initialiser_plans("xavier", 3, 64, norm="pre")
    ]
    found = propagate(plans, variance0=2.0, r0=0.3, rg=0.1, length=16)
    assert np.all(found.variance == 2) and np.all(found.gradient == 1)
    assert found.correlation == pytest.approx(np.full(7, 0.3))
    assert found.gradient_correlation == pytest.approx(np.full(7, 0.1))
    assert found.branches.shape == found.sums.shape == (6,)


def test_pre_norm_grows_linearly_and_its_gradient_falls_hyperbolically() -> None:
    plans = [SublayerPlan("mlp", 64, 256, {"in": 1 / 64, "out": 1 / 128})] * 50
    found = propagate(plans, r0=0.2, rg=0.2, length=16)
    assert found.variance == pytest.approx(np.arange(1.0, 52.0))
    assert found.gradient == pytest.approx(51 / np.arange(1.0, 52.0))


def test_post_norm_without_residual_is_the_branch_over_its_size() -> None:
    plan = SublayerPlan("mlp", 64, 256, {"in": 0.01, "out": 0.02}, norm="post", skip=0.0)
    found = propagate([plan, plan], r0=0.5, rg=0.3, length=16)
    assert found.variance == pytest.approx(np.ones(3))
    assert found.gradient == pytest.approx(
        np.ones(3)
    )  # an MLP's forward and backward size agree
    wide = replace(plan, gain=4.0)
    assert propagate([wide], r0=0.5, rg=0.3, length=16).variance[-1] == pytest.approx(4)


def test_the_two_norms_are_the_same_to_the_theory() -> None:
    layer = initialiser_plans("xavier", 4, 64, norm_kind="layer")
    rms = initialiser_plans("xavier", 4, 64, norm_kind="rms")
    one, other = (propagate(p, r0=0.2, rg=0.2, length=16) for p in (layer, rms))
    assert np.array_equal(one.gradient, other.gradient)


@pytest.mark.parametrize(
    ("name", "norm", "sums", "gradient"),
    [
        ("xavier", "pre", [1.60, 7.44, 14.5, 21.8, 28.1], [25.2, 2.61, 1.52, 1.18, 1.02]),
        ("deepscalelm", "pre", [1.01, 1.01, 1.00, 1.00, 1.00], [0.74, 0.52, 0.57, 0.72, 0.94]),
        ("deepscalelm", "post", [1.0, 1.0, 1.0, 1.0, 1.0], [0.73, 0.52, 0.57, 0.72, 0.94]),
        ("xavier", "post", [1.36] * 5, [0.37, 0.14, 0.17, 0.23, 0.64]),
    ],
)
def test_theory_of_24_layers(
    name: Any, norm: str, sums: list[float], gradient: list[float]
) -> None:
    found = propagate(
        initialiser_plans(name, 24, 256, norm=norm, **RATES), r0=0.198, rg=0.2, length=128
    )
    ends = np.array([1, 7, 13, 19, 24])
    assert found.sums[2 * ends - 1] == pytest.approx(sums, rel=6e-3)
    assert found.gradient[2 * ends - 2] == pytest.approx(gradient, rel=2e-2)


@pytest.mark.parametrize(
    ("name", "norm", "rate", "r"),
    [
        ("xavier", "post", 0.0, [0.400, 0.862, 0.9994, 1.0, 1.0]),
        ("xavier", "pre", 0.0, [0.394, 0.690, 0.870, 0.927, 0.959]),
        ("xavier", "post", 0.1, [0.357, 0.745, 0.858, 0.858, 0.858]),
    ],
)
def test_theory_of_rank_collapse(name: Any, norm: str, rate: float, r: list[float]) -> None:
    rates = {"dropout": rate, "attention_dropout": rate}
    plans = initialiser_plans(name, 48, 128, norm=norm, **rates)
    found = propagate(plans, r0=0.221 * (1 - rate), rg=0.2, length=64)
    assert found.correlation[[2, 8, 24, 48, 96]] == pytest.approx(r, abs=2e-3)


CASES: dict[str, dict[str, Any]] = {
    "relu, pre-norm": {"name": "xavier", "norm": "pre"} | RATES,
    "gelu, post-norm": {"name": "xavier", "norm": "post", "activation": "gelu"},
    "grouped heads, swiglu, rms": {
        "name": "xavier", "activation": "silu", "gated": True, "norm_kind": "rms",
        "key_values": 64,
    },
    "deepscalelm": {"name": "deepscalelm", "norm": "pre"} | RATES,
    "deepscalelm, gelu": {"name": "deepscalelm", "norm": "post", "activation": "gelu"},
    "deepnet": {"name": "deepnet", "norm": "post"},
    "huggingface": {"name": "huggingface", "activation": "gelu", "initializer_range": 0.05},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_simulated_stack_does_what_is_predicted(case: str) -> None:
    plans, seen = simulated(**CASES[case])
    found = propagate(plans, r0=0.3, rg=0.2, length=128)
    assert seen["sums"] == pytest.approx(found.sums, rel=0.12)
    assert seen["branches"] == pytest.approx(found.branches, rel=0.2)
    assert seen["correlation"] == pytest.approx(found.correlation, abs=0.06)
    # What the formulas leave out is of the order width / tokens, here 1.
    assert seen["gradient"] == pytest.approx(found.gradient, rel=0.25)
    assert seen["gradient_correlation"] == pytest.approx(found.gradient_correlation, abs=0.08)


def test_causal_attention_forward_as_simulated_and_backward_refused() -> None:
    plans, seen = simulated(name="xavier", activation="gelu", causal=True)
    _, sums, _ = forward_moments(plans, m.of(1.0, 0.3), 128)
    assert seen["sums"] == pytest.approx([x.variance for x in sums], rel=0.12)
    with pytest.raises(AttoscopeError, match="attoscope.predict"):
        propagate(plans, r0=0.3, rg=0.2, length=128)


def simulated(**options: Any) -> tuple[tuple[SublayerPlan, ...], dict[str, np.ndarray]]:
    plans = initialiser_plans(layers=6, width=128, **options)
    key_heads = 2 if "key_values" in options else 4
    runs = [
        simulate(plans, seed=seed, r0=0.3, rg=0.2, length=128, batch=2, heads=4,
                 key_heads=key_heads)
        for seed in range(6)
    ]  # fmt: skip
    return plans, {name: np.mean([run[name] for run in runs], 0) for name in runs[0]}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SublayerPlan("mlp", 8, 8, {"in": 1.0}), "expected variances of in, out"),
        (lambda: SublayerPlan("mlp", 8, 8, {"in": 1.0, "out": -1.0}), "variances from 0 on"),
        (lambda: SublayerPlan("mlp", 8, 8, HEADS), "got key, output, query, value"),
        (lambda: replace(SublayerPlan("attention", 8, 8, HEADS), norm="behind"), "norm: got"),
        (lambda: propagate([], r0=0.1, rg=0.1, length=4), "at least one each"),
        (lambda: initialiser_plans("he", 2, 8), "expected xavier"),
    ],
)
def test_bad_input_is_told_in_a_sentence(call: Callable[[], SignalProfile], words: str) -> None:
    with pytest.raises(AttoscopeError, match=words):
        call()
