"""Variance, token correlation and gradients through a stack of residual branches, in closed form.

The moments of the components, chained: one variance and one correlation for all pairs of tokens
(DeepScaleLM, arXiv 2403.09635). Averages over weights; one draw of width 128 is 5 to 15 % off in
each layer. Norms divide by the expected size, so that LayerNorm and RMSNorm are the same here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Float

from attoscope.errors import AttoscopeError
from attoscope.moments import components as m
from attoscope.moments import unit_variance as unit
from attoscope.moments.attention import (
    AttentionPlan,
    attention,
    attention_backward,
)
from attoscope.moments.components import Moments

Curve = Float[np.ndarray, " point"]
Steps = Float[np.ndarray, " sublayer"]
_ROLES = {"attention": {"query", "key", "value", "output"}, "mlp": {"in", "out"}}
_CHOICES = {
    "kind": ("attention", "mlp"),
    "norm": ("pre", "post", "none"),
    "norm_kind": ("layer", "rms"),
}


@dataclass(frozen=True, slots=True)
class SublayerPlan:
    """One residual branch: `x <- skip x + branch f(x)`, a norm before f, after the sum, or none.

    Args:
        kind: "attention" or "mlp". norm: "pre", "post" or "none". norm_kind: "layer" or "rms".
        width: of the stream. hidden: attention's values (query heads times head width), or the
            MLP's hidden units.
        weights: variances, of "query", "key", "value", "output", or of "in", "out" and, for a
            gated MLP, "gate". The gain of a pre-norm counts as its matrices'.
        dropout: of the branch's output. attention_dropout: of the attention weights.
        gain: the mean square of the gain of a post-norm.

    Raises AttoscopeError for other names, and numbers that cannot be.
    """

    kind: str
    width: int
    hidden: int
    weights: Mapping[str, float]
    norm: str = "pre"
    norm_kind: str = "layer"
    activation: str = "relu"
    causal: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    skip: float = 1.0
    branch: float = 1.0
    gain: float = 1.0

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if (got := getattr(self, name)) not in allowed:
                raise AttoscopeError(
                    f"{name}: got {got!r}; expected one of {', '.join(allowed)}"
                )
        given, wanted = set(self.weights), _ROLES[self.kind]
        if given - (wanted | ({"gate"} if self.kind == "mlp" else set())) or wanted - given:
            raise AttoscopeError(
                f"weights: got {', '.join(sorted(given)) or 'none'} for an {self.kind} branch; "
                f"expected variances of {', '.join(sorted(wanted))}"
            )
        least = min([*self.weights.values(), self.width - 1, self.hidden - 1, self.gain])
        if not least >= 0:
            raise AttoscopeError(
                f"plan: got {least:g} as its least variance, gain or size; expected variances "
                "from 0 on and sizes from 1 on"
            )

    def attention(self, length: int) -> AttentionPlan:
        """What the formulas of attention need to know."""
        w = self.weights
        return AttentionPlan(
            self.width, self.hidden, w["query"] * w["key"], w["value"], length,
            self.attention_dropout, self.causal,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class SignalProfile:
    """Predicted moments along a stack of n sub-layers.

    `variance`, `correlation`, `gradient` (variance, as a multiple of that at the top) and
    `gradient_correlation` have n + 1 points: before each sub-layer, and behind the last. `sums`
    are the variances of skip plus branch, (n,): before a post-norm; else `variance[1:]`.
    `branches` and `branch_correlations` are of what each branch hands out, (n,), before its factor.
    """

    variance: Curve
    correlation: Curve
    sums: Steps
    branches: Steps
    branch_correlations: Steps
    gradient: Curve
    gradient_correlation: Curve


Branch = Callable[[SublayerPlan, Moments, int], Moments]


def branch_moments(plan: SublayerPlan, x: Moments, length: int) -> Moments:
    """What a branch makes of its input x (behind a pre-norm), dropout included."""
    w = plan.weights
    if plan.kind == "attention":
        made = m.linear(attention(x, plan.attention(length)), plan.hidden, w["output"])
    else:
        up = m.linear(x, plan.width, w["in"])
        if "gate" in w:
            hidden = m.gated(plan.activation, m.linear(x, plan.width, w["gate"]), up)
        else:
            hidden = m.activation(plan.activation, up)
        made = m.linear(hidden, plan.hidden, w["out"])
    return m.dropout(made, plan.dropout)


def branch_gradient(
    plan: SublayerPlan, gradient: Moments, x: Moments, length: int, *, corrected: bool = True
) -> Moments:
    """The gradient at a branch's input x from that at its output."""
    w, g = plan.weights, _output_gradient(plan, gradient)
    if plan.kind == "attention":
        return attention_backward(g, x, plan.attention(length), corrected=corrected)
    up = m.linear(x, plan.width, w["in"])
    if "gate" not in w:
        g = m.activation_backward(plan.activation, g, up)
        return m.linear_backward(g, plan.hidden, w["in"])
    gate = m.linear(x, plan.width, w["gate"])
    at_gate, at_up = m.gated_backward(plan.activation, g, gate, up)
    return m.residual(
        m.linear_backward(at_gate, plan.hidden, w["gate"]),
        m.linear_backward(at_up, plan.hidden, w["in"]),
    )


