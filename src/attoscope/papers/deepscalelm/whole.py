"""Whole stacks of 24 layers: variance forward, gradients backward, foreseen and measured."""

from __future__ import annotations

from typing import Any

import numpy as np

from attoscope.moments import components as m
from attoscope.moments.components import Moments
from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.deepscalelm import _stacks as stacks
from attoscope.papers.deepscalelm._paper import PAPER
from attoscope.papers.deepscalelm._simulation import Array
from attoscope.papers.deepscalelm._stacks import (
    DEEP_POST,
    DEEP_PRE,
    NAMES,
    UNSCALED,
    XAVIER_POST,
    XAVIER_PRE,
    Model,
    Size,
    ends,
    error,
    r_squared,
    starts,
)
from attoscope.prediction.propagation import SublayerPlan, branch_moments, forward_moments

SETTING = (
    "24 layers, width 256, 4 heads, 128 tokens (64 in a quick run), dropout 0.1, token "
    "correlation 0.199"
)
FORWARD, R_SQUARED = 0.10, 0.98
VARIANCE, GRADIENT = (0.9, 1.1), (0.4, 1.2)


def setting(run: Run) -> tuple[Size, int]:
    """Size and number of draws; one draw is 6 % off in variance, twice that at worst."""
    length, draws = run.pick(quick=(64, 4), paper=(128, 20))
    return Size(24, 256, length), draws


@PAPER.claim(
    name="whole-model",
    statement="Chained closed forms foresee the variance of the stream and of its gradient in "
    "whole models, if the correlation of tokens is carried along.",
    source="arXiv 2403.09635, the propagation through whole models; simulation ours",
    criterion=f"means over draws ({SETTING}): forward variance within {FORWARD:.0%} at every layer "
    f"for Xavier, Pre-LN and Post-LN; R^2 at least {R_SQUARED} for Xavier Pre-LN, "
    "of the forward variance and of the logarithm of the gradient's",
)
def whole_model(run: Run) -> Evidence:
    size, draws = setting(run)
    found = stacks.measure(run, (XAVIER_PRE, XAVIER_POST), size, draws)
    table = [_row(model, curves, size) for model, curves in found.items()]
    seen = found[XAVIER_PRE]
    foreseen = stacks.theory(XAVIER_PRE, size)
    forward = r_squared(ends(seen["sums"]), ends(foreseen.sums))
    backward = r_squared(np.log(starts(seen["gradient"])), np.log(starts(foreseen.gradient)))
    independent = error(ends(seen["sums"]), ends(_independent(size)))
    return Evidence(
        measured={
            "draws": draws,
            "largest_forward_error": max(row["forward_error"] for row in table),
            "r_squared_forward": forward,
            "r_squared_log_gradient": backward,
        },
        holds=max(row["forward_error"] for row in table) <= FORWARD
        and min(forward, backward) >= R_SQUARED,
        control=Control(
            "Xavier Pre-LN with attention foreseen for tokens without correlation",
            {"forward_error": independent},
            fails=independent > FORWARD,
        ),
        figure=_figure(found, size),
        table=table,
    )


def _independent(size: Size) -> Array:
    """Forward variance where attention takes tokens to be independent."""

    def branch(plan: SublayerPlan, x: Moments, length: int) -> Moments:
        alone = plan.kind == "attention"
        return branch_moments(plan, m.of(x.variance, 0.0) if alone else x, length)

    plans = stacks.plans(XAVIER_PRE, size)
    _, sums, _ = forward_moments(plans, m.of(1.0, size.r0), size.length, branch)
    return np.array([x.variance for x in sums])


def _row(model: Model, seen: dict[str, Array], size: Size) -> dict[str, Any]:
    foreseen, official = (stacks.theory(model, size, corrected=c) for c in (True, False))
    gradient = starts(seen["gradient"])
    return {
        "model": NAMES[model],
        "forward_error": error(ends(seen["sums"]), ends(foreseen.sums)),
        "gradient_error": error(gradient, starts(foreseen.gradient)),
        "gradient_error_official": error(gradient, starts(official.gradient)),
        "variance_at_the_end": seen["sums"][-1],
        "gradient_at_layer_1": gradient[0],
    }


@PAPER.claim(
    name="deepscalelm-conserves",
    statement="DeepScaleLM keeps the variance of the stream and of its gradient of the order 1 at "
    "every layer, Pre-LN and Post-LN.",
    source="arXiv 2403.09635, DeepScaleLM; simulation ours",
    criterion=f"means over draws ({SETTING}): variance in {list(VARIANCE)} behind, and gradient "
    f"variance in {list(GRADIENT)} in front of every layer, as multiples of input and top; forward "
    f"variance within {FORWARD:.0%} of what is foreseen",
)
def conserves(run: Run) -> Evidence:
    size, draws = setting(run)
    found = stacks.measure(run, (DEEP_PRE, DEEP_POST, UNSCALED), size, draws)
    bare = found.pop(UNSCALED)
    ranges = {NAMES[model]: _ranges(curves) for model, curves in found.items()}
    table = [_row(model, curves, size) for model, curves in found.items()]
    miss = max(row["forward_error"] for row in table)
    return Evidence(
        measured={"draws": draws, **ranges, "largest_forward_error": miss},
        holds=all(map(_conserved, found.values())) and miss <= FORWARD,
        control=Control(NAMES[UNSCALED], _ranges(bare), fails=not _conserved(bare)),
        figure=_figure(found | {UNSCALED: bare}, size),
        table=table,
    )


def _ranges(seen: dict[str, Array]) -> dict[str, list[float]]:
    variance, gradient = ends(seen["sums"]), starts(seen["gradient"])
    return {
        "variance": [float(variance.min()), float(variance.max())],
        "gradient": [float(gradient.min()), float(gradient.max())],
    }


def _conserved(seen: dict[str, Array]) -> bool:
    ranges = _ranges(seen)
    return all(
        low <= ranges[name][0] and ranges[name][1] <= high
        for name, (low, high) in (("variance", VARIANCE), ("gradient", GRADIENT))
    )


def _figure(found: dict[Model, dict[str, Array]], size: Size) -> Any:
    both: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [], []
    for model, seen in found.items():
        foreseen, name = stacks.theory(model, size), NAMES[model]
        both[0].extend(stacks.rows(name, "variance", ends(seen["sums"]), ends(foreseen.sums)))
        both[1].extend(
            stacks.rows(name, "gradient", starts(seen["gradient"]), starts(foreseen.gradient))
        )
    forward = stacks.figure(both[0], "variance", "variance: dots measured, lines foreseen")
    return forward | stacks.figure(
        both[1], "gradient", "gradient variance over that at the top"
    )
