"""Kernels of training: softmax, gradient coefficients, and their product with the data.

Probabilities are kept as the winner's own and, for the others, as shares relative to the
runner-up: they lose no digits however far the winner is ahead.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from attoscope.svm._jit import kernel


@kernel
@no_type_check
def attend(tokens, queries, sequence, allowed, weight, chosen, own, log_runner, shares):
    """Softmax of X W z: the winner, its probability, log of the runner-up's, others over that."""
    trials, samples, size = shares.shape
    dk, dq = weight.shape[1:]
    m = np.empty(dk)
    for r in range(trials):
        for i in range(samples):
            for k in range(dk):
                s = 0.0
                for q in range(dq):
                    s += weight[r, k, q] * queries[r, i, q]
                m[k] = s
            x = tokens[r, sequence[i]]
            out = shares[r, i]
            top, second, best = -np.inf, -np.inf, 0
            for t in range(size):
                if not allowed[r, i, t]:
                    continue
                s = 0.0
                for k in range(dk):
                    s += x[t, k] * m[k]
                out[t] = s
                if s > top:
                    top, second, best = s, top, t
                elif s > second:
                    second = s
            total = 0.0
            for t in range(size):
                if t == best or not allowed[r, i, t]:
                    out[t] = 0.0
                else:
                    out[t] = np.exp(out[t] - second)
                    total += out[t]
            mass = total * np.exp(second - top)
            chosen[r, i] = best
            own[r, i] = 1.0 / (1.0 + mass)
            log_runner[r, i] = second - top - np.log1p(mass)


@kernel
@no_type_check
def log_slope(loss, u):
    """log(-l'(u)): logistic, exponential, linear."""
    if loss == 0:
        return -np.log1p(np.exp(-u)) - u if u > 0.0 else -np.log1p(np.exp(u))
    return -u if loss == 1 else 0.0


@kernel
@no_type_check
def exact(chosen, log_runner, shares, gamma, value, linear, loss, log_scale, c):
    """Coefficients of minus the gradient over exp(log_scale), without cancellation.

    c_it = s_it (-l'_i) (gamma_it - gbar_i) / samples / exp(log_scale), with
    gbar_i - gamma_it = (gamma_ia - gamma_it) - sum_r s_ir (gamma_ia - gamma_ir), a the winner,
    and c_ia minus the sum of the others. `value` holds label * f where the head is not linear.
    """
    trials, samples, size = shares.shape
    lost, log_w = np.empty(samples), np.empty(samples)
    for r in range(trials):
        largest = -np.inf
        for i in range(samples):
            a = gamma[r, i, chosen[r, i]]
            s = 0.0
            for t in range(size):
                s += shares[r, i, t] * (a - gamma[r, i, t])
            lost[i] = s * np.exp(log_runner[r, i])
            u = a - lost[i] if linear else value[r, i]
            log_w[i] = log_runner[r, i] + log_slope(loss, u)
            largest = max(largest, log_w[i])
        if largest == -np.inf:
            largest = 0.0
        log_scale[r] = largest
        for i in range(samples):
            best = chosen[r, i]
            a = gamma[r, i, best]
            w = np.exp(log_w[i] - largest) / samples
            total = 0.0
            for t in range(size):
                mu = w * shares[r, i, t] * (a - gamma[r, i, t] - lost[i])
                c[r, i, t] = -mu
                total += mu
            c[r, i, best] = total


@kernel
@no_type_check
def plain(chosen, own, log_runner, shares, gamma, value, linear, loss, log_scale, c):
    """The same as back-propagation computes it: c_it = s_it (-l'_i) (gamma_it - gbar_i) / n."""
    trials, samples, size = shares.shape
    for r in range(trials):
        log_scale[r] = 0.0
        for i in range(samples):
            runner = np.exp(log_runner[r, i])
            for t in range(size):
                c[r, i, t] = runner * shares[r, i, t]
            c[r, i, chosen[r, i]] = own[r, i]
            mean = 0.0
            for t in range(size):
                mean += c[r, i, t] * gamma[r, i, t]
            u = mean if linear else value[r, i]
            w = np.exp(log_slope(loss, u)) / samples
            for t in range(size):
                c[r, i, t] *= w * (gamma[r, i, t] - mean)


@kernel
@no_type_check
def product(k, q, out):
    """K Q^T for each trial."""
    trials, m = k.shape[0], k.shape[2]
    for r in range(trials):
        for i in range(k.shape[1]):
            for j in range(q.shape[1]):
                s = 0.0
                for a in range(m):
                    s += k[r, i, a] * q[r, j, a]
                out[r, i, j] = s


@kernel
@no_type_check
def split(direction, k, q, for_k, for_q):
    """What a direction for K Q^T is for each factor: D Q and D^T K."""
    trials, dk, dq = direction.shape
    m = k.shape[2]
    for r in range(trials):
        for_k[r] = 0.0
        for_q[r] = 0.0
        for i in range(dk):
            for j in range(dq):
                s = direction[r, i, j]
                for a in range(m):
                    for_k[r, i, a] += s * q[r, j, a]
                    for_q[r, j, a] += s * k[r, i, a]


@kernel
@no_type_check
def unit_step(p, d, lr, eps, out):
    """p += lr d / (||d||_F + eps) for each trial, the factor kept in out; nothing where d is 0."""
    for r in range(p.shape[0]):
        s = 0.0
        for i in range(p.shape[1]):
            for j in range(p.shape[2]):
                s += d[r, i, j] * d[r, i, j]
        size = np.sqrt(s) + eps
        out[r] = lr / size if size > 0.0 else 0.0
        for i in range(p.shape[1]):
            for j in range(p.shape[2]):
                p[r, i, j] += out[r] * d[r, i, j]


@kernel
@no_type_check
def pull(tokens, queries, sequence, c, out):
    """sum_it c_it x_it z_i^T for each trial."""
    trials, samples, size = c.shape
    dk, dq = out.shape[1:]
    u = np.empty(dk)
    for r in range(trials):
        for k in range(dk):
            for q in range(dq):
                out[r, k, q] = 0.0
        for i in range(samples):
            x = tokens[r, sequence[i]]
            for k in range(dk):
                u[k] = 0.0
            for t in range(size):
                s = c[r, i, t]
                if s != 0.0:
                    for k in range(dk):
                        u[k] += s * x[t, k]
            for k in range(dk):
                s = u[k]
                for q in range(dq):
                    out[r, k, q] += s * queries[r, i, q]
