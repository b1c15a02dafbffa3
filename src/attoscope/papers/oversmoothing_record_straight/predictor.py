"""The dominating eigenvalue against a simulation, on random pairs of attention and maps."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray

from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.oversmoothing_record_straight._layers import chunks
from attoscope.papers.oversmoothing_record_straight._paper import PAPER
from attoscope.prediction.spectra import UNDECIDED, attention_spectrum, dominance
from attoscope.prediction.stacks import (
    frequency_ratio,
    iterate_fixed,
    map_from_spectrum,
    random_row_stochastic,
)

Array = NDArray[np.float64]
TOKENS, WIDTH, LAYERS = 6, 4, 4000
KINDS = ("Gaussian", "eigenvalues in (0, 1)", "eigenvalues in (-3, 0)")
EQUAL, AGREEMENT = 1e-6, 0.99


def pairs(item: dict[str, Any]) -> dict[str, Array]:
    """Margin, largest real part of the map, and frequency ratio after many layers, (pair,)."""
    attentions, maps, tokens, margins, largest = [], [], [], [], []
    for seed, kind in zip(item["seeds"], item["kinds"], strict=True):
        rng = np.random.default_rng(seed)
        attentions.append(random_row_stochastic(rng, TOKENS))
        maps.append(_map(rng, kind))
        tokens.append(rng.standard_normal((TOKENS, WIDTH)))
        values = np.linalg.eigvals(maps[-1])
        margins.append(dominance(attention_spectrum(attentions[-1]).values, values).margin)
        largest.append(values.real.max())
    end = iterate_fixed(np.stack(attentions), np.stack(maps), np.stack(tokens), LAYERS)
    return {
        "margin": np.array(margins),
        "largest": np.array(largest),
        "ratio": frequency_ratio(end),
    }


def _map(rng: np.random.Generator, kind: str) -> Array:
    if kind == KINDS[0]:
        gaussian: Array = rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5
        return gaussian
    scale = 1.0 if kind == KINDS[1] else -3.0
    return map_from_spectrum(rng, scale * rng.uniform(size=WIDTH))


@PAPER.claim(
    name="predictor",
    statement="Whether tokens become equal is decided by whether the eigenvalue of the layer "
    "that is largest in modulus uses the eigenvalue 1 of attention.",
    source="arXiv 2401.04301, the theorems on the dominating eigenvalue; simulation ours",
    criterion=f"of random pairs with |margin| at least {UNDECIDED}, the prediction agrees with "
    f"a frequency ratio below {EQUAL:g} after {LAYERS} layers in at least {AGREEMENT:.0%}",
)
def predictor(run: Run) -> Evidence:
    number = run.pick(quick=300, paper=6000)
    kinds = np.resize(KINDS, number)
    parts = chunks(run, "pairs", number)
    ends = np.cumsum([len(part) for part in parts])
    items = [
        {"seeds": part, "kinds": kinds[end - len(part) : end].tolist()}
        for part, end in zip(parts, ends, strict=True)
    ]
    results = run.map(pairs, items, label="pairs")
    found = {key: np.concatenate([each[key] for each in results]) for key in results[0]}
    decided = np.abs(found["margin"]) >= UNDECIDED
    equal = found["ratio"] < EQUAL
    right = (found["margin"] > 0) == equal
    sign = ((found["largest"] > 0) == equal)[decided].mean()
    shuffled = run.rng("shuffle").permutation(found["margin"][decided] > 0)
    agreement = right[decided].mean()
    return Evidence(
        measured={
            "pairs": int(decided.sum()),
            "skipped": int((~decided).sum()),
            "agreement": agreement,
            "smoothed": equal[decided].mean(),
            "agreement_shuffled": (shuffled == equal[decided]).mean(),
            "reported_agreement": 1.0,
            "reported_shuffled": 0.63,
        },
        holds=bool(agreement >= AGREEMENT),
        control=Control(
            "a prediction from the sign of the largest real part of the map's eigenvalues alone",
            {"agreement": sign, "reported": 0.86},
            fails=bool(sign < AGREEMENT),
        ),
        figure=_figure(found, kinds.tolist()),
        table=[
            {
                "map": kind,
                "pairs": int((decided & (kinds == kind)).sum()),
                "agreement": right[decided & (kinds == kind)].mean(),
                "smoothed": equal[decided & (kinds == kind)].mean(),
            }
            for kind in KINDS
        ],
    )


def _figure(found: dict[str, Array], kinds: list[str], most: int = 600) -> Any:
    ratios = np.clip(found["ratio"], 1e-17, 1e17)
    rows = [
        {"margin": float(m), "ratio": float(r), "map": k}
        for m, r, k in zip(found["margin"][:most], ratios[:most], kinds[:most], strict=True)
    ]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_circle(size=30, opacity=0.6)
        .encode(
            x=alt.X("margin:Q", title="margin: ln(Perron / other), positive smooths"),
            y=alt.Y("ratio:Q", title=f"frequency ratio after {LAYERS} layers")
            .scale(type="log")
            .axis(grid=False, format=".0e"),
            color=alt.Color("map:N", title="map", sort=list(KINDS)),
        )
        .properties(width=400, height=280)
    )
