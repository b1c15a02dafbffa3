"""Variance, token correlation and gradients carried through a stack of residual branches.

The chain of DeepScaleLM (arXiv 2403.09635), with the variances of the model's own matrices in
place of nominal ones. The paper carries one correlation for all pairs of tokens; here it is the
covariance of every pair of positions, as causal attention treats positions differently. Ours
are also: any shapes, gains of norms, the factor `e^a (1 + a)` of the attention gradient,
activations by quadrature, and gated MLPs. Values are Gaussian without a mean, scores are small;
biases are left out; dropout is off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float

from attoscope.moments.curves import curve_moments
from attoscope.prediction.branch_weights import BranchWeights

Matrix = Float[np.ndarray, "token token"]
# Longer documents are computed with so many tokens: matrices of tokens grow with the square.
LONGEST = 256


@dataclass(frozen=True, slots=True)
class Pair:
    """A variance and the correlation of two different tokens at the same feature."""

    variance: float
    correlation: float

    def matrix(self, length: int) -> Matrix:
        """The covariance of so many equicorrelated tokens."""
        own = 1 - self.correlation
        return self.variance * (own * np.eye(length) + self.correlation)


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A sub-layer's predicted moments, named as in `Measured`; `gradient` is the stream's."""

    before: Pair
    branch: Pair
    after: Pair
    gradient: Pair


def pair_of(covariance: Matrix) -> Pair:
    """Mean variance of the tokens, and their mean covariance over it."""
    length = len(covariance)
    variance = float(covariance.trace()) / length
    if length < 2 or variance <= 0:
        return Pair(variance, math.nan)
    shared = (float(covariance.sum()) - length * variance) / (length * (length - 1))
    return Pair(variance, shared / variance)


def forecast(
    branches: Sequence[BranchWeights],
    start: Pair,
    top: Pair,
    *,
    length: int,
    causal: bool,
    backward: bool = True,
) -> tuple[Foreseen, ...]:
    """Moments at every sub-layer of one stack.

    Args:
        branches: in the order of the run, all of them readable (no `reason`).
        start: the stream that enters the first sub-layer. top: the gradient behind the last
        one (behind its norm, where it is post-norm).
        length: tokens of a document. causal: whether attention is.
        backward: whether gradients are wanted; without, they are given as `top`.
    """
    length = min(length, LONGEST)
    stream, steps = start.matrix(length), []
    for branch in branches:
        out, after = step(branch, stream, causal)
        steps.append((stream, out, after))
        stream = normed(after) * branch.sum_gain if branch.sublayer.norm == "post" else after
    gradient, made = top.matrix(length), []
    for branch, (stream, out, after) in zip(reversed(branches), reversed(steps), strict=True):
        if backward:
            gradient = _backward(branch, stream, after, gradient, causal)
        before = branch.skip**2 * stream
        made.append(Foreseen(pair_of(before), pair_of(out), pair_of(after), pair_of(gradient)))
    return tuple(reversed(made))


def step(branch: BranchWeights, stream: Matrix, causal: bool) -> tuple[Matrix, Matrix]:
    """The covariances of a branch's output and of its sum with the stream."""
    out = branch.scale**2 * output(branch, _read(branch, stream), causal)
    return out, branch.skip**2 * stream + out


def output(branch: BranchWeights, x: Matrix, causal: bool) -> Matrix:
    """What a branch makes of tokens with covariance x, before its factor."""
    if branch.sublayer.kind == "mlp":
        return _mlp(branch, x)
    return _attention(branch, x, causal)


def normed(covariance: Matrix) -> Matrix:
    """Every token divided by its own standard deviation."""
    size = np.sqrt(np.maximum(covariance.diagonal(), 1e-300))
    return np.asarray(covariance / size[:, None] / size)


def _read(branch: BranchWeights, stream: Matrix) -> Matrix:
    """What its matrices read: a norm in front makes the variance 1 (its gain counts as theirs)."""
    return normed(stream) if branch.sublayer.norm == "pre" else stream


def _backward(
    branch: BranchWeights, stream: Matrix, after: Matrix, top: Matrix, causal: bool
) -> Matrix:
    """The gradient of the stream before a sub-layer from that behind it."""
    if branch.sublayer.norm == "post":
        top = branch.sum_gain * _divided(top, after)
    x = _read(branch, stream)
    if branch.sublayer.kind == "mlp":
        back = _mlp_back(branch, x, top)
    else:
        back = _attention_back(branch, x, top, causal)
    if branch.sublayer.norm == "pre":
        back = _divided(back, stream)
    return branch.skip**2 * top + branch.scale**2 * back


def _divided(gradient: Matrix, covariance: Matrix) -> Matrix:
    """The gradient through a norm: every token divided by the size of what was normalised."""
    size = np.sqrt(np.maximum(covariance.diagonal(), 1e-300))
    return np.asarray(gradient / size[:, None] / size)


