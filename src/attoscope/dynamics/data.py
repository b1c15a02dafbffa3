"""What one attention layer is trained on: tokens, queries, labels and a head, over many trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray

from attoscope.dynamics.heads import Head, LinearHead
from attoscope.errors import AttoscopeError
from attoscope.svm import Selection
from attoscope.svm import _checks as checks
from attoscope.svm._problem import EXTREME

Array = NDArray[np.float64]
SHAPE = "(trial, sequence, token, width)"


@dataclass(frozen=True, eq=False)
class AttentionData:
    """Training data of the one-layer model `f_i = h(sum_t s_it x_it)`, `s_i = softmax(X_i W z_i)`.

    Every array has a leading trial axis: trials are independent and trained side by side.
    Arrays of float64 are not copied: do not change them afterwards.

    Args:
        tokens: (trial, sequence, token, width): the keys, and also the values if none are given.
        queries: (trial, sample, query width); may have another width than the tokens.
        labels: (trial, sample), +1 or -1.
        head: what is read from the attention output, with as many trials.
        sequence: (sample,) whose tokens each sample reads; left out, sample i reads sequence i.
        allowed: (sample, token) or (trial, sample, token) tokens that a sample may attend to
            (padding, causality); left out, all.
        values: (trial, sequence, token, value width) that the head reads in place of the tokens.

    Raises `AttoscopeError` in one sentence for shapes that do not fit, NaN or infinity, labels
    other than +1 and -1, a sample that may attend to nothing, and tokens, queries or values of
    a trial that are largest outside 1e-60 to 1e60.
    Source: arXiv 2308.16898, section 2.
    """

    tokens: Float[np.ndarray, "trial sequence token width"]
    queries: Float[np.ndarray, "trial sample query_width"]
    labels: Float[np.ndarray, "trial sample"]
    head: Head
    sequence: Int[np.ndarray, " sample"]
    allowed: Bool[np.ndarray, "trial sample token"]
    values: Float[np.ndarray, "trial sequence token value_width"]

    def __init__(
        self,
        tokens: Any,
        queries: Any,
        labels: Any,
        head: Head,
        sequence: Any = None,
        allowed: Any = None,
        *,
        values: Any = None,
    ) -> None:
        tokens = checks.floats("tokens", tokens, 4, SHAPE)
        queries = checks.floats("queries", queries, 3, "(trial, sample, width)")
        labels = checks.floats("labels", labels, 2, "(trial, sample)")
        values = tokens if values is None else checks.floats("values", values, 4, SHAPE)
        for name, array in {"tokens": tokens, "queries": queries, "values": values}.items():
            _refuse_extremes(name, array)
        (trials, sequences, size, _), (_, samples, _) = tokens.shape, queries.shape
        _same("queries", "trials", len(queries), trials)
        if values.shape[:3] != tokens.shape[:3]:
            raise AttoscopeError(
                f"values: got shape {values.shape}; expected {tokens.shape[:3]} and any width, as "
                "tokens have"
            )
        if labels.shape != (trials, samples):
            raise AttoscopeError(
                f"labels: got shape {labels.shape}; expected {(trials, samples)} (trial, sample)"
            )
        if not (np.abs(labels) == 1.0).all():
            wrong = labels[np.abs(labels) != 1.0][0]
            raise AttoscopeError(f"labels: got {wrong:g}; expected +1 or -1 for every sample")
        _same("head", "trials", head.trials, trials)
        _same("head", "components", head.width, values.shape[3])
        fields = {
            "tokens": tokens, "queries": queries, "labels": labels, "head": head,
            "sequence": checks.sequence_of(sequence, samples, sequences),
            "allowed": _allowed(allowed, (trials, samples, size)),
            "values": values,
        }  # fmt: skip
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @classmethod
    def cross(
        cls, tokens: Any, queries: Any, labels: Any, head: Head, **options: Any
    ) -> AttentionData:
        """Cross-attention: sample i reads sequence i with a query of its own."""
        return cls(tokens, queries, labels, head, **options)

    @classmethod
    def self_attention(
        cls, tokens: Any, labels: Any, head: Head, position: int = 0, **options: Any
    ) -> AttentionData:
        """Self-attention of one position: the query of each sequence is its token `position`."""
        tokens = checks.floats("tokens", tokens, 4, SHAPE)
        size = tokens.shape[2]
        if not -size <= position < size:
            raise AttoscopeError(
                f"position: got {position}; expected a position in a sequence of {size} tokens"
            )
        return cls(tokens, tokens[:, :, position], labels, head, **options)

    @classmethod
    def causal(
        cls, tokens: Any, labels: Any, head: Head, *, lengths: Any = None
    ) -> AttentionData:
        """Every position but the first is a sample, and sees itself and what comes before.

        `labels` is (trial, sequence, token); the first position's entry is not read.
        """
        return _all_positions(cls, tokens, labels, head, lengths, causal=True)

    @classmethod
    def every_position(
        cls, tokens: Any, labels: Any, head: Head, *, lengths: Any = None
    ) -> AttentionData:
        """Every position is a sample, and sees the whole of its sequence."""
        return _all_positions(cls, tokens, labels, head, lengths, causal=False)

    @property
    def trials(self) -> int:
        return len(self.tokens)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(trials, samples, tokens, key width, query width)."""
        trials, samples, size = self.allowed.shape
        return trials, samples, size, self.tokens.shape[3], self.queries.shape[2]

    def scores(self) -> Float[np.ndarray, "trial sample token"]:
        """Token scores `gamma_it = label_i v^T x_it`; minus infinity where not allowed."""
        if not isinstance(self.head, LinearHead):
            raise AttoscopeError(
                f"scores: got a {type(self.head).__name__}; expected a LinearHead, as only there "
                "a token has a score of its own"
            )
        value = np.matmul(self.values, self.head.v[:, None, :, None])[..., 0]
        gamma = self.labels[:, :, None] * value[:, self.sequence]
        return np.where(self.allowed, gamma, -np.inf)

    def optimal(self) -> Int[np.ndarray, "trial sample"]:
        """The token of largest score of each sample (the first of equals)."""
        return np.asarray(self.scores().argmax(2))

    def selection(self, trial: int, selected: Any) -> Selection:
        """The selection problem of one trial: `selected` (sample,) or (sample, token) booleans."""
        trial = checked_position("trial", trial, self.trials)
        return Selection(
            self.tokens[trial], self.queries[trial], selected, self.sequence,
            allowed=None if self.allowed[trial].all() else self.allowed[trial],
        )  # fmt: skip

    def take(self, trials: Any) -> AttentionData:
        """Some of the trials: positions, a slice or booleans; one number gives one trial."""
        try:
            kept = np.atleast_1d(np.arange(self.trials)[trials])
        except (IndexError, TypeError):
            kept = np.zeros(0, np.int64)
        if not kept.size or kept.ndim != 1:
            raise AttoscopeError(
                f"trials: got {trials!r}; expected positions among {self.trials} trials, a slice "
                "or booleans that keep at least one"
            )
        return AttentionData(
            self.tokens[kept], self.queries[kept], self.labels[kept], self.head.take(kept),
            self.sequence, self.allowed[kept], values=self.values[kept],
        )  # fmt: skip


