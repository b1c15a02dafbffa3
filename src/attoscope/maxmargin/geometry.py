"""A head's weight beside its SVM: margin share, alignment, what competes, and ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray

from attoscope.maxmargin.choices import Choices
from attoscope.maxmargin.predictors import solve
from attoscope.svm import certify

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Geometry:
    """A weight against the max-margin weight of what it chooses.

    `margin_share`: (least margin / norm) of the weight, over the largest that there is; certified
    to at least this. `alignment`: cosine of the two; it is the mean margin that the weight has on
    the competing keys (weighted by their multipliers), over the largest possible one, and never
    below the margin share. `support_share`: competing keys with a multiplier, as a share of all.
    `rank`: singular values of the max-margin weight that are certain; `stable_rank`: its squared
    Frobenius over its squared spectral norm, which needs no tolerance. `support` lists (query,
    key) pairs, largest multiplier first, and `multiplier` theirs.
    """

    margin_share: float
    alignment: float
    support_share: float
    rank: int
    stable_rank: float
    gap: float
    support: Int[np.ndarray, "pair 2"]
    multiplier: Array


def cosine(a: Array, b: Array) -> float:
    """The cosine of two matrices; 0 where one of them is zero."""
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.vdot(a, b)) / size if size > 0.0 else 0.0


def stable_rank(weight: Array) -> float:
    """`||W||_F^2 / ||W||_2^2`: between 1 and the rank."""
    values = np.linalg.svd(weight, compute_uv=False)
    return float((values**2).sum() / values[0] ** 2) if values[0] > 0.0 else 0.0


def geometry(choices: Choices) -> Geometry | None:
    """The head's weight beside its Frobenius SVM; None where no weight makes the choices.

    Source: arXiv 2308.16898 (Att-SVM); that the alignment is a mean margin over the support
    follows from its dual, `W_svm = sum_it multiplier_it (chosen - key_t) query_i^T`.
    """
    model = solve(choices)
    if model is None:
        return None
    own = certify(choices.selection, choices.weight, model.dual_)
    dual = model.dual_.tocoo()
    held = dual.data > 1e-6 * dual.data.max(initial=0.0)
    order = np.argsort(-dual.data[held], kind="stable")
    pairs = np.stack([dual.row[held], dual.col[held]], 1)[order]
    weight: Array = model.weight_
    return Geometry(
        margin_share=model.lower_bound_ / own.upper,
        alignment=cosine(choices.weight, weight),
        support_share=int(held.sum()) / choices.selection.constraint_count,
        rank=model.rank_,
        stable_rank=stable_rank(weight),
        gap=model.gap_,
        support=pairs.astype(np.int64),
        multiplier=dual.data[held][order],
    )
