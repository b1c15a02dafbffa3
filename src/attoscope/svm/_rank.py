"""A bound on the rank: alternate between the two factors, each a convex problem of its own."""

from __future__ import annotations

import numpy as np

from attoscope.svm._project import Clock
from attoscope.svm._solve import FROBENIUS, Solution, solve_selection
from attoscope.svm.certificate import certify
from attoscope.svm.infeasible import InfeasibleSelection
from attoscope.svm.norms import Norm, Schatten
from attoscope.svm.selection import Array, Selection

ROUNDS = 30
NUCLEAR = Schatten(1)
# Of a unit of shortfall, where a space of this rank cannot hold all margins.
PRICE, BRIEF = 1e3, 100


def limited(
    selection: Selection,
    norm: Norm,
    solution: Solution,
    rank: int,
    tol: float | int,
    clock: Clock,
) -> Solution:
    """A weight of at most this rank, from an unrestricted solution.

    With W = P Q^T and Q fixed, P solves a Frobenius problem whose queries are Q^T query; then the
    same for Q. Starts from the solution, and from that of another norm, cut to the rank. The
    bound that is certified is that of the unrestricted optimum, so the gap says what the
    restriction costs at most; it is infinite where no weight of this rank was found.
    """
    values = np.linalg.svd(solution.weight, compute_uv=False)
    if np.count_nonzero(values > 1e-9 * max(values[0], 1e-300)) <= rank:
        return solution
    other = FROBENIUS if norm == NUCLEAR else NUCLEAR
    starts = [solution.weight, solve_selection(selection, other, np.inf, 1e-4, clock).weight]
    best, upper = np.zeros_like(solution.weight), np.inf
    for start in starts:
        if not start.any():
            # The time was up before there was a start.
            continue
        weight, reached = start, np.inf
        for _ in range(ROUNDS):
            weight = _half(selection, norm, weight, rank, tol, clock, keys=False)
            weight = _half(selection, norm, weight, rank, tol, clock, keys=True)
            now = certify(selection, weight, solution.dual, norm).upper
            if now < upper:
                best, upper = weight, now
            if now < np.inf and now >= reached * (1.0 - tol) or clock.spent():
                break
            reached = now
    certificate = certify(selection, best, solution.dual, norm)
    return Solution(best, solution.dual, certificate, clock.done, clock.seconds)


def _half(
    selection: Selection,
    norm: Norm,
    weight: Array,
    rank: int,
    tol: float | int,
    clock: Clock,
    keys: bool,
) -> Array:
    """The best weight with the same row space (`keys`: column space), of the given rank.

    Where none separates, the one that falls short least: the other half may mend it.
    """
    u, s, vt = np.linalg.svd(weight, full_matrices=False)
    # For the nuclear norm the factors share the singular values, else they only span.
    share = np.sqrt(s[:rank]) if norm == NUCLEAR else np.ones(min(rank, len(s)))
    kept = s[:rank] > 1e-9 * max(s[0], 1e-300)
    basis = (u[:, :rank] if keys else vt[:rank].T)[:, kept] * share[kept]
    if keys:
        smaller = selection.replace(keys=_cleaned(selection.keys @ basis))
    else:
        smaller = selection.replace(queries=_cleaned(selection.queries @ basis))
    inner = Clock(clock.left, clock.time_limit, began=clock.began)
    try:
        found = solve_selection(smaller, FROBENIUS, np.inf, max(tol, 1e-8), inner)
    except InfeasibleSelection:
        brief = Clock(min(BRIEF, inner.left), clock.time_limit, began=clock.began)
        found = solve_selection(smaller, FROBENIUS, PRICE, 1e-3, brief)
        inner.done += brief.done
    clock.done += inner.done
    return np.asarray(basis @ found.weight if keys else found.weight @ basis.T)


def _cleaned(array: Array) -> Array:
    """Zeros where rounding left a trace of what lies outside the space."""
    return np.asarray(np.where(np.abs(array) > 1e-14 * np.abs(array).max(), array, 0.0))
