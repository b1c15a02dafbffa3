"""From a selection to a solution: which algorithm, when to stop, what is certified."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import sparse

from attoscope.svm import _scan as scans
from attoscope.svm._problem import Problem, WorkingSet, from_table
from attoscope.svm._project import Clock, Projector, solve
from attoscope.svm.certificate import Certificate, certify, made_to_separate
from attoscope.svm.infeasible import Farkas, InfeasibleSelection
from attoscope.svm.norms import Entrywise, Norm, Schatten
from attoscope.svm.selection import Array, Selection

FROBENIUS = Schatten(2)
# A bound this far above what single constraints ask for makes one look for a contradiction.
SUSPECT = 0.03
# A margin missed by less than this, relative to the right-hand sides, is held.
ROUNDING = 1e-12
PROOF = 1e-13
# The Frobenius solution that other norms start from need not be exact.
FIRST_GAP = 0.1
# Scores chosen together that differ by more, relative to the right-hand sides, are far from equal.
UNEQUAL = 0.1
# After so many looks a small problem is solved directly.
DIRECT = (32, 256, 2048)


@dataclass(frozen=True, eq=False)
class Solution:
    """A weight that separates (where one was found), its multipliers, and what is certified."""

    weight: Array
    dual: Any
    certificate: Certificate
    n_iter: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Start:
    """What an earlier fit found: multipliers (query, token), and the weight."""

    dual: Any
    weight: Array


class Frobenius:
    """The least Frobenius norm, by projecting 0; also the start of every other norm."""

    def __init__(self, problem: Problem, C: float | int, start: Start | None = None) -> None:
        self.problem = problem
        self.C = C
        self.start = start
        old = None if start is None else from_table(problem, start.dual)
        self.projector = Projector(problem, C, old)
        # Given differences of scores between chosen keys do not survive a change of scale.
        wide = problem.rhs.size > 1
        self.tied = wide and bool(
            (problem.rhs[(problem.state & 3) == scans.EQUAL] != 0.0).any()
        )
        self.interior: tuple[Array, float] | None = None

    def run(self, clock: Clock, tol: float | int) -> float:
        """Solve to a relative gap of `tol`; gives the gap."""
        p = self.projector
        p.begin()
        total, square = float(p.set.rhs @ p.set.lam), float(np.vdot(p.weight, p.weight))
        if self.start is not None and np.isinf(self.C) and total > 0.0 and square > 0.0:
            # Multipliers of another norm, or another price, at the scale that suits this one.
            p.set.lam *= total / square
            p.weight *= total / square
        return solve(self.projector, clock, self.gap, tol, self.direct)

    def direct(self) -> bool:
        """Solve all constraints at once, where they are few and descent has taken long."""
        if np.isfinite(self.C) or self.projector.looks not in DIRECT:
            return False
        return self.projector.direct(least_distance)

    def gap(self) -> float:
        """Relative gap from the last look at all constraints; raises if they contradict."""
        p = self.projector
        image = p.weight
        square = float(np.vdot(image, image))
        total = float(p.set.rhs @ p.set.lam)
        if np.isfinite(self.C):
            upper = 0.5 * square + self.C * float(p.stats[scans.HINGE])
            most = self.C / max(float(p.set.lam[~p.set.equal].max(initial=0.0)), 1e-300)
            scale = min(most, total / square) if square > 0.0 else most
            lower = scale * total - 0.5 * scale**2 * square
        else:
            point = feasible_weight(p.weight, p.stats, self)
            upper = np.inf if point is None else float(np.linalg.norm(point))
            lower = total / np.sqrt(square) if square > 0.0 else 0.0
            if upper == np.inf:
                seek_contradiction(self.problem, p)
        # Unequal scores of keys chosen together make the weight lie outside, not above.
        unequal = float(p.stats[scans.UNEQUAL]) / p.scale()
        if upper <= 0.0:
            return unequal
        if lower <= 0.0 or upper == np.inf:
            return np.inf
        return max(upper / lower - 1.0, unequal)

    def repaired(self, weight: Array, slack: float) -> Array | None:
        """The weight with as much of the interior point as makes up for `slack` < 0."""
        if slack >= -ROUNDING * self.projector.scale():
            return weight
        return None if self.interior is None else mixed(weight, slack, *self.interior)


def mixed(weight: Array, slack: float, interior: Array, spare: float) -> Array:
    """The convex combination whose worst margin is just held."""
    share = min(1.0, -slack / (spare - slack) * (1.0 + 1e-12))
    return (1.0 - share) * weight + share * interior


def feasible_weight(weight: Array, stats: Array, first: Frobenius) -> Array | None:
    """The weight scaled until it separates, or repaired where no scaling helps."""
    need, permit = float(stats[scans.NEED]), float(stats[scans.PERMIT])
    unequal = float(stats[scans.UNEQUAL])
    if unequal > UNEQUAL * first.projector.scale() / max(1.0, min(need, permit)):
        # Scores that have to be equal: what looks like a margin may be what they differ by.
        return None
    if need <= permit and need < np.inf and not first.tied:
        return need * weight
    return first.repaired(weight, float(stats[scans.SLACK]))


def seek_contradiction(problem: Problem, projector: Projector) -> None:
    """Raises `Contradiction` where the multipliers are a proof, or can be completed to one."""
    s = projector.set
    i = np.repeat(np.arange(len(s.ptr) - 1), np.diff(s.ptr))
    hopeless = (s.sq * problem.zz[i] == 0.0) & np.where(s.equal, s.rhs != 0.0, s.rhs > 0.0)
    if hopeless.any():
        # A key equal to the chosen one (or a query of zero) cannot be told apart at all.
        s.lam = hopeless * np.sign(s.rhs) / float(np.abs(s.rhs) @ hopeless)
        raise Contradiction
    ratio = vanishing(problem, s, s.lam)
    if ratio > SUSPECT or ratio > 0.5 * projector.sought:
        return
    small, looks = problem.quick(len(s.lam)), projector.looks
    if not small and ratio > PROOF and (looks < 8 or looks & (looks - 1)):
        # Completing a proof costs as much as many passes: tried after 8, 16, 32 … looks.
        return
    projector.sought = ratio if small else np.inf
    for proof in (s.lam, least_distance(problem, s, True) if small else rounded(projector)):
        if vanishing(problem, s, proof) <= PROOF:
            s.lam = proof / float(s.rhs @ proof)
            raise Contradiction


def rounded(projector: Projector) -> Array:
    """The multipliers moved to where their combination vanishes, as far as they may."""
    lam = projector.null_part()
    return np.where(projector.set.equal, lam, np.maximum(lam, 0.0))


def vanishing(problem: Problem, s: WorkingSet, lam: Array) -> float:
    """Size of the combination of constraints over the sizes of its terms; 0 contradicts."""
    i = np.repeat(np.arange(len(s.ptr) - 1), np.diff(s.ptr))
    terms = float(np.abs(lam) @ np.sqrt(s.sq * problem.zz[i]))
    if not 0.0 < terms < np.inf or float(s.rhs @ lam) <= 0.0:
        return np.inf
    return float(np.linalg.norm(s.weight(problem, lam / terms)))


def least_distance(problem: Problem, s: WorkingSet, proof: bool = False) -> Array:
    """Multipliers of total 1 whose combination is smallest (Lawson and Hanson).

    Up to scale they are the solution, or prove that there is none. A proof where no right-hand
    side is negative needs only their signs, which a `proof` takes: sizes may then differ widely.
    """
    from scipy.optimize import nnls

    from attoscope.svm._linear import written_out

    design = written_out(problem, s)
    size = np.maximum(np.linalg.norm(design, axis=1), 1e-300)
    side = np.sign(s.rhs) if proof and (s.rhs >= 0.0).all() else s.rhs / size
    design = np.hstack([design / size[:, None], side[:, None]])
    # Free multipliers are the difference of two non-negative ones.
    sides = np.vstack([design, -design[s.equal]])
    goal = np.zeros(design.shape[1])
    goal[-1] = 1.0
    try:
        found, _ = nnls(sides.T, goal)
    except RuntimeError:
        return np.asarray(s.lam)
    lam = found[: len(size)].copy()
    lam[s.equal] -= found[len(size) :]
    return np.asarray(lam / size)


class Contradiction(Exception):
    """The multipliers of the working set prove that the constraints contradict each other."""


def sparse_dual(problem: Problem, working: WorkingSet) -> Any:
    """Multipliers as a sparse (query, token) table in the caller's order."""
    keep = working.lam != 0.0
    before = np.concatenate([[0], np.cumsum(keep)])
    table = sparse.csr_array(
        (working.lam[keep], working.tok[keep], before[working.ptr]), shape=problem.state.shape
    )
    return (
        table if problem.order is None else sparse.csr_array(table[np.argsort(problem.order)])
    )


