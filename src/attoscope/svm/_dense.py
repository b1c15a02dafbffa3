"""Few constraints, wide data: the inner products of the working set are written out and solved.

maximise residual . step - 1/2 step^T G step over the steps that keep multipliers allowed, by
Newton's method on the free ones (a few Cholesky factorisations; finite when it settles).
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from numpy.typing import NDArray

from attoscope.svm._jit import kernel
from attoscope.svm._kernels import clip, pushed
from attoscope.svm._problem import Problem, WorkingSet
from attoscope.svm.selection import Array

# Factorisations at most, and as a rule; sweeps before each.
ROUNDS, TYPICAL, SWEEPS = 12, 3.0, 8
TINY, LARGEST = 400, 3500
RIDGE = 1e-12
# Newton stops when no multiplier is pushed by more than this share of the first residual.
REST = 1e-8


def pays(problem: Problem, working: WorkingSet, iterations: int) -> bool:
    """Whether this costs less than so many conjugate-gradient iterations."""
    m = len(working.tok)
    if m <= TINY or m > LARGEST:
        return m <= TINY
    rows, columns = problem.shape
    dense = 2.0 * m * m * (rows + columns) + TYPICAL * m**3 / 3.0
    return dense < iterations * 4.0 * len(problem.queries) * rows * columns * 3.0


def inner_products(problem: Problem, working: WorkingSet) -> Array:
    """<A_p, A_q> of the working set's constraint matrices A = (key[ref] - key[t]) query^T."""
    p, s = problem, working
    return np.asarray(write_out(p.keys, p.seq, p.ref, p.queries, s.ptr, s.tok))


def newton_step(
    gram: Array, working: WorkingSet, residual: Array, cap: float
) -> tuple[Array, float]:
    """The multipliers after it, never worse ones, and how far one still wants to move."""
    lam, r = working.lam.copy(), residual.copy()
    return lam, float(newton(gram, lam, r, working.equal, working.sq, cap, ROUNDS))


def solved(gram: Array, free: NDArray[np.bool_], r: Array) -> Array:
    """The step that makes the residuals of the free constraints vanish."""
    return np.asarray(face_solution(gram, np.flatnonzero(free), r))


@kernel
@no_type_check
def write_out(keys, seq, ref, queries, ptr, tok):
    m, d = tok.shape[0], keys.shape[2]
    apart = np.empty((m, d))
    owner = np.empty(m, np.int64)
    for i in range(ref.shape[0]):
        own = keys[seq[i]]
        x = own[ref[i]]
        for p in range(ptr[i], ptr[i + 1]):
            y = own[tok[p]]
            owner[p] = i
            for k in range(d):
                apart[p, k] = x[k] - y[k]
    gram = np.dot(apart, apart.T)
    cross = np.dot(queries, queries.T)
    for p in range(m):
        row = cross[owner[p]]
        for q in range(m):
            gram[p, q] *= row[owner[q]]
    return gram


@kernel
@no_type_check
def newton(gram, lam, r, equal, sq, cap, rounds):
    """Changes `lam` and the residuals `r` until no multiplier wants to move, or `rounds` ran."""
    m = lam.shape[0]
    rest = REST * np.abs(r).max() if m else 0.0
    worst = np.inf if m else 0.0
    index = np.empty(m, np.int64)
    short, aim = np.empty(m), np.empty(m)
    for _ in range(rounds):
        # Coordinate descent guesses at the face.
        descend(gram, lam, r, equal, cap, SWEEPS, 1e-5)
        count = 0
        for p in range(m):
            goal = lam[p] + r[p] / max(gram[p, p], 1e-300)
            if sq[p] > 0.0 and (equal[p] or 0.0 < goal < cap):
                index[count] = p
                count += 1
        if count == 0:
            break
        full = face_solution(gram, index[:count], r)
        share, inside = 1.0, True
        for p in range(m):
            aim[p] = clip(lam[p] + full[p], equal[p], cap) - lam[p]
            if aim[p] != full[p]:
                inside = False
                edge = cap if full[p] > 0.0 else 0.0
                share = min(share, (edge - lam[p]) / full[p])
        if not inside:
            # The better of two: cut every multiplier at its bound, or stop at the first bound.
            for p in range(m):
                short[p] = share * full[p]
            if gain_of(gram, short, r) > gain_of(gram, aim, r):
                aim[:] = short
        if gain_of(gram, aim, r) <= 0.0:
            break
        curve = np.dot(aim, np.dot(gram, aim))
        length = min(1.0, np.dot(r, aim) / curve) if curve > 0.0 else 1.0
        change = np.dot(gram, aim)
        worst = 0.0
        for p in range(m):
            lam[p] = clip(lam[p] + length * aim[p], equal[p], cap)
            r[p] -= length * change[p]
            worst = max(worst, pushed(r[p], lam[p], equal[p], cap))
        if worst <= rest:
            break
    return worst


@kernel
@no_type_check
def gain_of(gram, step, r):
    """How much the dual gains by the best part of a step, none where it goes downhill."""
    slope = np.dot(r, step)
    if slope <= 0.0:
        return 0.0
    curve = np.dot(step, np.dot(gram, step))
    share = min(1.0, slope / curve) if curve > 0.0 else 1.0
    return share * slope - 0.5 * share * share * curve


@kernel
@no_type_check
def face_solution(gram, index, r):
    """The step over `index` that makes their residuals vanish; zero elsewhere."""
    count = index.shape[0]
    part, goal = np.empty((count, count)), np.empty(count)
    trace = 0.0
    for a in range(count):
        row = gram[index[a]]
        goal[a] = r[index[a]]
        trace += row[index[a]]
        for b in range(count):
            part[a, b] = row[index[b]]
    out = np.zeros(r.shape[0])
    ridge = RIDGE * trace / max(count, 1)
    for _ in range(6):
        for a in range(count):
            part[a, a] += ridge
        ridge *= 100.0
        found, done = by_cholesky(part, goal)
        if done:
            for a in range(count):
                out[index[a]] = found[a]
            return out
    for a in range(count):
        out[index[a]] = goal[a] / max(part[a, a], 1e-300)
    return out


@kernel
@no_type_check
def by_cholesky(matrix, goal):
    """The solution of a positive definite system, and whether it was one."""
    x = goal.copy()
    try:
        factor = np.linalg.cholesky(matrix)
    except Exception:
        return x, False
    n = goal.shape[0]
    for a in range(n):
        s = x[a]
        for k in range(a):
            s -= factor[a, k] * x[k]
        x[a] = s / factor[a, a]
    for a in range(n - 1, -1, -1):
        x[a] /= factor[a, a]
        for k in range(a):
            x[k] -= factor[a, k] * x[a]
    return x, True


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
