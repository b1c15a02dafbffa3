"""Which norm has this weight minimised? The excess over the best weight in each norm."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from sklearn.exceptions import ConvergenceWarning

from attoscope.errors import AttoscopeError
from attoscope.svm import _checks as checks
from attoscope.svm.certificate import certify
from attoscope.svm.estimator import AttentionSVM
from attoscope.svm.norms import NAMES, Norm, as_norm
from attoscope.svm.selection import Selection

# Runs that minimise a norm end within this of its optimum; a factored Adam run, which minimises
# none of the five, stays above 1.09 (measured; arXiv 2410.14581, 2502.04664).
THRESHOLD = 1.06


@dataclass(frozen=True)
class Fingerprint:
    """The excess of a weight in each norm, and what that says.

    `excess[norm]` is (norm of the weight at margin 1) / (least such norm): 1 is a max-margin
    weight, infinity one that does not separate. `nearest` is the norm of least excess,
    `runner_up` the next one and `distance` how much larger its excess is. `label` is `nearest`
    where its excess is at most the threshold, and "none" where it is not. `uncertain` is the
    largest certified gap of the optima: each excess is right up to that factor.
    """

    excess: dict[str, float]
    label: str
    nearest: str
    runner_up: str
    distance: float
    uncertain: float

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value:.3f}" for name, value in self.excess.items())
        return f"{self.label} (excess: {values})"


def fingerprint(
    weight: Float[np.ndarray, "key_width width"],
    selection: Selection,
    *,
    norms: Sequence[str | Norm] = NAMES,
    tol: float = 1e-4,
    threshold: float = THRESHOLD,
    max_iter: int = 20_000,
    time_limit: float | None = None,
) -> Fingerprint:
    """Which norm this weight comes nearest to having minimised, for what it selects.

    `excess_N(W) = (||W||_N / least margin of W) / min ||W'||_N over weights with margins 1`.
    Gradient descent on W minimises the Frobenius norm, on factors K Q^T the nuclear norm, Muon
    the spectral norm, sign descent and Adam the largest entry, greedy coordinates the l1 norm.

    Args:
        weight: (key width, query width).
        selection: what the weight selects: recompute it from the trained head, because different
            optimisers may choose different keys.
        norms: two or more to compare.
        tol: certified gap of each optimum.
        threshold: above this excess the answer is "none".
        max_iter: per norm, as in `AttentionSVM`.
        time_limit: seconds per norm.

    Raises `InfeasibleSelection` where no weight makes the selection. Source: arXiv 2410.14581,
    2502.04664, 2403.08699, 2410.23819; their transfer to attention is measured, not proved.
    """
    if len(norms) < 2:
        raise AttoscopeError(f"norms: got {len(norms)}; expected two or more to compare")
    weight = checks.weight(weight, selection.keys.shape[2], selection.queries.shape[1])
    excess, uncertain = {}, 0.0
    for norm in map(as_norm, norms):
        model = AttentionSVM(norm, tol=tol, max_iter=max_iter, time_limit=time_limit)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit_selection(selection)
        own = certify(selection, weight, model.dual_, norm)
        excess[norm.name] = own.upper / model.objective_
        uncertain = max(uncertain, model.gap_)
    nearest, runner_up = sorted(excess, key=excess.__getitem__)[:2]
    label = nearest if excess[nearest] <= threshold else "none"
    finite = np.isfinite(excess[runner_up])
    distance = excess[runner_up] - excess[nearest] if finite else float("inf")
    return Fingerprint(excess, label, nearest, runner_up, distance, uncertain)
