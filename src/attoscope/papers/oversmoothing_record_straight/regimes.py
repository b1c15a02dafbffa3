"""The sign and size of the eigenvalues of H decide: smoothing, sharpening, smoothing again."""

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
from attoscope.prediction.stacks import frequency_ratio, iterate_fixed, map_from_spectrum

Array = NDArray[np.float64]
WIDTH = 6
MARKS = (1, 3, 10, 30, 100, 300, 1000, 3000, LAYERS)
POSITIVE = np.linspace(0.2, 1.0, WIDTH)
BARE = "sharpening, no residual"
SPECTRA: dict[str, Array] = {
    "smoothing": POSITIVE,
    "sharpening": -POSITIVE,
    "too negative": -np.linspace(2.2, 3.0, WIDTH),
    BARE: -POSITIVE,
}
REPORTED = {"smoothing": 1.0, "sharpening": -1 / 7, "too negative": 1.0, BARE: 1.0}


def layers(item: dict[str, Any]) -> dict[str, Array]:
    """Tokens after the last layer and the frequency ratio at each mark, for one spectrum."""
    attention, maps, x = _draws(item["seeds"], SPECTRA[item["spectrum"]])
    ratios, at = [], 0
    for mark in MARKS:
        residual = item["spectrum"] != BARE
        x = iterate_fixed(attention, maps, x, mark - at, residual=residual)
        at = mark
        ratios.append(frequency_ratio(x))
    return {"tokens": x, "ratios": np.stack(ratios, 1), "attention": attention}


def _draws(seeds: list[int], values: Array) -> tuple[Array, Array, Array]:
    """Attention, maps and tokens of each seed; attention and tokens whatever the values."""
    drawn = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((TOKENS, WIDTH))
        drawn.append((kernel_attention(rng), map_from_spectrum(rng, values), x))
    attention, maps, tokens = (np.stack(each) for each in zip(*drawn, strict=True))
    return attention, maps, tokens


@PAPER.claim(
    name="spectrum-decides",
    statement="Residual attention smooths where the value-output map has positive eigenvalues, "
    "sharpens where they lie in [-1, 0), and smooths again far below.",
    source="arXiv 2401.04301, the theorems on the dominating eigenvalue",
    criterion=f"in every draw, after {LAYERS} layers with eigenvalues 0.2 to 1 and -3 to -2.2: "
    f"{SMOOTHED}; with -1 to -0.2: {SHARPENED}",
)
def spectrum_decides(run: Run) -> Evidence:
    parts = chunks(run, "regimes", run.pick(quick=10, paper=400))
    items = [{"spectrum": name, "seeds": part} for name in SPECTRA for part in parts]
    results = run.map(layers, items, label="layers")
    found, ratios, verdicts = {}, {}, {}
    for i, name in enumerate(SPECTRA):
        mine = results[i * len(parts) : (i + 1) * len(parts)]
        found[name] = Ends.of(np.concatenate([each["tokens"] for each in mine]))
        ratios[name] = np.concatenate([each["ratios"] for each in mine])
        attention = np.concatenate([each["attention"] for each in mine])
        verdicts[name] = (found[name].smoothed(), found[name].sharpened(attention))
    table = [
        {
            "map": name,
            "smoothed": float(verdicts[name][0].mean()),
            "sharpened": float(verdicts[name][1].mean()),
        }
        | found[name].worst()
        | {"reported_cosine": REPORTED[name]}
        for name in SPECTRA
    ]
    sharp = verdicts["sharpening"][1]
    return Evidence(
        measured={
            "draws": len(sharp),
            "share_smoothed": verdicts["smoothing"][0].mean(),
            "share_sharpened": sharp.mean(),
            "share_smoothed_too_negative": verdicts["too negative"][0].mean(),
            "median_cosine_sharpened": np.median(found["sharpening"].cosine),
            "largest_cosine_sharpened": found["sharpening"].cosine.max(),
            "reported_cosine_sharpened": REPORTED["sharpening"],
        },
        holds=bool(
            verdicts["smoothing"][0].all() and sharp.all() and verdicts["too negative"][0].all()
        ),
        control=Control(
            "the sharpening maps without the residual stream",
            {
                "share_sharpened": verdicts[BARE][1].mean(),
                "share_smoothed": verdicts[BARE][0].mean(),
                "least_cosine": found[BARE].cosine.min(),
                "reported_cosine": REPORTED[BARE],
            },
            fails=not verdicts[BARE][1].any(),
        ),
        figure=_figure(ratios),
        table=table,
    )


def _figure(ratios: dict[str, Array]) -> Any:
    rows = [
        # Below rounding, and exactly 0, the logarithm has nothing to show.
        {"map": name, "layer": mark, "ratio": max(float(value), 1e-17)}
        for name, found in ratios.items()
        for mark, value in zip(MARKS, np.median(found, axis=0), strict=True)
    ]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=True)
        .encode(
            x=alt.X("layer:Q", title="layers").scale(type="log").axis(values=list(MARKS)),
            y=alt.Y("ratio:Q", title="frequency ratio (median over draws)")
            .scale(type="log")
            .axis(grid=False, format=".0e"),
            color=alt.Color("map:N", title="eigenvalues of the map", sort=list(SPECTRA)),
            strokeDash=alt.condition(
                f"datum.map == '{BARE}'", alt.value([5, 3]), alt.value([1, 0])
            ),
        )
        .properties(width=400, height=280)
    )
