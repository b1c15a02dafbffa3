"""DeepScaleLM's weight variances: every residual branch gets the variance 1 at the start.

All numbers are for a branch that reads a stream of variance 1 and token correlation r, and for its
output after dropout with rate p. Source: arXiv 2403.09635 and its initialiser. What the paper does
not have (other activations than ReLU, gated MLPs, causal attention, grouped heads) is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from attoscope.errors import AttoscopeError
from attoscope.moments.attention import AttentionPlan, attention
from attoscope.moments.components import activation, of


@dataclass(frozen=True, slots=True)
class Branch:
    """What the recursion needs to know of a residual branch; `length` None: many tokens."""

    kind: str
    dropout: float = 0.0
    activation: str = "relu"
    gated: bool = False
    causal: bool = False
    length: int | None = None
    width: int = 1


def mlp_correlation(r: float, name: str = "relu", gated: bool = False) -> float:
    """Token correlation of an MLP's output, before dropout, for an input of correlation r.

    `E[f(u) f(v)] / E[f(u)^2]`, for "relu" the paper's kappa(r); times r where it is gated.
    """
    made = activation(name, of(1.0, r))
    ratio = made.covariance / made.variance
    return ratio * r if gated else ratio


def averaged(r: float, one: Branch) -> tuple[float, float]:
    """(variance, covariance) of averaged values of variance 1 under attention.

    Both are r where the length is not known: the leading order in the number of tokens, as the
    paper's initialiser has it. Else those of `moments.attention.attention`, which differ
    where tokens are few or little correlated, or the attention is causal.
    """
    if one.length is None:
        return r, r
    d = one.width
    plan = AttentionPlan(
        d, d, query_key=1 / d**2, value=1 / d, length=one.length, causal=one.causal
    )
    made = attention(of(1.0, r), plan)
    return made.variance, made.covariance


def entering_correlations(
    branches: Iterable[Branch], r0: float, skip: float, branch: float
) -> list[float]:
    """Token correlation of the stream as it enters each branch, and after the last one.

    `r <- (skip^2 r + branch^2 q) / (skip^2 + branch^2)` with q the branch's own: 1 - p for
    attention, `(1 - p) mlp_correlation(r)` for an MLP. `r0` is that of the stream at the start,
    with its dropout. In [0, 1].
    """
    r, found = r0, [r0]
    for one in branches:
        if one.kind == "attention":
            variance, covariance = averaged(r, one)
            own = covariance / variance
        else:
            own = mlp_correlation(r, one.activation, one.gated)
        own *= 1 - one.dropout
        r = (skip**2 * r + branch**2 * own) / (skip**2 + branch**2)
        found.append(r)
    return found


def residual_factors(count: int, k: float = 2.0, alpha: float = 1.0) -> tuple[float, float]:
    """(skip lambda, branch beta) with `beta^2 = k / count^alpha` and `lambda^2 = 1 - beta^2`.

    Raises `AttoscopeError` where beta^2 would be 1 or more, which leaves nothing of the stream.
    """
    square = k / count**alpha
    if not 0 < square < 1:
        raise AttoscopeError(
            f"k: got {k:g} with alpha={alpha:g} for a stack that counts {count}, so beta^2 = "
            f"{square:.3g}; expected it above 0 and below 1: a deeper model, count='sublayers' or "
            "a smaller k"
        )
    return math.sqrt(1 - square), math.sqrt(square)


def weight_variance(role: str, inputs: int, outputs: int, r: float, one: Branch) -> float:
    """Variance of a branch's weights by role, so that the branch has the variance 1.

    Queries and keys `1 / d`; values and outputs `1 / inputs sqrt((1 - p) / A)`, A the
    variance of `averaged`; both matrices of a ReLU MLP `sqrt(2 (1 - p) / (inputs outputs))`; of
    another one `1 / d` and `(1 - p) / (h E[f^2])`.
    """
    kept = 1 - one.dropout
    if role in ("query", "key"):
        return 1 / inputs
    if role in ("value", "output"):
        return math.sqrt(kept / averaged(r, one)[0]) / inputs
    if one.activation == "relu" and not one.gated:
        return math.sqrt(2 * kept / (inputs * outputs))
    return (
        1 / inputs
        if role != "out"
        else kept / (inputs * activation(one.activation, of(1.0, 1.0)).variance)
    )
