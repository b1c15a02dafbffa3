"""Norms other than Frobenius: alternate between the projection and the norm's proximal map.

    minimise ||V|| + cap * shortfalls(W)   subject to   W = V

Over-relaxed, with the penalty rebalanced when primal and dual residuals part. The multipliers of
the projection, rescaled, are the dual candidate that certifies the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attoscope.svm import _scan as scans
from attoscope.svm._problem import Problem
from attoscope.svm._project import Clock, Projector
from attoscope.svm.norms import Norm
from attoscope.svm.selection import Array

if TYPE_CHECKING:
    from attoscope.svm._solve import Frobenius

RELAX = 1.6
LOOK = 5


class Alternating:
    """One run of the alternation; the best weight so far is kept with its bound."""

    def __init__(self, problem: Problem, norm: Norm, C: float | int, first: Frobenius) -> None:
        self.problem, self.norm, self.C, self.first = problem, norm, C, first
        self.projector: Projector = first.projector
        from attoscope.svm._solve import feasible_weight

        self.feasible = feasible_weight
        self.best = np.zeros(problem.shape)
        self.upper, self.lower = np.inf, 0.0
        self.lam = np.zeros(0)

    def run(self, clock: Clock, tol: float | int) -> Array:
        """Start from the hard Frobenius solution (or what there is of one), then alternate."""
        self.tol = tol
        self.begin(clock)
        while not clock.spent():
            for _ in range(LOOK):
                self.turn()
                clock.done += 1
            self.look()
            if self.upper - self.lower <= tol * self.lower or self.upper == 0.0:
                break
            self.rebalance()
        self.leave()
        return self.best

    def begin(self, clock: Clock) -> None:
        p = self.projector
        if np.isinf(self.C):
            self.first.run(clock, 1e-3)
        else:
            p.begin()
            p.sweep(5, inner=3)
        size = self.norm.dual.value(p.weight)
        self.rho = 1.0 / size if size > 0.0 else 1.0
        self.image = p.weight.copy()
        self.u, self.v = p.weight.copy(), p.weight.copy()
        p.cap = self.C / self.rho
        self.look()

    def turn(self) -> None:
        """Project, shrink, and move the multiplier of W = V."""
        p = self.projector
        anchor = self.v - self.u
        p.weight += anchor - p.anchor
        p.anchor = anchor
        p.sweep(2)
        mixed = RELAX * p.weight + (1.0 - RELAX) * self.v
        before = self.v
        self.v = self.norm.prox(mixed + self.u, 1.0 / self.rho)
        self.u = self.u + mixed - self.v
        self.apart = float(np.linalg.norm(p.weight - self.v))
        self.moved = float(np.linalg.norm(self.v - before))

    def look(self) -> None:
        """Bounds from all constraints, and the constraints that joined."""
        p = self.projector
        scale = p.scale()
        for weight in (self.v, p.weight):
            stats = p.scan(0.1 * scale, p.room(), at=weight)
            upper, point = self.bound(weight, stats)
            if upper < self.upper and stats[scans.UNEQUAL] <= self.tol * scale:
                self.upper, self.best = upper, point
        p.refresh()
        image = p.weight - p.anchor
        size = self.norm.dual.value(image)
        total = float(p.set.rhs @ p.set.lam)
        if np.isfinite(self.C):
            largest = float(p.set.lam[~p.set.equal].max(initial=0.0))
            scale = min(1.0 / size if size > 0.0 else np.inf, self.C / max(largest, 1e-300))
            self.raise_lower(total * scale, scale)
        elif size > 0.0:
            self.raise_lower(total / size, 1.0 / size)

    def raise_lower(self, value: float, scale: float) -> None:
        if value > self.lower:
            self.lower = value
            self.kept = (self.projector.set, self.projector.set.lam * scale)

    def bound(self, weight: Array, stats: Array) -> tuple[float, Array]:
        """An upper bound on the optimum, and the weight that reaches it."""
        if np.isfinite(self.C):
            return self.norm.value(weight) + self.C * float(stats[scans.HINGE]), weight
        point = self.feasible(weight, stats, self.first)
        return (np.inf, weight) if point is None else (self.norm.value(point), point)

    def rebalance(self) -> None:
        """A penalty that lets W - V and the change of V shrink together."""
        ratio = self.apart / max(self.moved, 1e-300)
        if 0.2 < ratio < 5.0:
            return
        factor = float(np.clip(np.sqrt(ratio), 0.4, 2.5))
        p = self.projector
        self.rho *= factor
        self.u = self.u / factor
        p.set.lam = p.set.lam / factor
        p.cap = self.C / self.rho
        p.anchor = self.v - self.u
        p.refresh()

    def leave(self) -> None:
        """Hand over the multipliers that gave the best lower bound."""
        if self.lower > 0.0:
            self.projector.set, self.projector.set.lam = self.kept[0], self.kept[1]
