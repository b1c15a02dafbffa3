"""Closed-form moments of attention: known values, and Monte Carlo forward and backward."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from attoscope import AttoscopeError
from attoscope.moments import components as m
from attoscope.moments.attention import (
    AttentionPlan,
    attention,
    attention_backward,
    score_variance,
)
from attoscope.moments.components import Moments
from attoscope.papers.deepscalelm._simulation import Draws, attend
from attoscope.papers.deepscalelm._simulation import moments as measured
from attoscope.prediction.propagation import SublayerPlan

UNIT = Moments(0.0, 1.0, 1.0)


def near(value: float, tolerance: float) -> object:
    return pytest.approx(value, rel=0, abs=tolerance)


def test_attention() -> None:
    plan = AttentionPlan(128, 64, (0.36 / 128) ** 2, 1 / 128, 300, 0.1)
    made, back = both(plan, 1 / 3, 0.3)
    assert (made.variance, made.covariance) == near((0.3364810580, 0.3355585556), 1e-10)
    assert (back.variance, back.covariance) == near((0.1513518519, 0.1511666667), 1e-10)
    plan = AttentionPlan(256, 64, 1 / 256**2, 1 / 256, 512)
    made, back = both(plan, 0.5, 0.2)
    assert (made.variance, made.covariance) == near((0.5025973133, 0.5009803772), 1e-10)
    assert (back.variance, back.covariance) == near((0.0503906250, 0.0503906250), 1e-10)
    # k = 0.5, so a = 0.25: the correction multiplies rg alone.
    assert score_variance(m.of(1.0, 0.5), plan) == 0.5
    ours = attention_backward(m.of(1.0, 0.2), m.of(1.0, 0.5), plan)
    factor = math.exp(0.25) * 1.25
    assert ours.variance == near(0.25 * (1 + 511 * 0.2 * factor) / 512, 1e-12)
    assert ours.covariance == back.covariance


def both(plan: AttentionPlan, r: float, rg: float) -> tuple[Moments, Moments]:
    x = m.of(1.0, r)
    return attention(x, plan), attention_backward(m.of(1.0, rg), x, plan, corrected=False)


def test_causal_attention_without_scores_is_even() -> None:
    x, plan = m.of(1.0, 0.3), AttentionPlan(8, 8, 0.0, 1 / 8, 64, causal=True)
    assert attention(x, plan).variance == near(0.351886, 1e-6)
    even = np.tril(np.ones((64, 64))) / np.arange(1, 65)[:, None]
    tokens = 0.7 * np.eye(64) + 0.3
    out, back = even @ tokens @ even.T, even.T @ tokens @ even
    for made, exact in ((attention(x, plan), out), (attention_backward(x, x, plan), back)):
        assert made.variance == near(exact.trace() / 64, 1e-12)
        assert made.covariance == near((exact.sum() - exact.trace()) / 64 / 63, 1e-12)


def test_one_token_attends_to_itself() -> None:
    for causal in (False, True):
        plan = AttentionPlan(8, 8, 0.0, 1 / 8, 1, causal=causal)
        assert attention(m.of(2.0, 0.5), plan).variance == near(2.0, 1e-12)
        assert attention_backward(m.of(2.0, 0.5), UNIT, plan).variance == near(2.0, 1e-12)


def run_attention(
    scale: float,
    r: float,
    *,
    heads: int = 2,
    key_heads: int = 2,
    causal: bool = False,
    dropout: float = 0.0,
    seeds: int = 6,
) -> tuple[Moments, Moments, Moments, Moments]:
    """Attention's measured and predicted moments, forward and backward; gradient of rg 0.3."""
    width, length, q = 128, 200, scale**2 / 128
    weights = {"query": q, "key": q, "value": 1 / width, "output": 0.0}
    plan = SublayerPlan(
        "attention", width, 128, weights, causal=causal, attention_dropout=dropout
    )
    seen = []
    for seed in range(seeds):
        draws = Draws(seed)
        x = draws.alike(8, length, width, r).requires_grad_()
        out = attend(draws, plan, x, heads, key_heads)
        g = draws.alike(8, length, 128, 0.3)
        (back,) = torch.autograd.grad(out, x, g)
        seen.append([_both(t) for t in (x, g, out, back)])
    at, top, out, back = (Moments(0.0, *map(float, row)) for row in np.mean(seen, 0))
    formula = plan.attention(length)
    return out, attention(at, formula), back, attention_backward(top, at, formula)


def _both(x: Tensor) -> tuple[float, float]:
    variance, r = measured(x)
    return variance, r * variance


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.25, 1.0])
@pytest.mark.parametrize("r", [0.0, 1 / 3, 2 / 3])
def test_attention_by_monte_carlo(scale: float, r: float, causal: bool) -> None:
    out, made, back, made_back = run_attention(scale, r, dropout=0.1, causal=causal)
    # Without correlation what is left out (width / tokens) is a larger part of a small number.
    rough = r == 0 and scale == 1
    assert out.variance == pytest.approx(made.variance, rel=0.15 if rough else 0.06)
    assert out.covariance == pytest.approx(made.covariance, rel=0.06)
    assert back.variance == pytest.approx(made_back.variance, rel=0.25 if rough else 0.12)
    assert back.covariance == pytest.approx(made_back.covariance, rel=0.10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.25, 1.0])
def test_grouped_heads_are_as_separate_ones(scale: float, causal: bool) -> None:
    out, made, back, made_back = run_attention(
        scale, 1 / 3, heads=4, key_heads=1, causal=causal, seeds=12
    )
    assert (out.variance, out.covariance) == pytest.approx(
        (made.variance, made.covariance), rel=0.10
    )
    assert (back.variance, back.covariance) == pytest.approx(
        (made_back.variance, made_back.covariance), rel=0.15
    )


def test_the_official_attention_gradient_is_too_small() -> None:
    _, _, back, made = run_attention(1.0, 1 / 3)
    plan = AttentionPlan(128, 128, 1 / 128**2, 1 / 128, 200)
    official = attention_backward(m.of(1.0, 0.3), m.of(1.0, 1 / 3), plan, corrected=False)
    assert official.variance < 0.75 * back.variance
    assert made.variance > 0.88 * back.variance


def test_bad_input_is_told_in_a_sentence() -> None:
    with pytest.raises(AttoscopeError, match="at least one token"):
        AttentionPlan(8, 8, 0.0, 1.0, 0)
