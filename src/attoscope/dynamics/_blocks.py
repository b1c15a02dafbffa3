"""Many small trials under the rule of the official code: blocks of them in one kernel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attoscope.dynamics import _lanes as kernels
from attoscope.dynamics.gradients import Gradient
from attoscope.dynamics.rules import EPS, Normalised, Rule, rate

Array = NDArray[np.float64]
# Lanes come in whole vectors, and few enough that a block stays in the cache. With fewer trials a
# loop over them costs more than it saves, and wider weights are better read trial by trial.
VECTOR, MOST = 8, 64
FEWEST, WIDEST = 8, 14


def served(rule: Rule, slope: Gradient, parameters: list[Array]) -> bool:
    """Whether `Blocks` takes this: `Normalised` to the letter, a linear head, many small trials."""
    plain = type(rule) is Normalised and not rule.log_domain and slope.linear
    small = max(slope.direction.shape[1:] + parameters[0].shape[1:]) <= WIDEST
    return plain and small and slope.data.trials >= FEWEST


class Blocks:
    """A run's parameters, trial by trial, and as arrays (block, rows, lanes) that are trained."""

    def __init__(
        self, slope: Gradient, parameters: list[Array], factored: bool, weight_decay: float
    ) -> None:
        d = slope.data
        trials, samples, size, dk, dq = d.shape
        self.blocks = -(-trials // MOST)
        self.lanes = VECTOR * -(-trials // (VECTOR * self.blocks))
        self.parameters, self.factored = parameters, factored
        self.decay, self.code, self.sequence = weight_decay, slope.code, d.sequence
        self.size = (samples, size, dk, dq, parameters[0].shape[2] if factored else 0)
        tokens = self.packed(d.tokens)
        self.tokens = tokens.reshape(self.blocks, d.tokens.shape[1], size * dk, self.lanes)
        self.read = [self.packed(a) for a in (d.queries, barred(d.allowed), slope.gamma)]
        self.trained = [self.packed(p) for p in parameters]
        nothing = np.zeros((self.blocks, 0, self.lanes))
        product = np.zeros((self.blocks, dk * dq, self.lanes))
        first, second = self.trained if factored else (nothing, nothing)
        self.changed = [product if factored else self.trained[0], first, second]
        self.weight = np.empty_like(slope.direction) if factored else parameters[0]
        self.coefficients = np.zeros_like(slope.coefficients)
        self.changed.append(self.packed(self.coefficients))

    @property
    def kept(self) -> list[Array]:
        """What is recorded."""
        return [self.weight, self.coefficients, *(self.parameters if self.factored else [])]

    def advance(self, rule: Rule, first: int, last: int) -> None:
        """Steps `first` to before `last`."""
        assert isinstance(rule, Normalised)
        rates = np.array([rate(rule.lr, number) for number in range(first, last)], np.float64)
        for b in range(self.blocks):
            queries, barred, gamma = (array[b] for array in self.read)
            kernels.advance(
                rates, self.tokens[b], queries, self.sequence, barred, gamma, self.code,
                self.decay, EPS, self.size, *(array[b] for array in self.changed),
            )  # fmt: skip

    def collect(self) -> None:
        """Trial by trial again; the products of the factors too."""
        weight, _, _, summed = self.changed
        for into, packed in (
            (self.weight, weight),
            (self.coefficients, summed),
            *(zip(self.parameters, self.trained, strict=True) if self.factored else ()),
        ):
            rows = packed.transpose(0, 2, 1).reshape(self.blocks * self.lanes, -1)
            into[...] = rows[: len(into)].reshape(into.shape)

    def packed(self, array: Array) -> Array:
        """(trial, ...) as (block, rows, lanes), with zeros in the lanes that are left over."""
        rows = np.zeros((self.blocks * self.lanes, array[0].size))
        rows[: len(array)] = array.reshape(len(array), -1)
        return np.ascontiguousarray(
            rows.reshape(self.blocks, self.lanes, -1).transpose(0, 2, 1)
        )


def barred(allowed: NDArray[np.bool_]) -> Array:
    """What is added to scores: minus infinity where not allowed."""
    return np.where(allowed, 0.0, -np.inf)
