"""The one primitive of the solver: the nearest weight whose margins hold.

    minimise 1/2 ||W - W0||_F^2 + cap * sum of shortfalls,   margins(W) >= rhs

by dual coordinate descent in blocks over a working set, matrix products that find what the
working set lacks, and conjugate gradients on the face of free multipliers to finish.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from attoscope.svm import _dense as dense
from attoscope.svm import _kernels as kernels
from attoscope.svm import _scan as scans
from attoscope.svm._face import face_step
from attoscope.svm._problem import Problem, WorkingSet
from attoscope.svm.selection import Array

BLOCK = 32
# Below this many constraints all of them are visited from the start.
ALL = 50_000
NEAR = 2.0
# How far conjugate gradients go: further once the free multipliers are the same as before.
RTOL, SETTLED_RTOL = 0.05, 0.003
MOST = 64
SMALL, SMALL_SWEEPS = 1_000, 4
FIRST, SWEEPS, JUMP, LONGEST, INNER = 2, 3, 12, 48, 8


@dataclass
class Clock:
    """Iterations and seconds left; an iteration is one pass over the working set."""

    max_iter: int
    time_limit: float | int | None = None
    done: int = 0
    began: float = field(default_factory=time.perf_counter)

    def spent(self) -> bool:
        late = self.time_limit is not None and (
            time.perf_counter() - self.began > self.time_limit
        )
        return late or self.done >= self.max_iter

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @property
    def left(self) -> int:
        return max(1, self.max_iter - self.done)


class Projector:
    """Keeps the working set and its multipliers between projections of nearby points."""

    def __init__(self, problem: Problem, cap: float, start: WorkingSet | None = None) -> None:
        self.problem = problem
        self.cap = cap
        self.warm = start is not None
        self.set = start or WorkingSet.empty(len(problem.queries))
        self.anchor = np.zeros(problem.shape)
        self.weight = np.zeros(problem.shape)
        self.push, self.whole = np.inf, False
        self.sought, self.looks, self._stale = np.inf, 0, False
        self._reach, self._face, self._spent = JUMP, 0, 0
        self.stats: Array = np.zeros(6)
        self._few = int(np.count_nonzero(problem.state)) <= ALL

    def begin(self, anchor: Array | None = None) -> None:
        """Start from an anchor (0 if none) and the multipliers that are there."""
        if anchor is not None:
            self.anchor = anchor
        self.weight = self.anchor.copy()
        if len(self.set.tok):
            bounded = ~self.set.equal
            self.set.lam[bounded] = np.clip(self.set.lam[bounded], 0.0, self.cap)
            self.weight += self.set.weight(self.problem, self.set.lam)
            return
        if self._few:
            self.problem.state[(self.problem.state & 3) != scans.NONE] |= scans.WORKING
            self._stale = True
        else:
            # The direction that favours every chosen key says which constraints come first.
            self.look(np.inf, 8, at=_hebb(self.problem))
        self.renew(local=not self._few)

    def room(self) -> int:
        """How many keys may join per query: about as many as already count, and a few more."""
        return 4 + int(1.5 * np.count_nonzero(self.set.lam) / len(self.problem.queries))

    def reach(self) -> tuple[int, float]:
        """Conjugate-gradient iterations worth taking, and how far: more once the face settled."""
        count = int(np.count_nonzero(self.set.lam))
        settled = abs(count - self._face) <= 0.003 * count
        self._face = count
        self._reach = min(2 * self._reach, LONGEST) if settled else JUMP
        return self._reach, SETTLED_RTOL if settled else RTOL

    def few(self) -> bool:
        """Whether the working set is solved as a whole."""
        return len(self.set.tok) <= dense.TINY

    def turns_per_look(self) -> int:
        """How often to go over the working set before all constraints are read again."""
        every, few = self.problem.state.size, max(1, len(self.set.tok))
        return int(np.clip(every / (40 * few), 1, 4))

    def scale(self) -> float:
        """The size of right-hand sides: what a violation is compared with."""
        return self.set.scale

    def look(
        self, threshold: float, most: int, at: Array | None = None, keep: bool = False
    ) -> Array:
        """Read all constraints and mark the close ones, which `renew` lets join.

        With `keep` the others stay, and the set is left alone where nothing is to join.
        """
        self.looks += 1
        weight = self.weight if at is None else at
        self.stats = self.problem.scan(weight, threshold, most, keep)
        self._stale = not keep or bool(self.stats[scans.FRESH] > 0.0)
        return self.stats

    def renew(self, local: bool = True) -> None:
        """The working set as marked; `local` keeps the inner products of single queries."""
        if self._stale:
            self.set = self.set.rebuilt(self.problem, local)
            self._stale = False

    def sweep(self, rounds: int, inner: int | None = None) -> None:
        """Coordinate descent over the working set; `push` says what is left to move."""
        p, s = self.problem, self.set
        self.push = kernels.sweep(
            p.keys, p.seq, p.ref, p.queries, p.zz, self.weight, s.ptr, s.tok, s.lam, s.rhs, s.sq,
            s.equal, self.cap, s.gptr, s.gram, BLOCK, rounds, inner or INNER,
        )  # fmt: skip

    def dual_value(self, lam: Array, weight: Array) -> float:
        """The dual objective, larger is better."""
        moved = weight - self.anchor
        return float(
            self.set.rhs @ lam - np.vdot(self.anchor, moved) - 0.5 * np.vdot(moved, moved)
        )

    def jump(self, iterations: int, rtol: float | int) -> int:
        """Conjugate gradients over the free multipliers; gives the iterations that it took.

        Where it pays, the working set is solved as a whole: `push` says how well.
        """
        p, s = self.problem, self.set
        residual = s.rhs - s.margins(p, self.weight)
        # What conjugate gradients have cost since counts: where they settle nothing, they end.
        self.whole = dense.pays(p, s, iterations + self._spent)
        if self.whole:
            self._spent = 0
            gram = dense.inner_products(p, s)
            lam, self.push = dense.newton_step(gram, s, residual, self.cap)
            self.weight += s.weight(p, lam - s.lam)
            s.lam = lam
            return 1
        aim = s.lam + residual / np.maximum(s.sq * np.repeat(p.zz, np.diff(s.ptr)), 1e-300)
        free = s.equal | ((aim > 0.0) & (aim < self.cap))
        free &= s.sq > 0.0
        step, done = face_step(
            p.keys, p.seq, p.ref, p.queries, p.zz, s.ptr, s.tok, s.sq, free, residual, s.gptr,
            s.gram, iterations, rtol,
        )  # fmt: skip
        self._take(step)
        self._spent += int(done)
        return int(done)

    def _take(self, step: Array) -> None:
        """The step cut to what multipliers may be; shortened where that would go downhill."""
        s = self.set
        before = self.dual_value(s.lam, self.weight)
        lower = np.where(s.equal, -np.inf, 0.0)
        upper = np.where(s.equal, np.inf, self.cap)
        for share in (1.0, 0.3, dense.within(s.lam, step, lower, upper)):
            lam = np.clip(s.lam + share * step, lower, upper)
            weight = self.weight + s.weight(self.problem, lam - s.lam)
            if self.dual_value(lam, weight) >= before:
                s.lam, self.weight = lam, weight
                return

    def null_part(self, iterations: int = 200) -> Array:
        """The multipliers less the least change that makes their combination vanish."""
        p, s = self.problem, self.set
        free = (s.equal | (s.lam > 0.0)) & (s.sq > 0.0)
        lam = np.where(free | (s.sq <= 0.0), s.lam, 0.0)
        gram = dense.inner_products(p, s) if dense.pays(p, s, iterations) else None
        for _ in range(3):
            image = s.margins(p, s.weight(p, lam))
            if gram is not None:
                step = dense.solved(gram, free, image)
            else:
                step, _ = face_step(
                    p.keys, p.seq, p.ref, p.queries, p.zz, s.ptr, s.tok, s.sq, free, image,
                    s.gptr, s.gram, iterations, 1e-12,
                )  # fmt: skip
            lam = np.where(s.equal, lam - step, np.maximum(lam - step, 0.0))
        return np.asarray(lam)

    def everything(self) -> WorkingSet:
        """A working set of all constraints."""
        self.problem.state[(self.problem.state & 3) != scans.NONE] |= scans.WORKING
        return self.set.rebuilt(self.problem, local=True)

    def direct(self, multipliers: Callable[[Problem, WorkingSet], Array]) -> bool:
        """Solve all constraints at once, where they are few: multipliers up to scale."""
        if not self.problem.quick(int(np.count_nonzero(self.problem.state & 3))):
            return False
        whole = self.everything()
        lam = multipliers(self.problem, whole)
        image = whole.weight(self.problem, lam)
        square, total = float(np.vdot(image, image)), float(whole.rhs @ lam)
        if not 0.0 < square < np.inf or total <= 0.0:
            return False
        whole.lam = lam * (total / square)
        self.set = whole
        self.refresh()
        self.look(-np.inf, 0, keep=True)
        return True

    def refresh(self) -> None:
        """The weight made again from the multipliers: rounding does not pile up."""
        self.weight = self.anchor + self.set.weight(self.problem, self.set.lam)


def _hebb(problem: Problem) -> Array:
    """sum over queries of (chosen key - mean key) query^T."""
    own = problem.keys[problem.seq, problem.ref] - problem.keys.mean(1)[problem.seq]
    return np.ascontiguousarray(own.T @ problem.queries)


def solve(
    projector: Projector,
    clock: Clock,
    gap: Callable[[], float],
    tol: float | int,
    direct: Callable[[], bool] = lambda: False,
) -> float:
    """Run the projector until `gap()` <= tol or the clock says stop; gives the last gap.

    `gap` reads `projector.stats` and multipliers, after each look at all constraints; `direct`
    may then solve them another way, and says whether it did.
    """
    scale = projector.scale()
    # A small problem is solved as a whole as soon as its face can be guessed.
    cold = not projector.warm and len(projector.set.tok) <= SMALL
    first = SMALL_SWEEPS if cold else 2
    projector.sweep(first, inner=3)
    clock.done += first
    near, turn = (0.3, 0) if first == 2 else (0.05, FIRST)
    while True:
        slack = projector.look(near * scale, projector.room())[0]
        value = gap()
        if value > tol and direct():
            value = gap()
        if value <= tol or clock.spent():
            return value
        projector.renew()
        # Constraints that a few more passes could make active: some times the present violation;
        # a small problem is solved as a whole, and comes much nearer in one turn.
        violation = float(max(-slack, 0.0))
        reach = 0.05 * NEAR if projector.few() else NEAR
        near = min(0.3, reach * violation / scale + 0.01)
        for _ in range(projector.turns_per_look()):
            if turn >= FIRST or (turn and projector.few()):
                iterations, rtol = projector.reach()
                clock.done += projector.jump(min(iterations, clock.left), rtol)
            turn += 1
            if not (projector.whole and projector.push < 1e-6 * violation):
                settle(projector, clock, turn)
            if projector.push < 0.3 * violation or clock.spent():
                break


def settle(projector: Projector, clock: Clock, turn: int) -> None:
    """A few sweeps; where the face stands, or was solved as a whole, more add little."""
    face = np.count_nonzero(projector.set.lam)
    for _ in range(min(SWEEPS, clock.left)):
        projector.sweep(1)
        clock.done += 1
        late = turn > FIRST - projector.few()
        if late and face == np.count_nonzero(projector.set.lam):
            return
