"""Which norm has this weight minimised? The excess over the best weight in each norm."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from attoscope.errors import AttoscopeError
from attoscope.svm import _checks as checks
from attoscope.svm.certificate import certify
from attoscope.svm.estimator import AttentionSVM
from attoscope.svm.norms import NAMES, Norm, as_norm
from attoscope.svm.selection import Selection, as_selection

# Runs that minimise a norm end within this of its optimum; a factored Adam run, which minimises
# none of the five, stays above 1.09 (measured; arXiv 2410.14581, 2502.04664).
THRESHOLD = 1.06
# Gap of a first solution, and how far above the threshold an excess is beyond doubt.
COARSE, CLEAR = 0.02, 1.5


@dataclass(frozen=True)
class Fingerprint:
    """The excess of a weight in each norm, and what that says.

    The excess is (norm of the weight at margin 1) / (least such norm): 1 is a max-margin weight,
    infinity one that does not separate. It is certified to lie between `excess[norm]` and
    `at_most[norm]`. `nearest` is the norm of least excess as far as that is known, `runner_up`
    the next one and `distance` how much larger its excess is at least.

    `label` is `nearest` where that is certain and its excess is at most the threshold; "none"
    where no norm's excess is; "undecided" where the certified optima leave it open. `sentence`
    gives the reason. `uncertain` is the largest certified gap of the optima.
    """

    excess: dict[str, float]
    at_most: dict[str, float]
    label: str
    sentence: str
    nearest: str
    runner_up: str
    distance: float
    uncertain: float

    def __str__(self) -> str:
        values = ", ".join(
            f"{name} {_shown(low, self.at_most[name])}" for name, low in self.excess.items()
        )
        return f"{self.label} (excess: {values}): {self.sentence}"


def _shown(low: float, high: float) -> str:
    texts = f"{low:.3f}", f"{high:.3f}"
    return texts[0] if high == low or high - low <= 1e-3 * low else " to ".join(texts)


def fingerprint(
    weight: Any,
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
        norms: two or more to compare, each once.
        tol: certified gap of each optimum that the weight is anywhere near; the others are known
            to 2 %, which `excess` and `at_most` say.
        threshold: above this excess in every norm the answer is "none".
        max_iter: per norm, as in `AttentionSVM`.
        time_limit: seconds per norm.

    The answer is "undecided" where limits, or norms that agree, leave it open.

    Raises `InfeasibleSelection` where no weight makes the selection, `AttoscopeError` for bad
    input and for required margins that the zero weight has. Source: arXiv 2410.14581,
    2502.04664, 2403.08699, 2410.23819; their transfer to attention is measured, not proved.
    """
    selection = as_selection(selection)
    weight = checks.weight(weight, selection.keys.shape[2], selection.queries.shape[1])
    if not (checks.is_number(threshold) and threshold >= 1):
        raise AttoscopeError(f"threshold: got {threshold!r}; expected a number from 1, as 1.06")
    compared = {norm.name: norm for norm in map(as_norm, norms)}
    if len(compared) < max(2, len(norms)):
        raise AttoscopeError(
            f"norms: got {', '.join(compared) or 'none'}, {len(norms)} in all; expected two or "
            "more to compare, each once"
        )
    top = np.abs(weight).max()
    if selection.bias is None and top > 0.0:
        # The excess does not change with the scale, and extreme ones cannot be squared.
        weight = weight / top
    low, high, uncertain = {}, {}, 0.0
    for name, norm in compared.items():
        model = AttentionSVM(
            norm, tol=max(tol, COARSE), max_iter=max_iter, time_limit=time_limit,
            warm_start=True,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit_selection(selection)
            own = certify(selection, weight, model.dual_, norm).upper
            left = max_iter - model.n_iter_
            if own <= CLEAR * threshold * model.objective_ and left > 0:
                # Near enough for the last digits to matter.
                model.set_params(tol=tol, max_iter=left).fit_selection(selection)
        if model.objective_ == 0.0:
            raise AttoscopeError(
                "required: got margins that the zero weight has; expected one that asks for a "
                "weight, as 1, because an excess over 0 means nothing"
            )
        low[name], high[name] = _excess(own, model.lower_bound_, model.objective_)
        uncertain = max(uncertain, model.gap_)
    nearest, runner_up = sorted(low, key=lambda name: (high[name], low[name]))[:2]
    apart = low[runner_up] - high[nearest] if high[nearest] < np.inf else -np.inf
    distance = float("inf") if low[runner_up] == np.inf else max(0.0, float(apart))
    label, sentence = _answer(low, high, nearest, threshold, uncertain)
    return Fingerprint(low, high, label, sentence, nearest, runner_up, distance, uncertain)


def _excess(own: float, lower: float, upper: float) -> tuple[float, float]:
    """Bounds on own / optimum, from those on the optimum; `own` is itself an upper bound."""
    if own == np.inf:
        return own, own
    low = own / min(own, upper)
    return low, max(low, own / lower) if lower > 0.0 else float("inf")


def _answer(
    low: dict[str, float],
    high: dict[str, float],
    nearest: str,
    threshold: float,
    uncertain: float,
) -> tuple[str, str]:
    """The label that the bounds allow, and why."""
    if min(low.values()) == np.inf:
        return "none", "the weight does not make this selection"
    if min(low.values()) > threshold:
        return "none", f"the excess is above {threshold:g} in every norm"
    rivals = [name for name in low if name != nearest and low[name] <= high[nearest]]
    if high[nearest] <= threshold and not rivals:
        return nearest, f"the excess is certified to be least there, and below {threshold:g}"
    what = f"above or below {threshold:g}"
    if high[nearest] <= threshold:
        what = f"least in {nearest} or in {' or '.join(rivals)}, or the same"
    return "undecided", (
        f"the optima are known to a relative gap of {uncertain:.1e}, which leaves open whether "
        f"the excess is {what}: a smaller tol, more max_iter or more time may tell"
    )
