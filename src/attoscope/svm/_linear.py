"""Norms that make the problem a linear programme, where it can be written out."""

from __future__ import annotations

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from attoscope.svm._problem import Problem, WorkingSet
from attoscope.svm.norms import Entrywise, Norm
from attoscope.svm.selection import Array

LARGEST = 2_000_000


def is_linear(problem: Problem, norm: Norm) -> bool:
    """Whether `norm` is l1 or max and the constraints are few enough to be written out."""
    size = int(np.count_nonzero(problem.state & 3)) * problem.shape[0] * problem.shape[1]
    return isinstance(norm, Entrywise) and norm.p in (1.0, np.inf) and size <= LARGEST


def by_linear_programme(
    problem: Problem, norm: Norm, C: float | int, s: WorkingSet, seconds: float | None
) -> tuple[Array, Array] | None:
    """The weight and the multipliers of the working set, by HiGHS; None where it finds none.

    minimise size + C * shortfalls over W = P - N with P, N >= 0, and sum(P + N) <= size (l1) or
    P + N <= size entry by entry (max).
    """
    constraints = written_out(problem, s)
    m, d = constraints.shape
    soft = np.isfinite(C)
    short = (
        -sparse.eye_array(m, format="csr")[:, ~s.equal] if soft else sparse.csr_array((m, 0))
    )
    margins = sparse.hstack([-constraints, constraints, short, np.zeros((m, 1))], format="csr")
    sums = np.ones((1, d)) if norm.p == 1 else sparse.eye_array(d)  # type: ignore[attr-defined]
    ceiling = -np.ones((sums.shape[0], 1))
    gap = sparse.csr_array((sums.shape[0], short.shape[1]))
    bound = sparse.hstack([sums, sums, gap, ceiling], format="csr")
    cost = np.zeros(margins.shape[1])
    cost[2 * d : -1], cost[-1] = C if soft else 0.0, 1.0
    held = margins[s.equal]
    found = linprog(
        cost,
        A_ub=sparse.vstack([margins[~s.equal], bound]),
        b_ub=np.concatenate([-s.rhs[~s.equal], np.zeros(sums.shape[0])]),
        A_eq=held if held.shape[0] else None,
        b_eq=-s.rhs[s.equal] if held.shape[0] else None,
        method="highs",
        options=None if seconds is None else {"time_limit": seconds},
    )
    if found.x is None:
        return None
    lam = np.zeros(m)
    lam[~s.equal] = np.maximum(-found.ineqlin.marginals[: m - held.shape[0]], 0.0)
    if held.shape[0]:
        lam[s.equal] = -found.eqlin.marginals
    return (found.x[:d] - found.x[d : 2 * d]).reshape(problem.shape), lam


def written_out(problem: Problem, s: WorkingSet) -> Array:
    """The constraints of the working set as rows of length key width x query width."""
    i = np.repeat(np.arange(len(s.ptr) - 1), np.diff(s.ptr))
    apart = problem.keys[problem.seq[i], problem.ref[i]] - problem.keys[problem.seq[i], s.tok]
    return np.asarray((apart[:, :, None] * problem.queries[i][:, None, :]).reshape(len(i), -1))
