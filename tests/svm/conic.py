"""The same problem for two conic solvers that share nothing with ours: Clarabel and SCS."""

from __future__ import annotations

import numpy as np
from scipy import sparse

from attoscope.svm import Selection


def rows(selection: Selection):
    """Constraint matrices flattened by rows, right-hand sides, and which are equalities."""
    apart, h, equal = [], [], []
    for i in range(len(selection.queries)):
        ref = selection.reference[i]
        keys = selection.keys[selection.sequence[i]]
        for t in range(keys.shape[0]):
            if t == ref or (selection.allowed is not None and not selection.allowed[i, t]):
                continue
            chosen = selection.selected[i, t]
            need = selection.required[i, t] if selection.required.size > 1 else (
                selection.required[0, 0]
            )  # fmt: skip
            need = 0.0 if chosen else need
            if selection.bias is not None:
                need -= selection.bias[i, ref] - selection.bias[i, t]
            apart.append(np.outer(keys[ref] - keys[t], selection.queries[i]).ravel())
            h.append(need)
            equal.append(chosen)
    return np.array(apart), np.array(h), np.array(equal, bool)


def problem(selection: Selection, norm: str, C: float):
    """(P, q, A, b, sizes of the zero, non-negative and positive semidefinite cones)."""
    design, h, equal = rows(selection)
    dk, dq = selection.shape[2:]
    size = dk * dq
    if norm == "frobenius":
        P, psd = sparse.eye(size, format="csc"), None
    else:
        P, psd = None, dk + dq
    # Variables: weight, then one shortfall per inequality where there is a price.
    soft = np.isfinite(C)
    count = int((~equal).sum())
    blocks = [sparse.csc_array(-design[equal]), sparse.csc_array(-design[~equal])]
    b = [-h[equal], -h[~equal]]
    extra = count if soft else 0
    big = 0 if psd is None else psd * (psd + 1) // 2
    width = size + extra + big
    A0 = sparse.hstack([blocks[0], sparse.csc_array((blocks[0].shape[0], extra + big))])
    middle = [blocks[1]]
    if soft:
        middle.append(-sparse.eye(count))
    middle.append(sparse.csc_array((count, big)))
    A1 = sparse.hstack(middle)
    parts = [A0, A1]
    if soft:
        parts.append(sparse.hstack([
            sparse.csc_array((count, size)), -sparse.eye(count), sparse.csc_array((count, big))
        ]))  # fmt: skip
        b.append(np.zeros(count))
    zero, positive = blocks[0].shape[0], count * (2 if soft else 1)
    cost = np.zeros(width)
    cost[size : size + extra] = C if soft else 0.0
    return P, cost, parts, b, (zero, positive), psd, size, extra


def svec_order(n: int, upper: bool):
    """(row, column) of the entries of a symmetric matrix in a solver's order."""
    if upper:
        return [(i, j) for j in range(n) for i in range(j + 1)]
    return [(i, j) for j in range(n) for i in range(j, n)]


def standard(selection: Selection, norm: str, C: float, upper: bool):
    """The problem in standard form; the semidefinite block is [[A, W], [W^T, B]]."""
    P, cost, parts, b, (zero, positive), psd, size, extra = problem(selection, norm, C)
    width = len(cost)
    if psd is None:
        full = sparse.block_diag([P, sparse.csc_array((extra, extra))], format="csc")
        A = sparse.vstack(parts, format="csc")
        return full, cost, A, np.concatenate(b), zero, positive, 0
    order = svec_order(psd, upper)
    dk, dq = selection.shape[2:]
    offset = size + extra
    ties, cone = [], []
    for place, (i, j) in enumerate(order):
        scale = 1.0 if i == j else np.sqrt(2.0)
        cone.append((place, offset + place, -scale))
        if i == j:
            cost[offset + place] = 0.5
        low, high = min(i, j), max(i, j)
        if low < dk <= high:
            ties.append((offset + place, low * dq + high - dk))
    tie = sparse.lil_array((len(ties), width))
    for row, (entry, at) in enumerate(ties):
        tie[row, entry] = 1.0
        tie[row, at] = -1.0
    block = sparse.coo_array(
        ([c for _, _, c in cone], ([r for r, _, _ in cone], [k for _, k, _ in cone])),
        shape=(len(order), width),
    )
    A = sparse.vstack([tie, *parts, block], format="csc")
    rhs = np.concatenate([np.zeros(len(ties)), *b, np.zeros(len(order))])
    return (
        sparse.csc_array((width, width)), cost, A, rhs, zero + len(ties), positive, psd
    )  # fmt: skip


def clarabel(selection: Selection, norm: str = "frobenius", C: float = np.inf):
    """(status, weight) from Clarabel."""
    import clarabel as solver

    P, q, A, b, zero, positive, psd = standard(selection, norm, C, upper=True)
    cones = [solver.ZeroConeT(zero)] if zero else []
    cones += [solver.NonnegativeConeT(positive)] if positive else []
    cones += [solver.PSDTriangleConeT(psd)] if psd else []
    settings = solver.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-10
    up = sparse.csc_matrix(sparse.triu(P))
    found = solver.DefaultSolver(up, q, sparse.csc_matrix(A), b, cones, settings).solve()
    dk, dq = selection.shape[2:]
    return str(found.status), np.array(found.x)[: dk * dq].reshape(dk, dq)


def scs(selection: Selection, norm: str = "frobenius", C: float = np.inf, eps: float = 1e-9):
    """(status, weight) from SCS."""
    import scs as solver

    P, q, A, b, zero, positive, psd = standard(selection, norm, C, upper=False)
    cone = {"z": zero, "l": positive}
    if psd:
        cone["s"] = [psd]
    data = {"A": sparse.csc_matrix(A), "b": b, "c": q, "P": sparse.csc_matrix(sparse.triu(P))}
    found = solver.solve(data, cone, eps_abs=eps, eps_rel=eps, max_iters=200_000, verbose=False)
    dk, dq = selection.shape[2:]
    return found["info"]["status"], found["x"][: dk * dq].reshape(dk, dq)
