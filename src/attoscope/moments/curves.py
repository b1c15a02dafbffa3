"""Second moments of activation functions of correlated Gaussians, by quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float
from scipy.interpolate import CubicSpline
from scipy.special import erf, expit

_NODES = 40
_KNOTS = 17
_Function = Callable[[np.ndarray], np.ndarray]


def _normal(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(-x * x / 2) / math.sqrt(2 * math.pi))


def _gelu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x * (1 + erf(x / math.sqrt(2))) / 2)


def _gelu_slope(x: np.ndarray) -> np.ndarray:
    return np.asarray((1 + erf(x / math.sqrt(2))) / 2 + x * _normal(x))


def _swish(c: float) -> tuple[_Function, _Function]:
    def curve(x: np.ndarray) -> np.ndarray:
        return np.asarray(x * expit(c * x))

    def slope(x: np.ndarray) -> np.ndarray:
        s = expit(c * x)
        return np.asarray(s + c * x * s * (1 - s))

    return curve, slope


_CURVES: dict[str, tuple[_Function, _Function]] = {
    "gelu": (_gelu, _gelu_slope),
    "silu": _swish(1.0),
    "quick_gelu": _swish(1.702),
    "tanh": (np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    "identity": (lambda x: x, np.ones_like),
}
KNOWN = ("relu", *_CURVES)


@dataclass(frozen=True, slots=True, eq=False)
class CurveMoments:
    """Of f and its slope f' at u, v: Gaussians of one variance with correlation r.

    `square` is E f(u)^2 and `slope_square` E f'(u)^2; `product` E f(u) f(v) and `slope_product`
    E f'(u) f'(v), for each r that was given.
    """

    square: float
    product: np.ndarray
    slope_square: float
    slope_product: np.ndarray


@lru_cache(maxsize=1)
def _grid() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    weights = weights / weights.sum()
    return nodes[:, None], nodes[None, :], weights[:, None] * weights[None, :]


def curve_moments(name: str, variance: float, r: Float[np.ndarray, "*shape"]) -> CurveMoments:
    """The moments of a known activation, at correlations r from -1 to 1 of any shape.

    "relu" in closed form; others by Gauss-Hermite quadrature (40 x 40 nodes) at 17 correlations,
    and a cubic spline between them.
    """
    r = np.clip(r, -1.0, 1.0)
    if name == "relu":
        shared = np.sqrt(1 - r * r) + r * (math.pi - np.arccos(r))
        slopes = 0.25 + np.arcsin(r) / (2 * math.pi)
        return CurveMoments(variance / 2, variance * shared / (2 * math.pi), 0.5, slopes)
    knots, product, slope_product = _table(name, float(variance))
    return CurveMoments(
        float(product[-1]),
        np.asarray(CubicSpline(knots, product)(r)),
        float(slope_product[-1]),
        np.asarray(CubicSpline(knots, slope_product)(r)),
    )


@lru_cache(maxsize=512)
def _table(name: str, variance: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    curve, slope = _CURVES[name]
    first, second, weights = _grid()
    knots = np.linspace(-1, 1, _KNOTS)
    u = math.sqrt(variance) * (first + 0 * second)
    fu, du = weights * curve(u), weights * slope(u)
    products = []
    for r in knots:
        v = math.sqrt(variance) * (r * first + math.sqrt(1 - r * r) * second)
        products.append((float((fu * curve(v)).sum()), float((du * slope(v)).sum())))
    product, slope_product = np.array(products).T
    return knots, product, slope_product
