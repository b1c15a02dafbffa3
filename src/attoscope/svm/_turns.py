"""Turns of the alternation in one compiled loop: small weights, nuclear norm.

There a turn costs less than the calls around its parts.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from attoscope.svm._jit import kernel
from attoscope.svm._kernels import shrink, sweep
from attoscope.svm._memory import PATIENCE, add, follow
from attoscope.svm._project import BLOCK

RELAX = 1.6
INNER = 8
LAG, STRICT, PATIENT = 10.0, 0.2, 16
# Places in `sizes`: ||W - V||, the change of V, ||V||, and what the sweep left to move.
APART, MOVED, SIZE, PUSH = range(4)


@kernel
@no_type_check
def turns(
    count, keys, seq, ref, queries, zz, ptr, tok, lam, rhs, sq, equal, cap, gptr, gram,
    weight, anchor, y, v, step, scale, memory, sizes,
):  # fmt: skip
    """So many turns, or up to one whose projection lags behind: gives how many are complete.

    Changes `lam`, `weight`, `anchor`, `y`, `v`, `memory` and `sizes`; of one that lags all is
    done but `close`.
    """
    for done in range(count):
        follow(memory, y.reshape(y.size))
        moved = 0.0
        new = shrink(y, step)
        for i in range(v.shape[0]):
            for j in range(v.shape[1]):
                moved += (new[i, j] - v[i, j]) ** 2
                v[i, j] = new[i, j]
                goal = 2.0 * v[i, j] - y[i, j]
                weight[i, j] += goal - anchor[i, j]
                anchor[i, j] = goal
        sizes[MOVED] = np.sqrt(moved)
        sizes[PUSH] = sweep(
            keys, seq, ref, queries, zz, weight, ptr, tok, lam, rhs, sq, equal, cap, gptr, gram,
            BLOCK, 1, INNER,
        )  # fmt: skip
        if lags(memory, sizes, scale):
            return done
        close(weight, y, v, memory, sizes)
    return count


@kernel
@no_type_check
def lags(memory, sizes, scale):
    """Whether the projection is behind what the alternation has reached."""
    share = LAG if memory.counts[PATIENCE] <= PATIENT else STRICT
    return sizes[PUSH] * sizes[SIZE] > share * scale * sizes[APART]


@kernel
@no_type_check
def close(weight, y, v, memory, sizes):
    """The end of a turn: its step is remembered and measured."""
    apart = weight - v
    sizes[APART], sizes[SIZE] = np.sqrt(np.sum(apart * apart)), np.sqrt(np.sum(v * v))
    add(memory, y.reshape(y.size), RELAX * apart.reshape(apart.size))