def _output_gradient(plan: SublayerPlan, gradient: Moments) -> Moments:
    """In front of the branch's last matrix."""
    last = plan.weights["output" if plan.kind == "attention" else "out"]
    return m.linear_backward(m.dropout_backward(gradient, plan.dropout), plan.width, last)


def forward_moments(
    plans: Sequence[SublayerPlan], x: Moments, length: int, branch: Branch = branch_moments
) -> tuple[list[Moments], list[Moments], list[Moments]]:
    """The stream at its n + 1 points, the sums and the branches, n each.

    `branch` is the rule for what a branch makes of its input.
    """
    stream, sums, branches = [x], [], []
    for plan in plans:
        x = stream[-1]
        branches.append(branch(plan, _read(plan, x), length))
        sums.append(m.residual(x, branches[-1], plan.skip, plan.branch))
        after = sums[-1]
        if plan.norm == "post":
            after = m.layer_norm(after).scaled(math.sqrt(plan.gain))
        stream.append(after)
    return stream, sums, branches


def _read(plan: SublayerPlan, x: Moments) -> Moments:
    return m.layer_norm(x) if plan.norm == "pre" else x


def propagate(
    plans: Sequence[SublayerPlan],
    *,
    variance0: float = 1.0,
    r0: float,
    rg: float,
    length: int,
    corrected: bool = True,
) -> SignalProfile:
    """Moments of the stream and of its gradient along a stack.

    Args:
        plans: the sub-layers, in the order of the run.
        variance0, r0: variance and token correlation of what enters the first.
        rg: token correlation of the gradient at the top (behind the last norm, where post-norm).
        length: tokens of a document.
        corrected: with our factor in the gradient of attention; False: the official formula.

    Raises AttoscopeError for no sub-layers, and for causal attention: `forward_moments` alone
    takes that.

    How to read it: a pre-norm stack with skip = branch = 1 grows linearly in variance, and its
    gradient falls as 1/layer from the first layer on; a post-norm stack loses (or gains) a factor
    in each layer. Source: arXiv 2403.09635.
    """
    if not plans or length < 1:
        raise AttoscopeError(
            f"propagate: got {len(plans)} sub-layers and {length} tokens; expected at least "
            "one each"
        )
    if any(plan.causal for plan in plans):
        raise AttoscopeError(
            "propagate: got causal attention, whose first tokens have larger gradients than the "
            "last ones; expected attention to all tokens: use attoscope.predict, which carries "
            "every pair of tokens"
        )
    stream, sums, branches = forward_moments(plans, m.of(variance0, r0), length)
    g = m.of(1.0, rg)
    gradients = [g]
    for plan, x, total in zip(
        reversed(plans), reversed(stream[:-1]), reversed(sums), strict=True
    ):
        if plan.norm == "post":
            g = m.layer_norm_backward(g, total).scaled(math.sqrt(plan.gain))
        back = branch_gradient(plan, g, _read(plan, x), length, corrected=corrected)
        if plan.norm == "pre":
            back = m.layer_norm_backward(back, x)
        g = m.residual(g, back, plan.skip, plan.branch)
        gradients.append(g)
    gradients.reverse()
    return SignalProfile(
        *_curves(stream), _curves(sums)[0], *_curves(branches), *_curves(gradients)
    )


