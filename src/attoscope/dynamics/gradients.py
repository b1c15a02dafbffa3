"""The gradient of the training loss, in a form that loses no digits as attention saturates."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.special import logsumexp

from attoscope.dynamics import _kernels as kernels
from attoscope.dynamics.data import AttentionData
from attoscope.dynamics.heads import LinearHead
from attoscope.dynamics.losses import log_excess, loss_code, loss_value
from attoscope.errors import AttoscopeError
from attoscope.svm import _checks as checks

Array = NDArray[np.float64]


class Gradient:
    """Minus the gradient at a weight, as `exp(log_scale) * direction`, over all trials.

    `at(weight)` fills, per trial,

        direction = sum_it c_it x_it z_i^T,   c_it = s_it (-l'_i) (gamma_it - gbar_i) / n

    (`coefficients`), both over `exp(log_scale)`; gamma_it = label_i x_it^T grad h(a_i) and gbar_i
    its mean under the probabilities. For any token alpha_i this is `sum mu_it A_it` with
    `A_it = (x_i,alpha - x_it) z_i^T` and `mu_it = -c_it`: the gradient is a dual candidate of the
    attention SVM. In the log domain it is computed relative to the largest weight, so that it has
    full relative accuracy even where the gradient itself underflows.

    The arrays are overwritten by the next `at`. Source: arXiv 2308.16898, gradient of the ERM
    objective; the log-domain form is exact algebra.
    """

    def __init__(
        self, data: AttentionData, loss: str = "logistic", *, log_domain: bool = True
    ) -> None:
        trials, samples, size, dk, dq = data.shape
        self.data, self.loss, self.log_domain = data, loss, log_domain
        self.code, self.linear = loss_code(loss), isinstance(data.head, LinearHead)
        self.chosen = np.zeros((trials, samples), np.int64)
        self.own, self.log_runner = np.empty((2, trials, samples))
        self.shares, self.coefficients = np.empty((2, trials, samples, size))
        self.direction, self.log_scale = np.empty((trials, dk, dq)), np.zeros(trials)
        self.value = np.zeros((trials, samples))
        self.gamma = np.zeros((trials, samples, size))
        if self.linear:
            # Finite where not allowed: those tokens have probability 0 anyway.
            self.gamma = np.where(data.allowed, data.scores(), 0.0)

    def attend(self, weight: Float[np.ndarray, "trial key_width query_width"]) -> None:
        """Only the probabilities."""
        d = self.data
        kernels.attend(
            d.tokens, d.queries, d.sequence, d.allowed,
            np.ascontiguousarray(weight, np.float64),
            self.chosen, self.own, self.log_runner, self.shares,
        )  # fmt: skip

    def at(self, weight: Float[np.ndarray, "trial key_width query_width"]) -> Gradient:
        """Everything at this weight; gives itself."""
        self.attend(weight)
        if not self.linear:
            self._linearise()
        if self.log_domain:
            kernels.exact(
                self.chosen, self.log_runner, self.shares, self.gamma, self.value,
                self.linear, self.code, self.log_scale, self.coefficients,
            )  # fmt: skip
        else:
            kernels.plain(
                self.chosen, self.own, self.log_runner, self.shares, self.gamma, self.value,
                self.linear, self.code, self.log_scale, self.coefficients,
            )  # fmt: skip
        d = self.data
        kernels.pull(d.tokens, d.queries, d.sequence, self.coefficients, self.direction)
        return self

    def probabilities(self) -> Float[np.ndarray, "trial sample token"]:
        """Attention probabilities at the last weight."""
        s = self.shares * np.exp(self.log_runner)[:, :, None]
        np.put_along_axis(s, self.chosen[:, :, None], self.own[:, :, None], 2)
        return s

    def margin(self) -> Float[np.ndarray, "trial sample"]:
        """`label_i f_i` at the last weight."""
        if self.linear:
            return np.asarray((self.probabilities() * self.gamma).sum(2))
        return self.data.labels * self.data.head.value(self._outputs())

    def mean_loss(self) -> Float[np.ndarray, " trial"]:
        """The training loss at the last weight."""
        return np.asarray(loss_value(self.loss, self.margin()).mean(1))

    def log_excess(self) -> Float[np.ndarray, " trial"]:
        """`log(loss - its infimum)` at the last weight; linear heads only, exact to the end."""
        best, gap = self._gaps
        with np.errstate(divide="ignore"):
            logs = np.log(self.shares) + self.log_runner[:, :, None]
            np.put_along_axis(logs, self.chosen[:, :, None], np.log(self.own)[:, :, None], 2)
            lost = logsumexp(logs + np.log(gap), axis=2)
        samples = self.data.shape[1]
        return np.asarray(
            logsumexp(log_excess(self.loss, best, lost), axis=1) - np.log(samples)
        )

    @cached_property
    def _gaps(self) -> tuple[Array, Array]:
        """Best score of each sample, and how far each token is below it (0 if not allowed)."""
        scores = self.data.scores()
        best = scores.max(2)
        return best, np.where(self.data.allowed, best[:, :, None] - scores, 0.0)

    @cached_property
    def _read(self) -> Array:
        """The values that each sample reads, (trial, sample, token, value width)."""
        return self.data.values[:, self.data.sequence]

    def _outputs(self) -> Array:
        s = self.probabilities()
        return np.asarray(np.matmul(s[:, :, None, :], self._read)[:, :, 0])

    def _linearise(self) -> None:
        """Scores of the head's linear part at the attention output."""
        d, a = self.data, self._outputs()
        u = d.head.gradient(a)
        self.value = d.labels * d.head.value(a)
        own = np.matmul(self._read, u[..., None])[..., 0]
        self.gamma = np.where(d.allowed, d.labels[:, :, None] * own, 0.0)


def gradient(
    data: AttentionData, weight: Any, loss: str = "logistic"
) -> Float[np.ndarray, "trial key_width query_width"]:
    """The gradient of the mean loss with respect to the weight, per trial.

    `grad L(W) = (1/n) sum_i l'(label_i f_i) X_i^T (diag(s_i) - s_i s_i^T) g_i z_i^T`; for factors
    `grad_K = grad L(W) Q`, `grad_Q = grad L(W)^T K`.

    Args:
        data: the training data.
        weight: (trial, key width, query width).
        loss: "logistic", "exponential" or "linear".
    """
    g = Gradient(data, loss).at(checked_weight("weight", weight, data))
    return np.asarray(-np.exp(g.log_scale)[:, None, None] * g.direction)


def checked_weight(name: str, weight: Any, data: AttentionData) -> Array:
    """A finite weight of the shape that the data ask for."""
    trials, _, _, dk, dq = data.shape
    array = checks.floats(name, weight, 3, "(trial, key width, query width)")
    if array.shape != (trials, dk, dq):
        raise AttoscopeError(
            f"{name}: got shape {array.shape}; expected {(trials, dk, dq)} (trial, key width, "
            "query width)"
        )
    return array
