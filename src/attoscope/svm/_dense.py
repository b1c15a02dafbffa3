"""Few constraints, wide data: the inner products of the working set are written out and solved.

maximise residual . step - 1/2 step^T G step over the steps that keep multipliers allowed, by
Newton's method on the free ones (a few Cholesky factorisations; finite when it settles).
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dposv

from attoscope.svm._jit import kernel
from attoscope.svm._kernels import clip
from attoscope.svm._problem import Problem, WorkingSet
from attoscope.svm.selection import Array

ROUNDS, SWEEPS = 12, 40
TINY, LARGEST = 400, 2500
RIDGE = 1e-12


def pays(problem: Problem, working: WorkingSet, iterations: int) -> bool:
    """Whether this costs less than so many conjugate-gradient iterations."""
    m = len(working.tok)
    if m <= TINY or m > LARGEST:
        return m <= TINY
    rows, columns = problem.shape
    dense = 2.0 * m * m * (rows + columns) + 3.0 * m**3 / 3.0
    return dense < iterations * 4.0 * len(problem.queries) * rows * columns * 3.0


def inner_products(problem: Problem, working: WorkingSet) -> Array:
    """<A_p, A_q> of the working set's constraint matrices A = (key[ref] - key[t]) query^T."""
    p, s = problem, working
    i = np.repeat(np.arange(len(s.ptr) - 1), np.diff(s.ptr))
    apart = p.keys[p.seq[i], p.ref[i]] - p.keys[p.seq[i], s.tok]
    z = p.queries[i]
    return np.asarray((apart @ apart.T) * (z @ z.T))


def newton_step(gram: Array, working: WorkingSet, residual: Array, cap: float) -> Array:
    """The change of multipliers; its dual gain is never negative."""
    s = working
    lam, r = s.lam.copy(), residual.copy()
    diagonal = np.maximum(np.diagonal(gram), 1e-300)
    lower = np.where(s.equal, -np.inf, 0.0)
    upper = np.where(s.equal, np.inf, cap)
    descend(gram, lam, r, s.equal, cap, SWEEPS, 1e-5)
    for _ in range(ROUNDS):
        aim = lam + r / diagonal
        free = (s.equal | ((aim > 0.0) & (aim < cap))) & (s.sq > 0.0)
        if not free.any():
            break
        full = solved(gram, free, r)
        aim = lam + full
        if (
            free.sum() == np.count_nonzero(lam)
            and (aim >= lower).all()
            and (aim <= upper).all()
        ):
            lam, r = aim, r - gram @ full
            break
        step = np.clip(aim, lower, upper) - lam
        fixed = ~free & ~s.equal
        step[fixed] = np.clip(lam + r / diagonal, 0.0, cap)[fixed] - lam[fixed]
        short = within(lam, full, lower, upper) * full
        change, part, gain = _uphill(gram, step, r)
        other, part_other, gain_other = _uphill(gram, short, r)
        if gain_other > gain:
            change, part, gain = other, part_other, gain_other
        if gain <= 0.0:
            break
        done = np.array_equal(change, full)
        lam, r = np.clip(lam + change, lower, upper), r - part
        if done:
            break
    return lam - s.lam


@kernel
@no_type_check
def descend(gram, lam, r, equal, cap, rounds, rtol):
    """Coordinate descent on the written-out problem: finds the face that Newton then solves."""
    m = lam.shape[0]
    first = 0.0
    for turn in range(rounds):
        worst = 0.0
        for p in range(m):
            curve = gram[p, p]
            if curve <= 0.0:
                continue
            step = clip(lam[p] + r[p] / curve, equal[p], cap) - lam[p]
            if step != 0.0:
                worst = max(worst, abs(step) * curve)
                lam[p] += step
                for q in range(m):
                    r[q] -= step * gram[p, q]
        if turn == 0:
            first = worst
        if worst <= rtol * first:
            break


def within(lam: Array, step: Array, lower: Array, upper: Array) -> float:
    """The longest share of the step, up to all of it, that keeps every multiplier allowed."""
    with np.errstate(divide="ignore", invalid="ignore"):
        room = np.where(step > 0.0, (upper - lam) / step, (lower - lam) / step)
    return float(np.clip(np.min(room[step != 0.0], initial=1.0), 0.0, 1.0))


def solved(gram: Array, free: NDArray[np.bool_], r: Array) -> Array:
    """The step that makes the residuals of the free constraints vanish."""
    index = np.flatnonzero(free)
    part = gram[index][:, index]
    out = np.zeros(len(r))
    ridge = RIDGE * float(np.trace(part)) / len(part)
    for _ in range(6):
        part.flat[:: len(part) + 1] += ridge
        _, found, failed = dposv(part, r[index], lower=1)
        if not failed:
            out[index] = found
            return out
        ridge *= 100.0
    out[index] = r[index] / np.diagonal(part)
    return out


def _uphill(gram: Array, step: Array, r: Array) -> tuple[Array, Array, float]:
    """The step shortened to the best point along it, what it does to residuals, and its gain."""
    change = gram @ step
    slope, curve = float(r @ step), float(step @ change)
    share = min(1.0, slope / curve) if curve > 0.0 else 1.0
    if slope <= 0.0:
        return step, change, 0.0
    gain = share * slope - 0.5 * share**2 * curve
    return (step, change, gain) if share == 1.0 else (share * step, share * change, gain)
