"""Anderson's acceleration of a fixed-point map: the next point from its last few steps."""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import numpy as np
from numpy.typing import NDArray

from attoscope.svm._dense import by_cholesky
from attoscope.svm._jit import kernel
from attoscope.svm.selection import Array

DEPTH = 8
GROWTH = 2.0
REACH = 5.0
LENIENT, MOST = 4, 1024
# Places in `counts` and in `lengths`.
HELD, PLAIN, PATIENCE = range(3)
SHORTEST, LAST = range(2)


class Memory(NamedTuple):
    """The last points of the map and the steps that it took from them.

    `order` lists the places that are held, the oldest first; `counts` how many are, for how many
    turns steps stay plain, and for how many they will the next time; `lengths` are those of the
    shortest step and of the last.
    """

    points: Array
    steps: Array
    gram: Array
    order: NDArray[np.int64]
    counts: NDArray[np.int64]
    lengths: Array

    @classmethod
    def of(cls, size: int) -> Memory:
        """An empty one, for points of so many numbers."""
        return cls(
            np.empty((DEPTH, size)), np.zeros((DEPTH, size)), np.zeros((DEPTH, DEPTH)),
            np.zeros(DEPTH, np.int64), np.array([0, 0, LENIENT]), np.full(2, np.inf),
        )  # fmt: skip

    def forget(self) -> None:
        """The map has changed: what was seen of it says nothing any more."""
        self.counts[HELD], self.lengths[SHORTEST] = 0, np.inf


@kernel
@no_type_check
def add(memory, point, step):
    """The map sends `point` to `point + step`; a step that grew too much is not believed."""
    counts, lengths, order = memory.counts, memory.lengths, memory.order
    length = np.sqrt(np.dot(step, step))
    if length > GROWTH * lengths[SHORTEST]:
        # Not believed: plain steps for a while, a longer one each time this happens.
        counts[HELD], counts[PLAIN] = 0, counts[PATIENCE]
        counts[PATIENCE] = min(2 * counts[PATIENCE], MOST)
        lengths[SHORTEST] = length
    lengths[SHORTEST], lengths[LAST] = min(lengths[SHORTEST], length), length
    counts[PLAIN] -= 1
    held = counts[HELD]
    slot = order[0]
    if held == DEPTH:
        for a in range(DEPTH - 1):
            order[a] = order[a + 1]
        held -= 1
    else:
        for slot in range(DEPTH):
            free = True
            for a in range(held):
                free = free and order[a] != slot
            if free:
                break
    order[held] = slot
    counts[HELD] = held + 1
    memory.points[slot], memory.steps[slot] = point, step
    product = np.dot(memory.steps, step)
    memory.gram[slot], memory.gram[:, slot] = product, product


@kernel
@no_type_check
def follow(memory, point):
    """Where the last points, mixed so that their steps cancel best, are sent; as it is if none."""
    held = memory.counts[HELD]
    if held == 0:
        return
    first = 0 if memory.counts[PLAIN] <= 0 and held > 2 else held - 1
    order = memory.order[first:held]
    reach = REACH * memory.lengths[LAST]
    mix(memory.gram, memory.points, memory.steps, order, reach, point)


@kernel
@no_type_check
def mix(gram, points, steps, order, reach, out):
    """Least squares over the steps in `order` (the newest last); at most `reach` off the newest."""
    rest, last = order.shape[0] - 1, order[-1]
    share = np.zeros(rest + 1)
    share[rest] = 1.0
    if rest > 0:
        square, cross = np.empty((rest, rest)), np.empty(rest)
        own, trace = gram[last, last], 0.0
        for a in range(rest):
            cross[a] = own - gram[last, order[a]]
        for a in range(rest):
            for b in range(rest):
                square[a, b] = cross[a] + cross[b] - own + gram[order[a], order[b]]
            trace += square[a, a]
        for a in range(rest):
            # Steps that do not differ say nothing: what they leave undetermined stays small.
            square[a, a] += 1e-10 * trace + 1e-12 * own + 1e-300
        part, done = by_cholesky(square, cross)
        if done:
            for a in range(rest):
                share[a] = part[a]
                share[rest] -= part[a]
    size, square_off = out.shape[0], 0.0
    for k in range(size):
        out[k] = 0.0
    for a in range(rest + 1):
        p, s = points[order[a]], steps[order[a]]
        for k in range(size):
            out[k] += share[a] * (p[k] + s[k])
    p, s = points[last], steps[last]
    for k in range(size):
        square_off += (out[k] - p[k] - s[k]) ** 2
    far = np.sqrt(square_off) / (reach + 1e-300)
    if far > 1.0:
        for k in range(size):
            plain = p[k] + s[k]
            out[k] = plain + (out[k] - plain) / far
