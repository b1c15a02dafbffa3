"""Kernels of the solver: dual coordinate descent in blocks, and products with the constraints.

One constraint p of query i is `(key[ref] - key[t])^T W query_i >= rhs`, an equality where
`equal`. Constraints of query i are the slice ptr[i]:ptr[i+1]; `tok` says which key each one is
about, `sq` holds ||key[ref] - key[t]||^2 and `zz` ||query_i||^2. The weight is kept equal to
start + sum_p lam_p (key[ref] - key[t]) query_i^T throughout.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from attoscope.svm._jit import kernel

# Queries whose inner products fit here keep them, so that a block is solved without its keys.
LOCAL = 64


@kernel
@no_type_check
def clip(value, equal, cap):
    """The nearest allowed multiplier."""
    if equal:
        return value
    return min(max(value, 0.0), cap)


@kernel
@no_type_check
def pushed(residual, lam, equal, cap):
    """How far a multiplier still wants to move, in units of the margin."""
    if not equal and ((lam <= 0.0 and residual < 0.0) or (lam >= cap and residual > 0.0)):
        return 0.0
    return abs(residual)


@kernel
@no_type_check
def visit_keys(x, keys, m, a, zz, first, last, tok, lam, rhs, sq, equal, cap, inner):
    """Coordinate descent over one query's constraints, with `m` = W query kept up to date."""
    d = x.shape[0]
    worst = 0.0
    for turn in range(inner):
        moved = False
        for p in range(first, last):
            if turn > 0 and lam[p] == 0.0:
                continue
            y = keys[tok[p]]
            s = 0.0
            for k in range(d):
                s += (x[k] - y[k]) * m[k]
            r = rhs[p] - s
            if turn == 0:
                worst = max(worst, pushed(r, lam[p], equal[p], cap))
            curve = sq[p] * zz
            if curve <= 0.0:
                # A key equal to the chosen one: nothing helps, so it pays the full price.
                if cap < np.inf and not equal[p]:
                    lam[p] = cap if rhs[p] > 0.0 else 0.0
                continue
            step = clip(lam[p] + r / curve, equal[p], cap) - lam[p]
            if step != 0.0:
                moved = True
                lam[p] += step
                c = step * zz
                for k in range(d):
                    u = x[k] - y[k]
                    m[k] += c * u
                    a[k] += step * u
        if not moved:
            break
    return worst


@kernel
@no_type_check
def visit_gram(x, keys, m, a, zz, first, last, tok, lam, rhs, equal, cap, gram, inner):
    """The same with the inner products at hand: many turns cost no look at the keys."""
    d = x.shape[0]
    size = last - first
    r = np.empty(size)
    before = lam[first:last].copy()
    worst = 0.0
    for p in range(size):
        y = keys[tok[first + p]]
        s = 0.0
        for k in range(d):
            s += (x[k] - y[k]) * m[k]
        r[p] = rhs[first + p] - s
        worst = max(worst, pushed(r[p], lam[first + p], equal[first + p], cap))
    for _ in range(inner):
        left = 0.0
        for p in range(size):
            curve = gram[p * size + p] * zz
            if curve <= 0.0:
                if cap < np.inf and not equal[first + p]:
                    lam[first + p] = cap if rhs[first + p] > 0.0 else 0.0
                continue
            old = lam[first + p]
            step = clip(old + r[p] / curve, equal[first + p], cap) - old
            if step != 0.0:
                left = max(left, abs(step) * curve)
                lam[first + p] = old + step
                c = step * zz
                for q in range(size):
                    r[q] -= c * gram[p * size + q]
        if left <= 0.05 * worst:
            break
    for p in range(size):
        step = lam[first + p] - before[p]
        if step != 0.0:
            y = keys[tok[first + p]]
            for k in range(d):
                a[k] += step * (x[k] - y[k])
    return worst


