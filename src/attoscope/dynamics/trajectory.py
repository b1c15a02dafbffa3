"""A training run: the weights along it, and what they select."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray

from attoscope.dynamics.certificate import training_certificate
from attoscope.dynamics.data import AttentionData, checked_position
from attoscope.dynamics.gradients import Gradient
from attoscope.dynamics.optimality import locally_optimal
from attoscope.dynamics.weights import correlation
from attoscope.svm import InfeasibleSelection, Norm, Selection

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The weights of a run at its recorded steps, over all trials.

    `steps` (record,); `weights` (record, trial, key width, query width); `factors` None or (Ks,
    Qs). `coefficients` (record, trial, sample, token): the gradient's coefficients, summed over
    the steps so far with their step lengths (the whole of `W - W(0)` where W is trained by
    multiples of its gradient); minus them, at tokens not selected, are SVM multipliers.
    """

    data: AttentionData
    loss_name: str
    steps: Int[np.ndarray, " record"]
    weights: Float[np.ndarray, "record trial key_width query_width"]
    coefficients: Float[np.ndarray, "record trial sample token"]
    factors: tuple[Array, Array] | None = None

    @property
    def weight(self) -> Float[np.ndarray, "trial key_width query_width"]:
        """The last weights."""
        return np.asarray(self.weights[-1])

    def probabilities(self, at: int = -1) -> Float[np.ndarray, "trial sample token"]:
        """Attention probabilities at a record."""
        return self._attention(at).probabilities()

    def selected(self, at: int = -1) -> Int[np.ndarray, "trial sample"]:
        """The most probable token of each sample at a record."""
        return self._attention(at).chosen

    def selection(self, trial: int, at: int = -1) -> Selection:
        """What a trial selects at a record, as a problem for `AttentionSVM`."""
        trial = checked_position("trial", trial, self.data.trials)
        return self.data.selection(trial, self.selected(at)[trial])

    def loss(self, at: int = -1) -> Float[np.ndarray, " trial"]:
        """Mean loss over samples at a record, without weight decay."""
        return self._attention(at).mean_loss()

    def norms(self) -> Float[np.ndarray, "record trial"]:
        """Frobenius norms of the weights."""
        return np.asarray(np.linalg.norm(self.weights, axis=(2, 3)))

    def correlation(
        self, reference: Float[np.ndarray, "trial key_width query_width"]
    ) -> Float[np.ndarray, "record trial"]:
        """Correlation of each weight with a reference per trial."""
        return correlation(self.weights, reference)

    def globally_optimal(self, at: int = -1) -> Bool[np.ndarray, " trial"]:
        """Whether each sample selects a token of largest score; linear heads only."""
        scores = self.data.scores()
        own = np.take_along_axis(scores, self.selected(at)[:, :, None], 2)[:, :, 0]
        return np.asarray((own == scores.max(2)).all(1))

    def locally_optimal(self, at: int = -1) -> Bool[np.ndarray, " trial"]:
        """Whether what is selected is locally optimal; one SVM is solved per trial.

        False where no weight makes the selection.
        """
        scores, selected = self.data.scores(), self.selected(at)
        out = np.zeros(self.data.trials, bool)
        for r in range(self.data.trials):
            with suppress(InfeasibleSelection):
                out[r] = bool(locally_optimal(self.data.selection(r, selected[r]), scores[r]))
        return out

    def certificate(
        self, norm: str | Norm = "frobenius", *, window: float | int | None = None
    ) -> tuple[Float[np.ndarray, "record trial"], Float[np.ndarray, "record trial"]]:
        """(lower, upper) bounds on the least norm with the final selection, without a solver.

        lower from the gradients of training, upper from the weight (infinite while it does not
        make the final selection); both approach the optimum where training goes there.

        Args:
            norm: "frobenius" for W, "nuclear" for factors.
            window: over which last share of the steps so far gradients are summed; 0 takes the
                gradient at the record alone. Left out: 0 where W is trained, and the last half
                (0.5) for factors, whose gradient swings about the mean that is optimal.
        """
        share = window if window is not None else (0.0 if self.factors is None else 0.5)
        duals, selected = self._duals(share), self.selected()
        bounds = np.empty((2, *self.weights.shape[:2]))
        for r in range(self.data.trials):
            selection = self.data.selection(r, selected[r])
            for k, weight in enumerate(self.weights[:, r]):
                found = training_certificate(selection, weight, duals[k, r], norm)
                bounds[:, k, r] = found.lower, found.upper
        return bounds[0], bounds[1]

    def _attention(self, at: int) -> Gradient:
        """Attention at a record."""
        slope = Gradient(self.data, self.loss_name)
        slope.attend(self.weights[checked_position("at", at, len(self.weights))])
        return slope

    def _duals(self, share: float | int) -> Array:
        """Coefficients summed over the last share of the steps before each record."""
        if share <= 0.0:
            slope = Gradient(self.data, self.loss_name)
            return np.stack([slope.at(w).coefficients.copy() for w in self.weights])
        out = self.coefficients.copy()
        for k, step in enumerate(self.steps):
            before = np.searchsorted(self.steps, (1.0 - share) * step, side="right") - 1
            if 0 <= before < k:
                out[k] -= self.coefficients[before]
        return out
