"""Norms other than Frobenius: alternate between the projection and the norm's proximal map.

    minimise ||V|| + cap * shortfalls(W)   subject to   W = V

Over-relaxed, with the penalty rebalanced when primal and dual residuals part. The multipliers of
the projection, rescaled, are the dual candidate that certifies the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attoscope.svm import _scan as scans
from attoscope.svm import _turns as compiled
from attoscope.svm._memory import Memory, follow
from attoscope.svm._problem import Problem
from attoscope.svm._project import Clock, Projector
from attoscope.svm._turns import APART, MOVED, PUSH
from attoscope.svm.norms import SMALL, Norm, Schatten
from attoscope.svm.selection import Array

if TYPE_CHECKING:
    from attoscope.svm._solve import Frobenius

LOOK = 5
PRUNE = 5
JUMP = 8
SPAN = 1e3


class Alternating:
    """One run of the alternation; the best weight so far is kept with its bound."""

    def __init__(self, problem: Problem, norm: Norm, C: float | int, first: Frobenius) -> None:
        self.problem, self.norm, self.C, self.first = problem, norm, C, first
        self.projector: Projector = first.projector
        from attoscope.svm import _solve

        self.feasible, self.first_gap = _solve.feasible_weight, _solve.FIRST_GAP
        self.best = np.zeros(problem.shape)
        self.upper, self.lower = np.inf, 0.0
        self.looks, self.dual = 0, norm.dual
        self.compiled = norm == Schatten(1) and max(problem.shape) <= SMALL

    def run(self, clock: Clock, tol: float | int) -> Array:
        """Start from the hard Frobenius solution (or what there is of one), then alternate."""
        self.tol = tol
        self.begin(clock)
        while not clock.spent():
            self.turns(LOOK)
            clock.done += LOOK
            self.look()
            if self.upper - self.lower <= tol * self.lower or self.upper == 0.0:
                break
            self.rebalance()
        self.leave()
        return self.best

    def begin(self, clock: Clock) -> None:
        """The Frobenius solution, or the last fit's weight and multipliers, as V and U."""
        p, old = self.projector, self.first.start
        if old is not None:
            p.begin()
            image, self.v = p.weight.copy(), self.problem.inside(old.weight)
        elif np.isinf(self.C):
            self.first.run(clock, self.first_gap)
            image, self.v = p.weight.copy(), p.weight.copy()
        else:
            p.begin()
            p.sweep(5, inner=3)
            image, self.v = p.weight.copy(), p.weight.copy()
        self.rho = self.first_rho = self.penalty(image)
        if old is not None:
            p.set.lam /= self.rho
            image = image / self.rho
        self.y = self.v + image
        p.anchor, p.weight = self.v - image, self.v.copy()
        self.sizes = np.array([np.inf, 0.0, np.linalg.norm(self.v), 0.0])
        self.memory = Memory.of(self.y.size)
        p.cap = self.C / self.rho
        self.look()

    def penalty(self, image: Array) -> float:
        """The multipliers' image at the scale where it pairs with the norm, over the weight's."""
        if self.first.start is not None:
            own = float(np.linalg.norm(self.v))
            return float(np.linalg.norm(image)) / own or 1.0 if own > 0.0 else 1.0
        size = self.dual.value(image)
        return 1.0 / size if size > 0.0 else 1.0

    def turns(self, count: int) -> None:
        """Steps y + RELAX (W - V) of Douglas and Rachford, V = prox(y), W = project(2 V - y)."""
        done = 0
        while done < count:
            asked = count - done if self.compiled else 1
            made = self.several(asked) if self.compiled else self.one()
            done += made
            if made < asked:
                self.catch_up()
                done += 1

    def one(self) -> int:
        """A turn in the norm's own terms: gives 1 where it is complete, 0 where it lags."""
        p = self.projector
        follow(self.memory, self.y.reshape(-1))
        before = self.v
        self.v = self.norm.prox(self.y, 1.0 / self.rho)
        self.sizes[MOVED] = np.linalg.norm(self.v - before)
        anchor = 2.0 * self.v - self.y
        p.weight += anchor - p.anchor
        p.anchor = anchor
        p.sweep(1, inner=compiled.INNER)
        self.sizes[PUSH] = p.push
        if compiled.lags(self.memory, self.sizes, p.scale()):
            return 0
        compiled.close(p.weight, self.y, self.v, self.memory, self.sizes)
        return 1

    def several(self, count: int) -> int:
        """The same in one compiled loop: gives how many turns are complete before one lags."""
        p, q, s = self.problem, self.projector, self.projector.set
        # What was kept as the best weight may be this very array.
        self.v = self.v.copy()
        done = compiled.turns(
            count, p.keys, p.seq, p.ref, p.queries, p.zz, s.ptr, s.tok, s.lam, s.rhs, s.sq,
            s.equal, q.cap, s.gptr, s.gram, q.weight, q.anchor, self.y, self.v, 1.0 / self.rho,
            q.scale(), self.memory, self.sizes,
        )  # fmt: skip
        q.push = self.sizes[PUSH]
        return int(done)

    def catch_up(self) -> None:
        """Ends a turn whose projection lags behind what the alternation has reached."""
        p = self.projector
        for _ in range(3):
            p.jump(JUMP, 0.1)
            p.sweep(1)
            self.sizes[PUSH] = p.push
            if not compiled.lags(self.memory, self.sizes, p.scale()):
                break
        compiled.close(p.weight, self.y, self.v, self.memory, self.sizes)

    def look(self) -> None:
        """Bounds from all constraints, and the constraints that joined."""
        p = self.projector
        scale = p.scale()
        self.looks += 1
        if self.upper == np.inf and self.looks in (16, 128, 1024):
            self.doubt()
        prune = self.looks % PRUNE == 1
        if prune or self.upper == np.inf:
            self.consider(p.weight, p.look(0.0, 1, keep=True))
            p.renew()
        stats = p.look((0.1 if prune else 0.02) * scale, p.room(), at=self.v, keep=not prune)
        self.consider(self.v, stats)
        p.renew()
        p.refresh()
        image = p.weight - p.anchor
        size = self.dual.value(image)
        total = float(p.set.rhs @ p.set.lam)
        if np.isfinite(self.C):
            largest = float(p.set.lam[~p.set.equal].max(initial=0.0))
            scale = min(1.0 / size if size > 0.0 else np.inf, self.C / max(largest, 1e-300))
            self.raise_lower(total * scale, scale)
        elif size > 0.0:
            self.raise_lower(total / size, 1.0 / size)

    def doubt(self) -> None:
        """No weight in sight: the Frobenius problem finds one, or a contradiction."""
        if np.isfinite(self.C):
            return
        probe = type(self.first)(self.problem, self.C)
        probe.interior = self.first.interior
        try:
            probe.run(Clock(5_000), 1e-6)
        except Exception:
            self.projector.set = probe.projector.set
            raise

    def consider(self, weight: Array, stats: Array) -> None:
        """Keep a weight that is better than what there is."""
        upper, point = self.bound(weight, stats)
        # What making scores equal costs afterwards has to be small beside the gap.
        equal = stats[scans.UNEQUAL] <= 0.1 * self.tol * self.projector.scale()
        if upper < self.upper and equal:
            self.upper, self.best = upper, point

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
        ratio = self.sizes[APART] / max(self.sizes[MOVED], 1e-300)
        if 0.2 < ratio < 5.0:
            return
        factor = float(np.clip(np.sqrt(ratio), 0.4, 2.5))
        if not 1.0 / SPAN <= self.rho * factor / self.first_rho <= SPAN:
            # A penalty far from where it began multiplies rounding into the multipliers.
            return
        p = self.projector
        self.rho *= factor
        u = (self.y - self.v) / factor
        self.y = self.v + u
        self.memory.forget()
        p.set.lam = p.set.lam / factor
        p.cap = self.C / self.rho
        p.anchor = self.v - u
        p.refresh()

    def leave(self) -> None:
        """Hand over the multipliers that gave the best lower bound."""
        if self.lower > 0.0:
            self.projector.set, self.projector.set.lam = self.kept[0], self.kept[1]
