"""Training the attention weight, or its factors, of many trials side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attoscope.dynamics import _kernels as kernels
from attoscope.dynamics._blocks import Blocks, served
from attoscope.dynamics.data import AttentionData
from attoscope.dynamics.gradients import Gradient, checked_weight
from attoscope.dynamics.rules import EPS, Descent, Normalised, Rule, refuse_overflow
from attoscope.dynamics.trajectory import Trajectory
from attoscope.errors import AttoscopeError
from attoscope.svm import _checks as checks

Array = NDArray[np.float64]
RECORDS = 60


def train(
    data: AttentionData,
    rule: Rule,
    steps: int,
    *,
    weight: Any = None,
    factors: Any = None,
    loss: str = "logistic",
    weight_decay: float | int = 0.0,
    record: int | Sequence[int] | None = None,
) -> Trajectory:
    """Full-batch training of W, or of K and Q with W = K Q^T, on the mean loss over samples.

    Args:
        data: what to train on; all its trials are trained side by side, each by itself.
        rule: `GradientDescent`, `Normalised`, `Polyak`, `Steepest`, `Adam` or `Mirror`.
        steps: how many, at least 1.
        weight: the start, (trial, key width, query width); zeros when left out.
        factors: starts (K, Q) of (trial, key width, m) and (trial, query width, m); trains these.
        loss: "logistic", "exponential" or "linear" (`-u`) of `u = label * f`.
        weight_decay: adds `weight_decay / 2` times the squared Frobenius norms of what is trained.
        record: after which steps the weights are kept: every so many, these numbers (0 is the
            start), or about 60 evenly spaced in the logarithm; the last always is.

    Gives a `Trajectory`. Raises `AttoscopeError` for bad input, and when the weights overflow.
    """
    if not isinstance(data, AttentionData):
        raise AttoscopeError(f"data: got {type(data).__name__}; expected AttentionData")
    # A class has the members of its instances.
    if isinstance(rule, type) or not isinstance(rule, Rule):
        raise AttoscopeError(
            f"rule: got {rule!r}; expected one with its lr, as Normalised(0.1)"
        )
    parameters, factored = _start(data, weight, factors)
    if not (checks.is_number(weight_decay) and 0.0 <= weight_decay < np.inf):
        raise AttoscopeError(f"weight_decay: got {weight_decay!r}; expected at least 0")
    if factored and isinstance(rule, Normalised) and not rule.log_domain:
        weight_decay = weight_decay + 2.0 * EPS
    kept = record_steps(steps, record)
    slope = Gradient(data, loss, log_domain=rule.log_domain)
    kind = Blocks if served(rule, slope, parameters) else Loop
    loop = kind(slope, parameters, factored, float(weight_decay))
    records = [np.empty((len(kept), *part.shape)) for part in loop.kept]
    number = 0
    for done, following in enumerate(kept):
        loop.advance(rule, number, number := int(following))
        loop.collect()
        refuse_overflow("a weight", number, loop.weight)
        for into, part in zip(records, loop.kept, strict=True):
            into[done] = part
    weights, coefficients, *rest = records
    return Trajectory(
        data, loss, kept, weights, coefficients, (rest[0], rest[1]) if factored else None
    )


class Loop:
    """The parameters of a run, and one step on them."""

    def __init__(
        self, slope: Gradient, parameters: list[Array], factored: bool, weight_decay: float
    ) -> None:
        self.slope, self.parameters, self.factored = slope, parameters, factored
        self.weight_decay = weight_decay
        self.memory: dict[str, Any] = {}
        self.weight = np.empty_like(slope.direction) if factored else parameters[0]
        self.directions = [np.empty_like(p) for p in parameters]
        self.coefficients = np.zeros_like(slope.coefficients)
        self.excess = slope.log_excess if slope.linear and weight_decay <= 2.0 * EPS else None

    @property
    def kept(self) -> list[Array]:
        """What is recorded."""
        return [self.weight, self.coefficients, *(self.parameters if self.factored else [])]

    def advance(self, rule: Rule, first: int, last: int) -> None:
        """Steps `first` to before `last`."""
        for number in range(first, last):
            self.collect()
            self.step(rule, number)

    def collect(self) -> None:
        """The weight made from its factors."""
        if self.factored:
            kernels.product(*self.parameters, self.weight)

    def step(self, rule: Rule, number: int) -> None:
        slope = self.slope.at(self.weight)
        if self.factored:
            kernels.split(slope.direction, *self.parameters, *self.directions)
        else:
            self.directions[0][...] = slope.direction
        log_scale, shrunk = self.decay(slope.log_scale)
        descent = Descent(self.directions, log_scale, number, self.excess)
        scales = rule.step(self.parameters, descent, self.memory)
        share = scales[0] if len(scales) == 1 else 0.5 * (scales[0] + scales[1])
        self.coefficients += (share * shrunk)[:, None, None] * slope.coefficients

    def decay(self, log_scale: Array) -> tuple[Array, Array | float]:
        """Add the penalty's gradient, in whichever units are the larger."""
        if self.weight_decay == 0.0:
            return log_scale, 1.0
        if not self.slope.log_domain:
            for p, d in zip(self.parameters, self.directions, strict=True):
                d -= self.weight_decay * p
            return log_scale, 1.0
        common = np.maximum(log_scale, np.log(self.weight_decay))
        shrunk = np.exp(log_scale - common)
        pull = self.weight_decay * np.exp(-common)
        for p, d in zip(self.parameters, self.directions, strict=True):
            d *= shrunk[:, None, None]
            d -= pull[:, None, None] * p
        return common, shrunk


