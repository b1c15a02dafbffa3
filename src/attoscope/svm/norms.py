"""Norms of a weight matrix: value, dual norm, and proximal map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from attoscope.errors import AttoscopeError
from attoscope.svm import _checks as checks
from attoscope.svm.selection import Array

NAMES = ("frobenius", "nuclear", "spectral", "max", "l1")


@runtime_checkable
class Norm(Protocol):
    """What the solver asks of a norm."""

    @property
    def name(self) -> str: ...
    @property
    def dual(self) -> Norm: ...
    @property
    def rotates(self) -> bool:
        """True where rotations of keys and queries leave the norm as it is."""
        ...

    def value(self, weight: Array) -> float: ...
    def prox(self, weight: Array, step: float | int) -> Array:
        """argmin_X step ||X|| + 1/2 ||X - weight||_F^2."""
        ...


# Up to here the calls around a small decomposition cost more than itself.
SMALL = 32


@dataclass(frozen=True)
class Schatten:
    """The l_p norm of the singular values, 1 <= p <= infinity.

    p = 1 is the nuclear norm, 2 the Frobenius norm, infinity the spectral norm.
    """

    p: float | int

    def __post_init__(self) -> None:
        _check_p("Schatten", self.p)

    @property
    def name(self) -> str:
        known = {1.0: "nuclear", 2.0: "frobenius", np.inf: "spectral"}
        return known.get(float(self.p), f"Schatten({self.p:g})")

    @property
    def dual(self) -> Schatten:
        return Schatten(_conjugate(self.p))

    @property
    def rotates(self) -> bool:
        return True

    def value(self, weight: Array) -> float:
        top = float(np.abs(weight).max(initial=0.0))
        if 0.0 < top < np.inf and not 1e-140 < top < 1e140:
            # Squares of such entries would leave the range of numbers.
            return top * self.value(weight / top)
        if self.p == 2:
            return float(np.linalg.norm(weight))
        if self.p == np.inf:
            if 0 < max(weight.shape) <= SMALL:
                from attoscope.svm._kernels import largest_singular

                return float(largest_singular(np.ascontiguousarray(weight)))
            # The largest eigenvalue of the Gram matrix is as accurate, and half the work.
            gram = (
                weight.T @ weight if weight.shape[0] >= weight.shape[1] else weight @ weight.T
            )
            return float(np.sqrt(max(0.0, np.linalg.eigvalsh(gram)[-1])))
        values = np.asarray(np.linalg.svd(weight, compute_uv=False), np.float64)
        return vector_norm(values, self.p)

    def prox(self, weight: Array, step: float | int) -> Array:
        # Eigenvectors of the smaller Gram matrix cost half of a singular value decomposition;
        # what they lose, far below the threshold, is what the map sets to zero or leaves alone.
        if self.p == 1 and max(weight.shape) <= SMALL:
            from attoscope.svm._kernels import shrink

            return np.asarray(shrink(np.ascontiguousarray(weight), float(step)))
        wide = weight.shape[0] < weight.shape[1]
        left = weight.T if wide else weight
        square, v = np.linalg.eigh(left.T @ left)
        s = np.sqrt(np.maximum(square, 0.0))
        shrunk = vector_prox(s, self.p, step)
        keep = (shrunk > 0.0) & (s > 1e-12 * s[-1])
        v = v[:, keep]
        out = (left @ (v * (shrunk[keep] / s[keep]))) @ v.T
        return np.asarray(out.T if wide else out)


@dataclass(frozen=True)
class Entrywise:
    """The l_p norm of the entries, 1 <= p <= infinity (not a Schatten norm).

    Depends on the basis of keys and queries. Source: arXiv 2410.14581.
    """

    p: float | int

    def __post_init__(self) -> None:
        _check_p("Entrywise", self.p)

    @property
    def name(self) -> str:
        return {1.0: "l1", np.inf: "max"}.get(float(self.p), f"l_{self.p:g}")

    @property
    def dual(self) -> Entrywise:
        return Entrywise(_conjugate(self.p))

    @property
    def rotates(self) -> bool:
        return self.p == 2

    def value(self, weight: Array) -> float:
        return vector_norm(np.abs(weight).ravel(), self.p)

    def prox(self, weight: Array, step: float | int) -> Array:
        shrunk = vector_prox(np.abs(weight).ravel(), self.p, step)
        return np.asarray(np.sign(weight) * shrunk.reshape(weight.shape))


def as_norm(norm: str | Norm) -> Norm:
    """A norm from its name ("frobenius", "nuclear", "spectral", "max", "l1") or itself."""
    known: dict[str, Norm] = {
        "frobenius": Schatten(2), "nuclear": Schatten(1), "spectral": Schatten(np.inf),
        "max": Entrywise(np.inf), "l1": Entrywise(1),
    }  # fmt: skip
    if isinstance(norm, str) and norm in known:
        return known[norm]
    if isinstance(norm, (Schatten, Entrywise)):
        return norm
    raise AttoscopeError(
        f"norm: got {norm!r}; expected one of {', '.join(NAMES)}, Schatten(p) or Entrywise(p)"
    )


def vector_norm(values: Array, p: float | int) -> float:
    """The l_p norm of non-negative values, safe against overflow of powers."""
    top = float(values.max(initial=0.0))
    if top == 0.0 or p == np.inf:
        return top
    if p == 1:
        return float(values.sum())
    return top * float(((values / top) ** p).sum() ** (1.0 / p))


def vector_prox(values: Array, p: float | int, step: float | int) -> Array:
    """The proximal map of step * l_p on non-negative values (Moreau: what the dual ball leaves)."""
    if step <= 0.0:
        return values
    if p == 1:
        return np.asarray(np.maximum(values - step, 0.0))
    if p == 2:
        size = float(np.linalg.norm(values))
        return np.asarray(values * max(0.0, 1.0 - step / size)) if size > 0.0 else values
    return np.asarray(np.maximum(values - step * onto_ball(values / step, _conjugate(p)), 0.0))


def onto_ball(values: Array, q: float) -> Array:
    """The nearest point of the l_q unit ball to non-negative values."""
    if vector_norm(values, q) <= 1.0:
        return values
    if q == 1:
        ordered = np.sort(values)[::-1]
        excess = (np.cumsum(ordered) - 1.0) / np.arange(1, len(ordered) + 1)
        count = np.count_nonzero(ordered > excess)
        return np.asarray(np.maximum(values - excess[count - 1], 0.0))
    if q == np.inf:
        return np.asarray(np.minimum(values, 1.0))
    return _onto_power_ball(values, q)


def _onto_power_ball(values: Array, q: float) -> Array:
    """1 < q < infinity: y + m q y^(q-1) = value, with m such that sum y^q = 1."""
    from scipy.optimize import brentq

    def point(log_m: float) -> Array:
        return _power_root(values, np.exp(log_m) * q, q - 1.0)

    def excess(log_m: float) -> float:
        return float(np.log((point(log_m) ** q).sum()))

    low, high = -60.0, 60.0
    while excess(high) > 0.0:
        high *= 2
    root: float = brentq(excess, low, high, xtol=1e-13, rtol=8.9e-16, maxiter=300)
    y = point(root)
    return np.asarray(y / max(1.0, vector_norm(y, q)))


def _power_root(values: Array, c: float, e: float) -> Array:
    """The root y in [0, value] of y + c y^e = value, by Newton in the better of two variables."""
    if e >= 1.0:
        # Convex and increasing in y: from the right Newton never overshoots.
        y = np.minimum(values, (values / c) ** (1.0 / e))
        for _ in range(60):
            step = (y + c * y**e - values) / (1.0 + c * e * y ** (e - 1.0))
            y = np.maximum(y - step, 0.0)
            if np.abs(step).max(initial=0.0) <= 1e-16 * values.max(initial=0.0):
                break
        return np.asarray(y)
    # With w = y^e the equation is w^(1/e) + c w = value, of the first kind again.
    w = _power_root(values / c, 1.0 / c, 1.0 / e)
    return np.asarray(w ** (1.0 / e))


def _conjugate(p: float | int) -> float:
    if p == 1:
        return float("inf")
    return 1.0 if p == np.inf else p / (p - 1.0)


def _check_p(name: str, p: Any) -> None:
    if not (checks.is_number(p) and p >= 1):
        raise AttoscopeError(f"{name}: got p = {p!r}; expected 1 <= p <= infinity")