@kernel
@no_type_check
def sweep(
    keys, seq, ref, queries, zz, weight, ptr, tok, lam, rhs, sq, equal, cap, gptr, gram,
    block, rounds, inner,
):  # fmt: skip
    """Gauss-Seidel over blocks of queries; changes `lam` and `weight`, gives the largest push.

    Within a block the effect of earlier queries is carried by query products alone, so that the
    weight is touched once per block, by matrix products.
    """
    n = queries.shape[0]
    d = keys.shape[2]
    worst = 0.0
    for _ in range(rounds):
        worst = 0.0
        for lo in range(0, n, block):
            hi = min(n, lo + block)
            if ptr[hi] == ptr[lo]:
                continue
            z = queries[lo:hi]
            image = np.dot(z, weight.T)
            cross = np.dot(z, z.T)
            change = np.zeros((hi - lo, d))
            for i in range(lo, hi):
                first, last = ptr[i], ptr[i + 1]
                if first == last:
                    continue
                m = image[i - lo]
                for j in range(i - lo):
                    c = cross[i - lo, j]
                    if c != 0.0:
                        for k in range(d):
                            m[k] += c * change[j, k]
                own = keys[seq[i]]
                x = own[ref[i]]
                a = change[i - lo]
                if gptr[i] >= 0:
                    size = (last - first) ** 2
                    v = visit_gram(
                        x, own, m, a, zz[i], first, last, tok, lam, rhs, equal, cap,
                        gram[gptr[i] : gptr[i] + size], inner,
                    )  # fmt: skip
                else:
                    v = visit_keys(
                        x, own, m, a, zz[i], first, last, tok, lam, rhs, sq, equal, cap,
                        min(inner, 3),
                    )  # fmt: skip
                worst = max(worst, v)
            weight += np.dot(change.T, z)
    return worst


@kernel
@no_type_check
def local_grams(keys, seq, ref, ptr, tok, gptr, gram):
    """Inner products of the differences of each query that has few constraints."""
    d = keys.shape[2]
    for i in range(ref.shape[0]):
        if gptr[i] < 0:
            continue
        first = ptr[i]
        size = ptr[i + 1] - first
        own = keys[seq[i]]
        x = own[ref[i]]
        u = np.empty((size, d))
        for p in range(size):
            y = own[tok[first + p]]
            for k in range(d):
                u[p, k] = x[k] - y[k]
        base = gptr[i]
        for p in range(size):
            for q in range(p + 1):
                c = 0.0
                for k in range(d):
                    c += u[p, k] * u[q, k]
                gram[base + p * size + q] = c
                gram[base + q * size + p] = c


@kernel
@no_type_check
def forward(keys, seq, ref, queries, weight, ptr, tok, out):
    """out_p = (key[ref] - key[t])^T weight query."""
    d = keys.shape[2]
    image = np.dot(queries, weight.T)
    for i in range(queries.shape[0]):
        own = keys[seq[i]]
        x = own[ref[i]]
        m = image[i]
        for p in range(ptr[i], ptr[i + 1]):
            y = own[tok[p]]
            s = 0.0
            for k in range(d):
                s += (x[k] - y[k]) * m[k]
            out[p] = s


@kernel
@no_type_check
def adjoint(keys, seq, ref, queries, ptr, tok, coefficient):
    """sum_p coefficient_p (key[ref] - key[t]) query^T."""
    n = queries.shape[0]
    d = keys.shape[2]
    a = np.zeros((n, d))
    for i in range(n):
        own = keys[seq[i]]
        x = own[ref[i]]
        for p in range(ptr[i], ptr[i + 1]):
            c = coefficient[p]
            if c != 0.0:
                y = own[tok[p]]
                for k in range(d):
                    a[i, k] += c * (x[k] - y[k])
    return np.dot(a.T, queries)


@kernel
@no_type_check
def differences_squared(keys, seq, ref, ptr, tok, out):
    """||key[ref] - key[t]||^2 of each constraint."""
    d = keys.shape[2]
    for i in range(ref.shape[0]):
        own = keys[seq[i]]
        x = own[ref[i]]
        for p in range(ptr[i], ptr[i + 1]):
            y = own[tok[p]]
            s = 0.0
            for k in range(d):
                s += (x[k] - y[k]) ** 2
            out[p] = s


@kernel
@no_type_check
def shrink(weight, step):
    """Singular values less by `step`, not below 0: W V diag(max(1 - step/s, 0)) V^T."""
    square, v = np.linalg.eigh(weight.T @ weight)
    n = v.shape[0]
    part = np.zeros((n, n))
    for k in range(n):
        s = np.sqrt(max(square[k], 0.0))
        if s > step:
            scale = 1.0 - step / s
            for i in range(n):
                c = scale * v[i, k]
                for j in range(n):
                    part[i, j] += c * v[j, k]
    return weight @ part


@kernel
@no_type_check
def largest_singular(weight):
    """By the smaller Gram matrix: as accurate for the largest, and half the work."""
    gram = weight.T @ weight if weight.shape[0] >= weight.shape[1] else weight @ weight.T
    return np.sqrt(max(0.0, np.linalg.eigvalsh(gram)[-1]))