def checked_position(name: str, value: Any, count: int) -> int:
    """A position among so many; negative ones count from the end."""
    if not (checks.is_number(value, whole=True) and -count <= value < count):
        raise AttoscopeError(
            f"{name}: got {value!r}; expected a whole number from {-count} to {count - 1}"
        )
    return int(value)


def _refuse_extremes(name: str, array: Array) -> None:
    """Products of four of these numbers have to fit into double precision."""
    axes = tuple(range(1, array.ndim))
    largest = np.maximum(array.max(axes), -array.min(axes))
    wrong = (largest > 0.0) & ~((largest > 1.0 / EXTREME) & (largest < EXTREME))
    if wrong.any():
        raise AttoscopeError(
            f"{name}: got numbers of size {largest[wrong][0]:.0e}; expected sizes between 1e-60 "
            "and 1e60, so scale them (the weight scales the other way)"
        )


def _same(name: str, what: str, got: int, expected: int) -> None:
    if got != expected:
        raise AttoscopeError(f"{name}: got {got} {what}; expected {expected}, as tokens have")


def _allowed(value: Any, shape: tuple[int, int, int]) -> NDArray[np.bool_]:
    if value is None:
        return np.ones(shape, bool)
    array = np.asarray(value)
    if array.dtype != bool or array.shape not in (shape, shape[1:]):
        raise AttoscopeError(
            f"allowed: got shape {array.shape} of {array.dtype}; expected {shape[1:]} booleans "
            f"(sample, token), or {shape} with the trials in front"
        )
    array = np.ascontiguousarray(np.broadcast_to(array, shape))
    nothing = np.argwhere(~array.any(2))
    if len(nothing):
        raise AttoscopeError(
            f"allowed: got sample {nothing[0][1]} of trial {nothing[0][0]} with no token to attend "
            "to; expected at least one, so allow a token or drop the sample"
        )
    return array


def _all_positions(
    cls: type[AttentionData],
    tokens: Any,
    labels: Any,
    head: Head,
    lengths: Any,
    *,
    causal: bool,
) -> AttentionData:
    tokens = checks.floats("tokens", tokens, 4, SHAPE)
    trials, sequences, size, _ = tokens.shape
    labels = checks.floats("labels", labels, 3, "(trial, sequence, token)")
    if labels.shape != (trials, sequences, size):
        raise AttoscopeError(
            f"labels: got shape {labels.shape}; expected {(trials, sequences, size)} (trial, "
            "sequence, token)"
        )
    ends = np.full(sequences, size)
    if lengths is not None:
        ends = checks.lengths(lengths, sequences, size)
    valid = np.arange(size)[None, :] < ends[:, None]
    asks = valid.copy()
    if causal:
        asks[:, 0] = False
    s, k = np.nonzero(asks)
    if not len(s):
        raise AttoscopeError(
            "tokens: got sequences of one token; expected at least two, as the first position of "
            "a causal sequence has nothing to choose"
        )
    allowed = valid[s]
    if causal:
        allowed = allowed & (np.arange(size)[None, :] <= k[:, None])
    return cls(tokens, tokens[:, s, k], labels[:, s, k], head, s, allowed)
