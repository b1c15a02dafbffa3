"""What initialisers would make of a model: the variances they set, predicted and not drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from attoscope.errors import AttoscopeError
from attoscope.moments.unit_variance import residual_factors
from attoscope.prediction.branch_weights import BranchWeights, Weights
from attoscope.prediction.chain import (
    LONGEST,
    Foreseen,
    Pair,
    forecast,
    normed,
    output,
    pair_of,
    step,
)
from attoscope.prediction.growth import Growth, depth_verdict
from attoscope.trace.branch_types import Role

NAMES = ("xavier", "deepscalelm", "admin", "deepnet")
_POST_ONLY = ("admin", "deepnet")


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one initialiser is predicted to do to a stack; `own` is the model as it is."""

    name: str
    curves: tuple[Foreseen, ...]
    forward: Growth
    backward: Growth


def layer_ends(layers: Sequence[int]) -> tuple[list[int], list[int]]:
    """Numbers of the first and the last sub-layer of each layer."""
    first = [i for i, at in enumerate(layers) if i == 0 or layers[i - 1] != at]
    return first, [*(i - 1 for i in first[1:]), len(layers) - 1]


def foresee(
    name: str,
    branches: Sequence[BranchWeights],
    start: Pair,
    top: Pair,
    length: int,
    causal: bool,
) -> Forecast:
    """Curves and verdicts of a stack as its `branches` are."""
    curves = forecast(branches, start, top, length=length, causal=causal)
    first, last = layer_ends([b.sublayer.site.layer for b in branches])
    return Forecast(
        name,
        curves,
        depth_verdict([curves[i].after.variance for i in last]),
        depth_verdict([curves[i].gradient.variance for i in first], backward=True),
    )


def fits(name: str, branches: Sequence[BranchWeights]) -> bool:
    """Whether an initialiser is made for a stack: Admin and DeepNet are for post-norm ones."""
    if name not in NAMES:
        raise AttoscopeError(f"init: got {name!r}; expected one of {', '.join(NAMES)}")
    post = all(b.sublayer.norm == "post" for b in branches)
    return (
        post if name in _POST_ONLY else post or all(b.sublayer.norm == "pre" for b in branches)
    )


def initialised(
    name: str, branches: Sequence[BranchWeights], r0: float, *, length: int, causal: bool
) -> tuple[BranchWeights, ...]:
    """The branches with the variances and residual factors of an initialiser; gains are 1.

    "xavier": 2 / (inputs + outputs) of each matrix, residual as it is. "deepscalelm": 1 / d for
    W_Q and W_K; the others such that each branch has variance 1 at the correlation that enters
    it, and `x <- lambda x + beta f(x)` with beta^2 = 2 / layers (arXiv 2403.09635; any shapes,
    causal attention and other activations than ReLU are ours). "admin": xavier with
    `omega_i^2 = sum_{j<i} Var f_j` in front of the stream (arXiv 2004.08249). "deepnet": xavier
    times (8 N)^(-1/2) but for W_Q, W_K, and (2 N)^(1/4) in front of the stream (2203.00555).
    """
    layers = len({b.sublayer.site.layer for b in branches})
    if name == "deepscalelm":
        return _deepscalelm(branches, r0, layers, length, causal)
    plain = [_with(b, {role: _xavier(w) for role, w in b.roles.items()}) for b in branches]
    if name == "deepnet":
        shrink = (8 * layers) ** -0.5
        return tuple(
            replace(
                _with(
                    b,
                    {role: 1.0 if role in ("query", "key") else shrink for role in b.roles},
                    True,
                ),
                skip=(2 * layers) ** 0.25,
            )
            for b in plain
        )
    if name == "admin":
        return _admin(plain, r0, length, causal)
    return tuple(plain)


def _xavier(weights: Weights) -> float:
    return 2 / (weights.inputs + weights.outputs)


def _with(
    branch: BranchWeights, squares: dict[Role, float], times: bool = False
) -> BranchWeights:
    roles = {
        role: replace(w, square=squares[role] * (w.square if times else 1.0))
        for role, w in branch.roles.items()
    }
    own = 1.0 if not times else branch.skip
    return replace(branch, roles=roles, skip=own, scale=1.0, sum_gain=1.0)


def _deepscalelm(
    branches: Sequence[BranchWeights], r0: float, layers: int, length: int, causal: bool
) -> tuple[BranchWeights, ...]:
    if layers < 3:
        raise AttoscopeError(
            f"deepscalelm: got {layers} layers; expected at least 3, as beta^2 = 2 / layers has to "
            "be below 1"
        )
    skip, scale = residual_factors(layers)
    stream, made = Pair(1.0, r0).matrix(min(length, LONGEST)), []
    for branch in branches:
        squares = {role: 1 / w.inputs for role, w in branch.roles.items()}
        unit = _with(branch, squares)
        # Each branch is to have variance 1: what it has with unit factors is divided out.
        variance = pair_of(output(unit, normed(stream), causal)).variance
        for role in ("value", "output"):
            if role in squares:
                squares[role] /= math.sqrt(variance)
        if "out" in squares:
            squares["out"] /= variance
        one = replace(_with(branch, squares), skip=skip, scale=scale)
        made.append(one)
        stream = normed(step(one, stream, causal)[1])
    return tuple(made)


def _admin(
    branches: Sequence[BranchWeights], r0: float, length: int, causal: bool
) -> tuple[BranchWeights, ...]:
    """Omegas from a run of the model without them, as its profiling step does."""
    total, made = 0.0, []
    stream = Pair(1.0, r0).matrix(min(length, LONGEST))
    for branch in branches:
        omega = math.sqrt(total) if total else 1.0
        made.append(replace(branch, skip=omega))
        out, after = step(branch, stream, causal)
        total += pair_of(out).variance
        stream = normed(after)
    return tuple(made)
