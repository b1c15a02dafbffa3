"""Kernels for many small trials: the trials are the last axis, and every loop runs over them.

Arrays are (rows, lanes): a matrix or a table row by row, with as many trials as there are lanes.
All steps between two records are one call.
"""

from __future__ import annotations

from functools import partial
from typing import no_type_check

import numpy as np

from attoscope.svm._jit import kernel

# A division that has to look for zeros cannot be done for several trials at once.
lanewise = partial(kernel, error_model="numpy")
# ln 2 in two parts, so that whole multiples of the first are exact.
LOG2E, LN2, REST = 1.4426950408889634, 6.93145751953125e-1, 1.42860682030941723212e-6
LEAST, LARGEST = -708.0, 709.0


@partial(lanewise, fastmath={"contract"})
@no_type_check
def exponential(x):
    """exp to 2 units in the last place, in operations that run on several lanes at once.

    0 below -708, infinite above 709. Source: the rational approximation of Cephes.
    """
    y = min(max(x, LEAST), LARGEST)
    n = np.floor(LOG2E * y + 0.5)
    r = (y - n * LN2) - n * REST
    s = r * r
    p = 1.26177193074810590878e-4
    p = r * ((p * s + 3.02994407707441961300e-2) * s + 1.0)
    q = (3.00198505138664455042e-6 * s + 2.52448340349684104192e-3) * s
    q = (q + 2.27265548208155028766e-1) * s + 2.0
    power = np.int64((np.int64(np.int32(n)) + 1023) << 52).view(np.float64)
    e = (1.0 + 2.0 * p / (q - p)) * power
    return 0.0 if x < LEAST else (np.inf if x > LARGEST else e)


@lanewise
@no_type_check
def dots(a, i, di, b, j, dj, count, out, o):
    """out[o] = sum over q < count of a[i + q di] * b[j + q dj], for each lane."""
    lanes = out.shape[1]
    done = min(count, 1 if count < 4 else 4)
    if done == 4:
        i1, i2, i3, j1, j2, j3 = i + di, i + 2 * di, i + 3 * di, j + dj, j + 2 * dj, j + 3 * dj
        for r in range(lanes):
            s = a[i, r] * b[j, r] + a[i1, r] * b[j1, r]
            out[o, r] = s + a[i2, r] * b[j2, r] + a[i3, r] * b[j3, r]
    else:
        for r in range(lanes):
            out[o, r] = a[i, r] * b[j, r] if done else 0.0
    i, j = i + done * di, j + done * dj
    while done + 2 <= count:
        more = 4 if done + 4 <= count else 2
        i1, j1 = i + di, j + dj
        if more == 4:
            i2, i3, j2, j3 = i1 + di, i1 + 2 * di, j1 + dj, j1 + 2 * dj
            for r in range(lanes):
                s = a[i, r] * b[j, r] + a[i1, r] * b[j1, r]
                out[o, r] += s + a[i2, r] * b[j2, r] + a[i3, r] * b[j3, r]
        else:
            for r in range(lanes):
                out[o, r] += a[i, r] * b[j, r] + a[i1, r] * b[j1, r]
        done, i, j = done + more, i + more * di, j + more * dj
    if done < count:
        for r in range(lanes):
            out[o, r] += a[i, r] * b[j, r]


@lanewise
@no_type_check
def contract(a, ai, aq, b, bj, bq, rows, columns, count, out):
    """out[i, j] = sum_q a[i, q] * b[j, q]; ai, aq, bj, bq say how far apart their rows are."""
    for i in range(rows):
        for j in range(columns):
            dots(a, i * ai, aq, b, j * bj, bq, count, out, i * columns + j)


