"""Closed-form moments of the components: known values, and Monte Carlo forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attoscope import AttoscopeError
from attoscope.moments import components as m
from attoscope.moments.components import Moments
from attoscope.papers.deepscalelm._simulation import Draws
from attoscope.papers.deepscalelm._simulation import moments as measured

UNIT = Moments(0.0, 1.0, 1.0)
EXACT = 1e-9


def near(value: float, tolerance: float = EXACT) -> object:
    return pytest.approx(value, rel=0, abs=tolerance)


# Known values.


@pytest.mark.parametrize(
    ("r", "covariance"),
    [
        (0.25, 0.0674999958), (0.5, 0.1453439474), (0.75, 0.2348461107),
        (0.9, 0.2956142563), (1.0, 0.3408450569),
    ],
)  # fmt: skip
def test_relu(r: float, covariance: float) -> None:
    made = m.relu(m.of(1.0, r))
    assert made.mean == near(0.3989422804, 1e-10)
    assert made.variance == near(0.3408450569, 1e-10)
    assert made.covariance == near(covariance, 1e-10)


@pytest.mark.parametrize(
    ("r", "value"),
    [
        (0.0, 0.3183098862), (0.25, 0.4533098778), (0.5, 0.6089977810), (0.75, 0.7880021076),
        (0.9, 0.9095383988), (1.0, 1.0),
    ],
)  # fmt: skip
def test_kappa(r: float, value: float) -> None:
    assert m.kappa(r) == near(value, 1e-10)


@pytest.mark.parametrize(("r", "value"), [(0.5, 0.6666666667), (0.9, 0.8564337069)])
def test_relu_backward(r: float, value: float) -> None:
    made = m.relu_backward(UNIT, m.of(1.0, r))
    assert made.variance == 0.5
    assert made.correlation == near(value, 1e-10)


def test_the_authors_approximations_of_relu_and_kappa() -> None:
    r = np.linspace(0, 1, 1001)
    own = np.array([m.relu(m.of(1.0, x)).correlation for x in r])
    assert np.abs(own - 0.7 * r - 0.3 * r**2).max() == near(0.0060, 5e-5)
    kappas = np.array([m.kappa(x) for x in r])
    polynomial = 1 / math.pi + r / 2 + (0.5 - 1 / math.pi) * r**2
    assert np.abs(kappas - polynomial).max() == near(0.0075, 5e-5)


@pytest.mark.parametrize(
    ("s", "r", "forward", "backward"),
    [
        (1.0, 0.5, (0.2820947918, 0.3456440110, 0.1477174435), (0.4558508656, 0.3422672425)),
        (1.0, 0.9, (0.2820947918, 0.3456440110, 0.3013913990), (0.4558508656, 0.4296273622)),
        (4.0, 0.5, (0.7136496465, 1.4205691980, 0.5940282628), (0.5060447641, 0.3465869674)),
        (0.25, 0.5, (0.0892062058, 0.0755489766, 0.0344825327), (0.3556851397, 0.3018758555)),
    ],
)  # fmt: skip
def test_gelu(
    s: float, r: float, forward: tuple[float, ...], backward: tuple[float, ...]
) -> None:
    made = m.gelu(m.of(s, r))
    assert (made.mean, made.variance, made.covariance) == near(forward, 1e-10)
    back = m.gelu_backward(UNIT, m.of(s, r))
    assert (back.variance, back.covariance) == near(backward, 1e-10)


@pytest.mark.parametrize("s", [0.25, 1.0, 2.0])
@pytest.mark.parametrize("r", [-0.3, 0.2, 0.8])
def test_gelu_and_silu_are_what_quadrature_gives(s: float, r: float) -> None:
    nodes, weights = np.polynomial.hermite_e.hermegauss(160)
    weights = weights / weights.sum()

    def integral(f: Callable[[Tensor], Tensor]) -> float:
        u = torch.from_numpy(math.sqrt(s) * nodes)
        v = math.sqrt(s) * torch.from_numpy(
            r * nodes[:, None] + math.sqrt(1 - r * r) * nodes[None]
        )
        return float(weights @ (f(u)[:, None] * f(v)).numpy() @ weights)

    made = m.activation("gelu", m.of(s, r))
    assert integral(F.gelu) == near(made.covariance)
    assert made.variance == near(m.gelu(m.of(s, r)).variance + m.gelu(m.of(s, r)).mean ** 2)
    silu = m.activation("silu", m.of(s, r))
    assert integral(F.silu) == near(silu.covariance, 1e-5)


def test_layer_norm() -> None:
    x = m.of(3.0, 0.5)
    assert m.layer_norm(x) == Moments(0.0, 1.0, 0.5)
    assert m.layer_norm(x, 16, official=True).covariance == 0.46875
    assert m.layer_norm(x, 16).covariance == near(0.4875, 1e-12)
    assert m.layer_norm(m.of(1.0, 0.9), 16).covariance == near(0.8943, 1e-4)
    assert m.layer_norm_backward(UNIT, x) == Moments(0.0, 1 / 3, 1 / 3)
    for width, ratio in ((16, 14 / 13), (64, 62 / 61), (256, 254 / 253)):
        assert 3 * m.layer_norm_backward(m.of(1.0, 0.0), x, width).variance == near(ratio)


def test_dropout() -> None:
    made = m.dropout(Moments(1.5, 2.0, 1.0), 0.3)
    assert made.mean == 1.5 and made.covariance == 1.0
    assert made.variance == near(3.8214285714, 1e-10)
    assert m.dropout_backward(m.of(0.7, 0.5), 0.3) == Moments(0.0, 1.0, 0.35)


def test_linear() -> None:
    made = m.linear(Moments(0.6, 1.3, 0.4 * 1.3), 32, 0.04)
    assert (made.mean, made.variance, made.covariance) == near((0.0, 2.1248, 1.1264), 1e-12)
    back = m.linear_backward(m.of(0.9, 0.3), 24, 0.04)
    assert (back.variance, back.covariance) == near((0.864, 0.2592), 1e-12)


@pytest.mark.parametrize(
    ("s", "r", "length", "simple", "long", "gradient"),
    [
        (1.0, 0.0, 512, 6.5547249926e-06, 6.6171508206e-06, 1.0369422258e-05),
        (0.5, 0.5, 300, 3.1558379632e-06, 3.1777579372e-06, 1.4266949074e-05),
    ],
)
def test_softmax(
    s: float, r: float, length: int, simple: float, long: float, gradient: float
) -> None:
    relative = {"rel": 1e-9, "abs": 0}
    assert m.softmax(s, length, r).mean == 1 / length
    assert m.softmax(s, length, r).variance == pytest.approx(simple, **relative)
    assert m.softmax(s, length, r, long=True).variance == pytest.approx(long, **relative)
    assert m.softmax_backward(1.0, s, length, r) == pytest.approx(gradient, **relative)


def test_zipf_frequencies_and_embeddings() -> None:
    for size, exact in ((1000, 0.02933907), (30522, 0.01383608), (50257, 0.01265235)):
        p = m.zipf_frequencies(size)
        assert float(p @ p) == near(exact, 1e-8)
    made = m.embedding(m.zipf_frequencies(30522), 0.3, 3, segments=2)
    assert made.variance == near(0.9) and made.correlation == near(0.226834, 1e-6)
    alone = m.embedding(m.zipf_frequencies(50257), 1.0, 2, segments=0)
    assert alone.correlation == near(0.01265235 / 2, 1e-8)


@pytest.mark.parametrize("length", [2, 7, 128])
def test_two_tokens_share_a_segment_with_probability_two_thirds(length: int) -> None:
    # A boundary behind each of 0 to L tokens; pairs of different tokens.
    first = np.arange(length + 1)
    same = first * (first - 1) + (length - first) * (length - first - 1)
    assert (same / (length * (length - 1))).mean() == near(2 / 3, 1e-12)


@pytest.mark.parametrize(("r", "value"), [(0.5, 0.257423), (0.9, 0.805802)])
def test_swiglu(r: float, value: float) -> None:
    made = m.swiglu(m.of(1.0, r), m.of(1.0, r))
    assert made.correlation == near(value, 1e-6)
    assert made.variance == near(0.3557755198, 1e-8)


def test_fixed_points() -> None:
    rates = (0.1, 0.2, 0.5, 0.0)
    alone = (0.627146, 0.472799, 0.217234, 1.0)
    even = (0.834808, 0.700052, 0.383431, 1.0)
    assert [m.fixed_point(p, attention=0.0) for p in rates] == near(list(alone), 1e-6)
    assert [m.fixed_point(p) for p in rates] == near(list(even), 1e-6)
    assert [m.fixed_point(p, attention=1.0) for p in rates] == near([0.9, 0.8, 0.5, 1.0], 1e-9)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Moments(0.0, -1.0, 0.0), "a variance from 0 on"),
        (lambda: Moments(0.0, 0.5, 0.6), "give a covariance, not a correlation"),
        (lambda: m.relu(Moments(0.5, 1.0, 0.0)), "expected mean 0"),
        (lambda: m.layer_norm(m.of(0.0, 0.0)), "expected one that varies"),
        (lambda: m.dropout(UNIT, 1.0), "a rate from 0 to below 1"),
        (lambda: m.activation("softsign", UNIT), "expected one of"),
        (lambda: m.embedding(np.ones(3), 1.0, 1, 0), "divide by the sum"),
        (lambda: m.fixed_point(0.1, attention=2.0), "a share from 0 to 1"),
    ],
)
def test_bad_input_is_told_in_a_sentence(call: Callable[[], object], words: str) -> None:
    with pytest.raises(AttoscopeError, match=words):
        call()


# Monte Carlo.


def pairs(seed: int, count: int, s: float, r: float, mean: float = 0.0) -> Tensor:
    """Two correlated tokens, (count, 2, 1) in the layout of (batch, token, width)."""
    return mean + s**0.5 * Draws(seed, torch.float64).alike(count, 2, 1, r)


def check(made: Moments, x: Tensor, tolerance: float) -> None:
    variance, r = measured(x)
    assert (float(x.mean()), variance, r * variance) == pytest.approx(
        (made.mean, made.variance, made.covariance), rel=tolerance, abs=tolerance
    )


def check_back(
    made: Moments, function: Callable[[Tensor], Tensor], x: Tensor, g: Tensor, tolerance: float
) -> None:
    x = x.clone().requires_grad_()
    (back,) = torch.autograd.grad(function(x), x, g)
    variance, r = measured(back)
    assert (variance, r * variance) == pytest.approx(
        (made.variance, made.covariance), rel=tolerance
    )


@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_activations_by_monte_carlo(name: str) -> None:
    x, g = pairs(0, 1_000_000, 1.3, 0.6), pairs(1, 1_000_000, 0.8, 0.4)
    at, top = m.of(1.3, 0.6), m.of(0.8, 0.4)
    forward, backward = getattr(m, name), getattr(m, f"{name}_backward")
    check(forward(at), getattr(F, name)(x), 3e-3)
    check_back(backward(top, at), getattr(F, name), x, g, 1e-2)


def test_gated_by_monte_carlo() -> None:
    gate, x = pairs(0, 1_000_000, 1.3, 0.6), pairs(1, 1_000_000, 0.7, 0.5)
    g = pairs(2, 1_000_000, 0.8, 0.4)
    at_gate, at = m.of(1.3, 0.6), m.of(0.7, 0.5)
    check(m.swiglu(at_gate, at), F.silu(gate) * x, 4e-3)
    back_gate, back = m.swiglu_backward(m.of(0.8, 0.4), at_gate, at)
    check_back(back_gate, lambda gate: F.silu(gate) * x, gate, g, 2e-2)
    check_back(back, lambda x: F.silu(gate) * x, x, g, 2e-2)


def test_dropout_by_monte_carlo() -> None:
    draws = Draws(3, torch.float64)
    x = pairs(0, 1_000_000, 2.0, 0.5, mean=1.5)
    check(m.dropout(Moments(1.5, 2.0, 1.0), 0.3), draws.dropped(x, 0.3), 5e-3)
    g = pairs(1, 1_000_000, 0.9, 0.3)
    back = m.dropout_backward(m.of(0.9, 0.3), 0.3)
    check_back(back, lambda x: draws.dropped(x, 0.3), x, g, 1e-2)


def test_linear_by_monte_carlo() -> None:
    draws = Draws(0, torch.float64)
    x = 0.6 + 1.3**0.5 * draws.alike(4000, 6, 32, 0.4)
    weights = 0.04**0.5 * draws.normal(4000, 32, 24)
    check(m.linear(Moments(0.6, 1.3, 0.52), 32, 0.04), x @ weights, 1.5e-2)
    g = 0.9**0.5 * draws.alike(4000, 6, 24, 0.3)
    check_back(m.linear_backward(m.of(0.9, 0.3), 24, 0.04), lambda x: x @ weights, x, g, 1.5e-2)


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_by_monte_carlo(kind: str, width: int) -> None:
    draws, count = Draws(0, torch.float64), 1_500_000 // width
    x = 2**0.5 * draws.alike(count, 2, width, 0.5)
    g = draws.alike(count, 2, width, 0.4)
    function = getattr(F, f"{kind}_norm")
    forward, backward = getattr(m, f"{kind}_norm"), getattr(m, f"{kind}_norm_backward")
    check(forward(m.of(2.0, 0.5), width), function(x, (width,)), 3e-3)
    made = backward(m.of(1.0, 0.4), m.of(2.0, 0.5), width)
    x.requires_grad_()
    (back,) = torch.autograd.grad(function(x, (width,)), x, g)
    assert measured(back)[0] == pytest.approx(made.variance, rel=4e-3)


def test_rms_norm_keeps_the_mean() -> None:
    draws = Draws(0, torch.float64)
    x = 0.5 + draws.alike(4000, 2, 256, 0.5)
    made = m.rms_norm(Moments(0.5, 1.0, 0.5))
    assert made.mean == near(1 / math.sqrt(5), 1e-12)
    check(made, F.rms_norm(x, (256,)), 1e-2)


@pytest.mark.parametrize(
    ("t", "low", "high"), [(0.1, -0.01, 0.01), (0.5, 0.0, 0.025), (2.0, 0.10, 0.40)]
)
def test_softmax_by_monte_carlo(t: float, low: float, high: float) -> None:
    """Good for small scores, and too large for others: both are measured."""
    scores = t**0.5 * Draws(0, torch.float64).normal(8000, 512)
    variance = float(scores.softmax(-1).var())
    assert low <= m.softmax(t, 512).variance / variance - 1 <= high
