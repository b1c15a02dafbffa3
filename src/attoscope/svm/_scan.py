"""Kernels that read a block of scores: how far each constraint is from holding."""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from attoscope.svm._jit import kernel
from attoscope.svm._kernels import LOCAL, differences_squared, local_grams

NONE, COMPETES, EQUAL, WORKING = 0, 1, 2, 4
# What `scan_block` keeps: least (margin - rhs); the factor that scaling the weight needs to make
# positive right-hand sides hold; the factor that the others permit; the sum of shortfalls; the
# largest difference among keys that should be equal; how many constraints were newly marked.
SLACK, NEED, PERMIT, HINGE, UNEQUAL, FRESH = range(6)


def fresh_stats() -> np.ndarray:
    """What a scan starts from."""
    return np.array([np.inf, 0.0, np.inf, 0.0, 0.0, 0.0])


@kernel
@no_type_check
def take(stats, margin, h):
    slack = margin - h
    stats[SLACK] = min(stats[SLACK], slack)
    if slack < 0.0:
        stats[HINGE] -= slack
    if h > 0.0:
        stats[NEED] = max(stats[NEED], h / margin if margin > 0.0 else np.inf)
    elif margin < 0.0:
        stats[PERMIT] = min(stats[PERMIT], h / margin)


@kernel
@no_type_check
def scan_block(scores, low, ref, state, rhs, threshold, most, keep, stats):
    """Reads a block of scores into `stats`, and marks what is closer than `threshold`.

    At most `most` keys are marked per query, the worst ones. Marks are the WORKING bit of
    `state`; equalities are always marked, and so is what was marked before, with `keep`.
    """
    tokens = scores.shape[1]
    slacks = np.empty(tokens)
    shared = rhs.shape[0] == 1 and rhs.shape[1] == 1
    for b in range(scores.shape[0]):
        i = low + b
        own = scores[b, ref[i]]
        close = 0
        for t in range(tokens):
            kind = state[i, t] & 3
            marked = keep and state[i, t] & WORKING
            if not keep:
                state[i, t] = kind
            slacks[t] = np.inf
            if kind == NONE:
                continue
            h = rhs[0, 0] if shared else rhs[i, t]
            margin = own - scores[b, t]
            if kind == EQUAL:
                h = 0.0 if shared else h
                stats[UNEQUAL] = max(stats[UNEQUAL], abs(margin - h))
                state[i, t] = kind | WORKING
                continue
            take(stats, margin, h)
            if margin - h < threshold and not marked:
                slacks[t] = margin - h
                close += 1
        if close == 0:
            continue
        bar = threshold
        if close > most:
            bar = np.partition(slacks, most - 1)[most - 1]
        for t in range(tokens):
            if slacks[t] <= bar and slacks[t] < threshold:
                state[i, t] |= WORKING
                stats[FRESH] += 1.0


@kernel
@no_type_check
def mark(ptr, tok, lam, state):
    """Constraints that carry a multiplier stay in the working set."""
    for i in range(ptr.shape[0] - 1):
        for p in range(ptr[i], ptr[i + 1]):
            if lam[p] != 0.0:
                state[i, tok[p]] |= WORKING


@kernel
@no_type_check
def count_marks(state, ptr):
    for i in range(state.shape[0]):
        c = 0
        for t in range(state.shape[1]):
            if state[i, t] & WORKING:
                c += 1
        ptr[i + 1] = ptr[i] + c


@kernel
@no_type_check
def gather(state, rhs, old_ptr, old_tok, old_lam, ptr, tok, lam, h, equal):
    """The working set as lists, with the multipliers that it already had."""
    shared = rhs.shape[0] == 1 and rhs.shape[1] == 1
    for i in range(state.shape[0]):
        p = ptr[i]
        o = old_ptr[i]
        for t in range(state.shape[1]):
            if not state[i, t] & WORKING:
                continue
            tok[p] = t
            equal[p] = (state[i, t] & 3) == EQUAL
            h[p] = rhs[0, 0] if shared else rhs[i, t]
            if shared and equal[p]:
                h[p] = 0.0
            while o < old_ptr[i + 1] and old_tok[o] < t:
                o += 1
            lam[p] = old_lam[o] if o < old_ptr[i + 1] and old_tok[o] == t else 0.0
            p += 1


@kernel
@no_type_check
def rebuilt(keys, seq, ref, state, rhs, old_ptr, old_tok, old_lam, local):
    """The arrays of a working set: marked constraints, and those that carried a multiplier.

    `local` keeps the inner products of queries with few constraints, within twice the memory of
    their rows.
    """
    n = ref.shape[0]
    mark(old_ptr, old_tok, old_lam, state)
    ptr = np.zeros(n + 1, np.int64)
    count_marks(state, ptr)
    m = ptr[n]
    tok, equal = np.empty(m, np.int32), np.empty(m, np.bool_)
    lam, h, sq = np.empty(m), np.empty(m), np.empty(m)
    gather(state, rhs, old_ptr, old_tok, old_lam, ptr, tok, lam, h, equal)
    differences_squared(keys, seq, ref, ptr, tok, sq)
    gptr, area = np.full(n, -1, np.int64), 0
    for i in range(n):
        size = ptr[i + 1] - ptr[i]
        if local and 0 < size <= min(LOCAL, 2 * keys.shape[2]):
            gptr[i] = area
            area += size * size
    gram = np.empty(area)
    local_grams(keys, seq, ref, ptr, tok, gptr, gram)
    return ptr, tok, lam, h, sq, equal, gptr, gram


@kernel
@no_type_check
def find_equal(keys, seq, ref, equal):
    """Marks the keys that equal the reference of each query, itself included."""
    for i in range(ref.shape[0]):
        own = keys[seq[i]]
        for t in range(own.shape[0]):
            same = True
            for k in range(own.shape[1]):
                if own[t, k] != own[ref[i], k]:
                    same = False
                    break
            equal[i, t] = same
