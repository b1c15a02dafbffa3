"""Conjugate gradients on a face: the multipliers that are free to move, all at once.

Solves (A A^T) step = residual over the free constraints, A the map from weights to margins,
preconditioned by the exact blocks of single queries where their inner products are known.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from attoscope.svm._jit import kernel
from attoscope.svm._kernels import adjoint, forward

RIDGE = 1e-9


@kernel
@no_type_check
def factor_blocks(ptr, free, zz, sq, gptr, gram, factor, index):
    """Cholesky factors of each query's free block, compressed in place; index lists the free."""
    for i in range(zz.shape[0]):
        first, last = ptr[i], ptr[i + 1]
        if gptr[i] < 0:
            continue
        size = last - first
        count = 0
        for p in range(size):
            if free[first + p]:
                index[first + count] = p
                count += 1
        base = gptr[i]
        for r in range(count):
            for c in range(r + 1):
                s = gram[base + index[first + r] * size + index[first + c]] * zz[i]
                if r == c:
                    s *= 1.0 + RIDGE
                for k in range(c):
                    s -= factor[base + r * size + k] * factor[base + c * size + k]
                if r == c:
                    floor = RIDGE * sq[first + index[first + r]] * zz[i]
                    factor[base + r * size + r] = np.sqrt(max(s, floor))
                else:
                    factor[base + r * size + c] = s / factor[base + c * size + c]


@kernel
@no_type_check
def precondition(ptr, free, zz, sq, gptr, factor, index, vector, out):
    """out = the blocks' inverses times vector, zero outside the face."""
    for i in range(zz.shape[0]):
        first, last = ptr[i], ptr[i + 1]
        size = last - first
        if gptr[i] < 0:
            for p in range(first, last):
                out[p] = vector[p] / (sq[p] * zz[i]) if free[p] else 0.0
            continue
        base = gptr[i]
        count = 0
        for p in range(size):
            out[first + p] = 0.0
            if free[first + p]:
                count += 1
        for r in range(count):
            s = vector[first + index[first + r]]
            for k in range(r):
                s -= factor[base + r * size + k] * out[first + index[first + k]]
            out[first + index[first + r]] = s / factor[base + r * size + r]
        for r in range(count - 1, -1, -1):
            s = out[first + index[first + r]]
            for k in range(r + 1, count):
                s -= factor[base + k * size + r] * out[first + index[first + k]]
            out[first + index[first + r]] = s / factor[base + r * size + r]


@kernel
@no_type_check
def face_step(
    keys, seq, ref, queries, zz, ptr, tok, sq, free, residual, gptr, gram, iterations, rtol
):
    """The step of conjugate gradients, and how many iterations it took."""
    m = residual.shape[0]
    factor = np.empty_like(gram)
    index = np.zeros(m, np.int64)
    factor_blocks(ptr, free, zz, sq, gptr, gram, factor, index)
    step = np.zeros(m)
    r = np.where(free, residual, 0.0)
    y = np.empty(m)
    q = np.empty(m)
    precondition(ptr, free, zz, sq, gptr, factor, index, r, y)
    direction = y.copy()
    size = np.dot(r, y)
    goal = size * rtol * rtol
    done = 0
    for _ in range(iterations):
        if size <= goal or size <= 0.0:
            break
        forward(
            keys, seq, ref, queries,
            adjoint(keys, seq, ref, queries, ptr, tok, direction), ptr, tok, q,
        )  # fmt: skip
        for p in range(m):
            if not free[p]:
                q[p] = 0.0
        curve = np.dot(direction, q)
        if curve <= 0.0:
            break
        alpha = size / curve
        for p in range(m):
            step[p] += alpha * direction[p]
            r[p] -= alpha * q[p]
        precondition(ptr, free, zz, sq, gptr, factor, index, r, y)
        new = np.dot(r, y)
        beta = new / size
        size = new
        for p in range(m):
            direction[p] = y[p] + beta * direction[p]
        done += 1
    return step, done
