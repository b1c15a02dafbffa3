"""What is read from the attention output: the head h of the model f = h(sum_t s_t x_t)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

from attoscope.errors import AttoscopeError
from attoscope.svm import _checks as checks

Array = NDArray[np.float64]


@runtime_checkable
class Head(Protocol):
    """A fixed, differentiable function of the attention output, one per trial."""

    @property
    def trials(self) -> int: ...
    @property
    def width(self) -> int: ...
    def value(self, outputs: Array) -> Array: ...
    def gradient(self, outputs: Array) -> Array: ...
    def take(self, trials: Int[np.ndarray, " kept"]) -> Head: ...


@dataclass(frozen=True, eq=False)
class LinearHead:
    """`h(a) = v^T a`: its optimum is always a single token.

    Args:
        v: (trial, width).
    """

    v: Float[np.ndarray, "trial width"]

    def __init__(self, v: Any) -> None:
        object.__setattr__(self, "v", checks.floats("v", v, 2, "(trial, width)"))

    @property
    def trials(self) -> int:
        return len(self.v)

    @property
    def width(self) -> int:
        return int(self.v.shape[1])

    def value(
        self, outputs: Float[np.ndarray, "trial sample width"]
    ) -> Float[np.ndarray, "trial sample"]:
        return np.asarray(np.matmul(outputs, self.v[:, :, None])[..., 0])

    def gradient(
        self, outputs: Float[np.ndarray, "trial sample width"]
    ) -> Float[np.ndarray, "trial sample width"]:
        return np.broadcast_to(self.v[:, None, :], outputs.shape)

    def take(self, trials: Int[np.ndarray, " kept"]) -> LinearHead:
        return LinearHead(self.v[trials])


@dataclass(frozen=True, eq=False)
class ReluHead:
    """`h(a) = sum_j relu(a^T V_j)`: may keep several tokens.

    Args:
        V: (trial, width, hidden).
    """

    V: Float[np.ndarray, "trial width hidden"]

    def __init__(self, V: Any) -> None:
        object.__setattr__(self, "V", checks.floats("V", V, 3, "(trial, width, hidden)"))

    @property
    def trials(self) -> int:
        return len(self.V)

    @property
    def width(self) -> int:
        return int(self.V.shape[1])

    def value(
        self, outputs: Float[np.ndarray, "trial sample width"]
    ) -> Float[np.ndarray, "trial sample"]:
        return np.asarray(np.maximum(outputs @ self.V, 0.0).sum(-1))

    def gradient(
        self, outputs: Float[np.ndarray, "trial sample width"]
    ) -> Float[np.ndarray, "trial sample width"]:
        on = (outputs @ self.V > 0.0).astype(np.float64)
        return np.asarray(on @ self.V.transpose(0, 2, 1))

    def take(self, trials: Int[np.ndarray, " kept"]) -> ReluHead:
        return ReluHead(self.V[trials])


@dataclass(frozen=True, eq=False)
class LambdaHead:
    """`h(a) = v^T a - strength ||a||^2`: rewards mixing, the more the larger the strength.

    With orthonormal tokens and label +1 the optimal probabilities are
    `sparsemax(X v / (2 strength))`.

    Args:
        v: (trial, width).
        strength: the code's lambda, at least 0.
    """

    v: Float[np.ndarray, "trial width"]
    strength: float | int

    def __post_init__(self) -> None:
        object.__setattr__(self, "v", checks.floats("v", self.v, 2, "(trial, width)"))
        if not (checks.is_number(self.strength) and 0.0 <= self.strength < np.inf):
            raise AttoscopeError(
                f"strength: got {self.strength!r}; expected a number of at least 0"
            )

    @property
    def trials(self) -> int:
        return len(self.v)

    @property
    def width(self) -> int:
        return int(self.v.shape[1])

    def value(
        self, outputs: Float[np.ndarray, "trial sample width"]
    ) -> Float[np.ndarray, "trial sample"]:
        linear = np.matmul(outputs, self.v[:, :, None])[..., 0]
        return np.asarray(linear - self.strength * (outputs**2).sum(-1))

    def gradient(
        self, outputs: Float[np.ndarray, "trial sample width"]
    ) -> Float[np.ndarray, "trial sample width"]:
        return np.asarray(self.v[:, None, :] - 2.0 * self.strength * outputs)

    def take(self, trials: Int[np.ndarray, " kept"]) -> LambdaHead:
        return LambdaHead(self.v[trials], self.strength)


def sparsemax(scores: Float[np.ndarray, "*batch token"]) -> Float[np.ndarray, "*batch token"]:
    """The point of the probability simplex nearest to the scores, along the last axis.

    `max(score - tau, 0)` with tau such that the sum is 1; minus infinity gives 0. What a
    `LambdaHead` drives the attention probabilities to: `sparsemax(X v / (2 strength))`.

    Raises `AttoscopeError` for no scores, NaN, infinity, and rows of minus infinity alone.
    """
    scores = checks.real("scores", scores, "numbers (..., token)")
    if scores.ndim == 0 or 0 in scores.shape or not np.isfinite(scores.max(-1)).all():
        raise AttoscopeError(
            f"scores: got shape {scores.shape} with a row that is empty or has no finite largest "
            "number; expected (..., token) with one in every row"
        )
    ordered = -np.sort(-scores, axis=-1)
    excess = (np.cumsum(ordered, -1) - 1.0) / np.arange(1, scores.shape[-1] + 1)
    kept = np.count_nonzero(ordered > excess, axis=-1, keepdims=True)
    return np.asarray(np.maximum(scores - np.take_along_axis(excess, kept - 1, -1), 0.0))
