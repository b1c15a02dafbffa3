"""The optimisers: their steps on known matrices, and two flows known in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attoscope.dynamics import (
    Adam,
    Descent,
    GradientDescent,
    Mirror,
    Normalised,
    Polyak,
    Steepest,
    balance,
    gradient,
    nuclear_gap,
    steepest,
    train,
)
from attoscope.dynamics.gradients import Gradient
from attoscope.errors import AttoscopeError
from tests.dynamics.build import as_users_run_it, random_data

# U diag(3, 1, 0) V^T: rank two, so that one singular direction has to be dropped.
U, V = (np.linalg.qr(np.random.default_rng(k).standard_normal((3, 3)))[0] for k in (1, 2))
RANK_TWO = U @ np.diag([3.0, 1.0, 0.0]) @ V.T
KNOWN = np.array([[2.0, -1.0], [0.0, -3.0]])


@pytest.mark.parametrize(
    ("norm", "given", "unit", "dual"),
    [
        ("frobenius", KNOWN, KNOWN / np.sqrt(14), np.sqrt(14)),
        ("max", KNOWN, [[1, -1], [0, -1]], 6.0),
        ("l1", KNOWN, [[0, 0], [0, -1]], 3.0),
        ("spectral", RANK_TWO, U[:, :2] @ V[:, :2].T, 4.0),
        ("nuclear", RANK_TWO, np.outer(U[:, 0], V[:, 0]), 3.0),
    ],
)
def test_steepest_steps(norm: str, given, unit, dual: float) -> None:
    found, size = steepest(norm, np.stack([given, np.zeros_like(given)]))
    np.testing.assert_allclose(found[0], unit, atol=1e-14)
    np.testing.assert_array_equal(found[1], np.zeros_like(given))
    np.testing.assert_allclose(size, [dual, 0.0], rtol=1e-14)
    assert np.vdot(found[0], given) == pytest.approx(dual, rel=1e-14)


def moved(rule, gradients, start=None, log_scales=None) -> np.ndarray:
    """Where a rule goes when it is told these gradients, one after the other."""
    w = np.zeros((1, *gradients[0].shape)) if start is None else start[None].copy()
    memory: dict = {}
    for k, g in enumerate(gradients):
        scale = np.zeros(1) if log_scales is None else np.array([log_scales[k]])
        rule.step([w], Descent([-g[None] * np.exp(-scale)], scale, k), memory)
    return w[0]


GRADIENTS = list(np.random.default_rng(7).standard_normal((6, 3, 2)))


def test_adam_is_torchs_without_epsilon() -> None:
    p = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([p], lr=0.03, betas=(0.8, 0.95), eps=1e-300)
    for g in GRADIENTS:
        p.grad = torch.tensor(g)
        adam.step()
    rule = Adam(0.03, betas=(0.8, 0.95))
    np.testing.assert_allclose(moved(rule, GRADIENTS), p.detach().numpy(), atol=1e-15)


def test_momentum_comes_before_the_map() -> None:
    want, mean = np.zeros((3, 2)), np.zeros((3, 2))
    for g in GRADIENTS:
        mean = 0.9 * mean - g
        want += 0.05 * np.sign(mean)
    rule = Steepest("max", 0.05, momentum=0.9)
    np.testing.assert_allclose(moved(rule, GRADIENTS), want, atol=1e-15)


@pytest.mark.parametrize(
    "rule",
    [
        GradientDescent(0.1),
        Normalised(),
        Adam(0.1),
        Steepest("spectral", 0.1, 0.9),
        Mirror(3.0),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_units_of_the_gradient_do_not_matter(rule) -> None:
    scaled = moved(rule, GRADIENTS, log_scales=[0.0, -3.0, 2.0, 1.0, -5.0, 0.5])
    np.testing.assert_allclose(scaled, moved(rule, GRADIENTS), atol=1e-14)


def test_mirror_descent_with_p_two_is_gradient_descent() -> None:
    start = GRADIENTS[0]
    plain = moved(GradientDescent(0.1), GRADIENTS, start)
    np.testing.assert_allclose(
        moved(Mirror(2, 0.1, False), GRADIENTS, start), plain, atol=1e-14
    )
    np.testing.assert_allclose(
        moved(Mirror(2, 0.1), GRADIENTS, start),
        moved(Normalised(0.1), GRADIENTS, start),
        atol=1e-14,
    )
    assert np.abs(moved(Mirror(3, 0.1, False), GRADIENTS, start) - plain).max() > 0.05


def test_mirror_descent_of_one_constraint() -> None:
    """From zero the first step is sign(G) |G|^(q-1), the l_p solution's direction (K1)."""
    a, p = np.array([[0.0, 4.0], [0.0, 2.0]]), 3.0
    w = moved(Mirror(p, 0.1), [-a])
    np.testing.assert_allclose(w / w[0, 1], a**0.5 / 2.0, atol=1e-15)
    q = p / (p - 1)
    v = 0.1 * a / (a**q).sum() ** (1 / q)
    np.testing.assert_allclose(w, v ** (1 / (p - 1)), atol=1e-15)


