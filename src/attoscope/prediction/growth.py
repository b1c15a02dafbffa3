"""How a number changes with depth, in one word: linear, hyperbolic, exponential or conserved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["conserved", "linear", "hyperbolic", "exponential", "unclear"]
# Within a factor of two over the whole depth nothing has to be done about it.
_STEADY = 2.0
_FEWEST = 4


@dataclass(frozen=True, slots=True)
class Growth:
    """The verdict on a positive number at layers 1 to N.

    `kind`: "conserved" (largest over smallest below 2), else the best of the fits below, "unclear"
    with fewer than four layers, or where no fit explains half of the variance. `factor` is the last
    value over the first; `r2` the share of the variance of ln y that each fit explains:
    "linear" `y = a + b n`, "hyperbolic" `ln y = a + b ln n`, "exponential" `ln y = a + b n`.
    """

    kind: Kind
    factor: float
    spread: float
    r2: dict[str, float]


def depth_verdict(values: Sequence[float] | np.ndarray, *, backward: bool = False) -> Growth:
    """The verdict on values at layers 1, 2, …, N, all positive.

    Forward, linear growth competes with exponential; for gradients (`backward`) a power of the
    layer's number does. Fits are least squares, compared in ln y.
    """
    y = np.asarray(values, dtype=np.float64)
    if len(y) < 2 or not np.isfinite(y).all() or (y <= 0).any():
        return Growth("unclear", math.nan, math.nan, {})
    factor, spread = float(y[-1] / y[0]), float(y.max() / y.min())
    n = np.arange(1, len(y) + 1)
    r2 = {
        "hyperbolic" if backward else "linear": (
            _explained(y, np.exp(_line(np.log(n), np.log(y)))) if backward
            else _explained(y, _line(n, y, relative=True))
        ),
        "exponential": _explained(y, np.exp(_line(n, np.log(y)))),
    }  # fmt: skip
    if spread < _STEADY:
        return Growth("conserved", factor, spread, r2)
    best = max(r2, key=lambda name: r2[name])
    clear = len(y) >= _FEWEST and r2[best] >= 0.5
    return Growth(best if clear else "unclear", factor, spread, r2)  # type: ignore[arg-type]


def _line(x: np.ndarray, y: np.ndarray, relative: bool = False) -> np.ndarray:
    """The least squares line through points, at the points; `relative` weighs errors by 1/y."""
    slope, offset = np.polyfit(x, y, 1, w=1 / y if relative else None)
    return np.asarray(offset + slope * x)


def _explained(y: np.ndarray, fit: np.ndarray) -> float:
    """R^2 of ln y; a fit that is not positive everywhere explains nothing."""
    if (fit <= 0).any():
        return -math.inf
    return r_squared(np.log(y), np.log(fit))


def r_squared(observed: np.ndarray, predicted: np.ndarray) -> float:
    """`1 - sum (o - p)^2 / sum (o - mean o)^2`; NaN where the observed values are all equal."""
    spread = float(np.square(observed - observed.mean()).sum())
    if spread == 0:
        return math.nan
    return 1 - float(np.square(observed - predicted).sum()) / spread