def _curves(made: Sequence[Moments]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([x.variance for x in made]), np.array([x.correlation for x in made])


def initialiser_plans(
    name: str,
    layers: int,
    width: int,
    *,
    hidden: int | None = None,
    values: int | None = None,
    key_values: int | None = None,
    gated: bool = False,
    initializer_range: float = 0.02,
    count: Literal["layers", "sublayers"] = "layers",
    k: float = 2.0,
    alpha: float = 1.0,
    r0: float = 0.221,
    length: int | None = None,
    **common: object,
) -> tuple[SublayerPlan, ...]:
    """Attention and MLP in turn, with the weight variances and residual factors of an initialiser.

    "xavier": `2 / (inputs + outputs)`. "huggingface": `initializer_range^2` throughout. "deepnet"
    (arXiv 2203.00555): xavier, but for queries and keys times `(8 N)^(-1/2)`, skip `(2 N)^(1/4)`.
    "deepscalelm": branches of variance 1, `branch^2 = k / N^alpha`, `skip^2 = 1 - branch^2`; N
    counts layers or sub-layers; `r0` is the token correlation before the embedding's dropout.

    Args:
        hidden: of the MLP, 4 width by default. values: query heads times head width, key_values:
            key heads times head width; width by default.
        gated: whether the MLP has a gate. length: tokens, for causal DeepScaleLM (None: many).
        common: what else `SublayerPlan` takes, the same for all: norm, activation, dropout, ...
    """
    hidden, values = hidden or 4 * width, values or width
    shapes = _shapes(width, hidden, values, key_values or values, gated)
    plain = [
        SublayerPlan(
            kind, width, values if kind == "attention" else hidden,
            {role: initializer_range**2 if name == "huggingface" else 2 / (a + b)
             for role, (a, b) in shapes[kind].items()},
            **common,  # type: ignore[arg-type]
        )
        for kind in ("attention", "mlp")
    ] * layers  # fmt: skip
    if name == "deepnet":
        return tuple(_deepnet(plan, layers) for plan in plain)
    if name == "deepscalelm":
        factors = unit.residual_factors(layers if count == "layers" else 2 * layers, k, alpha)
        return _deepscalelm(plain, shapes, factors, r0, length)
    if name not in ("xavier", "huggingface"):
        raise AttoscopeError(
            f"name: got {name!r}; expected xavier, deepscalelm, huggingface or deepnet"
        )
    return tuple(plain)


Shapes = dict[str, dict[str, tuple[int, int]]]


def _shapes(width: int, hidden: int, values: int, keys: int, gated: bool) -> Shapes:
    """(inputs, outputs) of each matrix."""
    mlp = {"in": (width, hidden), "out": (hidden, width)}
    if gated:
        mlp["gate"] = (width, hidden)
    return {
        "attention": {
            "query": (width, values), "key": (width, keys), "value": (width, keys),
            "output": (values, width),
        },
        "mlp": mlp,
    }  # fmt: skip


def _deepnet(plan: SublayerPlan, layers: int) -> SublayerPlan:
    shrink = (8 * layers) ** -0.5
    weights = {
        role: v * (1.0 if role in ("query", "key") else shrink)
        for role, v in plan.weights.items()
    }
    return replace(plan, weights=weights, skip=(2 * layers) ** 0.25)


def _deepscalelm(
    plain: Sequence[SublayerPlan],
    shapes: Shapes,
    factors: tuple[float, float],
    r0: float,
    length: int | None,
) -> tuple[SublayerPlan, ...]:
    skip, branch = factors
    branches = [
        unit.Branch(p.kind, p.dropout, p.activation, "gate" in p.weights, p.causal, length)
        for p in plain
    ]
    r = unit.entering_correlations(branches, r0 * (1 - plain[0].dropout), skip, branch)
    return tuple(
        replace(
            plan, skip=skip, branch=branch,
            weights={role: unit.weight_variance(role, a, b, own, one)
                     for role, (a, b) in shapes[plan.kind].items()},
        )
        for plan, one, own in zip(plain, branches, r, strict=False)
    )  # fmt: skip
