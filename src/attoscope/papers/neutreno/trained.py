"""Trained vision transformers: what the term does to cosine, and what of it is the anchor's."""

from __future__ import annotations

import numpy as np

from attoscope.papers.base import Control, Evidence, Fails, Run
from attoscope.papers.digits_evidence import (
    SETTING,
    Array,
    Found,
    figure,
    last,
    other_seed,
    table,
    trained,
)
from attoscope.papers.digits_vit import Item
from attoscope.papers.neutreno._paper import PAPER

HALF, STRENGTH = 0.5, 0.6
PLAIN, FIRST, ZERO, MEAN = "no term", "first values", "zero", "their mean"
RECIPES: dict[str, Item] = {PLAIN: {}} | {
    name: {"treat": {"remedy": "neutreno", "strength": STRENGTH, "anchor": anchor}}
    for name, anchor in ((FIRST, "first"), (ZERO, "zero"), (MEAN, "mean"))
}
SAME = "the same model from another seed in place of the term"


def ratio(found: Found, name: str) -> Array:
    """Last-block cosine over that without the term, by seed."""
    return np.asarray(last(found, name) / last(found, PLAIN))


@PAPER.claim(
    name="trained-cosine-falls",
    statement="A vision transformer trained with the term keeps its patches distinct with depth.",
    source="Cosine similarity against depth; here on handwritten digits",
    criterion=f"at strength {STRENGTH}, with every seed, the mean cosine is below {HALF} of that "
    f"without the term ({SETTING})",
)
def trained_cosine_falls(run: Run) -> Evidence:
    found = trained(run, {name: RECIPES[name] for name in (PLAIN, FIRST)})
    seeds = other_seed(found, PLAIN)
    return Evidence(
        measured={
            "ratio": ratio(found, FIRST),
            "cosine": last(found, FIRST),
            "cosine_without": last(found, PLAIN),
            "effective_rank": last(found, FIRST, "effective_rank"),
            "effective_rank_without": last(found, PLAIN, "effective_rank"),
        },
        holds=bool((ratio(found, FIRST) < HALF).all()),
        control=Control(SAME, {"ratios": seeds}, fails=bool((seeds >= HALF).all())),
        figure=figure(found),
        table=table(found),
    )


@PAPER.claim(
    name="trained-anchor",
    statement="In a trained vision transformer it is the pull towards the first values that lowers "
    "the cosine.",
    source="What a comparison of cosines against depth is taken to show",
    criterion=f"at strength {STRENGTH}, with every seed, the mean cosine is below {HALF} of that "
    f"without the term with the first values as the anchor, and not with zero in their place "
    f"({SETTING})",
    expected=Fails(
        "subtracting the layer's own values does it: with zero as the anchor the cosine falls "
        "about as far; what the anchor adds is rank, in stacks without a residual "
        "(anchor-keeps-rank)",
        "vision transformers on handwritten digits with zero in place of the first values",
    ),
)
def trained_anchor(run: Run) -> Evidence:
    found = trained(run, RECIPES)
    ratios = {name: ratio(found, name) for name in (FIRST, ZERO, MEAN)}
    seeds = other_seed(found, PLAIN)
    return Evidence(
        measured={f"ratio {name}": values for name, values in ratios.items()}
        | {f"effective_rank {name}": last(found, name, "effective_rank") for name in RECIPES},
        holds=bool((ratios[FIRST] < HALF).all() and (ratios[ZERO] >= HALF).all()),
        control=Control(SAME, {"ratios": seeds}, fails=bool((seeds >= HALF).all())),
        figure=figure(found),
        table=table(found),
    )
