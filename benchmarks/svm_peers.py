"""Other people's solvers on the same problem, each as well as it can be used, and the official way.

Every peer gives a weight; what it costs to reach a certified gap is measured with one lower bound
for all (ours, to 1e-12), so that no peer is asked for multipliers that it does not give.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np

from attoscope.svm import Selection

Weight = np.ndarray
Peer = Callable[[Selection], Weight | None]


def differences(selection: Selection) -> tuple[np.ndarray, np.ndarray]:
    """(key_chosen - key_t) and the query index of every constraint."""
    i, t = np.nonzero(~selection.selected)
    own = selection.keys[selection.sequence, selection.reference]
    return own[i] - selection.keys[selection.sequence[i], t], i


def design(selection: Selection) -> np.ndarray:
    """Constraints as explicit features: one row of width key width x query width each."""
    apart, i = differences(selection)
    rows = apart[:, :, None] * selection.queries[i][:, None, :]
    return rows.reshape(len(i), -1)


def scipy_nnls(selection: Selection) -> Weight:
    """Lawson and Hanson's least-distance form: one non-negative least-squares problem."""
    from scipy.optimize import nnls

    m = design(selection)
    sides = np.vstack([m.T, np.ones(len(m))])
    goal = np.zeros(len(sides))
    goal[-1] = 1.0
    u, _ = nnls(sides, goal)
    r = sides @ u - goal
    return (-r[:-1] / r[-1]).reshape(selection.shape[2:])


def liblinear(selection: Selection, tol: float) -> Weight:
    """LinearSVC on explicit features: half of the differences turned round, so that there are
    two classes; C above every multiplier, so that the margin is hard."""
    from sklearn.svm import LinearSVC

    m = design(selection)
    sign = np.where(np.arange(len(m)) % 2, 1, -1)
    model = LinearSVC(
        C=1e4, loss="hinge", fit_intercept=False, tol=tol, max_iter=1_000_000, dual=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(m * sign[:, None], sign)
    return model.coef_.reshape(selection.shape[2:])


def clarabel_dual(selection: Selection) -> Weight:
    """The dual quadratic programme in the multipliers, with the Gram matrix written out."""
    import clarabel
    from scipy import sparse

    apart, i = differences(selection)
    z = selection.queries[i]
    gram = (apart @ apart.T) * (z @ z.T)
    n = len(gram)
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-11
    lam = np.array(
        clarabel.DefaultSolver(
            sparse.csc_matrix(np.triu(gram)), -np.ones(n), -sparse.eye(n, format="csc"),
            np.zeros(n), [clarabel.NonnegativeConeT(n)], settings,
        ).solve().x
    )  # fmt: skip
    return (apart * lam[:, None]).T @ z


def scs_nuclear(selection: Selection, eps: float) -> Weight:
    """The semidefinite form: minimise 1/2 (tr A + tr B) with [[A, W], [W^T, B]] positive."""
    import scs
    from scipy import sparse

    m = design(selection)
    rows, columns = selection.shape[2:]
    side = rows + columns
    # Entries of the lower triangle by columns; W sits in rows `rows:` of the first columns.
    place, at = np.full((side, side), -1), 0
    scale = np.ones(side * (side + 1) // 2)
    for j in range(side):
        for i in range(j, side):
            place[i, j] = at
            scale[at] = 1.0 if i == j else np.sqrt(2.0)
            at += 1
    where = place[rows:, :rows].T.ravel()
    cost = np.zeros(at)
    cost[np.diagonal(place)] = 0.5
    width = sparse.csc_matrix(m)
    picked = sparse.csc_matrix(
        (np.ones(len(where)), (np.arange(len(where)), where)), shape=(len(where), at)
    )
    a = sparse.vstack([-width @ picked, -sparse.diags(scale)], format="csc")
    b = np.concatenate([-np.ones(len(m)), np.zeros(at)])
    found = scs.solve(
        {"A": a, "b": b, "c": cost}, {"l": len(m), "s": [side]}, eps_abs=eps, eps_rel=eps,
        max_iters=200_000, verbose=False,
    )  # fmt: skip
    return found["x"][where].reshape(rows, columns)


def official(selection: Selection, norm: str) -> Weight | None:
    """The official repository's way: cvxpy, one constraint object at a time, default solver."""
    import cvxpy as cp

    w = cp.Variable(selection.shape[2:])
    constraints = []
    for i in range(len(selection.queries)):
        x, z = selection.keys[selection.sequence[i]], selection.queries[i]
        own = selection.reference[i]
        for t in range(len(x)):
            if t != own:
                constraints.append((x[own] - x[t]) @ w @ z >= 1)
    aim = cp.norm(w, "fro") if norm == "frobenius" else cp.normNuc(w)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cp.Problem(cp.Minimize(aim), constraints).solve()
    return None if w.value is None else np.asarray(w.value)