def test_rates_may_depend_on_the_step() -> None:
    seen = []
    moved(Normalised(lambda k: seen.append(k) or 0.1), GRADIENTS[:3])
    assert seen == [0, 1, 2]


def test_polyak_step() -> None:
    """lr = (L - L*) / (2 ||grad||^2), over both factors together."""
    data = random_data()
    rng = np.random.default_rng(0)
    k, q = rng.standard_normal((3, 6, 4)), rng.standard_normal((3, 4, 4))
    w = k @ q.transpose(0, 2, 1)
    loss = Gradient(data).at(w).mean_loss()
    excess = loss - np.logaddexp(0, -data.scores().max(2)).mean(1)
    g = gradient(data, w)
    gk, gq = g @ q, g.transpose(0, 2, 1) @ k
    square = (gk**2).sum((1, 2)) + (gq**2).sum((1, 2))
    lr = (0.5 * excess / square)[:, None, None]
    ks, qs = train(data, Polyak(), 1, factors=(k, q)).factors
    np.testing.assert_allclose(ks[-1], k - lr * gk, rtol=1e-12)
    np.testing.assert_allclose(qs[-1], q - lr * gq, rtol=1e-12)


@pytest.mark.parametrize(
    ("init", "share"), [(1e-3, 0.9998), (0.1, 0.982), (1, 0.840), (3, 0.615)]
)
def test_diagonal_factors_forget_or_keep_the_sparse_bias(init: float, share: float) -> None:
    """Exponential loss on 2 w_1 + w_2, w = k q: y = exp(2 time) solves init^2 (2 y^2 + y) = 60."""
    k, q = np.full((2, 1, 1, 2), float(init))
    b, rule, number = np.array([2.0, 1.0]), GradientDescent(1.0), 0
    while (margin := float((b * k * q).sum())) < 60.0:
        # A factor common to both gradients changes only the speed along the flow's path.
        descent = Descent([b * q, b * k], np.log([1e-3]), number)
        rule.step([k, q], descent, {})
    w = (k * q).ravel()
    y = (-1 + np.sqrt(1 + 8 * 60 / init**2)) / 4
    assert w[0] / w.sum() == pytest.approx(share, abs=1e-3)
    assert w[0] / w.sum() == pytest.approx(y / (1 + y), abs=2e-3)
    assert margin < 62.0


@pytest.mark.parametrize("decay", [0.2, 1.0, 0.0])
def test_weight_decay_shrinks_singular_values(decay: float) -> None:
    """||A B^T - D||^2 + decay/2 (||A||^2 + ||B||^2): singular values max(d - decay/2, 0)."""
    d = np.array([0.2, 0.4, 0.6, 0.8, 1.0])
    rng = np.random.default_rng(0)
    a, b = 0.5 * rng.standard_normal((2, 1, 5, 5))
    rule = GradientDescent(0.05)
    for k in range(4000):
        miss = a @ b.transpose(0, 2, 1) - np.diag(d)
        slopes = [-2 * miss @ b - decay * a, -2 * miss.transpose(0, 2, 1) @ a - decay * b]
        rule.step([a, b], Descent(slopes, np.zeros(1), k), {})
    values = np.sort(np.linalg.svd(a[0] @ b[0].T, compute_uv=False))
    np.testing.assert_allclose(values, np.maximum(d - decay / 2, 0), atol=1e-5)
    if decay:
        assert balance(a, b)[0] < 1e-13
        assert abs(nuclear_gap(a, b)[0]) < 1e-5
    else:
        assert balance(a, b)[0] > 0.1
        assert nuclear_gap(a, b)[0] > 0.05


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GradientDescent(0.0), "lr: got 0.0; expected a positive number"),
        (lambda: Normalised(float("nan")), "lr: got nan"),
        (lambda: Mirror(1.0), "p: got 1.0; expected a number of at least 1.05"),
        (lambda: Steepest("fro"), "norm: got 'fro'; expected one of frobenius, max"),
        (lambda: Steepest("max", momentum=1.0), "momentum: got 1.0; expected 0 to below 1"),
        (lambda: Adam(betas=(0.9, 1.5)), "betas: got 1.5"),
        (lambda: Polyak(0.0), "longest: got 0.0"),
        (lambda: Polyak(None), "longest: got None"),
        (lambda: Normalised("a"), "lr: got 'a'; expected a positive number"),
        (lambda: Mirror("2"), "p: got '2'"),
        (lambda: Mirror(1.01), "p: got 1.01; .* leaves double precision"),
        (lambda: Adam(betas=0.9), "betas: got 0.9; expected a pair"),
        (lambda: Steepest("max", momentum="a"), "momentum: got 'a'"),
        (lambda: Steepest(["max"]), "norm: got ..max"),
    ],
)
def test_errors(make, says: str) -> None:
    with as_users_run_it(), pytest.raises(AttoscopeError, match=says):
        make()
