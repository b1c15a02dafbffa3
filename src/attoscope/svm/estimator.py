"""The estimator: the smallest weight that selects, with a certificate."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from attoscope.errors import AttoscopeError
from attoscope.svm import _checks as checks
from attoscope.svm._project import Clock
from attoscope.svm._solve import Solution, Start, solve_selection
from attoscope.svm.norms import Norm, as_norm
from attoscope.svm.selection import Array, Selection, as_selection, key_scores

OPTIMAL = "optimal: the certified gap is within the tolerance"
RANK = (
    "limit: the best weight found with rank at most {rank}, {gap:.2%} above the unrestricted "
    "optimum at most (the restricted problem is not convex)"
)
NONE = "limit: no weight with rank at most {rank} was found that separates; allow a higher rank"
LIMIT = "limit: stopped by {what} at a certified gap of {gap:.1e}; allow more or a larger tol"


class AttentionSVM(BaseEstimator):  # type: ignore[misc]
    """The smallest weight W that makes each query choose its keys: the attention SVM.

        minimise ||W||   subject to   (key_chosen - key_t)^T W query_i >= required_it

    for every query i and every allowed key t that it does not choose; several chosen keys of one
    query have to score equally. Training attention by gradient descent goes in this direction:
    Frobenius norm where W is trained, nuclear norm where W = K Q^T is.

    Args:
        norm: "frobenius", "nuclear", "spectral", "max", "l1", `Schatten(p)` or `Entrywise(p)`.
        C: infinite for the hard margin; else the price of a unit of shortfall, in
            `1/2 ||W||_F^2 + C sum` (Frobenius) or `||W|| + C sum` (other norms).
        max_rank: keep the rank at most this (not convex: the gap is to the unrestricted optimum).
        tol: relative gap between certified bounds at which to stop.
        max_iter: passes over the active constraints.
        time_limit: seconds.
        warm_start: start from the last fit, when the number of queries and keys is the same.

    Fitted: `weight_` (key width, query width), `dual_` (sparse, (query, token)), `support_` the
    (query, token) pairs whose margin is tight, `margin_` the least margin, `objective_`,
    `lower_bound_`, `gap_` (certified), `rank_`, `n_iter_`, `status_` (a sentence that begins with
    optimal or limit), `certificate_`, `selection_`.

    Raises `InfeasibleSelection` with a proof where no weight separates, `AttoscopeError` for bad
    input. Source: arXiv 2308.16898 (Att-SVM); entrywise norms: arXiv 2410.14581.
    """

    def __init__(
        self,
        norm: str | Norm = "frobenius",
        C: float | int = np.inf,
        max_rank: int | None = None,
        tol: float | int = 1e-6,
        max_iter: int = 20_000,
        time_limit: float | int | None = None,
        warm_start: bool = False,
    ) -> None:
        self.norm = norm
        self.C = C
        self.max_rank = max_rank
        self.tol = tol
        self.max_iter = max_iter
        self.time_limit = time_limit
        self.warm_start = warm_start

    def fit(
        self,
        keys: Any,
        queries: Any,
        selected: Any,
        sequence: Any = None,
        *,
        allowed: Any = None,
        required: Any = 1.0,
        bias: Any = None,
    ) -> AttentionSVM:
        """Fit to plain arrays: see `Selection` for what they are."""
        selection = Selection(
            keys, queries, selected, sequence, allowed=allowed, required=required, bias=bias
        )
        return self.fit_selection(selection)

    def fit_selection(self, selection: Selection) -> AttentionSVM:
        """Fit to a selection problem."""
        norm, selection = self._checked(), as_selection(selection)
        clock = Clock(self.max_iter, self.time_limit)
        solution = solve_selection(
            selection, norm, float(self.C), self.tol, clock, self._start(selection)
        )
        if self.max_rank is not None:
            from attoscope.svm._rank import limited

            solution = limited(selection, norm, solution, self.max_rank, self.tol, clock)
        self._keep(selection, solution, clock)
        return self

    def _checked(self) -> Norm:
        number, steps = checks.is_number, functools.partial(checks.is_number, whole=True)
        for name, holds, expected in (
            ("C", number(self.C) and self.C > 0, "a positive number, or infinity"),
            ("tol", number(self.tol) and 0 < self.tol < np.inf, "a positive number, as 1e-6"),
            ("max_iter", steps(self.max_iter) and self.max_iter >= 1, "a whole number from 1"),
            (
                "time_limit",
                self.time_limit is None or number(self.time_limit) and self.time_limit > 0,
                "seconds, or None",
            ),
            (
                "max_rank",
                self.max_rank is None or steps(self.max_rank) and self.max_rank >= 1,
                "a whole number from 1, or None",
            ),
        ):
            if not holds:
                raise AttoscopeError(
                    f"{name}: got {getattr(self, name)!r}; expected {expected}"
                )
        if self.max_rank is not None and np.isfinite(self.C):
            raise AttoscopeError(
                f"max_rank: got {self.max_rank} with C = {self.C}; expected the hard margin (C "
                "infinite), or no bound on the rank"
            )
        return as_norm(self.norm)

    def _start(self, selection: Selection) -> Start | None:
        """What the last fit found, where it can serve as a start."""
        if not self.warm_start or not hasattr(self, "dual_"):
            return None
        fits = self.dual_.shape == selection.selected.shape
        fits = fits and self.weight_.shape == selection.shape[2:]
        return Start(self.dual_, self.weight_) if fits and self.dual_.nnz else None

    def _keep(self, selection: Selection, solution: Solution, clock: Clock) -> None:
        certificate = solution.certificate
        self.selection_ = selection
        self.weight_ = solution.weight
        self.dual_ = solution.dual
        self.certificate_ = certificate
        self.objective_ = certificate.upper
        self.lower_bound_ = certificate.lower
        self.gap_ = certificate.gap
        self.margin_ = certificate.margin
        self.n_iter_ = solution.n_iter
        self.n_features_in_ = selection.shape[2]
        self.status_ = OPTIMAL
        if self.gap_ <= self.tol:
            return
        if self.max_rank is not None and not clock.spent() and np.isfinite(self.gap_):
            self.status_ = RANK.format(rank=self.max_rank, gap=self.gap_)
            return
        what = "rounding"
        if clock.spent():
            what = "max_iter" if clock.done >= self.max_iter else "time_limit"
        self.status_ = LIMIT.format(what=what, gap=self.gap_)
        if self.max_rank is not None and not clock.spent():
            self.status_ = NONE.format(rank=self.max_rank)
        warnings.warn(self.status_, ConvergenceWarning, stacklevel=3)

    @property
    def support_(self) -> Int[np.ndarray, "pair 2"]:
        """(query, token) pairs whose margin is tight, as far as the gap lets one say."""
        check_is_fitted(self)
        tolerance = max(1e-6, 3.0 * min(self.gap_, 0.1))
        return support(self.selection_, self.weight_, tolerance)

    @property
    def rank_(self) -> int:
        """Singular values of `weight_` that the certified gap does not leave in doubt."""
        check_is_fitted(self)
        return numerical_rank(self.weight_, self.gap_)

    def decision_function(
        self, keys: Any, queries: Any, sequence: Any = None
    ) -> Float[np.ndarray, "query token"]:
        """Scores `key_t^T W query_i` of new keys and queries."""
        check_is_fitted(self)
        return key_scores(keys, queries, sequence, self.weight_)

    def predict(
        self, keys: Any, queries: Any, sequence: Any = None
    ) -> Int[np.ndarray, " query"]:
        """The key with the largest score for each query."""
        return np.asarray(self.decision_function(keys, queries, sequence).argmax(1))

    def score(self, keys: Any, queries: Any, selected: Any, sequence: Any = None) -> float:
        """Share of queries whose best key is a chosen one, 0 to 1."""
        check_is_fitted(self)
        scores = key_scores(keys, queries, sequence, self.weight_)
        chosen = checks.chosen("selected", selected, *scores.shape)
        return float(np.take_along_axis(chosen, scores.argmax(1)[:, None], 1).mean())


def support(selection: Selection, weight: Array, tolerance: float) -> Int[np.ndarray, "pair 2"]:
    """(query, token) pairs whose margin is at most `required + tolerance`."""
    from attoscope.svm._problem import Problem
    from attoscope.svm._scan import COMPETES, WORKING

    problem = Problem.of(selection, reduce=False)
    scale = float(np.abs(problem.rhs).max()) or 1.0
    problem.scan(weight, tolerance * scale, selection.selected.shape[1])
    i, t = np.nonzero(problem.state == COMPETES + WORKING)
    i = i if problem.order is None else problem.order[i]
    return np.stack([i, t], 1)


def numerical_rank(weight: Array, gap: float) -> int:
    """Singular values above what the certified gap leaves uncertain."""
    values = np.linalg.svd(weight, compute_uv=False)
    unsure = max(1e-7, float(np.sqrt(2.0 * min(gap, 0.5))))
    return int(np.count_nonzero(values > unsure * values[0])) if values[0] > 0.0 else 0
