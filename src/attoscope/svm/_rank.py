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
    same for Q. The bound that is certified is that of the unrestricted optimum, so the gap says
    what the restriction costs at most.
    """
    values = np.linalg.svd(solution.weight, compute_uv=False)
    if np.count_nonzero(values > 1e-9 * max(values[0], 1e-300)) <= rank:
        return solution
    best, upper = np.zeros_like(solution.weight), np.inf
    weight = solution.weight
    for _ in range(ROUNDS):
        weight = _half(selection, norm, weight, rank, tol, clock, keys=False)
        weight = _half(selection, norm, weight, rank, tol, clock, keys=True)
        certificate = certify(selection, weight, solution.dual, norm)
        if certificate.upper >= upper * (1.0 - tol) or clock.spent():
            break
        best, upper = weight, certificate.upper
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
    """The best weight with the same row space (`keys`: column space), of the given rank."""
    u, s, vt = np.linalg.svd(weight, full_matrices=False)
    # For the nuclear norm the factors share the singular values, else they only span.
    share = np.sqrt(s[:rank]) if norm == Schatten(1) else np.ones(rank)
    kept = share > 1e-9 * share.max()
    basis = (u[:, :rank] if keys else vt[:rank].T)[:, kept] * share[kept]
    if keys:
        smaller = selection.replace(keys=selection.keys @ basis)
    else:
        smaller = selection.replace(queries=selection.queries @ basis)
    inner = Clock(clock.left, clock.time_limit, began=clock.began)
    try:
        found = solve_selection(smaller, FROBENIUS, np.inf, max(tol, 1e-8), inner)
    except InfeasibleSelection:
        return weight
    clock.done += inner.done
    return np.asarray(basis @ found.weight if keys else found.weight @ basis.T)
