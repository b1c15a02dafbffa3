"""Which selections training can end at: local optimality, its cone, and global conditions."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning

from attoscope.dynamics.data import AttentionData
from attoscope.dynamics.gradients import Gradient
from attoscope.errors import AttoscopeError
from attoscope.svm import AttentionSVM, Selection
from attoscope.svm import _checks as checks

Array = NDArray[np.float64]
# A margin within this of 1 is tight.
TIGHT = 1e-6
SOLVED, ENOUGH = 1e-10, 1e-7


@dataclass(frozen=True, eq=False)
class LocalOptimality:
    """Whether a selection is locally optimal, and by how much.

    `supports` are the (sample, token) pairs of tight margin, `offending` those among them whose
    score is not below the selected token's. `slack` is the least amount by which a selected token
    scores higher than one of its supports: positive exactly when locally optimal.
    """

    supports: Int[np.ndarray, "support 2"]
    offending: Int[np.ndarray, "offender 2"]
    slack: float

    def __bool__(self) -> bool:
        return self.slack > 0.0


@dataclass(frozen=True, eq=False)
class Condition:
    """A condition per trial: `holds`, and `slack`, how far it is from the other answer."""

    holds: Bool[np.ndarray, " trial"]
    slack: Float[np.ndarray, " trial"]


@dataclass(frozen=True, eq=False)
class LocalCone:
    """The cone around a locally optimal direction in which gradient descent has to stay.

    `{W : correlation with `weight` >= 1 - mu, ||W||_F >= radius}`. The constants are sufficient
    and far from sharp. `theta` is the margin of the unit max-margin weight, `delta` half of what
    the closest token that is no support has to spare (1 where all are supports).
    """

    weight: Float[np.ndarray, "key_width query_width"]
    mu: float
    radius: float
    theta: float
    delta: float

    def contains(self, weight: Float[np.ndarray, "key_width query_width"]) -> bool:
        size = float(np.linalg.norm(weight))
        inner = float(np.vdot(weight, self.weight)) * self.theta
        return size >= self.radius and inner >= (1.0 - self.mu) * size

    def sample(
        self, generator: np.random.Generator, count: int
    ) -> Float[np.ndarray, "count key_width query_width"]:
        """Random points on the edge of the cone, of norm `radius`."""
        unit = self.weight * self.theta
        aside = generator.standard_normal((count, *unit.shape))
        aside -= np.einsum("rij,ij->r", aside, unit)[:, None, None] * unit
        aside /= np.linalg.norm(aside, axis=(1, 2), keepdims=True)
        cos = 1.0 - self.mu
        points = cos * unit + np.sqrt(self.mu * (2.0 - self.mu)) * aside
        return np.asarray(self.radius * points)


def locally_optimal(
    selection: Selection,
    scores: Float[np.ndarray, "sample token"],
    *,
    weight: Float[np.ndarray, "key_width query_width"] | None = None,
    tolerance: float | int = TIGHT,
) -> LocalOptimality:
    """Whether every selected token scores strictly higher than each of its support tokens.

    Training can only converge in direction to a locally optimal selection. Supports are the
    tokens whose margin under the max-margin weight is 1.

    Args:
        selection: one selected token per sample.
        scores: token scores, as `AttentionData.scores` of the trial.
        weight: the max-margin weight, where it is known already.
        tolerance: margins up to 1 + tolerance are tight.

    Raises `InfeasibleSelection` where no weight makes the selection, and `AttoscopeError` for
    scores of another shape, or NaN. Source: arXiv 2308.16898, "locally optimal tokens".
    """
    scores = checks.real("scores", scores, "numbers (sample, token)")
    if scores.shape != selection.selected.shape or np.isnan(scores).any():
        raise AttoscopeError(
            f"scores: got shape {scores.shape} with {np.isnan(scores).sum()} NaN; expected "
            f"{selection.selected.shape} (sample, token) and none, as AttentionData.scores of the "
            "trial gives"
        )
    margins = selection.margins(max_margin(selection) if weight is None else weight)
    tight = competing(selection) & (margins <= 1.0 + tolerance)
    supports = np.argwhere(tight)
    apart = score_gaps(selection, scores)[tight]
    offending = supports[apart <= 0.0]
    return LocalOptimality(supports, offending, float(apart.min(initial=np.inf)))


def local_cone(selection: Selection, scores: Float[np.ndarray, "sample token"]) -> LocalCone:
    """Constants of the local convergence theorem for a locally optimal selection.

    `theta = 1/||W||`, `A = max ||A_it||_F ||W||`, `mu = (min(.5, delta)/A)^2 / 8` and
    `radius = max(log(4 T M Gmax/gmin) / (min(.5, delta) theta), 2 log(4T) / theta)`, with W the
    max-margin weight, M its largest margin, Gmax the largest difference of scores in a sample and
    gmin the smallest between a selected token and a support.

    Raises `AttoscopeError` for a selection that is not locally optimal.
    Source: arXiv 2308.16898, local convergence of gradient descent (constants recalled).
    """
    weight = max_margin(selection)
    local = locally_optimal(selection, scores, weight=weight)
    if not local:
        raise AttoscopeError(
            f"selection: got {len(local.offending)} supports that score at least as high as the "
            "selected token; expected a locally optimal selection (see locally_optimal)"
        )
    rivals, margins = competing(selection), selection.margins(weight)
    loose = rivals & (margins > 1.0 + TIGHT)
    delta = 0.5 * (float(margins[loose].min()) - 1.0) if loose.any() else 1.0
    size, bound = float(np.linalg.norm(weight)), min(0.5, delta)
    keys = selection.keys[selection.sequence]
    own = np.take_along_axis(keys, selection.reference[:, None, None], 1)
    sizes = (
        np.linalg.norm(own - keys, axis=2) * np.linalg.norm(selection.queries, axis=1)[:, None]
    )
    allowed = rivals | selection.selected
    spread = np.where(allowed, scores, -np.inf).max(1) - np.where(allowed, scores, np.inf).min(
        1
    )
    tokens = int(allowed.sum(1).max())
    ratio = 4.0 * tokens * float(margins[rivals].max()) * float(spread.max()) / local.slack
    radius = max(np.log(ratio) / bound, 2.0 * np.log(4.0 * tokens)) * size
    mu = (bound / (float(sizes[rivals].max()) * size)) ** 2 / 8.0
    return LocalCone(weight, mu, float(radius), 1.0 / size, delta)


def first_gradient_separates(data: AttentionData, loss: str = "logistic") -> Condition:
    """Whether minus the gradient at W = 0 already separates the optimal tokens.

    Then gradient descent with a large first step converges to the globally optimal direction.
    `slack` is the least margin of the unit-norm first gradient. Source: arXiv 2308.16898.
    """
    trials, _, _, dk, dq = data.shape
    first = Gradient(data, loss).at(np.zeros((trials, dk, dq))).direction
    optimal, slack = data.optimal(), np.empty(trials)
    for r in range(trials):
        selection = data.selection(r, optimal[r])
        size = float(np.linalg.norm(first[r]))
        margins = selection.margins(first[r])[competing(selection)]
        slack[r] = margins.min() / size if size > 0.0 else 0.0
    return Condition(slack > 0.0, slack)


def all_tokens_support(data: AttentionData) -> Condition:
    """B.1: every constraint of the globally optimal selection is tight at its solution.

    Tested without solving: the Gram matrix G of the constraints is positive definite and all
    multipliers `G^-1 1` are at least 0. Then no finite weight is a stationary point. `slack` is
    the least multiplier, minus infinity where G is singular. Source: arXiv 2308.16898.
    """
    optimal, slack = data.optimal(), np.empty(data.trials)
    for r in range(data.trials):
        selection = data.selection(r, optimal[r])
        i, t = np.nonzero(competing(selection))
        seq = selection.sequence[i]
        apart = selection.keys[seq, selection.reference[i]] - selection.keys[seq, t]
        z = selection.queries[i]
        gram = (apart @ apart.T) * (z @ z.T)
        values = np.linalg.eigvalsh(gram)
        regular = values[0] > len(values) * np.finfo(np.float64).eps * values[-1]
        slack[r] = np.linalg.solve(gram, np.ones(len(gram))).min() if regular else -np.inf
    return Condition(slack >= 0.0, slack)


def equal_scores(data: AttentionData, tolerance: float | int = 1e-12) -> Condition:
    """B.2: in each sample all tokens other than the optimal one have the same score.

    Then gradient descent converges to the globally optimal direction from any start. `slack` is
    minus the largest difference of such scores; it holds within `tolerance` times the largest
    score. Source: arXiv 2308.16898.
    """
    scores = data.scores()
    others = data.allowed.copy()
    np.put_along_axis(others, data.optimal()[:, :, None], False, 2)
    high = np.where(others, scores, -np.inf).max(2)
    low = np.where(others, scores, np.inf).min(2)
    spread = np.where(others.any(2), high - low, 0.0).max(1, initial=0.0)
    size = np.abs(scores[data.allowed]).max()
    return Condition(spread <= tolerance * size, -spread)


def max_margin(selection: Selection) -> Float[np.ndarray, "key_width query_width"]:
    """The Frobenius solution, to a certified gap at which tight margins can be told."""
    with warnings.catch_warnings():
        # Large weights are certified to what rounding leaves, which is enough.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = AttentionSVM(tol=SOLVED).fit_selection(selection)
    if not model.gap_ <= ENOUGH:
        raise AttoscopeError(
            f"selection: got one whose SVM is certified to a gap of {model.gap_:.0e} only; "
            f"expected {ENOUGH:.0e}, at which tight margins can be told"
        )
    return np.asarray(model.weight_)


def competing(selection: Selection) -> Bool[np.ndarray, "sample token"]:
    """Allowed tokens other than the selected one."""
    rivals = ~selection.selected
    return rivals if selection.allowed is None else rivals & selection.allowed


def score_gaps(selection: Selection, scores: Array) -> Float[np.ndarray, "sample token"]:
    """Score of the selected token minus each token's; infinite where not allowed."""
    own = np.take_along_axis(scores, selection.reference[:, None], 1)
    return np.asarray(own - scores)