def score_variance(branch: BranchWeights, x: Pair) -> float:
    """How much a query's scores spread over the keys: `(1-r) d^2 sq2 sk2 s2^2`."""
    query, key = branch.roles["query"], branch.roles["key"]
    both = query.inputs * query.square * key.inputs * key.square
    return (1 - x.correlation) * both * x.variance**2


@lru_cache(maxsize=8)
def _even(length: int, causal: bool) -> Matrix:
    """Attention that is spread evenly over the keys that a query may see."""
    seen = np.tril(np.ones((length, length))) if causal else np.ones((length, length))
    return np.asarray(seen / seen.sum(1, keepdims=True))


def _size(branch: BranchWeights) -> float:
    value, out = branch.roles["value"], branch.roles["output"]
    return value.inputs * value.square * out.inputs * out.square


def _attention(branch: BranchWeights, x: Matrix, causal: bool) -> Matrix:
    """Even attention, plus what a small spread of scores adds (spec: T1, T2, T3)."""
    even = _even(len(x), causal)
    made = even @ x @ even.T
    mean = pair_of(x)
    r = 0.0 if math.isnan(mean.correlation) else mean.correlation
    spread = score_variance(branch, Pair(mean.variance, r))
    own = (1 - r) * mean.variance
    lift = (1 - r) * spread * mean.variance / branch.roles["value"].inputs
    n = 1 / even[:, 0]  # keys that each query may see
    # The share of the heaviest key is 1 at most, however much scores spread.
    heavy = np.minimum(1.0, math.exp(min(spread, 50.0)) / n)
    more = lift * (n - 1) / n + 4 * lift * heavy + own * (heavy - 1 / n)
    shared = 2 * lift / np.maximum(n[:, None], n)
    np.fill_diagonal(shared, more)
    return np.asarray(_size(branch) * (made + shared))


def _attention_back(branch: BranchWeights, x: Matrix, top: Matrix, causal: bool) -> Matrix:
    """The gradient through the values; keys near the mean query get more, by `e^a (1 + a)`."""
    even = _even(len(x), causal)
    made = even.T @ top @ even
    mean = pair_of(x)
    r = 0.0 if math.isnan(mean.correlation) else mean.correlation
    a = min(max(r * score_variance(branch, Pair(mean.variance, r)), 0.0), 50.0)
    apart = top - np.diag(top.diagonal())
    more = (math.exp(a) * (1 + a) - 1) * np.einsum(
        "qk,qp,pk->k", even, apart, even, optimize=True
    )
    return np.asarray(_size(branch) * (made + np.diag(more)))


def _correlations(x: Matrix) -> tuple[float, Matrix]:
    """The mean variance of the tokens, and their correlations."""
    return float(x.diagonal().mean()), normed(x)


def _mlp(branch: BranchWeights, x: Matrix) -> Matrix:
    variance, r = _correlations(x)
    first, last, gate = branch.roles["in"], branch.roles["out"], branch.roles.get("gate")
    name = branch.sublayer.activation or "identity"
    s1 = first.inputs * first.square * variance
    if gate is None:
        made, own = (f := curve_moments(name, s1, r)).product, f.square
    else:
        f = curve_moments(name, gate.inputs * gate.square * variance, r)
        made, own = f.product * s1 * r, f.square * s1
    made = np.array(made)
    np.fill_diagonal(made, own)
    return np.asarray(last.inputs * last.square * made)


def _mlp_back(branch: BranchWeights, x: Matrix, top: Matrix) -> Matrix:
    variance, r = _correlations(x)
    first, last, gate = branch.roles["in"], branch.roles["out"], branch.roles.get("gate")
    name = branch.sublayer.activation or "identity"
    if gate is None:
        f = curve_moments(name, first.inputs * first.square * variance, r)
        pairs, own = first.square * f.slope_product, first.square * f.slope_square
    else:
        s1 = first.inputs * first.square * variance
        f = curve_moments(name, gate.inputs * gate.square * variance, r)
        pairs = first.square * f.product + gate.square * s1 * r * f.slope_product
        own = first.square * f.square + gate.square * s1 * f.slope_square
    made = np.array(pairs)
    np.fill_diagonal(made, own)
    return np.asarray(last.outputs * last.square * last.inputs * made * top)


def settled_correlation(
    branches: Sequence[BranchWeights], *, length: int, causal: bool
) -> float:
    """Where the correlation would settle if these branches were repeated without end.

    The fixed point of what the branches of one layer give together, each weighed by its variance:
    what a stream tends to that every layer adds a little to. 1 is rank collapse: all tokens
    equal.
    """
    x = Pair(1.0, 0.5).matrix(min(length, 64))
    last = math.inf
    for _ in range(500):
        made = [b.scale**2 * output(b, x, causal) for b in branches]
        x = normed(np.sum(made, 0))
        r = pair_of(x).correlation
        if abs(r - last) < 1e-6:
            break
        last = r
    return r
