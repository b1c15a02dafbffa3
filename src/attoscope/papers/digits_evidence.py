"""What claims on trained digits models share: seeds, the same models under recipes, figure, table.

A recipe is what `digits_vit.train` takes besides the seed. All recipes are trained from the same
seeds: equal weights at the start, images in equal order.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from attoscope.papers.base import Run
from attoscope.papers.digits_vit import BLOCKS, EPOCHS, PROFILE, Item, finished

Array = NDArray[np.float64]
Found = dict[str, dict[str, Array]]
# Of a quick run: at 8 epochs the effects are there, but near the limits with some seeds.
QUICK_EPOCHS, QUICK_SEEDS, PAPER_SEEDS = 12, 2, 3
SETTING = "ViT of 8 blocks and width 32 on handwritten digits; the patches after the last block"


def seeds(run: Run) -> list[int]:
    """As many seeds as the scale has, from the run's own."""
    count = run.pick(quick=QUICK_SEEDS, paper=PAPER_SEEDS)
    return [int(seed) for seed in run.rng("models").integers(2**31, size=count)]


def trained(run: Run, recipes: dict[str, Item]) -> Found:
    """Per recipe its measures: profiles (seed, point), the accuracy (seed,).

    Only models that no other claim of this process has trained are trained.
    """
    drawn = seeds(run)
    epochs = run.pick(quick=QUICK_EPOCHS, paper=EPOCHS)
    items = [
        {"seed": seed, "epochs": epochs, **recipe}
        for recipe in recipes.values()
        for seed in drawn
    ]
    results = finished(run, items, label="models")
    found: Found = {}
    for i, name in enumerate(recipes):
        mine = results[i * len(drawn) : (i + 1) * len(drawn)]
        found[name] = {
            key: np.array([one[key] for one in mine]) for key in (*PROFILE, "accuracy")
        }
    return found


def last(found: Found, name: str, quantity: str = "cosine") -> Float[np.ndarray, " seed"]:
    """A recipe's values after the last block, by seed."""
    return np.asarray(found[name][quantity][:, -1])


def other_seed(found: Found, name: str) -> Float[np.ndarray, " pair"]:
    """Ratios of the last block's cosine between models that differ in the seed alone."""
    values = last(found, name)
    return np.array(
        [a / b for i, a in enumerate(values) for j, b in enumerate(values) if i != j]
    )


def table(found: Found) -> list[dict[str, Any]]:
    """A row per model: its measures after the last block and its accuracy."""
    return [
        {"model": name, "seed": number}
        | {key: float(measures[key][number, -1]) for key in PROFILE}
        | {"accuracy": float(measures["accuracy"][number])}
        for name, measures in found.items()
        for number in range(len(measures["accuracy"]))
    ]


def figure(
    found: Found, quantity: str = "cosine", title: str = "mean cosine of patches"
) -> Any:
    """The measure after the embedding and after every block, a line per model."""
    rows = [
        {"model": name, "seed": number, "block": block, "value": value}
        for name, measures in found.items()
        for number, profile in enumerate(measures[quantity].tolist())
        for block, value in enumerate(profile)
    ]
    return (
        alt.Chart(alt.Data(values=rows), width=400, height=280)
        .mark_line()
        .encode(
            x=alt.X("block:Q", title="block (0: the embedding)").axis(tickCount=BLOCKS),
            y=alt.Y("value:Q", title=title),
            color=alt.Color("model:N", title=None, sort=list(found)),
            detail="seed:N",
        )
    )
