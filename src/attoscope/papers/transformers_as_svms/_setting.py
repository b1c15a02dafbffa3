"""What several claims share: published data by seed, starts of training, and how work is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from attoscope.dynamics import AttentionData, LinearHead
from attoscope.papers.base import Run
from attoscope.svm import AttentionSVM, Selection
from attoscope.tasks import Instance, stack, unit_sphere

# Seeds of one run's instances start this far from those of the next.
APART = 100_000
# Relative gaps at which a correlation, and a rank, have nothing left in doubt.
EXACT, CERTIFIED = 1e-10, 1e-8


def instance_seeds(run: Run, count: int) -> list[int]:
    """0, 1, 2 … as published for a run of seed 0, and as many others for other seeds."""
    return [run.seed * APART + i for i in range(count)]


def parts(seeds: Sequence[int], size: int = 25) -> list[list[int]]:
    """The seeds in parts that are trained side by side."""
    return [list(seeds[i : i + size]) for i in range(0, len(seeds), size)]


def unit_sphere_data(seeds: Sequence[int], n: int, T: int, d: int) -> AttentionData:
    """The instances of these seeds, one per trial, with their linear heads."""
    return training_data(stack(unit_sphere(seed, n, T, d) for seed in seeds))


def training_data(instances: Instance) -> AttentionData:
    """Stacked instances with linear heads, for cross-attention."""
    return AttentionData.cross(
        instances.tokens, instances.queries, instances.labels, LinearHead(instances.head)
    )


def default_start(
    seeds: Sequence[int], d: int, name: int
) -> Float[np.ndarray, "trial width width"]:
    """Uniform on +-1/sqrt(d), the default of a linear layer; by seed and the number of a matrix."""
    bound = 1.0 / np.sqrt(d)
    return np.stack(
        [np.random.default_rng([seed, name]).uniform(-bound, bound, (d, d)) for seed in seeds]
    )


def solve(selection: Selection, norm: str) -> AttentionSVM:
    """The attention SVM in this norm, solved as exactly as its readings ask for."""
    tol = EXACT if norm == "frobenius" else CERTIFIED
    return AttentionSVM(norm, tol=tol).fit_selection(selection)


def joined(results: Sequence[dict[str, Any]], name: str) -> Any:
    """One array of all parts of a sweep; trials are on the last axis."""
    return np.concatenate([np.asarray(result[name]) for result in results], axis=-1)