def _start(data: AttentionData, weight: Any, factors: Any) -> tuple[list[Array], bool]:
    """Copies of the parameters to train, and whether they are factors."""
    trials, _, _, dk, dq = data.shape
    if factors is None:
        if weight is None:
            return [np.zeros((trials, dk, dq))], False
        return [checked_weight("weight", weight, data).copy()], False
    if weight is not None:
        raise AttoscopeError("weight: got weight and factors; expected one or the other")
    if len(factors) != 2:
        raise AttoscopeError(f"factors: got {len(factors)} arrays; expected the pair (K, Q)")
    k, q = (checks.floats("factors", f, 3, "(trial, width, m)").copy() for f in factors)
    if k.shape[:2] != (trials, dk) or q.shape != (trials, dq, k.shape[2]):
        raise AttoscopeError(
            f"factors: got shapes {k.shape} and {q.shape}; expected {(trials, dk, 'm')} and "
            f"{(trials, dq, 'm')} with one m"
        )
    return [k, q], True


def record_steps(steps: int, record: int | Sequence[int] | None) -> NDArray[np.int64]:
    """The step numbers after which the weights are kept."""
    if not checks.is_number(steps, whole=True) or steps < 1:
        raise AttoscopeError(f"steps: got {steps!r}; expected a whole number of at least 1")
    if record is None:
        numbers = np.unique(np.geomspace(1, steps, RECORDS).round().astype(np.int64))
    elif isinstance(record, (int, np.integer)) and not isinstance(record, bool):
        if record < 1:
            raise AttoscopeError(f"record: got every {record} steps; expected at least 1")
        numbers = np.arange(record, steps + 1, record, dtype=np.int64)
    else:
        meaning = "a whole number, or a sequence of step numbers"
        found = checks.as_array("record", record, meaning)
        if found.ndim == 0:
            raise AttoscopeError(f"record: got {record!r}; expected {meaning}")
        numbers = np.unique(checks.whole("record", found, meaning) if found.size else [])
        if len(numbers) and (numbers[0] < 0 or numbers[-1] > steps):
            raise AttoscopeError(
                f"record: got steps from {numbers[0]} to {numbers[-1]}; expected 0 to {steps}"
            )
    return np.union1d(numbers, [steps]).astype(np.int64)