def solve_selection(
    selection: Selection,
    norm: Norm,
    C: float | int,
    tol: float | int,
    clock: Clock,
    start: Start | None = None,
) -> Solution:
    """Solve and certify. `start` is what an earlier fit found on a problem of this shape.

    Raises `InfeasibleSelection` where a contradiction is proved.
    """
    problem = Problem.of(selection, reduce=norm.rotates)
    first = Frobenius(problem, C if norm == FROBENIUS else np.inf, start)
    try:
        if np.isfinite(C) and first.tied:
            hold_equalities(problem, first)
        if needs_interior(problem, C):
            first.interior = interior_point(problem, clock)
        weight = _run(problem, norm, C, tol, clock, first)
    except Contradiction:
        dual = sparse_dual(problem, first.projector.set)
        raise InfeasibleSelection(Farkas(selection, dual)) from None
    return _finished(selection, problem, norm, C, clock, first, weight)


def _run(
    problem: Problem,
    norm: Norm,
    C: float | int,
    tol: float | int,
    clock: Clock,
    first: Frobenius,
) -> Array:
    if norm == FROBENIUS:
        first.run(clock, 0.5 * tol)
        return first.projector.weight
    if isinstance(norm, Entrywise):
        found = _linear(problem, norm, C, clock, first)
        if found is not None:
            return found
    from attoscope.svm._admm import Alternating

    return Alternating(problem, norm, C, first).run(clock, 0.5 * tol)


