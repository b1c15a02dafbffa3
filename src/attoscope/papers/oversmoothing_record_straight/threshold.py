"""How negative a map must be to smooth again: the threshold -2 / (1 + least eigenvalue)."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray

from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.oversmoothing_record_straight._layers import (
    LAYERS,
    SHARPENED,
    SMOOTHED,
    TOKENS,
    Ends,
    chunks,
    kernel_attention,
)
from attoscope.papers.oversmoothing_record_straight._paper import PAPER
from attoscope.prediction.spectra import attention_spectrum, smoothing_threshold
from attoscope.prediction.stacks import iterate_fixed

Array = NDArray[np.float64]
WIDTH = 6
STEP = 0.03
SWEEP = np.linspace(-3.0, 1.0, 81)


def scaled(item: dict[str, Any]) -> dict[str, Array]:
    """Tokens (value, draw, token, channel) after many layers of H = h I, and the thresholds.

    The values of h are `item["values"]`, from the threshold on where `item["relative"]`.
    """
    drawn = []
    for seed in item["seeds"]:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((TOKENS, WIDTH))
        drawn.append((kernel_attention(rng), x))
    attention, x = (np.stack(each) for each in zip(*drawn, strict=True))
    limits = np.array([smoothing_threshold(attention_spectrum(a).smallest) for a in attention])
    h = np.asarray(item["values"])[:, None] + (limits if item["relative"] else 0 * limits)
    maps = h[..., None, None] * np.eye(WIDTH)
    return {
        "tokens": iterate_fixed(attention, maps, x, LAYERS),
        "attention": attention,
        "threshold": limits,
    }


@PAPER.claim(
    name="smoothing-threshold",
    statement="A multiple h of the identity smooths if h > 0 or h < -2 / (1 + least eigenvalue "
    "of attention), and sharpens between.",
    source="arXiv 2401.04301, the condition on the dominating eigenvalue; the closed form derived",
    criterion=f"in every draw, after {LAYERS} layers with h = threshold + {STEP}: {SHARPENED}; "
    f"with h = threshold - {STEP}: {SMOOTHED}",
)
def threshold(run: Run) -> Evidence:
    parts = chunks(run, "threshold", run.pick(quick=10, paper=400))
    near = [{"seeds": p, "values": [STEP, -STEP], "relative": True} for p in parts]
    above = [{"seeds": p, "values": [STEP], "relative": False} for p in parts]
    sweep = {"seeds": parts[0][:1], "values": SWEEP.tolist(), "relative": False}
    *results, swept = run.map(scaled, [*near, *above, sweep], label="layers")
    tokens = np.concatenate([each["tokens"] for each in results[: len(parts)]], axis=1)
    positive = np.concatenate([each["tokens"][0] for each in results[len(parts) :]])
    attention = np.concatenate([each["attention"] for each in results[: len(parts)]])
    limits = np.concatenate([each["threshold"] for each in results[: len(parts)]])
    over, under, control = (Ends.of(each) for each in (*tokens, positive))
    sharp, smooth = over.sharpened(attention), under.smoothed()
    missed = control.sharpened(attention)
    return Evidence(
        measured={
            "draws": len(limits),
            "threshold_from": limits.min(),
            "threshold_to": limits.max(),
            "share_sharpened_above": sharp.mean(),
            "share_smoothed_below": smooth.mean(),
            "median_cosine_above": np.median(over.cosine),
            "least_cosine_below": under.cosine.min(),
            "reported_cosines": [-1 / 7, 1.0],
        },
        holds=bool(sharp.all() and smooth.all()),
        control=Control(
            f"h = {STEP}, as far above 0 instead of above the threshold",
            {
                "share_sharpened": missed.mean(),
                "share_smoothed": control.smoothed().mean(),
                "least_cosine": control.cosine.min(),
            },
            fails=not missed.any(),
        ),
        figure=_figure(Ends.of(swept["tokens"][:, 0]).cosine, float(swept["threshold"][0])),
    )


def _figure(cosines: Array, limit: float) -> Any:
    rows = [{"h": float(h), "cosine": float(c)} for h, c in zip(SWEEP, cosines, strict=True)]
    curve = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=True)
        .encode(
            x=alt.X("h:Q", title="eigenvalue h of the map"),
            y=alt.Y("cosine:Q", title=f"mean cosine after {LAYERS} layers (first draw)"),
        )
    )
    marks = [{"h": limit, "name": "threshold"}, {"h": 0.0, "name": "zero"}]
    rules = (
        alt.Chart(alt.Data(values=marks))
        .mark_rule(strokeDash=[5, 3], color="grey")
        .encode(x="h:Q")
    )
    return (rules + curve).properties(width=400, height=260)