@lanewise
@no_type_check
def coefficients(c, low, size, barred, gamma, loss, samples, work):
    """Scores in c[low:low + size] become s_t (-l') (gamma_t - gbar) / samples, as in `plain`."""
    lanes = c.shape[1]
    top, total, mean = work[0], work[1], work[2]
    for r in range(lanes):
        top[r], total[r], mean[r] = -np.inf, 0.0, 0.0
    for t in range(low, low + size):
        for r in range(lanes):
            c[t, r] += barred[t, r]
            top[r] = max(top[r], c[t, r])
    for t in range(low, low + size):
        for r in range(lanes):
            c[t, r] = exponential(c[t, r] - top[r])
            total[r] += c[t, r]
            mean[r] += c[t, r] * gamma[t, r]
    for r in range(lanes):
        mean[r] /= total[r]
        total[r] *= samples
    if loss == 0:
        for r in range(lanes):
            total[r] *= 1.0 + exponential(mean[r])
    elif loss == 1:
        for r in range(lanes):
            total[r] *= exponential(mean[r])
    for t in range(low, low + size):
        for r in range(lanes):
            c[t, r] *= (gamma[t, r] - mean[r]) / total[r]


@lanewise
@no_type_check
def slope(tokens, queries, sequence, barred, gamma, weight, loss, shape, c, m, u, work, out):
    """Coefficients c and direction `out` at a weight; m and u hold W z_i and sum_t c_it x_it."""
    samples, size, dk, dq, _ = shape
    contract(queries, dq, 1, weight, dq, 1, samples, dk, dq, m)
    for i in range(samples):
        x, low = tokens[sequence[i]], i * size
        for t in range(size):
            dots(x, t * dk, 1, m, i * dk, 1, dk, c, low + t)
        coefficients(c, low, size, barred, gamma, loss, samples, work)
        for k in range(dk):
            dots(c, low, 1, x, k, dk, size, u, i * dk + k)
    contract(u, 1, dk, queries, 1, dq, dk, dq, samples, out)


@lanewise
@no_type_check
def unit_step(p, d, rate, decay, eps, scale):
    """p += rate d / (||d||_F + eps) with d less decay p; adds the factor to `scale`."""
    lanes = p.shape[1]
    square = np.zeros(lanes)
    for i in range(p.shape[0]):
        for r in range(lanes):
            d[i, r] -= decay * p[i, r]
            square[r] += d[i, r] * d[i, r]
    for r in range(lanes):
        square[r] = rate / (np.sqrt(square[r]) + eps)
        scale[r] += square[r]
    for i in range(p.shape[0]):
        for r in range(lanes):
            p[i, r] += square[r] * d[i, r]


@lanewise
@no_type_check
def advance(
    rates,
    tokens,
    queries,
    sequence,
    barred,
    gamma,
    loss,
    decay,
    eps,
    shape,
    weight,
    k,
    q,
    summed,
):
    """Normalised steps of these lengths on W, or (m > 0) on its factors K and Q.

    Changes what is trained, `weight`, and `summed`, the coefficients times their step lengths.
    """
    samples, size, dk, dq, m = shape
    lanes = weight.shape[1]
    image, pulled = np.empty((samples * dk, lanes)), np.empty((samples * dk, lanes))
    c, work, direction = np.empty_like(summed), np.empty((4, lanes)), np.empty_like(weight)
    for_k, for_q = np.empty_like(k), np.empty_like(q)
    scale = work[3]
    if m > 0:
        contract(k, m, 1, q, m, 1, dk, dq, m, weight)
    for rate in rates:
        slope(
            tokens, queries, sequence, barred, gamma, weight, loss, shape, c, image, pulled,
            work, direction,
        )  # fmt: skip
        scale[:] = 0.0
        if m == 0:
            unit_step(weight, direction, rate, decay, eps, scale)
        else:
            contract(direction, dq, 1, q, 1, m, dk, m, dq, for_k)
            contract(direction, 1, dq, k, 1, m, dq, m, dk, for_q)
            unit_step(k, for_k, rate, decay, eps, scale)
            unit_step(q, for_q, rate, decay, eps, scale)
            contract(k, m, 1, q, m, 1, dk, dq, m, weight)
        share = 1.0 if m == 0 else 0.5
        for t in range(c.shape[0]):
            for r in range(lanes):
                summed[t, r] += share * scale[r] * c[t, r]