def _linear(
    problem: Problem, norm: Norm, C: float | int, clock: Clock, first: Frobenius
) -> Array | None:
    """The solution as a linear programme, where it is a small one."""
    from attoscope.svm._linear import by_linear_programme, is_linear

    if not is_linear(problem, norm):
        return None
    whole = first.projector.everything()
    if np.isinf(C):
        # Proves it where no weight separates.
        first.run(clock, FIRST_GAP)
    found = by_linear_programme(problem, norm, C, whole, clock.time_limit)
    if found is None:
        return None
    weight, whole.lam = found
    first.projector.set = whole
    clock.done += 1
    return weight


def _finished(
    selection: Selection, problem: Problem, norm: Norm, C: float | int, clock: Clock,
    first: Frobenius, weight: Array,
) -> Solution:  # fmt: skip
    dual = sparse_dual(problem, first.projector.set)
    outside = problem.outside(weight)
    if np.isinf(C):
        simple = problem.rhs.size == 1 and first.interior is None and norm == FROBENIUS
        if simple and not first.projector.set.equal.any():
            # The solver stopped after a look at this very weight.
            point = feasible_weight(outside, first.projector.stats, first)
            outside = outside if point is None else point * (1.0 + 1e-15)
        else:
            inner = None if first.interior is None else problem.outside(first.interior[0])
            outside = made_to_separate(selection, outside, inner)
    certificate = certify(selection, outside, dual, norm, C)
    return Solution(outside, dual, certificate, clock.done, clock.seconds)


def hold_equalities(problem: Problem, first: Frobenius) -> None:
    """Raises `Contradiction` where given differences of scores contradict each other.

    A price for shortfalls pays for margins alone.
    """
    only = problem.state.copy()
    only[(only & 3) == scans.COMPETES] = scans.NONE
    probe = Frobenius(replace(problem, state=only), np.inf)
    try:
        probe.run(Clock(500), 1e-6)
    except Contradiction:
        first.projector.set = probe.projector.set
        raise


def needs_interior(problem: Problem, C: float | int) -> bool:
    """Whether scaling a weight may never reach the right-hand sides."""
    if np.isfinite(C):
        return False
    if problem.rhs.size == 1:
        return bool(problem.rhs[0, 0] <= 0.0)
    kinds = problem.state & 3
    low = (kinds == scans.COMPETES) & (problem.rhs <= 0.0)
    return bool(low.any() or ((kinds == scans.EQUAL) & (problem.rhs != 0.0)).any())


def interior_point(problem: Problem, clock: Clock) -> tuple[Array, float] | None:
    """A weight with something to spare on every inequality, and how much (None: none found).

    Mixed into a weight that misses a little, it makes up for it.
    """
    competes = (problem.state & 3) == scans.COMPETES
    rhs = np.broadcast_to(problem.rhs, problem.state.shape)
    scale = float(np.abs(problem.rhs).max()) or 1.0
    for spare in (0.3, 0.03, 0.003, 3e-4):
        wider = replace(problem, rhs=rhs + spare * scale * competes, state=problem.state.copy())
        projector = Projector(wider, np.inf)

        def missing(wider: Problem = wider, projector: Projector = projector) -> float:
            seek_contradiction(wider, projector)
            slack, unequal = projector.stats[scans.SLACK], projector.stats[scans.UNEQUAL]
            # Making chosen keys score exactly equal must not cost what was to be spared.
            held = slack >= -0.5 * spare * scale and unequal <= 0.01 * spare * scale  # noqa: B023
            return 0.0 if held else np.inf

        try:
            projector.begin()
            solve(projector, Clock(min(clock.max_iter, 500), clock.time_limit), missing, 0.0)
        except Contradiction:
            continue
        slack = float(problem.scan(projector.weight, -np.inf, 0)[scans.SLACK])
        if slack > 0.0:
            return projector.weight, slack
    return None
