"""Norms other than Frobenius: alternate between the projection and the norm's proximal map.

    minimise ||V|| + cap * shortfalls(W)   subject to   W = V

Over-relaxed, with the penalty rebalanced when primal and dual residuals part. The multipliers of
the projection, rescaled, are the dual candidate that certifies the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, no_type_check

import numpy as np

from attoscope.svm import _scan as scans
from attoscope.svm._dense import by_cholesky
from attoscope.svm._jit import kernel
from attoscope.svm._problem import Problem
from attoscope.svm._project import Clock, Projector
from attoscope.svm.norms import Norm
from attoscope.svm.selection import Array

if TYPE_CHECKING:
    from attoscope.svm._solve import Frobenius

RELAX = 1.6
LOOK = 5
PRUNE = 5
SWEEPS, JUMP = 1, 8
DEPTH = 8
GROWTH = 2.0
REACH = 5.0
LAG, STRICT = 10.0, 0.2
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
        self.looks = 0
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
        self.size, self.apart, self.moved = float(np.linalg.norm(self.v)), np.inf, 0.0
        self.memory = Memory(self.y.size)
        p.cap = self.C / self.rho
        self.look()

    def penalty(self, image: Array) -> float:
        """The multipliers' image at the scale where it pairs with the norm, over the weight's."""
        if self.first.start is not None:
            own = float(np.linalg.norm(self.v))
            return float(np.linalg.norm(image)) / own or 1.0 if own > 0.0 else 1.0
        size = self.norm.dual.value(image)
        return 1.0 / size if size > 0.0 else 1.0

    def turn(self) -> None:
        """One step y + RELAX (W - V) of Douglas and Rachford, V = prox(y), W = project(2 V - y)."""
        p = self.projector
        following = self.memory.step()
        if following is not None:
            self.y = following.reshape(self.y.shape)
        before = self.v
        self.v = self.norm.prox(self.y, 1.0 / self.rho)
        anchor = 2.0 * self.v - self.y
        p.weight += anchor - p.anchor
        p.anchor = anchor
        p.sweep(SWEEPS, inner=8)
        lag = LAG if self.memory.patience <= 16 else STRICT
        for _ in range(3):
            if p.push * self.size <= lag * p.scale() * self.apart:
                break
            # The projection lags behind what the alternation has reached.
            p.jump(JUMP, 0.1)
            p.sweep(1)
        apart = p.weight - self.v
        self.memory.add(self.y, RELAX * apart)
        self.apart = float(np.linalg.norm(apart))
        self.moved = float(np.linalg.norm(self.v - before))
        self.size = float(np.linalg.norm(self.v))

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
        size = self.norm.dual.value(image)
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
        ratio = self.apart / max(self.moved, 1e-300)
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


class Memory:
    """Anderson's acceleration: the next point from the last few steps of a fixed-point map."""

    def __init__(self, size: int) -> None:
        self.points = np.empty((DEPTH, size))
        self.steps = np.zeros((DEPTH, size))
        self.gram = np.zeros((DEPTH, DEPTH))
        self.order: list[int] = []
        self.length = self.last = np.inf
        self.plain, self.patience = 0, 4

    def add(self, point: Array, step: Array) -> None:
        """The map sends `point` to `point + step`; a step that grew too much is not believed."""
        length = float(np.linalg.norm(step))
        if length > GROWTH * self.length:
            # Not believed: plain steps for a while, a longer one each time this happens.
            self.order, self.plain = [], self.patience
            self.patience = min(2 * self.patience, 1024)
            self.length = length
        self.length, self.last = min(self.length, length), length
        self.plain -= 1
        free = next((k for k in range(DEPTH) if k not in self.order), None)
        slot = self.order.pop(0) if free is None else free
        self.order.append(slot)
        self.points[slot], self.steps[slot] = point.ravel(), step.ravel()
        self.gram[slot] = self.gram[:, slot] = self.steps @ self.steps[slot]

    def forget(self) -> None:
        """The map has changed: what was seen of it says nothing any more."""
        self.order, self.length = [], np.inf

    def step(self) -> Array | None:
        """Where the last points, mixed so that their steps cancel best, are sent."""
        if not self.order:
            return None
        order = self.order if self.plain <= 0 and len(self.order) > 2 else self.order[-1:]
        return np.asarray(
            mixed_step(self.gram, self.points, self.steps, np.array(order), REACH * self.last)
        )


@kernel
@no_type_check
def mixed_step(gram, points, steps, order, reach):
    """Least squares over the steps in `order` (the newest last); at most `reach` off the newest."""
    rest, last = order.shape[0] - 1, order[-1]
    share = np.zeros(rest + 1)
    share[rest] = 1.0
    if rest > 0:
        square, cross = np.empty((rest, rest)), np.empty(rest)
        own, trace = gram[last, last], 0.0
        for a in range(rest):
            cross[a] = own - gram[last, order[a]]
        for a in range(rest):
            for b in range(rest):
                square[a, b] = cross[a] + cross[b] - own + gram[order[a], order[b]]
            trace += square[a, a]
        for a in range(rest):
            # Steps that do not differ say nothing: what they leave undetermined stays small.
            square[a, a] += 1e-10 * trace + 1e-12 * own + 1e-300
        part, done = by_cholesky(square, cross)
        if done:
            for a in range(rest):
                share[a] = part[a]
                share[rest] -= part[a]
    plain = points[last] + steps[last]
    out = np.zeros_like(plain)
    for a in range(rest + 1):
        out += share[a] * (points[order[a]] + steps[order[a]])
    far = np.sqrt(np.sum((out - plain) ** 2)) / (reach + 1e-300)
    return out if far <= 1.0 else plain + (out - plain) / far
