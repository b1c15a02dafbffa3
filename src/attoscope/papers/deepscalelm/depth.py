"""Deep stacks: how unequal the gradients of the layers become."""

from __future__ import annotations

import numpy as np

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
    Size,
    ends,
    starts,
)

EVEN, UNEVEN = 3.0, 20.0


@PAPER.claim(
    name="gradients-with-depth",
    statement="In deep stacks the gradients of Xavier's Pre-LN fall hyperbolically and those of "
    "its Post-LN exponentially; DeepScaleLM's stay as large at every layer.",
    source="arXiv 2403.09635, signal propagation of 192 layers; here 96 of width 128",
    criterion="96 layers, width 128, 64 tokens, dropout 0.1, in the median draw: the largest over "
    f"the smallest gradient variance in front of a layer is at most {EVEN:g} for DeepScaleLM, "
    f"and at least {UNEVEN:g} for Xavier, Pre-LN and Post-LN",
)
def gradients_with_depth(run: Run) -> Evidence:
    size, number = Size(96, 128, 64), run.pick(quick=3, paper=20)
    models = (XAVIER_PRE, XAVIER_POST, DEEP_PRE, DEEP_POST, UNSCALED)
    drawn = stacks.draws(run, models, size, number)
    # Factors of many layers multiply: the mean over draws is that of the largest few.
    found = {
        model: {name: np.median(curve, 0) for name, curve in curves.items()}
        for model, curves in drawn.items()
    }
    spreads = {
        model: [_spread(starts(curve)) for curve in curves["gradient"]]
        for model, curves in drawn.items()
    }
    spread = {model: float(np.median(each)) for model, each in spreads.items()}
    theory = {model: stacks.theory(model, size) for model in models}
    rows = [
        row
        for model, seen in found.items()
        for row in stacks.rows(
            NAMES[model], "gradient", starts(seen["gradient"]), starts(theory[model].gradient)
        )
    ]
    return Evidence(
        measured={
            "draws": number,
            "largest_over_smallest": {NAMES[m]: spread[m] for m in models[:4]},
        },
        holds=max(spread[DEEP_PRE], spread[DEEP_POST]) <= EVEN
        and min(spread[XAVIER_PRE], spread[XAVIER_POST]) >= UNEVEN,
        control=Control(
            f"{NAMES[UNSCALED]}, held to what DeepScaleLM must do",
            {"largest_over_smallest": spread[UNSCALED]},
            fails=spread[UNSCALED] > EVEN,
        ),
        figure=stacks.figure(rows, "gradient", "gradient variance over that at the top"),
        table=[
            {
                "model": NAMES[model],
                "spread": spread[model],
                "spread_from": min(spreads[model]),
                "spread_to": max(spreads[model]),
                "spread_foreseen": _spread(starts(theory[model].gradient)),
                "gradient_at_layer_1": seen["gradient"][0],
                "gradient_foreseen": theory[model].gradient[0],
                "variance_at_the_end": seen["sums"][-1],
                "variance_from": float(ends(seen["sums"]).min()),
                "variance_to": float(ends(seen["sums"]).max()),
                "variance_foreseen": theory[model].sums[-1],
            }
            for model, seen in found.items()
        ],
    )


def _spread(gradient: Array) -> float:
    return float(gradient.max() / gradient.min())
