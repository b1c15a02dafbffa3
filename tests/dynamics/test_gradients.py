"""The gradient: against autograd, as a sum of constraints, and far beyond double precision."""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from attoscope.dynamics import Gradient, LambdaHead, LinearHead, ReluHead, gradient, loss_value
from attoscope.errors import AttoscopeError
from tests.dynamics.build import random_data, torch_loss

RNG = np.random.default_rng(5)
HEADS = {
    "linear": LinearHead(RNG.standard_normal((3, 6))),
    "relu": ReluHead(RNG.standard_normal((3, 6, 6))),
    "lambda": LambdaHead(RNG.standard_normal((3, 6)), 0.4),
}
WEIGHT = RNG.standard_normal((3, 6, 4)) * 0.3


@pytest.mark.parametrize("loss", ["logistic", "exponential", "linear"])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_equals_autograd(head, loss: str) -> None:
    data = random_data(head=head)
    w = torch.tensor(WEIGHT, requires_grad=True)
    value = torch_loss(data, w, loss)
    value.sum().backward()
    scale = np.abs(w.grad.numpy()).max()
    np.testing.assert_allclose(gradient(data, WEIGHT, loss), w.grad.numpy(), atol=1e-14 * scale)
    plain = Gradient(data, loss, log_domain=False).at(WEIGHT)
    np.testing.assert_allclose(-plain.direction, w.grad.numpy(), atol=1e-14 * scale)
    np.testing.assert_allclose(plain.mean_loss(), value.detach().numpy(), rtol=1e-14)


def test_is_a_sum_of_constraints_for_any_reference_token() -> None:
    """Closed form 2: minus the gradient is sum mu_it (x_i,alpha - x_it) z_i^T."""
    data = random_data()
    slope = Gradient(data).at(WEIGHT)
    np.testing.assert_allclose(slope.coefficients.sum(2), 0, atol=4e-16)
    for reference in (data.optimal(), slope.chosen, RNG.integers(0, 5, (3, 4))):
        mu = -slope.coefficients * np.exp(slope.log_scale)[:, None, None]
        own = np.take_along_axis(data.tokens, reference[:, :, None, None], 2)
        total = np.einsum("rnt,rntd,rnq->rdq", mu, own - data.tokens, data.queries)
        np.testing.assert_allclose(total, -gradient(data, WEIGHT), atol=1e-15)


def test_coefficients_are_those_of_the_paper() -> None:
    """mu_it = (1/n) (-l'(gbar)) s_it (gbar_i - gamma_it)."""
    data = random_data()
    slope = Gradient(data).at(WEIGHT)
    s, gamma = slope.probabilities(), data.scores()
    gbar = (s * gamma).sum(2, keepdims=True)
    mu = s * (gbar - gamma) / (1 + np.exp(gbar)) / 4
    found = -slope.coefficients * np.exp(slope.log_scale)[:, None, None]
    np.testing.assert_allclose(found, mu, atol=1e-16)


def exactly(data, weight) -> list[list[Decimal]]:
    """Coefficients of one trial, in as many digits as the context has."""
    x, z, gamma = data.tokens[0], data.queries[0], data.scores()[0]
    w, out = np.vectorize(Decimal)(weight), []
    for i in range(len(z)):
        logits = np.vectorize(Decimal)(x[i]) @ w @ np.vectorize(Decimal)(z[i])
        e = [(v - logits.max()).exp() for v in logits]
        s = [v / sum(e) for v in e]
        g = [Decimal(v) for v in gamma[i]]
        mean = sum(a * b for a, b in zip(s, g, strict=True))
        slope = 1 / (1 + mean.exp()) / len(z)
        out.append([slope * a * (b - mean) for a, b in zip(s, g, strict=True)])
    return out


@pytest.mark.parametrize("size", [1.0, 30.0, 300.0])
def test_no_digits_are_lost_as_attention_saturates(size: float) -> None:
    data = random_data(trials=1, n=2, tokens=3, d=(3, 2))
    weight = size * np.random.default_rng(3).standard_normal((1, 3, 2))
    with localcontext() as context:
        context.prec = 1500
        truth = exactly(data, weight[0])
        largest = max(abs(v) for row in truth for v in row)
        want = np.array([[float(v / largest) for v in row] for row in truth])
        context.prec = 20
        log_largest = float(largest.ln())
    slope = Gradient(data).at(weight)
    c = slope.coefficients[0]
    got = c / np.abs(c).max()
    # Logits of size 1000 are themselves only known to about 1e-13.
    np.testing.assert_allclose(got, want, atol=3e-15 * max(1.0, size))
    assert slope.log_scale[0] + np.log(np.abs(c).max()) == pytest.approx(log_largest, rel=1e-12)
    plain = Gradient(data, log_domain=False).at(weight).coefficients[0]
    lost = np.abs(plain / np.abs(plain).max() - want).max()
    assert lost > 0.1 if size == 300.0 else lost < 1e-9


@pytest.mark.parametrize("loss", ["logistic", "exponential", "linear"])
def test_excess_loss_is_exact(loss: str) -> None:
    data = random_data()
    best = loss_value(loss, data.scores().max(2)).mean(1)
    slope = Gradient(data, loss).at(WEIGHT)
    np.testing.assert_allclose(np.exp(slope.log_excess()), slope.mean_loss() - best, rtol=1e-12)
    # A rank-one weight v c^T that selects the best tokens, so far out that the excess underflows.
    one = data.take(0)
    c = np.linalg.lstsq(one.queries[0], one.labels[0], rcond=None)[0]
    far = [Gradient(one, loss).at(k * np.outer(one.head.v[0], c)[None]).log_excess()[0]
           for k in (2000.0, 4000.0)]  # fmt: skip
    scores = np.sort(one.scores()[0], 1)
    slowest = (scores[:, -1] - scores[:, -2]).min()
    assert far[0] < -800.0
    assert far[1] - far[0] == pytest.approx(-2000.0 * slowest, rel=1e-6)


def test_errors() -> None:
    data = random_data()
    with pytest.raises(AttoscopeError, match="loss: got 'hinge'; expected one of logistic"):
        gradient(data, WEIGHT, "hinge")
    with pytest.raises(
        AttoscopeError, match=r"weight: got shape \(3, 4, 6\); expected \(3, 6, 4\)"
    ):
        gradient(data, WEIGHT.transpose(0, 2, 1))
