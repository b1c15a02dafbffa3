"""The decreasing losses l(u) of the margin u = label * f, and their excess over the infimum."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from attoscope.errors import AttoscopeError

Array = NDArray[np.float64]
# The order is the number that the kernels know a loss by.
LOSSES = ("logistic", "exponential", "linear")
# Below this an excess is linear in the score lost, to rounding.
TINY = -36.0


def loss_code(loss: str) -> int:
    """The number by which the kernels know a loss."""
    if loss not in LOSSES:
        raise AttoscopeError(f"loss: got {loss!r}; expected one of {', '.join(LOSSES)}")
    return LOSSES.index(loss)


def loss_value(loss: str, margin: Float[np.ndarray, "*batch"]) -> Float[np.ndarray, "*batch"]:
    """`log(1 + exp(-u))` (logistic), `exp(-u)` (exponential) or `-u` (linear)."""
    code = loss_code(loss)
    if code == 0:
        return np.asarray(np.logaddexp(0.0, -margin))
    return np.asarray(np.exp(-margin) if code == 1 else -margin)


def log_excess(
    loss: str, best: Float[np.ndarray, "*batch"], log_lost: Float[np.ndarray, "*batch"]
) -> Float[np.ndarray, "*batch"]:
    """`log(l(best - lost) - l(best))`, exact however small `lost = exp(log_lost)` is."""
    code = loss_code(loss)
    if code == 2:
        return log_lost
    log_slope = -np.logaddexp(0.0, best) if code == 0 else -best
    lost = np.exp(np.maximum(log_lost, TINY))
    # log(exp(lost) - 1) of any size, as scores may be large.
    full = log_slope + lost + np.log(-np.expm1(-lost))
    if code == 0:
        full = np.where(full < TINY, full, np.log(np.logaddexp(0.0, np.maximum(full, TINY))))
    return np.asarray(np.where(log_lost < TINY, log_slope + log_lost, full))
