"""Components one by one: the closed forms against random tensors, by the paper's error measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import altair as alt
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attoscope.moments import components as m
from attoscope.moments.components import Moments
from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.deepscalelm._paper import PAPER
from attoscope.papers.deepscalelm._simulation import Draws, moments

QUANTITIES = ("mean", "variance", "covariance", "gradient variance", "gradient covariance")
CORRELATIONS, GRADIENT = (0.0, 1 / 3, 2 / 3), m.of(0.9, 0.4)
WITHIN, PERCENTILE = 0.10, 99
_RATE, _OUTPUTS = 0.2, 192

Function = Callable[[Draws, Tensor], Tensor]
# Each component, and the moments that it makes forward and backward, of width d.
Theory = Callable[[Moments, int], tuple[Moments, Moments]]


def _linear(draws: Draws, x: Tensor) -> Tensor:
    weights = [draws.weight(x.shape[-1], _OUTPUTS, 0.01) for _ in range(len(x))]
    return x @ torch.stack(weights)


COMPONENTS: dict[str, tuple[Function, Theory]] = {
    "linear": (
        _linear,
        lambda x, d: (m.linear(x, d, 0.01), m.linear_backward(GRADIENT, _OUTPUTS, 0.01)),
    ),
    "relu": (
        lambda _, x: F.relu(x), lambda x, _: (m.relu(x), m.relu_backward(GRADIENT, x))
    ),
    "gelu": (
        lambda _, x: F.gelu(x), lambda x, _: (m.gelu(x), m.gelu_backward(GRADIENT, x))
    ),
    "layer norm": (
        lambda _, x: F.layer_norm(x, x.shape[-1:]),
        lambda x, d: (m.layer_norm(x, d), m.layer_norm_backward(GRADIENT, x, d)),
    ),
    "dropout": (
        lambda draws, x: draws.dropped(x, _RATE),
        lambda x, _: (m.dropout(x, _RATE), m.dropout_backward(GRADIENT, _RATE)),
    ),
}  # fmt: skip


def errors(item: dict[str, Any]) -> list[float]:
    """The paper's errors of one component in one setting, in the order of `QUANTITIES`, and then
    those of the formulas for tokens without correlation."""
    function, theory = COMPONENTS[item["component"]]
    draws, width, shape = Draws(item["seed"], torch.float64), item["width"], (item["batch"], 48)
    s, r = item["variance"], item["correlation"]
    x = (s**0.5 * draws.alike(*shape, width, r)).requires_grad_()
    y = function(draws, x)
    g = GRADIENT.variance**0.5 * draws.alike(*shape, y.shape[-1], GRADIENT.correlation)
    (back,) = torch.autograd.grad(y, x, g)
    seen = [float(y.detach().mean()), *_both(y), *_both(back)]
    found = []
    for used in (r, 0.0):
        forward, backward = theory(m.of(s, used), width)
        made = [forward.mean, forward.variance, forward.covariance, backward.variance,
                backward.covariance]  # fmt: skip
        sizes = [forward.variance, 0.0, forward.variance, 0.0, backward.variance]
        found += [_error(*each) for each in zip(seen, made, sizes, strict=True)]
    return found


def _both(x: Tensor) -> tuple[float, float]:
    variance, r = moments(x)
    return variance, r * variance


def _error(actual: float, foreseen: float, variance: float) -> float:
    """Relative; for means and covariances over the variance foreseen, where that is smaller."""
    off = abs(actual - foreseen)
    relative = off / abs(actual) if actual else float(off > 0)
    return min(relative, off / variance) if variance else relative


@PAPER.claim(
    name="components",
    statement="Means, variances and covariances of tokens, forward and backward, are what the "
    "closed forms say for linear maps, ReLU, GELU, LayerNorm and dropout.",
    source="arXiv 2403.09635, the numeric verification; its error measure, a smaller grid",
    criterion=f"the {PERCENTILE}th percentile of the error over settings is below {WITHIN:.0%} for "
    "every component and quantity (the paper's own bound)",
)
def components(run: Run) -> Evidence:
    widths = run.pick(quick=(128,), paper=(100, 316, 1000))
    repeats = run.pick(quick=1, paper=3)
    settings = [
        {"component": name, "variance": s, "correlation": r, "width": width, "batch": 64}
        for name in COMPONENTS
        for s in run.pick(quick=(1.0,), paper=(0.25, 1.0, 2.0))
        for r in CORRELATIONS
        for width in widths
        for _ in range(repeats)
    ]
    seeds = run.rng("components").integers(2**31, size=len(settings)).tolist()
    items = [each | {"seed": seed} for each, seed in zip(settings, seeds, strict=True)]
    found = np.array(run.map(errors, items, label="components"))
    found = found.reshape(len(COMPONENTS), -1, 2, len(QUANTITIES))
    own, blind = np.percentile(found, PERCENTILE, axis=1).transpose(1, 0, 2)
    largest, control = float(own.max()), float(blind.max())
    return Evidence(
        measured={"settings": len(items), "largest": largest},
        holds=largest < WITHIN,
        control=Control(
            "the same formulas for tokens without correlation",
            {"largest": control, "each": dict(zip(COMPONENTS, blind.max(1), strict=True))},
            fails=control >= WITHIN,
        ),
        figure=_figure(found[:, :, 0]),
        table=[
            {"component": name} | dict(zip(QUANTITIES, row.tolist(), strict=True))
            for name, row in zip(COMPONENTS, own, strict=True)
        ],
    )


def _figure(found: np.ndarray) -> Any:
    rows = [
        {"component": name, "quantity": quantity, "error": max(float(value), 1e-6)}
        for name, settings in zip(COMPONENTS, found, strict=True)
        for values in settings
        for quantity, value in zip(QUANTITIES, values, strict=True)
    ]
    return (
        alt.Chart(alt.Data(values=rows), width=400, height=280)
        .mark_tick(thickness=1.5)
        .encode(
            x=alt.X("error:Q", title="error of one setting").scale(type="log"),
            y=alt.Y("quantity:N", title=None, sort=list(QUANTITIES)),
            color=alt.Color("component:N", title="component", sort=None),
            yOffset=alt.YOffset("component:N", sort=list(COMPONENTS)),
        )
    )
