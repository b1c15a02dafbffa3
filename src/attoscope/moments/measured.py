"""Measured moments of hidden states: mean, variance and token correlation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StreamMoments:
    """Mean, variance and token correlation of hidden states; NaN where they are not defined.

    `variance` is that of an entry over features, tokens and documents. `correlation` is that of
    two different tokens of one document at the same feature, from -1/(tokens - 1) to 1 (all
    tokens equal).
    """

    mean: float
    variance: float
    correlation: float


class MomentTally:
    """Adds up the moments of hidden states over batches; see `token_correlation`."""

    def __init__(self) -> None:
        self.count, self.total, self.square = 0.0, 0.0, 0.0
        self._documents: list[tuple[float, float]] = []

    def add(
        self, h: Float[Tensor, "batch token width"], valid: Bool[Tensor, "batch token"]
    ) -> None:
        """Take in a batch; only valid tokens count."""
        # Documents are summed on their own in float64: sums over tokens cancel.
        for states, real in zip(h.detach(), valid, strict=True):
            x = states[real].double()
            n, width = x.shape
            total, square = x.sum(0), x.square().sum(0)
            self.count += x.numel()
            self.total += float(total.sum())
            self.square += float(square.sum())
            if n >= 2:
                pairs = float((total.square() - square).sum()) / (n * (n - 1) * width)
                self._documents.append((pairs, float(total.sum()) / (n * width)))

    def moments(self) -> StreamMoments:
        """The moments of what was taken in."""
        if not self.count:
            return StreamMoments(math.nan, math.nan, math.nan)
        mean = self.total / self.count
        variance = max(self.square / self.count - mean**2, 0.0)
        if not self._documents or variance == 0:
            return StreamMoments(mean, variance, math.nan)
        pairs = [both - 2 * mean * own + mean**2 for both, own in self._documents]
        return StreamMoments(mean, variance, sum(pairs) / len(pairs) / variance)


def token_correlation(
    h: Float[Tensor, "batch token width"], valid: Bool[Tensor, "batch token"] | None = None
) -> float:
    """Correlation r of two different tokens of a document at the same feature.

    `r = cov / v` with `c = h - m`, m **one number**: the mean over documents, valid tokens and
    features; `v = mean c^2`; `cov` the mean over documents and features of
    `[(sum_l c)^2 - sum_l c^2] / (n (n-1))`. A mean per feature is not removed: what all tokens have
    in common is what r counts. From -1/(n-1) to 1; NaN where no document has two tokens.
    Source: DeepScaleLM (arXiv 2403.09635), whose script removes a mean per token over batch and
    features, which is nearly the same.
    """
    tally = MomentTally()
    everywhere = torch.ones(h.shape[:2], dtype=torch.bool)
    tally.add(h, everywhere if valid is None else valid)
    return tally.moments().correlation
