"""The regularisation path: the best weight of each norm, by minimisation and not by descent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.optimize import minimize

from attoscope.dynamics.data import AttentionData
from attoscope.dynamics.gradients import Gradient
from attoscope.dynamics.weights import correlation
from attoscope.errors import AttoscopeError

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RegularisationPath:
    """`radii` (radius,) ascending; `weights` (radius, trial, key width, query width); `factors`
    None or (Ks, Qs); `log_excess` (radius, trial): logarithm of the loss above its infimum."""

    radii: Float[np.ndarray, " radius"]
    weights: Float[np.ndarray, "radius trial key_width query_width"]
    log_excess: Float[np.ndarray, "radius trial"]
    factors: tuple[Array, Array] | None = None

    def correlation(
        self, reference: Float[np.ndarray, "trial key_width query_width"]
    ) -> Float[np.ndarray, "radius trial"]:
        """Correlation of each weight with a reference per trial."""
        return correlation(self.weights, reference)


def regularisation_path(
    data: AttentionData,
    radii: Sequence[float | int],
    *,
    factors: bool = False,
    rank: int | None = None,
    starts: int = 4,
    loss: str = "logistic",
    seed: int = 0,
) -> RegularisationPath:
    """`argmin loss(W)` over `||W||_F <= R`, or loss(K Q^T) over `||K||_F^2 + ||Q||_F^2 <= 2R`.

    In direction it goes to the attention SVM of the globally optimal tokens as R grows: with the
    Frobenius norm for W, the nuclear norm for factors. BFGS on the sphere (where the minimum lies
    once the optimal tokens can be separated) on the logarithm of the excess loss, which keeps full
    accuracy; from the solution at the radius before, the first gradient, and random points.

    Args:
        data: with a linear head; trials are solved one by one, so few and small ones.
        radii: positive numbers.
        factors: which parameterisation.
        rank: columns m of K and Q; the smaller width when left out.
        starts: random starts per radius.
        loss: "logistic", "exponential" or "linear".
        seed: of the random starts.

    Source: arXiv 2308.16898, regularisation path theorem; error O(1/R).
    """
    ascending = np.unique(np.asarray(radii, np.float64))
    if not len(ascending) or not (0.0 < ascending[0] and ascending[-1] < np.inf):
        raise AttoscopeError(f"radii: got {radii}; expected positive numbers")
    data.scores()
    trials, _, _, dk, dq = data.shape
    m = min(dk, dq) if rank is None else rank
    if m < 1:
        raise AttoscopeError(f"rank: got {rank}; expected at least 1")
    weights, excess = (
        np.empty((len(ascending), trials, dk, dq)),
        np.empty((len(ascending), trials)),
    )
    ks, qs = (
        np.empty((len(ascending), trials, dk, m)),
        np.empty((len(ascending), trials, dq, m)),
    )
    for r in range(trials):
        sphere = _Sphere(data.take(r), loss, m if factors else None)
        generator = np.random.default_rng([seed, r])
        best = sphere.first(generator)
        for j, radius in enumerate(ascending):
            points = [best, *generator.standard_normal((starts, sphere.size))]
            found = [sphere.minimise(point, radius) for point in points]
            excess[j, r], best = min(found, key=lambda pair: pair[0])
            weights[j, r], k, q = sphere.weight(best, radius)
            if k is not None and q is not None:
                ks[j, r], qs[j, r] = k, q
    return RegularisationPath(ascending, weights, excess, (ks, qs) if factors else None)


class _Sphere:
    """The log excess loss of one trial as a function of a direction of any length."""

    def __init__(self, data: AttentionData, loss: str, rank: int | None) -> None:
        self.slope, self.rank = Gradient(data, loss), rank
        _, _, _, self.dk, self.dq = data.shape
        self.size = self.dk * self.dq if rank is None else (self.dk + self.dq) * rank

    def weight(self, point: Array, radius: float) -> tuple[Array, Array | None, Array | None]:
        """W, and K and Q if factored, of this norm."""
        unit = point / np.linalg.norm(point)
        if self.rank is None:
            return radius * unit.reshape(self.dk, self.dq), None, None
        pair = np.sqrt(2.0 * radius) * unit.reshape(-1, self.rank)
        k, q = pair[: self.dk], pair[self.dk :]
        return k @ q.T, k, q

    def first(self, generator: np.random.Generator) -> Array:
        """Along minus the gradient at zero, split between the factors."""
        direction = self.slope.at(np.zeros((1, self.dk, self.dq))).direction[0]
        if self.rank is None:
            return (
                direction.ravel() if direction.any() else generator.standard_normal(self.size)
            )
        u, s, v = np.linalg.svd(direction)
        pair = generator.standard_normal((self.dk + self.dq, self.rank)) * 1e-3
        kept = min(len(s), self.rank)
        root = np.sqrt(s[:kept])
        pair[: self.dk, :kept] += u[:, :kept] * root
        pair[self.dk :, :kept] += v[:kept].T * root
        return np.asarray(pair.ravel())

    def value(self, point: Array, radius: float) -> tuple[float, Array]:
        """Log excess and its gradient, which has no part along the point."""
        length = float(np.linalg.norm(point))
        weight, k, q = self.weight(point, radius)
        slope = self.slope.at(weight[None])
        excess = float(slope.log_excess()[0])
        pull = -np.exp(slope.log_scale[0] - excess) * slope.direction[0]
        if k is None or q is None:
            full = radius * pull.ravel()
        else:
            full = np.sqrt(2.0 * radius) * np.concatenate([pull @ q, pull.T @ k]).ravel()
        unit = point / length
        return excess, (full - (full @ unit) * unit) / length

    def minimise(self, point: Array, radius: float) -> tuple[float, Array]:
        point = point / np.linalg.norm(point)
        options = {"gtol": 1e-9 * max(1.0, radius), "maxiter": 2000}
        found = minimize(self.value, point, (radius,), "BFGS", jac=True, options=options)
        return float(found.fun), np.asarray(found.x / np.linalg.norm(found.x))
