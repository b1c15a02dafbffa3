"""What several kept tokens predict for the trained weight: a finite part and an SVM direction."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from attoscope.dynamics import correlation
from attoscope.papers.transformers_as_svms._setting import solve
from attoscope.svm import Selection, finite_part

NAMES = {"svm_eq": "finite part + direction", "gen_svm": "direction", "one_token": "one token"}


def misfit(
    a: Float[np.ndarray, "key_width query_width"], b: Float[np.ndarray, "key_width query_width"]
) -> float:
    """1 - correlation: 0 for the same direction."""
    return 1.0 - float(correlation(a, b))


def predictions(
    weight: Float[np.ndarray, "key_width query_width"],
    selection: Selection,
    probabilities: Float[np.ndarray, "sample token"],
) -> dict[str, float]:
    """1 - correlation of a trained weight with what several kept tokens predict for it.

    `svm_eq`: `W_fin + R W_mm` with `R = <W_mm, W - W_fin> / ||W_mm||^2`; `gen_svm`: W_mm alone;
    `one_token`: the SVM of the most probable tokens; `permuted`: svm_eq with the probabilities of
    each sample's kept tokens moved on by one.

    Raises `InfeasibleSelection` where no weight makes the selection, or the one of single tokens.
    Source: arXiv 2308.16898, general SVM equivalence (conjecture).
    """
    direction = solve(selection, "frobenius").weight_
    ordinary = selection.replace(selected=probabilities.argmax(1))
    single = solve(ordinary, "frobenius").weight_
    moved = probabilities.copy()
    for row, kept in zip(moved, selection.selected, strict=True):
        row[kept] = np.roll(row[kept], 1)

    def off(p: Float[np.ndarray, "sample token"]) -> float:
        finite = finite_part(selection, p)
        growth = np.vdot(direction, weight - finite) / np.vdot(direction, direction)
        return misfit(weight, finite + growth * direction)

    return {
        "svm_eq": off(probabilities),
        "gen_svm": misfit(weight, direction),
        "one_token": misfit(weight, single),
        "permuted": off(moved),
    }
