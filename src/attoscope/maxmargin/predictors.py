"""Held-out choices: learn a head's choices on some documents, predict them on the others.

Weights (max-margin, mean-difference, a random one that makes the same choices) are learnt from
keys and queries; the tables know only where keys stand, or which token they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning

from attoscope.maxmargin.choices import Choices
from attoscope.svm import AttentionSVM, InfeasibleSelection, Norm
from attoscope.svm.selection import key_scores

Array = NDArray[np.float64]
TOL, MAX_ITER = 1e-3, 4000
# What to learn from the choices of some documents: scores (query, token) for other queries.
Learner = Callable[[Choices, Choices], Array]


def solve(
    choices: Choices,
    norm: str | Norm = "frobenius",
    C: float = np.inf,
    *,
    max_rank: int | None = None,
    tol: float = TOL,
    max_iter: int = MAX_ITER,
) -> AttentionSVM | None:
    """The SVM of these choices, or None where no weight makes them."""
    model = AttentionSVM(norm, C=C, max_rank=max_rank, tol=tol, max_iter=max_iter)
    try:
        with warnings.catch_warnings():
            # The certified gap says how far it came.
            warnings.simplefilter("ignore", ConvergenceWarning)
            return model.fit_selection(choices.selection)
    except InfeasibleSelection:
        return None


def mean_difference(choices: Choices) -> Float[np.ndarray, "key_width width"]:
    """sum_i (chosen key - mean of its competitors) query_i^T: one gradient step from zero."""
    s = choices.selection
    competes = choices.allowed & ~s.selected
    total = np.zeros((s.shape[2], s.shape[3]))
    for d in np.unique(s.sequence):
        mine = s.sequence == d
        share = -1.0 * competes[mine] / np.maximum(competes[mine].sum(1, keepdims=True), 1)
        share[np.arange(len(share)), choices.chosen[mine]] += 1.0
        total += (share @ s.keys[d]).T @ s.queries[mine]
    return np.asarray(total / len(s.queries))


def feasible_weight(
    choices: Choices, rng: np.random.Generator, size: float
) -> Float[np.ndarray, "key_width width"] | None:
    """A random weight that makes the same choices, with margins of at least 1.

    The nearest such weight to a Gaussian one of Frobenius norm `size`: the larger that is, the
    less is left of the max-margin solution (`size` 0).
    """
    s = choices.selection
    start = rng.standard_normal((s.shape[2], s.shape[3]))
    start *= size / np.linalg.norm(start)
    # As a known term of the scores: what is solved for is the least change that makes up for it.
    known = key_scores(s.keys, s.queries, s.sequence, start)
    known = np.where(choices.allowed, known, 0.0) + (0.0 if s.bias is None else s.bias)
    change = AttentionSVM(tol=TOL, max_iter=MAX_ITER)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            change.fit_selection(s.replace(bias=known))
    except InfeasibleSelection:
        return None
    return np.asarray(start + change.weight_)


def by_weight(weight: Array | None, test: Choices) -> Array:
    """Scores of a weight on other queries; NaN where there is no weight."""
    if weight is None:
        return np.full(test.selection.selected.shape, np.nan)
    return test.selection.scores(weight)


def svm(
    norm: str | Norm = "frobenius", C: float = np.inf, max_rank: int | None = None
) -> Learner:
    """The learner that solves the SVM."""

    def learn(train: Choices, test: Choices) -> Array:
        model = solve(train, norm, C, max_rank=max_rank)
        return by_weight(None if model is None else model.weight_, test)

    return learn


def difference(train: Choices, test: Choices) -> Array:
    """The mean-difference direction."""
    return by_weight(mean_difference(train), test)


def keys_only(train: Choices, test: Choices) -> Array:
    """The mean difference of the keys, whatever the query is: one direction for all."""

    def blind(choices: Choices) -> Choices:
        s = choices.selection
        return replace(choices, selection=s.replace(queries=np.ones((len(s.queries), 1))))

    return by_weight(mean_difference(blind(train)), blind(test))


def position_table(train: Choices, test: Choices) -> Array:
    """How often a key is chosen by where it stands: from the start, or from the query.

    Whichever of the two explains more of the training documents.
    """
    places = (_from_start, _from_query)
    tables = [_rates(train, place) for place in places]
    right = [
        hits(_looked_up(table, place(train)), train).mean()
        for table, place in zip(tables, places, strict=True)
    ]
    best = int(np.argmax(right))
    return _looked_up(tables[best], places[best](test))


def token_table(train: Choices, test: Choices) -> Array:
    """How often a key is chosen by which token it is."""
    return _looked_up(_rates(train, _token), _token(test))


def _from_start(choices: Choices) -> NDArray[np.int64]:
    return np.broadcast_to(
        np.arange(choices.allowed.shape[1], dtype=np.int64), choices.allowed.shape
    )


def _from_query(choices: Choices) -> NDArray[np.int64]:
    size = choices.allowed.shape[1]
    return np.asarray(np.arange(size)[None, :] - choices.positions[:, None], np.int64)


def _token(choices: Choices) -> NDArray[np.int64]:
    return np.asarray(choices.tokens[choices.selection.sequence])


def _rates(
    choices: Choices, place: Callable[[Choices], NDArray[np.int64]]
) -> tuple[NDArray[np.int64], Array]:
    """Labels seen, and how often each is chosen where it is there: (chosen + 1/2) / (there + 1)."""
    labels = place(choices)
    there = labels[choices.allowed]
    seen, count = np.unique(there, return_counts=True)
    won = np.zeros(len(seen))
    chosen = labels[np.arange(len(labels)), choices.chosen]
    np.add.at(won, np.searchsorted(seen, chosen), 1.0)
    return seen, (won + 0.5) / (count + 1.0)


def _looked_up(table: tuple[NDArray[np.int64], Array], labels: NDArray[np.int64]) -> Array:
    """The rate of each label; one never seen gets the median of all rates."""
    seen, rate = table
    spot = np.searchsorted(seen, labels).clip(max=len(seen) - 1)
    typical = float(np.median(rate))
    return np.where(seen[spot] == labels, rate[spot], typical)


def hits(scores: Array, test: Choices) -> Float[np.ndarray, " query"]:
    """Per query: 1 where the best allowed key is the chosen one, shared between equal best ones.

    NaN where there are no scores.
    """
    open_ = np.where(test.allowed, scores, -np.inf)
    best = open_.max(1, keepdims=True)
    tied = open_ == best
    right = np.take_along_axis(tied, test.chosen[:, None], 1)[:, 0] / np.maximum(tied.sum(1), 1)
    return np.asarray(np.where(np.isfinite(best[:, 0]), right, np.nan))


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Per query of a head, whether each learner predicted it from the other documents.

    `right[name]` is (query,) in 0 to 1, `document` whose query it is.
    """

    right: dict[str, Float[np.ndarray, " query"]]
    document: Int[np.ndarray, " query"]

    def share(self, name: str) -> float:
        """The share of choices that were predicted; NaN where none was tried."""
        values = self.right[name]
        return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def held_out(
    choices: Choices, learners: Mapping[str, Learner], seed: int = 0
) -> HeldOut | None:
    """Learn on half of the documents and predict the other half, both ways round.

    A learner that meets choices which no weight makes has NaN on that half. "chance" is always
    there. None for fewer than two documents.
    """
    sequence = choices.selection.sequence
    documents = np.unique(sequence)
    if len(documents) < 2:
        return None
    half = np.random.default_rng(seed).permutation(documents)[: len(documents) // 2]
    first = np.isin(sequence, half)
    right = {name: np.full(len(sequence), np.nan) for name in learners}
    for test_rows in (first, ~first):
        train, test = choices.take(~test_rows), choices.take(test_rows)
        if train is None or test is None:
            continue
        for name, learn in learners.items():
            right[name][test_rows] = hits(learn(train, test), test)
    return HeldOut({**right, "chance": choices.chance}, sequence)
